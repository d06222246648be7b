import { age, ask, at, classButtons, isForPage, language, list, loadWords, number, percent, show, text, words } from "../page/words.js";
import { Login } from "../page/login.js";

const POLL = 500; // milliseconds between two looks at the line
const QUIET = 4000; // milliseconds between two spoken decisions

const dialog = at("details");
const overruled = at("overruled");
const login = new Login(at("login"), () => words);
let state = null; // as the line told it last
let answered = Date.now(); // when it did, by this machine's clock
let isBegun = false;
let isLost = false;
let isHeld = false;
let held = null; // the verdict whose picture is shown
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
  const { model, last } = state;
  document.title = text("title", { line: state.line });
  show(at("line"), document.title);
  show(at("model"), text("model", model));
  renderConnection();
  renderVerdict();
  renderFigures();
  list(document.querySelector("#rejects ul"), state.rejects.length ? state.rejects : [null], reject);
  const isTranslated = ({ id }) => `warning_${id}` in words;
  const warnings = state.warnings.filter(isTranslated).map(({ id }) => id);
  if (state.labels_damaged) warnings.push("labels_damaged");
  list(at("warnings"), warnings, (id) => text(`warning_${id}`));
  const others = state.warnings.filter((warning) => !isTranslated(warning));
  const notices = [...others, ...state.notices].map((each) => each.text);
  list(document.querySelector("#notices ul"), notices.length ? notices : [text("no_notices")], (each) => each);
  at("heat").hidden = !model.has_heat;
  at("overrule").hidden = at("labels").hidden = at("login").hidden = !state.labels;
  if (!isHeld) held = last;
  at("overrule").disabled = !held;
  if (held) showPicture(held);
}

function renderConnection() {
  const status = isLost ? "lost" : state.state;
  at("connection").dataset.state = status;
  document.body.classList.toggle("lost", isLost);
  const since = isLost ? `: ${age((Date.now() - answered) / 1000)}` : "";
  show(at("connection"), text(status) + since);
}

function renderVerdict() {
  const { last, failure } = state;
  const decision = failure ? "failure" : last ? decide(last) : "waiting";
  at("verdict").className = `verdict ${decision}`;
  show(at("decision"), text(decision));
  show(at("label"), failure || !last ? "" : last.label); // a failure's error names its image
  show(at("confidence"), failure || !last ? "" : text("confidence", { confidence: percent(last.confidence) }));
  const reasons = failure ? [failure.error, failure.remedy]
    : last ? [...(last.taught ? [] : [text("untaught")]), ...last.doubts.map((doubt) => text(`doubt_${doubt}`))] : [];
  list(at("doubts"), reasons, (reason) => reason);
  const newest = failure ?? last;
  const seconds = newest ? (Date.parse(state.time) - Date.parse(newest.time)) / 1000 : 0;
  show(at("when"), newest ? text("when", { age: age(seconds) }) : "");
  speak(decision, failure || !last ? text(decision) : `${text(decision)}: ${last.label}`);
}

function speak(decision, sentence) {
  if (decision === "good" || spoken.what === sentence || Date.now() - spoken.when < QUIET) return;
  spoken = { what: sentence, when: Date.now() };
  at("spoken").textContent = sentence;
}

function showPicture(verdict) {
  const picture = at("picture");
  const address = `pictures/${verdict.id}${at("heat").ariaPressed === "true" ? "?heat=1" : ""}`;
  if (picture.dataset.address === address) return;
  picture.dataset.address = address;
  picture.src = address;
  picture.alt = describe(verdict);
  show(at("image"), picture.alt);
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
    state = await ask(isHeld && held ? `state?held=${held.id}` : "state");
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

/** Have the image that is shown wait before all others for its label, and ask for that. */
async function overrule() {
  const kept = await tell("../labels/overrule", { id: held.id });
  if (!kept) return;
  const choose = async (label) => {
    if (await tell("../labels/label", { images: [kept.kept], label })) overruled.close();
  };
  overruled.querySelector(".classes").replaceChildren(...classButtons(state.labels, choose));
  at("overruled-picture").src = `../labels/pictures/${kept.kept}`;
  overruled.showModal();
}

/** Send a change; what hinders it is told. */
async function tell(path, content) {
  try {
    show(at("problem"), "");
    return await login.send("POST", path, content);
  } catch (error) {
    show(at("problem"), error.message);
    return null;
  }
}

async function prepare() {
  await loadWords("strings.json", () => { login.render(); if (state) render(); });
  await login.look();
  for (const button of [at("heat"), at("hold")]) button.addEventListener("click", () => toggle(button));
  at("overrule").addEventListener("click", overrule);
  document.addEventListener("keydown", (event) => {
    const place = overruled.open ? overruled : isForPage(event) ? at("live") : null;
    const button = place?.querySelector(`[aria-keyshortcuts="${CSS.escape(event.key.toLowerCase())}"]`);
    if (button && !button.hidden) button.click();
  });
  at("picture").addEventListener("load", () => { at("picture").hidden = false; });
  at("picture").addEventListener("error", () => { at("picture").hidden = true; }); // the line holds it no more
  isBegun = true;
}

watch();
