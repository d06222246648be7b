// Login of a person who may change something: a button that says who has logged in, and a dialog.

import { build } from "./words.js";

const PATIENCE = 60000; // milliseconds for an answer: thousands of images may get a label at once

export class Login {
  #button;
  #words;
  #attempt = null; // the one that is on its way
  #isKnown = false; // whether the server has said who has logged in

  /** `words` gives the strings of the language that is shown now. */
  constructor(button, words) {
    this.name = "";
    this.#button = button;
    this.#words = words;
    button.addEventListener("click", () => (this.name ? this.leave() : this.enter()));
  }

  /** Show who has logged in, in the language of now. */
  render() {
    if (!this.#isKnown) return;
    const words = this.#words();
    this.#button.textContent = this.name ? words.log_out.replace("{name}", () => this.name) : words.log_in;
  }

  /** Ask the server who has logged in. */
  async look() {
    this.#show(await (await fetch("/login")).json());
  }

  async leave() {
    this.#show(await (await fetch("/login", { method: "DELETE" })).json());
  }

  /** Ask for name and password until they are right; false if the person gives up. */
  enter() {
    this.#attempt ??= this.#ask().finally(() => { this.#attempt = null; });
    return this.#attempt;
  }

  /** Send a change as JSON, after a login if need be; null if the person gives up.

  An error has the server's words, and with `isRefused` the server will not do it however often it is asked. */
  async send(method, path, content) {
    for (;;) {
      const answer = await fetch(path, {
        method,
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(content),
        signal: AbortSignal.timeout(PATIENCE),
      });
      if (answer.ok) return answer.json();
      if (answer.status !== 401) throw await toError(answer);
      if (!(await this.enter())) return null;
    }
  }

  #show({ name }) {
    this.name = name;
    this.#isKnown = true;
    this.render();
  }

  async #ask() {
    const words = this.#words();
    const name = build("input", { name: "name", autocomplete: "username", required: "", autofocus: "" });
    const password = build("input", { name: "password", type: "password", autocomplete: "current-password", required: "" });
    const problem = build("p", { role: "alert" });
    const cancel = build("button", { type: "button" }, words.cancel);
    const form = build("form", {},
      build("h2", { id: "login-title" }, words.log_in),
      build("label", {}, words.user, name),
      build("label", {}, words.password, password),
      problem,
      build("p", { class: "actions" }, build("button", { type: "submit" }, words.log_in), cancel));
    const dialog = build("dialog", { class: "login", "aria-labelledby": "login-title" }, form);
    document.body.append(dialog);
    return new Promise((resolve) => {
      cancel.addEventListener("click", () => dialog.close());
      dialog.addEventListener("close", () => {
        dialog.remove();
        this.#button.blur(); // the focus came back to it: the next Enter would log out again
        resolve(Boolean(this.name));
      });
      form.addEventListener("submit", async (event) => {
        event.preventDefault();
        problem.textContent = "";
        try {
          const answer = await fetch("/login", {
            method: "POST",
            headers: { "Content-Type": "application/json" },
            body: JSON.stringify({ name: name.value, password: password.value }),
          });
          if (!answer.ok) throw await toError(answer);
          this.#show(await answer.json());
          dialog.close();
        } catch (error) {
          problem.textContent = error.message;
          password.select();
        }
      });
      dialog.showModal();
    });
  }
}

async function toError(answer) {
  const { error, remedy } = await answer.json();
  return Object.assign(new Error(`${error}: ${remedy}`), { isRefused: answer.status < 500 });
}
