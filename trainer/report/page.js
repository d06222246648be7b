"use strict";
(() => {
  const root = document.documentElement;

  // Light or dark, by a button; the page follows the system until it is pressed.
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const name = () => { button.textContent = dark() ? "light" : "dark"; };
  button.hidden = false;
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
  system.addEventListener("change", name);
  name();

  // Pointing at a node in the legend brings its lines forward.
  for (const item of document.querySelectorAll("[data-node]")) {
    const focus = (on) => {
      for (const line of document.querySelectorAll("svg.curves .line, svg.curves .name, svg.curves .tie")) {
        line.classList.toggle("dim", on && !line.classList.contains(item.dataset.node));
      }
    };
    item.addEventListener("pointerenter", () => focus(true));
    item.addEventListener("pointerleave", () => focus(false));
  }

  // Pointing into a chart reads the values of that round.
  const box = document.getElementById("readout");
  for (const svg of document.querySelectorAll("svg.curves")) {
    const data = JSON.parse(svg.dataset.readout);
    const cursor = document.createElementNS("http://www.w3.org/2000/svg", "path");
    cursor.setAttribute("class", "cursor");
    svg.append(cursor);
    const rounds = [...new Set(data.lines.flatMap((line) => Object.keys(line[2]).map(Number)))];
    svg.addEventListener("pointermove", (event) => {
      const place = svg.getBoundingClientRect();
      const x = ((event.clientX - place.left) / place.width) * svg.viewBox.baseVal.width;
      const wanted = data.first + ((x - data.left) / (data.right - data.left)) * (data.last - data.first);
      const round = rounds.reduce((a, b) => (Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a));
      const at = data.left + ((round - data.first) / (data.last - data.first)) * (data.right - data.left);
      cursor.setAttribute("d", `M${at} ${data.top}V${data.bottom}`);
      box.replaceChildren();
      const head = document.createElement("b");
      head.textContent = `round ${round}`;
      box.append(head);
      for (const [node, kind, values] of data.lines) {
        if (!(round in values)) continue;
        const row = document.createElement("div");
        row.className = `name ${kind}`;
        row.textContent = `${node} ${values[round]}${data.unit}`;
        box.append(row);
      }
      box.hidden = false;
      const left = Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8);
      box.style.left = `${left + scrollX}px`;
      box.style.top = `${event.clientY + scrollY + 14}px`;
    });
    svg.addEventListener("pointerleave", () => { box.hidden = true; cursor.removeAttribute("d"); });
  }
})();
