// Elements of the console's page: facts, tables.

import { build, language, text } from "../page/words.js";

export function renderFacts(place, facts) {
  const key = JSON.stringify([language, facts]);
  if (place.dataset.shown === key) return;
  place.dataset.shown = key;
  place.replaceChildren(...facts.map(([name, value]) => build("div", {}, build("dt", {}, name), build("dd", {}, value))));
}

export function fillHead(place, heads) {
  if (place.dataset.shown === heads.join()) return;
  place.dataset.shown = heads.join();
  place.replaceChildren(...heads.map((head) => (
    build("th", ["last_error", "run", "state"].some((key) => text(key) === head) ? { scope: "col", class: "words" } : { scope: "col" }, head)
  )));
}

/** Replace only the rows that have changed: what has the focus keeps it. */
export function fillBody(place, rows, buildCells) {
  rows.forEach((row, index) => {
    const key = JSON.stringify([language, row]);
    const element = place.rows[index] ?? place.insertRow();
    if (element.dataset.shown === key) return;
    element.dataset.shown = key;
    if (element.contains(document.activeElement)) { // its cells but the one with the focus
      buildCells(row, index).forEach((cell, column) => {
        if (!element.cells[column]?.contains(document.activeElement)) element.cells[column]?.replaceWith(cell);
      });
    } else {
      element.replaceChildren(...buildCells(row, index));
    }
  });
  while (place.rows.length > rows.length) place.deleteRow(-1);
}
