// What pages have in common: language, formatting, and change of what is shown.

import { build } from "./login.js";

const PATIENCE = 5000; // milliseconds for an answer
const UNITS = [["day", 86400], ["hour", 3600], ["minute", 60], ["second", 1]];

let strings;
export let words, language;

export const at = (id) => document.getElementById(id);

export function text(key, values = {}) {
  return words[key].replace(/{(\w+)}/g, (_, name) => values[name]);
}

export function number(value, options) {
  return new Intl.NumberFormat(language, options).format(value);
}

export function percent(value, digits = 0) {
  return number(value, { style: "percent", minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export function age(seconds) {
  const [unit, size] = UNITS.find(([, least]) => seconds >= least) ?? UNITS.at(-1);
  return number(Math.max(0, Math.floor(seconds / size)), { style: "unit", unit, unitDisplay: "long" });
}

/** Change what is shown only if it is another: a screen reader's place and a selection stay. */
export function show(element, content) {
  if (element.textContent !== content) element.textContent = content;
}

export async function ask(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(PATIENCE) });
  if (!answer.ok) throw new Error(answer.statusText);
  return answer.json();
}

/** Whether a key is meant for the page, not for a field, a list or a dialog. */
export function isForPage(event) {
  const elsewhere = event.target.closest("select, input") || document.querySelector("dialog[open]");
  return !(event.ctrlKey || event.altKey || event.metaKey || elsewhere);
}

/** Buttons for classes, the first nine with a key each, which `choose` is called with. */
export function classButtons(classes, choose) {
  return classes.map((name, place) => {
    const button = build("button", { type: "button" }, name);
    if (place < 9) {
      button.setAttribute("aria-keyshortcuts", place + 1);
      button.prepend(build("kbd", {}, String(place + 1)), " ");
    }
    button.addEventListener("click", () => choose(name));
    return button;
  });
}

/** Load the words, and let the person choose their language; `render` shows everything in another one. */
export async function begin(render) {
  strings = await ask("strings.json");
  const list = at("language");
  list.append(...Object.entries(strings).map(([code, { name }]) => new Option(name, code)));
  choose(preferred());
  list.addEventListener("change", () => {
    localStorage.setItem("language", list.value);
    choose(list.value);
    render();
  });
}

function choose(wanted) {
  language = wanted;
  words = strings[wanted];
  document.documentElement.lang = wanted;
  at("language").value = wanted;
  for (const element of document.querySelectorAll("[data-text]")) element.textContent = words[element.dataset.text];
}

function preferred() {
  const wanted = [localStorage.getItem("language"), ...navigator.languages];
  return wanted.map((each) => each?.slice(0, 2)).find((each) => each in strings) ?? "en";
}
