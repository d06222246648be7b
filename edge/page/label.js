// Labels for images that wait for one: one after another, or many at once in a grid.
//
// A label is given to the images that are seen when a person acts. They leave the page at once, so that the next ones can
// be labelled, and the line gets one change after another, in the order in which they were made. A change that does not
// reach the line stays here until it does.

import { Grid } from "./label_grid.js";
import { Login } from "../page/login.js";
import { ask, at, classButtons, isForPage, keepFocus, loadWords, number, percent, show, text, words } from "../page/words.js";

const POLL = 5000; // milliseconds between two looks at how many images wait, and between two attempts to save
const AHEAD = 12; // pictures that are loaded before they are looked at
const SEVERAL = 20; // images that get a label without a question
const SLOW = 1000; // milliseconds after which it is told that a change is on its way
const FIELDS = ["kept", "group", "verdict", "confidence", "doubts", "time", "image", "sampled"];

const login = new Login(at("login"), () => words);
const grid = new Grid(renderChoice);
const pictures = new Map(); // images of the document, by name: of the image that is asked about, and of those after it
const changes = []; // that the line has not saved yet, the oldest first: {label, images}, or {isUndo}
let queue = { line: "", classes: [], images: [] }; // the most instructive image first
let said = null; // the last that was done: a word's key and its values
let problem = () => ""; // what hinders, in the reader's language
let isSending = false;
let isSlow = false;

const isGrid = () => at("mode").ariaPressed === "true";
const chosen = () => (isGrid() ? grid.chosen : queue.images.slice(0, 1));

async function load() {
  const { images, ...found } = await ask("queue");
  const leaving = new Set(changes.flatMap((change) => change.images ?? []).map(({ kept }) => kept));
  const rows = images.map((row) => Object.fromEntries(FIELDS.map((name, place) => [name, row[place]])));
  queue = { ...found, images: rows.filter(({ kept }) => !leaving.has(kept)) };
  at("reload").hidden = true;
  render();
}

/** In a grid similar images stand together, the groups in the order of their most instructive image. */
function grouped() {
  const groups = Map.groupBy(queue.images, ({ group }) => group);
  return [...groups.values()].flatMap((images, band) => images.map((image) => ({ ...image, band })));
}

// What is shown

function render() {
  document.title = text("labels_title", { line: queue.line });
  show(at("title"), document.title);
  show(at("waiting"), text("labels_waiting", { count: number(queue.images.length) }));
  renderSaid();
  at("one").hidden = isGrid();
  at("many").hidden = !isGrid();
  at("skip").hidden = isGrid();
  at("group").hidden = !isGrid();
  if (at("classes").dataset.shown !== JSON.stringify(queue.classes)) {
    at("classes").dataset.shown = JSON.stringify(queue.classes);
    at("classes").replaceChildren(...classButtons(queue.classes, label));
  }
  if (isGrid()) grid.fill(grouped());
  else renderOne();
  renderChoice();
}

function renderSaid() {
  const saving = text("labels_saving", { count: number(changes.length) });
  const done = said ? text(said.key, { ...said, images: number(said.images) }) : "";
  show(at("said"), isSlow ? saving : done);
  show(at("problem"), problem());
  at("again").hidden = isSending || !changes.length;
}

function renderOne() {
  const image = queue.images[0];
  at("picture").hidden = !image;
  if (!image) {
    show(at("asked"), text("labels_none"));
    show(at("facts"), "");
    return;
  }
  show(at("asked"), text("labels_asked", { label: image.verdict, confidence: percent(image.confidence) }));
  const alike = queue.images.filter(({ group }) => group === image.group).length - 1;
  const doubts = image.doubts.map((doubt) => text(`doubt_${doubt}`));
  if (image.sampled) doubts.push(text("labels_sampled"));
  show(at("facts"), [...doubts, text("labels_alike", { count: number(alike) }), image.image].join(" · "));
  prepare(queue.images.slice(0, 1 + AHEAD).map(({ kept }) => kept));
  const picture = pictures.get(image.kept);
  const before = at("picture");
  before.removeAttribute("id");
  before.replaceWith(picture);
  picture.id = "picture";
  picture.alt = at("asked").textContent;
}

/** Have these pictures, and no others, in the document's memory. */
function prepare(names) {
  for (const name of pictures.keys()) if (!names.includes(name)) pictures.delete(name);
  for (const name of names) {
    if (pictures.has(name)) continue;
    const picture = new Image();
    picture.decoding = "sync"; // it is seen in the same moment as the question about it
    picture.src = `pictures/${name}`;
    picture.addEventListener("load", renderChoice);
    picture.addEventListener("error", () => { if (picture.id !== "picture") pictures.delete(name); }); // asked again later
    pictures.set(name, picture);
  }
}

/** Say how many images a label would be given to, and what the model takes them for. */
function renderChoice() {
  const images = chosen();
  show(at("many-title"), text("labels_selected", { count: number(grid.selected) }));
  for (const button of document.querySelectorAll("#classes button, #confirm, #aside, #skip, #group")) button.disabled = !images.length;
  const verdicts = new Set(images.map(({ verdict }) => verdict));
  for (const [place, name] of queue.classes.entries()) at("classes").children[place].toggleAttribute("data-verdict", verdicts.has(name));
}

// What is done

/** Give the images that are seen now a label: `choose` tells [label, images] of them; `what` is how a person calls that. */
async function give(what, choose) {
  const images = chosen();
  if (!images.length) return;
  const labels = choose(images);
  if (!isSeen(labels)) {
    tell({ key: "labels_unseen" });
    return;
  }
  if (images.length > SEVERAL && !(await isMeant(what, images.length))) return;
  changes.push(...labels.map(([label, those]) => ({ label, images: those })));
  const gone = new Set(images.map(({ kept }) => kept));
  queue.images = queue.images.filter(({ kept }) => !gone.has(kept));
  tell(null);
  save();
}

/** Whether the picture of the image that is asked about is there; one that cannot be shown may be laid aside. */
function isSeen(labels) {
  if (isGrid()) return grid.isSeen;
  const picture = at("picture");
  return picture.complete && (picture.naturalWidth > 0 || labels.every(([label]) => label === null));
}

/** Ask whether so many images are meant. */
function isMeant(what, count) {
  const dialog = at("sure");
  show(at("sure-title"), text("labels_sure", { what, images: number(count) }));
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

function label(name) {
  give(name, (images) => [[name, images]]);
}

function undo() {
  const newest = changes.at(-1);
  if (newest?.images && !newest.isTried) { // the line has not heard of it
    changes.pop();
    giveBack([newest]);
    tell({ key: "labels_undone", images: newest.images.length });
    return;
  }
  changes.push({ isUndo: true });
  tell(null);
  save();
}

/** Images wait again, before all others. */
function giveBack(those) {
  queue.images.unshift(...those.flatMap(({ images }) => images ?? []));
}

function bringFirst(names) {
  queue.images.sort((one, other) => names.includes(other.kept) - names.includes(one.kept));
}

function tell(what, hindrance = () => "") {
  said = what;
  problem = hindrance;
  render();
}

/** Send one change after another until all are saved; what fails stays for another attempt, what is refused does not. */
async function save() {
  if (isSending) return;
  isSending = true;
  while (changes.length) {
    const slow = setTimeout(() => { isSlow = true; renderSaid(); }, SLOW);
    const change = changes[0];
    change.isTried = true;
    try {
      if (!(await send(change))) { // nobody has logged in
        giveBack(changes.splice(0));
        tell(null, () => text("labels_unsaved"));
      }
    } catch (error) {
      const reason = () => ("isRefused" in error ? error.message : text("lost"));
      if (changes[0] === change && !change.isUndo && !error.isRefused) {
        problem = () => text("labels_failed", { count: number(changes.length), reason: reason() });
        break;
      }
      if (changes[0] === change) giveBack(changes.splice(0, 1)); // else it is done, and only what waits now is not known
      at("reload").hidden = false;
      tell(null, reason);
    } finally {
      clearTimeout(slow);
      isSlow = false;
    }
  }
  isSending = false;
  render();
}

/** Send a change, and say what has become of it; null if the person does not log in. */
async function send({ isUndo, label, images }) {
  if (isUndo) {
    const undone = await login.send("POST", "undo", {});
    if (!undone) return null;
    changes.shift();
    await load();
    bringFirst(undone.images);
    tell({ key: "labels_undone", images: undone.images.length });
    return undone;
  }
  const done = await login.send("POST", "label", { images: images.map(({ kept }) => kept), label });
  if (!done) return null;
  changes.shift();
  const late = done.gone.length;
  tell(
    done.labelled ? { key: label === null ? "labels_laid_aside" : "labels_done", label, images: done.labelled } : null,
    () => (late ? text("labels_gone", { count: number(late) }) : ""),
  );
  return done;
}

function skip() {
  queue.images.push(...queue.images.splice(0, 1));
  render();
}

function switchMode() {
  const current = chosen()[0];
  at("mode").ariaPressed = String(!isGrid());
  if (!isGrid() && current) bringFirst([current.kept]);
  grid.clear();
  render();
  if (isGrid() && current) grid.go(current.kept);
  if (isGrid()) grid.element.focus();
}

// The page

/** Load the images that wait now; the one that is asked about stays so. */
async function reload() {
  const current = queue.images[0];
  try {
    await load();
    if (current) bringFirst([current.kept]);
    tell(said);
  } catch (error) {
    tell(said, () => error.message);
  }
}

async function watch() {
  let isLost = false;
  for (;;) {
    await new Promise((resume) => setTimeout(resume, POLL));
    if (changes.length) save();
    if (document.hidden || isSending) continue;
    if (!isGrid() && at("picture").complete && !at("picture").naturalWidth) pictures.delete(queue.images[0]?.kept);
    try {
      const { waiting } = await ask("queue?count=1");
      if (!queue.images.length && waiting) await load();
      else if (!changes.length) at("reload").hidden = waiting === queue.images.length;
      if (isLost) tell(said);
      else render();
      isLost = false;
    } catch {
      tell(said, () => text("lost"));
      isLost = true;
    }
  }
}

function shortcut(event) {
  if (!isForPage(event) || event.defaultPrevented || event.repeat) return;
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  if (key === "Enter" && event.target.closest("button, a")) return; // which it presses: Tab has led there
  const button = document.querySelector(`[aria-keyshortcuts="${CSS.escape(key)}"]`);
  if (button && !button.hidden) button.click();
}

async function start() {
  await loadWords("strings.json", () => { login.render(); render(); });
  const buttons = {
    confirm: () => give(text("labels_confirm"), (images) => [...Map.groupBy(images, ({ verdict }) => verdict)]),
    aside: () => give(text("labels_aside"), (images) => [[null, images]]),
    group: () => grid.selectGroup(),
    undo, skip, mode: switchMode, reload, again: save,
  };
  for (const [id, work] of Object.entries(buttons)) at(id).addEventListener("click", work);
  document.addEventListener("keydown", shortcut);
  addEventListener("beforeunload", (event) => { if (changes.length) event.preventDefault(); });
  keepFocus();
  await Promise.all([login.look(), load()]);
  watch();
}

start();
