// Values of a run's rounds: as they are charted, written and saved.

import { number, percent, words } from "../page/words.js";

const MEGABYTES = new Set(["bytes", "bytes_up", "bytes_down"]);
export const SHARES = new Set(["accuracy", "accuracy_all", "accuracy_others", "new_accuracy"]);
export const HIDDEN = new Set(["bytes", "offered", "absent", "refused"]); // measures without a chart of their own
export const WHOLE = ["new_accuracy", "new_rmse", "loss", "rmse", "seconds", "bytes_up", "bytes_down"]; // of a round

export function format(key, value) {
  if (value == null) return "–";
  if (SHARES.has(key)) return percent(value, 1);
  return number(MEGABYTES.has(key) ? value / 1e6 : value, { maximumSignificantDigits: 4 });
}

export function size(bytes) {
  const [unit, one] = bytes < 1e9 ? ["megabyte", 1e6] : ["gigabyte", 1e9];
  return number(bytes / one, { style: "unit", unit, maximumSignificantDigits: 3 });
}

export function drawn(key, value) {
  if (value == null) return null;
  return MEGABYTES.has(key) ? value / 1e6 : SHARES.has(key) ? 100 * value : value;
}

export function titleOf(measure) {
  return measure.title || words[measure.key] || measure.key;
}

export function values(run, key, position) {
  return run.rows.map((row) => drawn(key, row.values[key]?.[position]));
}

export function lastValue(run, key, position) {
  return run.rows.findLast((row) => row.values[key]?.[position] != null)?.values[key][position];
}

/** Mean, least and greatest value of the nodes in each of these rounds. */
export function spread(run, key, rounds) {
  const [mean, low, high] = [[], [], []];
  for (const round of rounds) {
    const row = run.byRound.get(round);
    const found = (row?.values[key] ?? [row?.whole[key]]).filter((value) => value != null).map((value) => drawn(key, value));
    mean.push(found.length ? found.reduce((sum, value) => sum + value, 0) / found.length : null);
    low.push(found.length ? Math.min(...found) : null);
    high.push(found.length ? Math.max(...found) : null);
  }
  return { values: mean, low, high };
}

export function valueText(key, value) {
  const digits = number(value, { maximumSignificantDigits: 4 });
  return SHARES.has(key) ? percent(value / 100, 1) : digits;
}

export function toCsv(head, rows) {
  // no formula, as `plain_cell` has it: where a cell may begin, an apostrophe precedes what could be one
  const formula = /(^|[;\t\r\n])(?=['\s\u200b-\u200f\u2060\ufeff]*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20])/g;
  const plain = (value) => (typeof value === "string" ? value.replace(formula, "$1'") : value ?? "");
  const cell = (value) => (/[",\r\n]/.test(plain(value)) ? `"${plain(value).replaceAll('"', '""')}"` : plain(value));
  return new Blob([[head, ...rows].map((row) => row.map(cell).join(",")).join("\n"), "\n"], { type: "text/csv" });
}

export function allValues(run) {
  const keys = run.measures.map((measure) => measure.key).filter((key) => run.rows.some((row) => key in row.values));
  const rows = run.rows.flatMap((row) => run.nodes.map((name, position) => (
    [row.round, new Date(1000 * row.opened).toISOString(), name, ...keys.map((key) => row.values[key]?.[position])]
  )));
  return toCsv(["round", "opened", "node", ...keys], rows);
}
