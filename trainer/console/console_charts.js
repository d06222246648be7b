// Charts of the console: a value by round for each node or run, and what nodes did when.

const COLOURS = 8; // the ninth line repeats the first one's, with another dash
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
const ROW = 1.4; // height of a node in the timeline, in letters' sizes as all lengths here
const NAMES = 6.5; // room for the nodes' names
const SMALL = 0.75; // letters of axes

const probe = document.createElement("span");

/** What a colour of the style sheet is in the theme of now. */
export function colour(name) {
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

export function save(name, content) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** So many letters' sizes in pixels. */
function em(count) {
  return count * parseFloat(getComputedStyle(document.body).fontSize);
}

function font(pixels) {
  return `${pixels}px ${getComputedStyle(document.body).fontFamily}`;
}

/** Lines over rounds in a box. A line has a name, a number for its colour, values, and perhaps a band around them. */
export class Chart {
  #plot = null; // uPlot
  #key = ""; // of what the plot was made for
  #rounds = [];
  #lines = [];
  #level = null;
  #isZoomed = false;
  #isVisible = false;
  #isDue = false;

  /** `read` is told what is under the pointer: a line's name, its value and the round; null for nothing. */
  constructor(box, read) {
    this.box = box;
    this.read = read;
    new ResizeObserver(() => this.restyle()).observe(box);
    new IntersectionObserver(([entry]) => {
      this.#isVisible = entry.isIntersecting;
      if (this.#isDue && this.#isVisible) this.#draw();
    }, { rootMargin: "200px" }).observe(box);
  }

  /** Show these lines, as soon as the chart can be seen; `level` is a value with its name to compare with. */
  update(rounds, lines, level) {
    [this.#rounds, this.#lines, this.#level, this.#isDue] = [rounds, lines, level, true];
    if (this.#isVisible) this.#draw();
  }

  /** Draw it anew, in another size or other colours. */
  restyle() {
    if (!this.#plot) return;
    this.#key = "";
    this.update(this.#rounds, this.#lines, this.#level);
  }

  /** The chart as it is seen, under its title, as PNG. */
  picture(title) {
    const from = this.#plot.ctx.canvas;
    const canvas = document.createElement("canvas");
    const scale = em(1 / 16) * devicePixelRatio;
    [canvas.width, canvas.height] = [from.width, from.height + 30 * scale];
    const context = canvas.getContext("2d");
    context.fillStyle = colour("paper");
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.fillStyle = colour("text");
    context.font = font(15 * scale);
    context.fillText(title, 8 * scale, 20 * scale);
    context.drawImage(from, 0, 30 * scale);
    return new Promise((resolve) => canvas.toBlob(resolve));
  }

  #draw() {
    this.#isDue = false;
    const bands = this.#lines.some((line) => line.low);
    const columns = this.#lines.flatMap((line) => (bands ? [line.values, line.low, line.high] : [line.values]));
    const data = [this.#rounds, ...columns];
    const key = JSON.stringify([bands, this.#level, this.#lines.map(({ name, number, faint }) => [name, number, faint])]);
    if (key === this.#key) {
      this.#plot.setData(data, !this.#isZoomed);
      if (this.#isZoomed) this.#plot.redraw();
      return;
    }
    this.#key = key;
    this.#isZoomed = false;
    this.#plot?.destroy();
    this.#plot = new uPlot(this.#options(bands), data, this.box);
  }

  #options(bands) {
    const axis = { font: font(em(SMALL)), grid: { stroke: colour("grid"), width: 1 }, stroke: colour("soft"), ticks: { show: false } };
    return {
      width: this.box.clientWidth,
      height: this.box.clientHeight,
      legend: { show: false },
      cursor: { drag: { x: true, y: false }, focus: { prox: 24 }, sync: { key: "rounds", setSeries: false } },
      focus: { alpha: 1 },
      scales: { x: { time: false } },
      axes: [{ ...axis, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000], size: em(1.9) }, { ...axis, size: em(3.8) }],
      series: [{}, ...this.#lines.flatMap((line) => this.#series(line, bands))],
      bands: bands ? this.#lines.map((line, index) => ({
        series: [3 * index + 3, 3 * index + 2],
        fill: colour(`n${line.number % COLOURS}`).replace("rgb(", "rgba(").replace(")", ", .16)"),
      })) : [],
      hooks: {
        draw: [(plot) => this.#drawLevel(plot)],
        setCursor: [(plot) => this.#tell(plot, bands ? 3 : 1)],
        setSeries: [(plot) => this.#tell(plot, bands ? 3 : 1)],
        setSelect: [(plot) => { this.#isZoomed = plot.select.width > 0; }],
        ready: [(plot) => plot.over.addEventListener("dblclick", () => { this.#isZoomed = false; })],
      },
    };
  }

  #series({ number, faint }, bands) {
    const line = {
      alpha: faint ? 0.15 : 1,
      dash: DASHES[Math.floor(number / COLOURS) % DASHES.length],
      points: { size: 4 },
      spanGaps: true,
      stroke: colour(`n${number % COLOURS}`),
      width: 1.5,
    };
    const edge = { points: { show: false }, spanGaps: true, stroke: "transparent", width: 0 };
    return bands ? [line, edge, edge] : [line];
  }

  #drawLevel(plot) {
    if (!this.#level) return;
    const [value, name] = this.#level;
    const { left, width, top, height } = plot.bbox;
    const y = Math.round(plot.valToPos(value, "y", true));
    if (y < top || y > top + height) return;
    const context = plot.ctx;
    context.save();
    context.strokeStyle = context.fillStyle = colour("soft");
    context.setLineDash([4, 4]);
    context.beginPath();
    context.moveTo(left, y);
    context.lineTo(left + width, y);
    context.stroke();
    context.font = font(em(SMALL) * devicePixelRatio);
    context.textAlign = "left";
    context.fillText(name, left + 6, y - 5);
    context.restore();
  }

  #tell(plot, step) {
    const index = plot.cursor.idx;
    const focused = plot.series.findIndex((series, place) => place > 0 && series._focus);
    const line = this.#lines[Math.floor(((this.#lines.length > 1 ? focused : 1) - 1) / step)];
    const value = line && index != null ? line.values[index] : null;
    this.read(value == null ? null : { name: line.name, value, round: this.#rounds[index] });
  }
}

/** Since when, and why, a node has no part in a round any more; null if it has. */
export function leftIn(row, index) {
  for (const why of ["refused", "absent"]) {
    const seconds = row.values[why]?.[index];
    if (seconds != null) return { why, time: row.opened + seconds };
  }
  return null;
}

/** What each node did in these rows: one row a node, training and sending as bars, and a line from when it was gone. */
export function drawTimeline(canvas, nodes, rows, now, locale) {
  const begin = rows[0].opened;
  const end = Math.max(...rows.map((row) => row.closed ?? now));
  const [pitch, names, letters] = [em(ROW), em(NAMES), em(SMALL)];
  const width = canvas.parentElement.clientWidth;
  const height = pitch * (nodes.length + 1.5);
  canvas.width = width * devicePixelRatio;
  canvas.height = height * devicePixelRatio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(devicePixelRatio, devicePixelRatio);
  context.font = font(letters);
  const [soft, text, grid, train, net, alarm] = ["soft", "text", "grid", "train", "net", "alarm"].map(colour);
  const at = (time) => names + (time - begin) / (end - begin || 1) * (width - names - 4);
  let free = 0; // where the next round's number has room
  for (const row of rows) {
    const x = at(row.opened);
    context.fillStyle = grid;
    context.fillRect(x, pitch, 1, height);
    context.fillStyle = soft;
    if (x >= free) {
      const name = row.round.toLocaleString(locale);
      context.fillText(name, x + 2, letters);
      free = x + context.measureText(name).width + letters;
    }
  }
  nodes.forEach((name, index) => {
    const y = pitch * (index + 1);
    context.fillStyle = text;
    context.fillText(name, 0, y + 1.2 * letters, names - letters);
    for (const row of rows) {
      const trained = row.values.offered?.[index] ?? row.values.counted?.[index];
      const counted = row.values.counted?.[index];
      const close = row.closed ?? now;
      const bar = (from, to, ink, height = 0.7) => {
        context.fillStyle = ink;
        context.fillRect(at(from), y + (0.5 - height / 2) * pitch, Math.max(at(Math.min(to, end)) - at(from), 1), height * pitch);
      };
      const left = leftIn(row, index);
      const last = left ? Math.min(left.time, close) : close;
      if (left) bar(last, close, left.why === "refused" ? alarm : soft, 0.15);
      if (trained == null && (left ? last <= row.opened : row.closed || row.values.weight?.[index] != null)) continue; // it had no part in it
      bar(row.opened, trained == null ? last : row.opened + trained, train);
      if (trained != null) bar(row.opened + trained, counted == null ? Math.max(last, row.opened + trained) : row.opened + counted, net);
    }
  });
}
