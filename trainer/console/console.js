import { Chart, drawTimeline, leftIn, save } from "./console_charts.js";
import { fillBody, fillHead, renderFacts } from "./console_elements.js";
import {
  HIDDEN, SHARES, WHOLE, allValues, drawn, format, lastValue, size, spread, titleOf, toCsv, valueText, values,
} from "./console_values.js";
import { Login } from "../page/login.js";
import { age, at, build, language, list, loadWords, number, percent, show, text, words } from "../page/words.js";

const COLOURS = 8;
const REDRAW = 400; // milliseconds between two times that all is drawn, at least
const PATIENCE = 12000; // milliseconds without a sign of the console
const RECENT = 10; // rounds whose durations say how long one takes
const SLOW = 2; // times what the others take, from which on a node is slow

const known = new Map(); // runs by id, as far as they were fetched
const charts = new Map(); // by key
let runs = []; // as the console told them last
let heard = Date.now(); // when it did
let chosen = null; // the id of a node
let isDue = false;
let listened = 0; // when it was last asked for events
const login = new Login(at("login"), () => words);

// The runs

const overviewOf = (id) => runs.find((run) => run.id === id);
const shown = () => known.get(at("run").value);
const compared = () => known.get(at("other").value);

async function fetchRun(id) {
  const run = known.get(id) ?? { id, version: 0, rows: [], byRound: new Map(), messages: [], isFetching: false };
  known.set(id, run);
  if (run.isFetching || run.version >= (overviewOf(id)?.version ?? 1)) return;
  run.isFetching = true;
  try {
    const answer = await fetch(`runs/${id}?since=${run.version}`);
    if (!answer.ok) throw new Error((await answer.json()).error);
    take(run, await answer.json());
    run.problem = "";
  } catch (error) {
    run.problem = error.message;
  } finally {
    run.isFetching = false;
  }
  schedule();
}

/** Add what is new of a run to what is known of it. */
function take(run, { rows, messages, whole, ...rest }) {
  if (whole) [run.byRound, run.messages] = [new Map(), []];
  Object.assign(run, rest);
  for (const [round, opened, closed, values, ofRound] of rows) {
    run.byRound.set(round, { round, opened, closed, values, whole: ofRound });
  }
  run.rows = [...run.byRound.values()].sort((one, other) => one.round - other.round);
  run.messages = [...run.messages, ...messages].slice(-500);
}

function stateOf(run) {
  if (Date.now() - heard > PATIENCE) return "lost";
  if (run.stage === "finished" || run.stage === "aborted") return run.stage;
  if (!run.running) return "suspended";
  if (run.held) return "held";
  return run.paused ? "paused" : run.stage === "open" ? "ready" : run.stage;
}

function hear(overview) {
  heard = Date.now();
  const isNew = JSON.stringify(runs.map((run) => run.id)) !== JSON.stringify(overview.runs.map((run) => run.id));
  const wasNewest = !runs.length || at("run").value === runs.at(-1).id;
  runs = overview.runs;
  if (isNew) {
    fillRuns();
    if (wasNewest) at("run").value = runs.at(-1)?.id ?? "";
  }
  for (const id of [at("run").value, at("other").value]) if (id) fetchRun(id);
  schedule();
}

function fillRuns() {
  for (const select of [at("run"), at("other")]) {
    const before = select.value;
    const none = select.id === "other" ? [new Option(text("nothing"), "")] : [];
    select.replaceChildren(...none, ...runs.map((run) => new Option(nameOf(run), run.id)));
    if (before) select.value = before;
  }
}

function nameOf(run) {
  return text("run_name", { ...run, begun: moment(run.begun) });
}

function moment(seconds) {
  return new Date(1000 * seconds).toLocaleString(language, { dateStyle: "short", timeStyle: "short" });
}

// What is shown

function schedule() {
  if (isDue) return;
  isDue = true;
  setTimeout(() => requestAnimationFrame(() => { isDue = false; render(); }), REDRAW);
}

function render() {
  const run = shown();
  const overview = overviewOf(at("run").value);
  renderConnection();
  if (!overview || !run?.version) return;
  document.title = text("title", overview);
  show(at("title"), document.title);
  renderOverview(run, overview);
  renderActions(overview);
  renderCharts(run, compared());
  renderNodes(run, overview);
  renderTimeline(run);
  renderMessages(run);
  renderRuns();
  renderFacts(document.querySelector("#settings dl"), Object.entries(run.settings).map(([key, value]) => [key, String(value)]));
}

function renderConnection() {
  const overview = overviewOf(at("run").value) ?? { stage: "gathering", running: true, round: 0 };
  const state = stateOf(overview);
  at("connection").dataset.state = state === "finished" ? "ready" : state;
  show(at("connection"), shown()?.problem || text(state));
  show(at("spoken"), text(state));
}

function renderOverview(run, overview) {
  const closed = run.rows.filter((row) => row.closed);
  const recent = closed.slice(-RECENT).map((row) => row.closed - row.opened).sort((one, other) => one - other);
  const pace = recent[Math.floor(recent.length / 2)];
  const isRunning = overview.running && overview.stage === "open";
  const present = run.status.filter(({ doing }) => doing !== "absent" && doing !== "refused").length;
  const total = (key) => closed.reduce((sum, row) => sum + (row.whole[key] ?? 0), 0);
  const contributed = run.rows.reduce((sum, row) => sum + (row.values.bytes ?? []).reduce((part, size) => part + size, 0), 0);
  const seconds = (value) => number(value, { style: "unit", unit: "second", maximumSignificantDigits: 3 });
  const last = overview.round;
  const latest = (key) => run.rows.findLast((row) => row.whole[key] != null)?.whole[key];
  const judged = ["new_accuracy", "new_rmse"].find((key) => latest(key) != null);
  const facts = [
    [text("round"), overview.rounds ? text("rounds", { round: number(last), rounds: number(overview.rounds) }) : number(last)],
    ...(overview.running ? [[text("present"), text("of", { count: present, all: overview.places })]] : []),
    ...(pace == null ? [] : [[text("pace"), seconds(pace)]]),
    ...(isRunning && pace != null && overview.rounds ? [[text("left"), age(pace * (overview.rounds - closed.length))]] : []),
    ...(contributed ? [[text("up"), size(contributed)]] : []),
    ...(total("bytes_down") ? [[text("down"), size(total("bytes_down"))]] : []),
    ...(judged ? [[text(judged), format(judged, latest(judged))], [text("baseline"), format(judged, latest("baseline"))]] : []),
    ...(latest("rmse") == null ? [] : [[text("rmse"), format("rmse", latest("rmse"))]]),
    ...["accuracy", "accuracy_all"].flatMap((key) => {
      const found = run.nodes.map((_, position) => lastValue(run, key, position)).filter((value) => value != null);
      return found.length ? [[text(key), percent(found.reduce((sum, value) => sum + value, 0) / found.length, 1)]] : [];
    }),
  ];
  renderFacts(document.querySelector("#overview dl"), facts);
}

// Actions

const canAct = (overview) => overview.kind === "federation" && overview.running && ["gathering", "open"].includes(overview.stage);

function renderActions(overview) {
  at("operate").hidden = !canAct(overview);
  show(at("pause"), text(overview.held ? "resume" : "pause"));
}

/** Have the coordinator do something with the run that is shown, after a question if it cannot be undone. */
async function act(what, node) {
  const { id, folder } = overviewOf(at("run").value);
  if (["abort", "drop"].includes(what) && !(await confirm(what, node))) return;
  show(at("outcome"), "");
  try {
    const { possible } = await (await fetch("/login")).json();
    if (!possible) throw new Error(text("nobody", { folder }));
    await login.send("POST", `runs/${id}/actions`, { what, node });
  } catch (error) {
    show(at("outcome"), error.message);
  }
}

function confirm(what, node) {
  const dialog = at("confirm");
  show(at("question"), text(`confirm_${what}`, { node }));
  show(dialog.querySelector("p"), text(`warn_${what}`));
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

// Charts

function renderCharts(run, other) {
  const both = other && other !== run && other.version ? [run, other] : [run];
  const measures = new Map();
  for (const measure of both.flatMap((each) => [...each.measures, ...WHOLE.map((key) => ({ key, title: "" }))])) {
    const before = measures.get(measure.key);
    if (!before || before.title === measure.key) measures.set(measure.key, measure); // the other method explains it
  }
  for (const [key, measure] of measures) {
    const withValues = both.filter((each) => each.rows.some((row) => key in row.values || key in row.whole));
    if (HIDDEN.has(key) || !withValues.length) {
      charts.get(key)?.figure.toggleAttribute("hidden", true);
      continue;
    }
    const chart = charts.get(key) ?? addChart(key);
    chart.figure.toggleAttribute("hidden", false);
    describe(chart, measure, run);
    const rounds = [...new Set(both.flatMap((each) => each.rows.map((row) => row.round)))].sort((one, another) => one - another);
    chart.drawn = both.length > 1 ? runLines(withValues, both, key, rounds) : nodeLines(run, key);
    chart.rounds = rounds;
    chart.plot.update(rounds, chart.drawn, measure.level);
  }
  for (const [key, chart] of charts) if (!measures.has(key)) chart.figure.toggleAttribute("hidden", true);
}

function nodeLines(run, key) {
  if (WHOLE.includes(key)) return [{ name: titleOf({ key }), number: 0, values: run.rows.map((row) => drawn(key, row.whole[key])) }];
  return run.nodes.map((name, position) => (
    { name, number: position, values: values(run, key, position), faint: chosen !== null && chosen !== name }
  ));
}

function runLines(withValues, both, key, rounds) {
  return withValues.map((run) => (
    { name: text("mean", { run: nameOf(overviewOf(run.id)) }), number: both.indexOf(run), ...spread(run, key, rounds) }
  ));
}

function addChart(key) {
  const title = build("b", {});
  const meaning = build("small", {});
  const plot = build("div", { class: "plot", role: "img" });
  const read = build("span", { class: "read" });
  const png = build("button", { type: "button" }, "PNG");
  const csv = build("button", { type: "button" }, "CSV");
  const figure = build("figure", { id: `chart-${key}` },
    build("figcaption", {}, title, meaning), plot, build("footer", {}, read, png, csv));
  document.querySelector("#charts > div").append(figure);
  const chart = { key, figure, title, meaning, box: plot };
  chart.plot = new Chart(plot, (point) => {
    show(read, point ? text("value_at", { name: point.name, value: valueText(key, point.value), round: number(point.round) }) : "");
  });
  png.addEventListener("click", async () => save(`${key}.png`, await chart.plot.picture(title.textContent)));
  csv.addEventListener("click", () => save(`${key}.csv`, toCsv(["round", ...chart.drawn.map((line) => line.name)],
    chart.rounds.map((round, index) => [round, ...chart.drawn.map((line) => line.values[index])]))));
  charts.set(key, chart);
  return chart;
}

function describe(chart, measure, run) {
  const [symbol, subscript] = measure.title && measure.key.includes("_") ? measure.key.split("_") : [];
  const key = JSON.stringify([language, measure]);
  if (chart.described !== key) {
    chart.described = key;
    chart.title.replaceChildren(...(symbol ? [build("i", {}, symbol), build("sub", {}, subscript), " "] : []),
      SHARES.has(measure.key) ? `${titleOf(measure)}, %` : titleOf(measure));
    chart.meaning.textContent = measure.meaning || words[`meaning_${measure.key}`] || "";
    for (const button of chart.figure.querySelectorAll("button")) button.ariaLabel = `${titleOf(measure)}: ${button.textContent}`;
  }
  const with_ = run.rows.filter((row) => measure.key in row.values || measure.key in row.whole);
  const ends = [with_[0], with_.at(-1)].filter(Boolean);
  const [first, last] = ends.map((row) => valueText(measure.key, spread(run, measure.key, [row.round]).values[0]));
  chart.box.ariaLabel = ends.length
    ? text("summary", { title: titleOf(measure), first, last, from: ends[0].round, to: ends[1].round }) : titleOf(measure);
}

// Tables

function renderNodes(run, overview) {
  const keys = ["weight", "accuracy", "accuracy_all", "counted", "latency", "iterations"].filter((key) => run.rows.some((row) => key in row.values));
  const hasBytes = run.rows.some((row) => row.values.bytes);
  const heads = [text("node"), text("doing"), text("round"), ...keys.map((key) => text(key)), ...(hasBytes ? [text("bytes")] : []), text("last_error"),
    ...(canAct(overview) ? [text("drop")] : [])];
  fillHead(document.querySelector("#nodes thead tr"), heads);
  const slow = run.nodes.map((_, position) => slowness(run, overview, position));
  const rows = run.nodes.map((name, position) => {
    const { doing, error } = run.status[position];
    const now = overview.kind !== "federation" && doing === "waiting" ? "there" : doing; // others do not tell what they do
    const word = doing === "finished" ? "done" : overview.running ? now : "unknown";
    const bytes = run.rows.reduce((sum, row) => sum + (row.values.bytes?.[position] ?? 0), 0);
    const last = run.rows.findLast((row) => (row.values.weight ?? row.values.latency)?.[position] != null)?.round;
    const state = slow[position] ? text("slow", { doing: text(word), times: number(slow[position], { maximumFractionDigits: 1 }) }) : text(word);
    return [name, state, last ? number(last) : "–", ...keys.map((key) => format(key, lastValue(run, key, position))),
      ...(hasBytes ? [format("bytes", bytes)] : []), error, ...(canAct(overview) ? [doing !== "refused"] : [])];
  });
  const problem = heads.indexOf(text("last_error"));
  fillBody(document.querySelector("#nodes tbody"), rows, (row, index) => row.map((cell, column) => {
    if (column === 0) return build("td", {}, nodeButton(cell, index));
    if (column > problem) return build("td", {}, ...(cell ? [dropButton(row[0])] : []));
    if (column === 1 && slow[index]) return build("td", { class: "alarm" }, cell);
    return build("td", column === problem ? { class: "words alarm" } : {}, cell);
  }));
}

/** How many times as long as the others a node takes, in the open round or in the last one that it was in; 0 if it is not slow. */
function slowness(run, overview, position) {
  if (!overview.running || ["absent", "refused", "finished"].includes(run.status[position].doing)) return 0;
  const key = overview.kind === "federation" ? "counted" : "latency";
  const recent = run.rows.slice(-RECENT);
  const others = recent.flatMap((row) => (row.values[key] ?? []).filter((value, place) => value != null && place !== position));
  const typical = others.sort((one, other) => one - other)[Math.floor(others.length / 2)];
  const open = run.rows.findLast((row) => !row.closed && row.opened);
  const isAwaited = open && open.values[key]?.[position] == null;
  const takes = Math.max(lastValue(run, key, position) ?? 0, isAwaited ? Date.now() / 1000 - open.opened : 0);
  return takes > SLOW * typical ? takes / typical : 0;
}

function nodeButton(name, index) {
  const button = build("button", { type: "button", class: `n${index % COLOURS}`, "aria-pressed": String(chosen === name) }, name);
  button.addEventListener("click", () => {
    chosen = chosen === name ? null : name;
    for (const each of document.querySelectorAll("#nodes tbody button")) each.ariaPressed = String(each.textContent === chosen);
    render();
  });
  return button;
}

function dropButton(node) {
  const button = build("button", { type: "button", "aria-label": text("drop_node", { node }) }, text("drop"));
  button.addEventListener("click", () => act("drop", node));
  return button;
}

function renderTimeline(run) {
  const rows = run.rows.slice(-Number(at("span").value)).filter((row) => row.opened);
  const canvas = document.querySelector("#timeline canvas");
  at("timeline").hidden = !rows.some((row) => row.values.counted);
  if (at("timeline").hidden) return;
  const left = run.nodes.filter((_, position) => leftIn(rows.at(-1), position));
  const words = left.map((name) => `${name}: ${text(leftIn(rows.at(-1), run.nodes.indexOf(name)).why)}`);
  canvas.ariaLabel = [text("timeline_summary", { from: rows[0].round, to: rows.at(-1).round }), ...words].join("; ");
  const isOpen = overviewOf(run.id)?.running;
  drawTimeline(canvas, run.nodes, rows, isOpen ? Date.now() / 1000 : Math.max(...rows.map((row) => row.closed ?? row.opened)), language);
}

function renderMessages(run) {
  const select = at("of");
  if (select.options.length !== run.nodes.length + 1 || select.dataset.language !== language) {
    const before = select.value;
    select.replaceChildren(new Option(text("all_nodes"), ""), ...run.nodes.map((name) => new Option(name, name)));
    [select.value, select.dataset.language] = [run.nodes.includes(before) ? before : "", language];
  }
  const found = run.messages.filter((message) => !select.value || message.node === select.value).slice(-100).reverse();
  list(document.querySelector("#messages ul"), found.length ? found : [null], (message) => {
    if (!message) return text("no_messages");
    const time = build("time", { datetime: new Date(1000 * message.time).toISOString() }, moment(message.time));
    return build("span", { class: message.kind }, time, message.text);
  });
}

function renderRuns() {
  fillHead(document.querySelector("#runs thead tr"), ["begun", "method", "round", "state", "took", "run"].map((key) => text(key)));
  const rows = runs.toReversed().map((run) => [
    moment(run.begun), run.method, run.rounds ? text("rounds", run) : number(run.round), text(stateOf(run)),
    run.ended ? age(run.ended - run.begun) : "–", run.id,
  ]);
  fillBody(document.querySelector("#runs tbody"), rows, (row) => row.map((cell, column) => {
    if (column < row.length - 1) return build("td", column === 3 ? { class: "words" } : {}, cell);
    const button = build("button", { type: "button", "aria-label": `${text("show")}: ${nameOf(overviewOf(cell))}` }, text("show"));
    button.addEventListener("click", () => { at("run").value = cell; chooseRun(); });
    return build("td", { class: "words" }, button);
  }));
}

// The page

function chooseRun() {
  chosen = null;
  fetchRun(at("run").value);
  schedule();
}

function begin() {
  at("run").addEventListener("change", chooseRun);
  at("other").addEventListener("change", () => { if (at("other").value) fetchRun(at("other").value); schedule(); });
  for (const id of ["span", "of"]) at(id).addEventListener("change", render);
  at("pause").addEventListener("click", () => act(overviewOf(at("run").value).held ? "resume" : "pause"));
  at("abort").addEventListener("click", () => act("abort"));
  at("csv").addEventListener("click", () => save(`${shown().id}.csv`, allValues(shown())));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const { plot } of charts.values()) plot.restyle();
    render();
  });
  addEventListener("resize", schedule);
  let events = listen();
  setInterval(() => {
    renderConnection();
    // The browser asks again after a lost connection, but not after a refusal, nor when a connection is dead and silent.
    if (Date.now() - Math.max(heard, listened) < PATIENCE) return;
    events.close();
    events = listen();
  }, PATIENCE / 4);
}

function listen() {
  listened = Date.now();
  const events = new EventSource("events");
  events.addEventListener("message", (event) => hear(JSON.parse(event.data)));
  events.addEventListener("alive", () => { heard = Date.now(); schedule(); });
  events.addEventListener("error", schedule);
  return events;
}

await loadWords("console_strings.json", () => { fillRuns(); login.render(); render(); });
login.look();
begin();
