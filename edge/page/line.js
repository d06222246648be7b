import { age, ask, at, build, classButtons, isForPage, keepFocus, language, list, loadWords, number, percent, show, text, words } from "../page/words.js";
import { Login } from "../page/login.js";

const POLL = 500; // milliseconds between two looks at the line
const QUIET = 4000; // milliseconds between two spoken decisions
const PATIENCE = 2000; // milliseconds for which a verdict waits for its picture
const IDLE = 10; // seconds without an image after which a line is not shown as live, if its images do not take longer

const dialog = at("details");
const overruled = at("overruled");
const login = new Login(at("login"), () => words);
let state = null; // as the line told it last
let answered = Date.now(); // when it did, by this machine's clock
let isBegun = false;
let isLost = false;
let isHeld = false;
let shown = null; // the verdict or failure that is seen, with its picture
let isLoading = false; // a picture
let disputed = null; // the verdict that a person does not believe, and the name of its image once it is kept
let attempt = null; // what is tried again if it fails
let saved = null; // the label that was given last
let spoken = { what: "", when: 0 };

// What is shown

/** What a person should do about a verdict: one of the decisions for which there is a word. */
function decide(verdict) {
  if (verdict.doubts.length || !verdict.taught) return "check";
  return verdict.defect ? "defect" : "good";
}

function describe(verdict) {
  return text("picture", { image: verdict.image, decision: text(decide(verdict)), label: verdict.label });
}

function render() {
  const { model } = state;
  document.title = text("title", { line: state.line });
  show(at("line"), document.title);
  show(at("model"), text("model", model));
  renderConnection();
  present();
  renderFigures();
  list(document.querySelector("#rejects ul"), state.rejects.length ? state.rejects : [null], reject);
  const isTranslated = ({ id }) => `warning_${id}` in words;
  const warnings = state.warnings.filter(isTranslated).map(({ id }) => id);
  if (state.labels_damaged) warnings.push("labels_damaged");
  const complaints = [
    ...state.away.map((sink) => text("away", { sink })),
    ...warnings.map((id) => text(`warning_${id}`)),
  ];
  list(at("warnings"), complaints, (each) => each);
  at("warnings").tabIndex = complaints.length ? 0 : -1; // it may have to be scrolled
  const others = state.warnings.filter((warning) => !isTranslated(warning));
  const notices = [...others, ...state.notices].map((each) => each.text);
  list(document.querySelector("#notices ul"), notices.length ? notices : [text("no_notices")], (each) => each);
  at("heat").hidden = !model.has_heat;
  at("overrule").hidden = at("labels").hidden = at("login").hidden = !state.labels;
  show(at("saved"), saved ? text("saved", saved) : "");
}

function renderConnection() {
  const newest = state.failure ?? state.last;
  const silence = newest ? secondsSince(newest) : 0;
  const pace = state.per_minute ? 60 / state.per_minute : 0; // seconds from one image to the next
  const isIdle = silence > Math.max(IDLE, 3 * pace);
  const status = isLost ? "lost" : state.state === "ready" && isIdle ? "idle" : state.state;
  at("connection").dataset.state = status;
  document.body.classList.toggle("old", isLost || isIdle);
  const since = isLost ? (Date.now() - answered) / 1000 : silence;
  show(at("connection"), status === "lost" || status === "idle" ? `${text(status)}: ${age(since)}` : text(status));
}

/** By the line's clock. */
function secondsSince({ time }) {
  return (Date.parse(state.time) - Date.parse(time)) / 1000;
}

/** Show the newest verdict, or the one that is held, together with its picture: neither changes without the other. */
async function present() {
  const wanted = isHeld && shown ? shown : state.failure ?? state.last;
  const address = wanted && !wanted.error ? `pictures/${wanted.id}${at("heat").ariaPressed === "true" ? "?heat=1" : ""}` : "";
  const isSame = wanted?.id === shown?.id && address === at("picture").dataset.address;
  if (isSame) shown = wanted; // doubts may have come to it
  if (isSame || isLoading) {
    renderVerdict();
    return;
  }
  isLoading = true;
  const picture = await load(address);
  isLoading = false;
  if (isHeld && shown && wanted.id !== shown.id) return; // it was held meanwhile
  shown = wanted;
  picture.dataset.address = address;
  at("picture").replaceWith(picture);
  renderVerdict();
  present(); // there may be a newer one
}

/** A picture, once it can be seen; hidden if the line holds it no more, or until it comes if that takes too long. */
async function load(address) {
  const picture = build("img", { id: "picture", alt: "", hidden: "" });
  if (!address) return picture;
  picture.src = address;
  const coming = picture.decode().then(() => { picture.hidden = false; }, () => {});
  await Promise.race([coming, new Promise((resume) => setTimeout(resume, PATIENCE))]);
  return picture;
}

const decisionOf = (outcome) => (!outcome ? "waiting" : outcome.error ? "failure" : decide(outcome));

function renderVerdict() {
  const decision = decisionOf(shown);
  const verdict = shown && !shown.error ? shown : null;
  at("verdict").className = `verdict ${decision}`;
  show(at("decision"), text(decision));
  show(at("label"), verdict?.label ?? ""); // a failure's error names its image
  at("label").style.setProperty("--letters", verdict?.label.length ?? 0);
  show(at("confidence"), verdict ? text("confidence", { confidence: percent(verdict.confidence) }) : "");
  const doubts = verdict ? [...(verdict.taught ? [] : [text("untaught")]), ...verdict.doubts.map((doubt) => text(`doubt_${doubt}`))] : [];
  list(at("doubts"), shown?.error ? [shown.error, shown.remedy] : doubts, (reason) => reason);
  const when = shown ? text("when", { age: age(secondsSince(shown)) }) : "";
  show(at("when"), isHeld ? `${text("held")} · ${when}` : when);
  at("picture").alt = verdict ? describe(verdict) : "";
  show(at("image"), at("picture").alt);
  at("image").title = at("picture").alt;
  at("overrule").disabled = !verdict;
  speak(decision, verdict ? `${text(decision)}: ${verdict.label}` : text(decision));
}

function speak(decision, sentence) {
  if (decision === "good" || spoken.what === sentence || Date.now() - spoken.when < QUIET) return;
  spoken = { what: sentence, when: Date.now() };
  at("spoken").textContent = sentence;
}

function renderFigures() {
  const { counts, latency, drift, model } = state;
  const share = (count) => `${number(count)}${counts.images ? ` (${percent(count / counts.images, 1)})` : ""}`;
  show(at("pace"), number(state.per_minute, { maximumFractionDigits: 0 }));
  show(at("latency"), latency ? text("latencies", { median: number(latency.median), p95: number(latency.p95) }) : "–");
  show(at("images"), number(counts.images));
  for (const name of ["defects", "doubtful"]) show(at(name), share(counts[name]));
  show(at("failures"), number(counts.failures));
  at("drift").classList.toggle("alarm", Boolean(drift?.drifted));
  show(at("drift"), drift ? level(drift) : text("unmeasured"));
  const known = model.accuracy;
  show(at("accuracy"), known
    ? text("accuracies", { share: percent(known.share, 1), low: percent(known.low), high: percent(known.high) })
    : text("unmeasured"));
  renderField(state);
}

/** The accuracy that labels of images kept at random show, beside the one that the bundle promises. */
function renderField({ field }) {
  at("field-figure").hidden = !state.labels;
  at("field").classList.toggle("alarm", field?.promise === "missed");
  if (!field) return show(at("field"), text("unmeasured"));
  const { share, low, high, images } = field.accuracy;
  const values = { share: percent(share, 1), low: percent(low), high: percent(high), images: number(images) };
  const told = text("fields", values);
  show(at("field"), field.promise === "missed" || field.promise === "exceeded" ? text(`field_${field.promise}`, { told }) : told);
}

function level(drift) {
  const share = percent(drift.level);
  return drift.drifted ? text("drifted", { level: share }) : share;
}

function reject(verdict) {
  if (!verdict) return text("no_rejects");
  const button = document.createElement("button");
  const picture = new Image(88, 88);
  picture.src = `rejects/${verdict.id}`;
  picture.alt = "";
  const label = document.createElement("b");
  label.textContent = verdict.label;
  const when = document.createElement("time");
  when.dateTime = verdict.time;
  when.textContent = new Date(verdict.time).toLocaleTimeString(language);
  button.type = "button";
  button.append(picture, label, when);
  button.addEventListener("click", () => open(verdict));
  return button;
}

function open(verdict) {
  const [title, picture, facts] = dialog.children;
  title.textContent = `${verdict.label}, ${percent(verdict.confidence)}`;
  picture.src = `rejects/${verdict.id}`;
  picture.alt = describe(verdict);
  facts.textContent = [verdict.image, verdict.bundle, new Date(verdict.time).toLocaleString(language)].join(" · ");
  dialog.showModal();
}

// The line

/** Show the line as it is; if that fails for a while, for whatever reason, say that what is shown is old. */
async function look() {
  try {
    if (!isBegun) await prepare();
    const held = disputed ?? (isHeld ? shown : null);
    state = await ask(held ? `state?held=${held.id}` : "state");
    isLost = false;
    render();
    answered = Date.now();
  } catch {
    isLost = Date.now() - answered > 3 * POLL;
    if (isLost && state) renderConnection();
  }
}

async function watch() {
  for (;;) {
    if (!document.hidden) await look();
    await new Promise((resume) => setTimeout(resume, POLL));
  }
}

function toggle(button) {
  button.ariaPressed = String(button.ariaPressed !== "true");
  isHeld = at("hold").ariaPressed === "true";
  document.body.classList.toggle("held", isHeld);
  if (state) render();
}

/** Have the image that is seen now wait before all others for its label, whatever comes meanwhile, and ask for that. */
function overrule() {
  disputed = { id: shown.id, image: shown.image };
  saved = null;
  overruled.querySelector(".classes").replaceChildren();
  show(at("overruled-about"), describe(shown));
  show(at("kept"), "");
  at("overruled-picture").src = at("picture").src;
  overruled.showModal();
  change(async () => {
    const kept = await login.send("POST", "../labels/overrule", { id: disputed.id });
    if (!kept) return overruled.close();
    disputed.kept = kept.kept;
    show(at("kept"), text("kept"));
    overruled.querySelector(".classes").replaceChildren(...classButtons(state.labels, label));
  });
}

function label(name) {
  const { kept, image } = disputed;
  change(async () => {
    const done = await login.send("POST", "../labels/label", { images: [kept], label: name });
    if (!done) return;
    if (done.gone.length) throw Object.assign(new Error(text("labels_gone", { count: number(1) })), { isRefused: true });
    saved = { image, label: name };
    render();
    at("spoken").textContent = text("saved", saved);
    overruled.close();
  });
}

/** Change something; what hinders it is told, and it can be tried again unless the line refuses it. */
async function change(work) {
  attempt = work;
  show(at("problem"), "");
  at("again").hidden = true;
  try {
    await work();
  } catch (error) {
    show(at("problem"), "isRefused" in error ? error.message : `${text("unsaved")}: ${text("lost")}`);
    at("again").hidden = Boolean(error.isRefused);
  }
}

async function prepare() {
  await loadWords("strings.json", () => { login.render(); if (state) render(); });
  await login.look();
  for (const button of [at("heat"), at("hold")]) button.addEventListener("click", () => toggle(button));
  at("overrule").addEventListener("click", overrule);
  document.addEventListener("keydown", (event) => {
    if (event.repeat) return;
    const top = [...document.querySelectorAll("dialog[open]")].at(-1); // over which a login may stand
    const place = top === overruled ? overruled : isForPage(event) ? at("live") : null;
    const button = place?.querySelector(`[aria-keyshortcuts="${CSS.escape(event.key.toLowerCase())}"]`);
    if (button && !button.hidden) button.click();
  });
  at("again").addEventListener("click", () => change(attempt));
  overruled.addEventListener("close", () => { disputed = null; });
  keepFocus();
  isBegun = true;
}

watch();
