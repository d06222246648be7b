// A grid of images of which many can be selected. Only those in sight are in the document, however many there are.

import { at, build, percent, text } from "../page/words.js";

const CELL = { width: 136, height: 176 }; // pixels, the least; a row is filled evenly
const SPARE = 2; // rows above and below those in sight

export class Grid {
  #images = [];
  #selected = new Set(); // names
  #current = 0; // place of the image to which keys refer
  #anchor = 0; // place from which a range is selected
  #cells = new Map(); // by name

  /** `changed` is called when another image is current or selected. */
  constructor(changed) {
    this.changed = changed;
    this.element = at("grid");
    this.element.addEventListener("scroll", () => this.render());
    this.element.addEventListener("keydown", (event) => this.#key(event));
    this.element.addEventListener("click", (event) => this.#click(event));
    new ResizeObserver(() => this.render()).observe(this.element);
  }

  /** What labels are given to: the selected images, or the current one. */
  get chosen() {
    const current = this.#images[this.#current];
    return this.#selected.size ? this.#images.filter(({ kept }) => this.#selected.has(kept)) : current ? [current] : [];
  }

  /** Whether what labels are given to was seen: it was selected, or its picture is there. */
  get isSeen() {
    const picture = this.#cells.get(this.#images[this.#current]?.kept)?.firstChild;
    return this.#selected.size > 0 || Boolean(picture?.complete && picture.naturalWidth);
  }

  get selected() {
    return this.#selected.size;
  }

  /** Show other images; of those that stay the selected ones stay so. */
  fill(images) {
    this.#images = images;
    const names = new Set(images.map(({ kept }) => kept));
    this.#selected = new Set([...this.#selected].filter((name) => names.has(name)));
    this.#current = this.#anchor = Math.max(0, Math.min(this.#current, images.length - 1));
    this.render();
  }

  /** Go to an image. */
  go(kept) {
    this.#move(Math.max(0, this.#images.findIndex((image) => image.kept === kept)));
  }

  /** Select all images that the model finds like the current one. */
  selectGroup() {
    const group = this.#images[this.#current]?.group;
    for (const image of this.#images) if (image.group === group) this.#selected.add(image.kept);
    this.#update();
  }

  clear() {
    this.#selected.clear();
    this.#update();
  }

  get #columns() {
    return Math.max(1, Math.floor(this.element.clientWidth / CELL.width));
  }

  render() {
    const { clientWidth: width, clientHeight: height, scrollTop } = this.element;
    if (!width) return; // it is not shown
    const columns = this.#columns;
    at("room").style.height = `${Math.ceil(this.#images.length / columns) * CELL.height}px`;
    const first = Math.max(0, Math.floor(scrollTop / CELL.height) - SPARE) * columns;
    const last = Math.ceil((scrollTop + height) / CELL.height + SPARE) * columns;
    const shown = this.#images.slice(first, last);
    const names = new Set(shown.map(({ kept }) => kept));
    for (const [name, cell] of this.#cells) {
      if (names.has(name)) continue;
      cell.remove();
      this.#cells.delete(name);
    }
    shown.forEach((image, index) => this.#place(image, index, first + index, columns, width / columns));
    const current = this.#images[this.#current];
    if (this.#cells.has(current?.kept)) this.element.setAttribute("aria-activedescendant", `cell-${current.kept}`);
    else this.element.removeAttribute("aria-activedescendant");
  }

  #place(image, index, place, columns, width) {
    let cell = this.#cells.get(image.kept);
    if (!cell) {
      const picture = build("img", { src: `pictures/${image.kept}?size=small`, alt: "", decoding: "async" });
      cell = build("div", { id: `cell-${image.kept}`, role: "option" }, picture, build("b", {}), build("span", {}));
      cell.dataset.kept = image.kept;
      this.#cells.set(image.kept, cell);
    }
    const there = at("room").children[index];
    if (there !== cell) at("room").insertBefore(cell, there ?? null); // a screen reader's order is the document's
    const [, label, sure] = cell.children;
    label.textContent = image.verdict;
    sure.textContent = text("confidence", { confidence: percent(image.confidence) });
    cell.className = `cell${image.band % 2 ? " even" : ""}${place === this.#current ? " current" : ""}`;
    cell.setAttribute("aria-selected", this.#selected.has(image.kept));
    cell.setAttribute("aria-setsize", this.#images.length);
    cell.setAttribute("aria-posinset", place + 1);
    cell.style.width = `${width - 6}px`;
    cell.style.height = `${CELL.height - 6}px`;
    cell.style.transform = `translate(${(place % columns) * width}px, ${Math.floor(place / columns) * CELL.height}px)`;
  }

  #click(event) {
    const kept = event.target.closest(".cell")?.dataset.kept;
    if (!kept) return;
    const place = this.#images.findIndex((image) => image.kept === kept);
    if (event.shiftKey) this.#range(place);
    else this.#toggle(place);
    this.#current = place;
    this.#update();
  }

  #key(event) {
    const rows = Math.max(1, Math.floor(this.element.clientHeight / CELL.height));
    const steps = {
      ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.#columns, ArrowDown: this.#columns,
      PageUp: -rows * this.#columns, PageDown: rows * this.#columns, Home: -Infinity, End: Infinity,
    };
    if (event.key in steps) {
      const place = Math.max(0, Math.min(this.#images.length - 1, this.#current + steps[event.key]));
      if (event.shiftKey) this.#range(place);
      else this.#anchor = place;
      this.#move(place);
    } else if (event.key === " ") {
      this.#toggle(this.#current);
      this.#update();
    } else if (event.key === "Escape") {
      this.clear();
    } else {
      return;
    }
    event.preventDefault();
  }

  #toggle(place) {
    const kept = this.#images[place]?.kept;
    if (!kept) return;
    if (!this.#selected.delete(kept)) this.#selected.add(kept);
    this.#anchor = place;
  }

  #range(place) {
    const [from, to] = [this.#anchor, place].sort((one, other) => one - other);
    for (const image of this.#images.slice(from, to + 1)) this.#selected.add(image.kept);
  }

  #move(place) {
    this.#current = place;
    const top = Math.floor(place / this.#columns) * CELL.height;
    const { clientHeight: height, scrollTop } = this.element;
    if (top < scrollTop) this.element.scrollTop = top;
    else if (top + CELL.height > scrollTop + height) this.element.scrollTop = top + CELL.height - height;
    this.#update();
  }

  #update() {
    this.render();
    this.changed();
  }
}
