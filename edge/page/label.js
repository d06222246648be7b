// Labels for images that wait for one: one after another, or many at once in a grid.

import { Grid } from "./label_grid.js";
import { Login } from "../page/login.js";
import { ask, at, classButtons, isForPage, loadWords, number, percent, show, text, words } from "../page/words.js";

const POLL = 5000; // milliseconds between two looks at how many images wait
const AHEAD = 3; // pictures that are loaded before they are looked at
const FIELDS = ["kept", "group", "verdict", "confidence", "doubts", "time", "image", "sampled"];

const login = new Login(at("login"), () => words);
const grid = new Grid(renderChoice);
let queue = { line: "", classes: [], images: [] }; // the most instructive image first
let said = null; // the last that was done: a word's key and its values
let isBusy = false;

const isGrid = () => at("mode").ariaPressed === "true";
const chosen = () => (isGrid() ? grid.chosen : queue.images.slice(0, 1));

async function load() {
  const { images, ...found } = await ask("queue");
  queue = { ...found, images: images.map((row) => Object.fromEntries(FIELDS.map((name, place) => [name, row[place]]))) };
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
  show(at("said"), said ? text(said.key, { ...said, images: number(said.images) }) : "");
  at("one").hidden = isGrid();
  at("many").hidden = !isGrid();
  at("skip").hidden = isGrid();
  at("group").hidden = !isGrid();
  at("classes").replaceChildren(...classButtons(queue.classes, label));
  if (isGrid()) grid.fill(grouped());
  else renderOne();
  renderChoice();
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
  at("picture").src = `pictures/${image.kept}`;
  at("picture").alt = at("asked").textContent;
  for (const { kept } of queue.images.slice(1, 1 + AHEAD)) new Image().src = `pictures/${kept}`;
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

/** Do one thing after another; what hinders it is told. */
async function act(work) {
  if (isBusy) return;
  isBusy = true;
  show(at("problem"), "");
  try {
    await work();
  } catch (error) {
    show(at("problem"), error.message);
  } finally {
    isBusy = false;
  }
  render();
}

/** Give images labels: [label, images] each. */
async function give(labels) {
  for (const [label, images] of labels) {
    const names = images.map(({ kept }) => kept);
    const done = await login.send("POST", "label", { images: names, label });
    if (!done) return;
    const gone = new Set(names);
    queue.images = queue.images.filter(({ kept }) => !gone.has(kept));
    said = { key: label === null ? "labels_laid_aside" : "labels_done", label, images: done.labelled };
  }
}

function label(name) {
  act(() => give([[name, chosen()]]));
}

function confirm() {
  act(() => give([...Map.groupBy(chosen(), ({ verdict }) => verdict)]));
}

function undo() {
  act(async () => {
    const undone = await login.send("POST", "undo", {});
    if (!undone) return;
    await load();
    bringFirst(undone.images);
    said = { key: "labels_undone", images: undone.images.length };
  });
}

function bringFirst(names) {
  queue.images.sort((one, other) => names.includes(other.kept) - names.includes(one.kept));
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

async function watch() {
  for (;;) {
    await new Promise((resume) => setTimeout(resume, POLL));
    if (document.hidden || isBusy) continue;
    try {
      const { waiting } = await ask("queue?count=1");
      if (!queue.images.length && waiting) await load();
      else at("reload").hidden = waiting === queue.images.length;
      show(at("problem"), "");
    } catch {
      show(at("problem"), text("lost"));
    }
  }
}

function shortcut(event) {
  if (!isForPage(event) || event.defaultPrevented || event.repeat) return;
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  if (key === "Enter" && event.target.closest("button, a")) return; // which it presses
  const button = document.querySelector(`[aria-keyshortcuts="${CSS.escape(key)}"]`);
  if (button && !button.hidden) button.click();
}

async function start() {
  await loadWords("strings.json", () => { login.render(); render(); });
  const buttons = { confirm, undo, skip, aside: () => label(null), group: () => grid.selectGroup(), mode: switchMode, reload: () => act(load) };
  for (const [id, work] of Object.entries(buttons)) at(id).addEventListener("click", work);
  document.addEventListener("keydown", shortcut);
  await Promise.all([login.look(), load()]);
  watch();
}

start();
