// Pictures of ten minutes: lines and stacked areas on a canvas, with axes, a legend and a table.

import { named, series } from "./colours.js";
import { el, say } from "./dom.js";
import { time } from "./format.js";

const HEIGHT = 168;
const LEFT = 66;
const BOTTOM = 22;
const TOP = 10;

/** The widths of the places of canvases, since asking for one makes the browser lay out. */
const widths = new WeakMap();
const sizes = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    widths.set(target, contentRect.width);
    for (const one of placed.get(target) ?? []) one();
  }
});
const placed = new WeakMap();

/** Call a function when the place of a canvas has another width. */
export function whenResized(place, call) {
  placed.set(place, [...(placed.get(place) ?? []), call]);
  sizes.observe(place);
}

/** A canvas as wide as its place, sharp on any screen. */
export function fit(canvas, height) {
  const place = canvas.parentElement;
  if (!widths.has(place)) {
    widths.set(place, place.clientWidth);
    sizes.observe(place);
  }
  const width = Math.max(40, widths.get(place));
  const scale = Math.min(3, devicePixelRatio || 1);
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return { context, width, height };
}

/** A step of an axis with about `parts` parts below `most`: 1, 2 or 5 times a power of ten, or of two for sizes. */
export function step(most, parts, isSize) {
  if (!(most > 0)) return 1;
  if (isSize) return 2 ** Math.ceil(Math.log2(most / parts));
  const power = 10 ** Math.floor(Math.log10(most / parts));
  return [1, 2, 5, 10].map((one) => one * power).find((one) => most / one <= parts) ?? 10 * power;
}

/**
 * A chart of series over time. `stacked`: areas on each other; else lines. `show`: a value as text.
 * `most`: the top of the axis, or nothing for that of the values. `names(name)`: a series as text.
 */
export class Chart {
  constructor({ title, stacked = false, show, most, isSize = false, names = (name) => name }) {
    Object.assign(this, { title, stacked, show, most, isSize, names });
    this.canvas = el("canvas", { role: "img", "aria-label": title });
    this.legend = el("ul", { class: "legend" });
    this.nothing = el("p", { class: "empty" }, "Nothing yet: the chart begins when this page is opened.");
    this.element = el("figure", { class: "chart" }, el("figcaption", {}, title),
      el("div", { class: "canvas" }, this.canvas), this.nothing, this.legend);
    this.places = new Map();
    this.isSeen = true;
    new IntersectionObserver(([entry]) => {
      this.isSeen = entry.isIntersecting;
      if (this.isSeen) this.draw();
    }, { rootMargin: "200px" }).observe(this.element);
    whenResized(this.canvas.parentElement, () => this.draw());
  }

  /** `at`: times in milliseconds; `columns`: by series, as many values, or null. */
  set(at, columns) {
    this.data = { at, columns };
    const isEmpty = at.length < 2;
    this.canvas.parentElement.hidden = isEmpty;
    this.nothing.hidden = !isEmpty;
  }

  draw() {
    if (!this.data || !this.isSeen || !this.canvas.isConnected || this.data.at.length < 2) return;
    const { at, columns } = this.data;
    const names = Object.keys(columns).sort((a, b) => (a === "" ? 1 : b === "" ? -1 : a.localeCompare(b, "en", { numeric: true })));
    names.forEach((name) => this.places.has(name) || this.places.set(name, this.places.size));
    const { context, width, height } = fit(this.canvas, HEIGHT);
    const box = { left: LEFT, right: width - 8, top: TOP, bottom: height - BOTTOM };
    const last = at.at(-1);
    const long = Math.max(60_000, last - at[0]);
    const x = (ms) => box.right - ((last - ms) / long) * (box.right - box.left);
    const peak = this.most ?? this.#peak(names, columns, at.length);
    const unit = step(peak || 1, 4, this.isSize);
    const top = this.most ?? Math.max(unit, Math.ceil(peak / unit) * unit);
    const y = (value) => box.bottom - (Math.min(value, top) / top) * (box.bottom - box.top);
    context.clearRect(0, 0, width, height);
    this.#axes(context, box, { x, y, top, unit, last, long });
    if (this.stacked) this.#areas(context, names, at, columns, x, y);
    else this.#lines(context, names, at, columns, x, y);
    this.#tell(names, columns);
  }

  #peak(names, columns, length) {
    let peak = 0;
    for (let place = 0; place < length; place += 1) {
      let sum = 0;
      for (const name of names) {
        const value = columns[name][place] ?? 0;
        sum = this.stacked ? sum + value : Math.max(sum, value);
      }
      peak = Math.max(peak, sum);
    }
    return peak;
  }

  #axes(context, box, { x, y, top, unit, last, long }) {
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = named("faint");
    context.strokeStyle = named("line");
    context.lineWidth = 1;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (let value = 0; value <= top * 1.001; value += unit) {
      const at = Math.round(y(value)) + 0.5;
      context.beginPath();
      context.moveTo(box.left, at);
      context.lineTo(box.right, at);
      context.stroke();
      context.fillText(this.show(value), box.left - 8, at);
    }
    context.textAlign = "center";
    context.textBaseline = "top";
    const minutes = [0.25, 0.5, 1, 2, 5].find((one) => long / 60_000 / one <= Math.max(2, (box.right - box.left) / 90)) ?? 5;
    for (let ago = 0; ago <= long; ago += minutes * 60_000) {
      const at = x(last - ago);
      const text = ago === 0 ? "now" : ago % 60_000 === 0 ? `−${ago / 60_000} min` : `−${ago / 1000} s`;
      context.fillText(text, Math.min(at, box.right - 12), box.bottom + 6);
    }
  }

  #lines(context, names, at, columns, x, y) {
    context.lineWidth = 1.75;
    context.lineJoin = "round";
    for (const name of names) {
      context.strokeStyle = series(this.places.get(name));
      context.beginPath();
      let isDown = false;
      at.forEach((ms, place) => {
        const value = columns[name][place];
        const isGap = place > 0 && ms - at[place - 1] > 5000;
        if (value === null || value === undefined) isDown = false;
        else if (isDown && !isGap) context.lineTo(x(ms), y(value));
        else {
          context.moveTo(x(ms), y(value));
          isDown = true;
        }
      });
      context.stroke();
    }
  }

  #areas(context, names, at, columns, x, y) {
    const below = new Float64Array(at.length);
    for (const name of names) {
      const above = below.map((value, place) => value + (columns[name][place] ?? 0));
      context.fillStyle = name === "" ? named("faint") : series(this.places.get(name));
      context.globalAlpha = 0.8;
      context.beginPath();
      at.forEach((ms, place) => context.lineTo(x(ms), y(above[place])));
      for (let place = at.length - 1; place >= 0; place -= 1) context.lineTo(x(at[place]), y(below[place]));
      context.fill();
      below.set(above);
    }
    context.globalAlpha = 1;
  }

  #tell(names, columns) {
    while (this.legend.children.length > names.length) this.legend.lastChild.remove();
    names.forEach((name, place) => {
      let item = this.legend.children[place];
      if (!item) {
        item = el("li", {}, el("span", { class: "swatch" }), el("span", { class: "name" }), el("b", {}));
        this.legend.append(item);
      }
      const colour = name === "" ? named("faint") : series(this.places.get(name));
      if (item.dataset.colour !== colour) {
        item.dataset.colour = colour;
        item.firstChild.style.background = colour;
      }
      say(item.children[1], name === "" ? "all others" : this.names(name));
      const value = columns[name].at(-1);
      say(item.children[2], value === null || value === undefined ? "–" : this.show(value));
    });
    const told = names.slice(0, 8).map((name) => `${name === "" ? "others" : this.names(name)} ${this.show(columns[name].at(-1) ?? 0)}`);
    this.canvas.setAttribute("aria-label", `${this.title}, at ${time(this.data.at.at(-1))}: ${told.join(", ") || "nothing"}`);
  }
}

/** A line of the last minutes in a tile. */
export class Spark {
  constructor() {
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.element = el("div", { class: "spark" }, this.canvas);
    this.isSeen = true;
    new IntersectionObserver(([entry]) => {
      this.isSeen = entry.isIntersecting;
      if (this.isSeen) this.draw();
    }).observe(this.element);
    whenResized(this.element, () => this.draw());
  }

  set(values) {
    this.values = values;
  }

  draw() {
    const { values } = this;
    if (!this.canvas.isConnected || !this.isSeen || !values || values.length < 2) return;
    const { context, width, height } = fit(this.canvas, 34);
    const most = Math.max(...values, 1e-9);
    context.clearRect(0, 0, width, height);
    context.beginPath();
    values.forEach((value, place) => context.lineTo((place / (values.length - 1)) * width, height - 2 - (value / most) * (height - 5)));
    context.lineWidth = 1.5;
    context.strokeStyle = named("accent");
    context.stroke();
    context.lineTo(width, height);
    context.lineTo(0, height);
    context.globalAlpha = 0.14;
    context.fillStyle = named("accent");
    context.fill();
    context.globalAlpha = 1;
  }
}
