// What pages have in common: words in the language of their reader, numbers and times, elements and lists, requests, keys.

const PATIENCE = 5000; // milliseconds for an answer
const UNITS = [["day", 86400], ["hour", 3600], ["minute", 60], ["second", 1]];

let strings;
export let words;
export let language;

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

/** Build an element: its attributes, then what is in it. */
export function build(name, attributes, ...content) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...content);
  return element;
}

/** Change what is shown only if it is another: a screen reader's place and a selection stay. */
export function show(element, content) {
  if (element.textContent !== content) element.textContent = content;
}

export function list(element, items, build) {
  const key = JSON.stringify([language, items]);
  if (element.dataset.shown === key) return;
  element.dataset.shown = key;
  element.replaceChildren(...items.map((item) => {
    const entry = document.createElement("li");
    entry.append(build(item));
    return entry;
  }));
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

/** Have what a pointer presses or chooses not keep the focus: the next Enter is for the page, not for what was clicked last. */
export function keepFocus() {
  let isPointer = false;
  document.addEventListener("keydown", () => { isPointer = false; });
  document.addEventListener("mousedown", (event) => {
    isPointer = true;
    if (!event.target.closest("button")) return;
    event.preventDefault();
    document.activeElement.closest("button, select")?.blur();
  });
  document.addEventListener("change", ({ target }) => { if (isPointer) target.blur(); });
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

/** Fetch the words, let the reader choose a language in #language, and call `render` whenever that is another. */
export async function loadWords(address, render) {
  strings = await ask(address);
  const choice = at("language");
  choice.replaceChildren(...Object.entries(strings).map(([code, { name }]) => new Option(name, code)));
  choice.addEventListener("change", () => {
    localStorage.setItem("language", choice.value);
    choose(choice.value, render);
  });
  choose(preferred(), render);
}

function choose(wanted, render) {
  language = wanted;
  words = strings[wanted];
  document.documentElement.lang = wanted;
  at("language").value = wanted;
  for (const element of document.querySelectorAll("[data-text]")) element.textContent = words[element.dataset.text];
  render();
}

function preferred() {
  const wanted = [localStorage.getItem("language"), ...navigator.languages];
  return wanted.map((each) => each?.slice(0, 2)).find((each) => each in strings) ?? "en";
}
