// The timeline: what each device did and does, drawn once and then moved.
//
// Bars are drawn on a tape, a canvas that is a ring in time, when their message comes. A frame copies one
// or two parts of it, so it costs the same however many bars there are. All is drawn anew when the size,
// the devices, the colours or the window change, some messages in each frame.

import * as colours from "./colours.js";
import { fit, whenResized } from "./charts.js";
import { el, head, mark, say } from "./dom.js";
import { count, micros, time } from "./format.js";

const WINDOWS = [10, 30, 60];
const KINDS = ["turn", "copy", "compute"];
const HEIGHTS = { turn: 7, copy: 7, compute: 22 };
const HEADER = 19;
const GAP = 9;
const DEVICE = HEADER + 7 + 7 + 22 + 4 + GAP;
const AXIS = 22;
/** The bars that are kept, in messages; and those that are drawn anew in one frame. */
const KEPT = 140;
const REDRAWN_A_FRAME = 6;
const STILL = matchMedia("(prefers-reduced-motion: reduce)");
/** Fields of a bar in a message. */
const FIELDS = 6;

export class Timeline {
  constructor(section, clock) {
    this.section = section;
    this.clock = clock;
    this.seconds = innerWidth < 700 ? 10 : 30;
    this.messages = [];
    this.devices = [];
    this.open = [];
    this.spans = [];
    this.names = new Map();
    this.queue = [];
    this.isSeen = true;
    this.pausedAt = null;
    this.missed = 0;
    this.#build();
    this.frame = requestAnimationFrame(() => this.#turn());
  }

  #build() {
    this.pauseButton = el("button", { type: "button", class: "quiet", "aria-pressed": "false", onclick: () => this.pause() }, "Pause");
    const windows = el("div", { class: "choice", role: "group", "aria-label": "Time shown" },
      ...WINDOWS.map((one) => el("button", { type: "button", "data-seconds": one, "aria-pressed": String(one === this.seconds),
        onclick: () => this.show(one) }, `${one} s`)));
    this.windows = windows;
    this.note = head(this.section, "Timeline", "", windows, this.pauseButton);
    this.canvas = el("canvas", { tabindex: "0", role: "img", "aria-label": "Timeline of devices" });
    this.tip = el("div", { class: "tip", hidden: true });
    this.frameElement = el("div", { class: "canvas timeline-canvas" }, this.canvas, this.tip);
    this.legend = el("ul", { class: "legend" });
    this.nothing = el("p", { class: "empty" }, "No device has run anything since this page was opened.");
    this.rows = el("tbody");
    const table = el("details", { class: "as-table" }, el("summary", {}, "The last seconds as a table"),
      el("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": "Timeline as a table" },
        el("table", {}, el("caption", { class: "sr" }, "Use of devices in the time shown"),
          el("thead", {}, el("tr", {}, ...["Device", "Lane", "Busy", "Runs and splits", "Sessions"].map((one) => el("th", { scope: "col" }, one)))),
          this.rows)));
    this.details = table;
    this.section.append(el("div", { class: "card" }, this.nothing, this.frameElement, this.legend, table));
    this.canvas.addEventListener("pointermove", (event) => this.#hover(event.offsetX, event.offsetY));
    this.canvas.addEventListener("pointerleave", () => this.#untip());
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.tape = document.createElement("canvas");
    this.observer = new IntersectionObserver(([entry]) => {
      this.isSeen = entry.isIntersecting;
    });
    this.observer.observe(this.frameElement);
    whenResized(this.frameElement, () => this.#redraw());
  }

  // What comes

  /** The devices, in their order; and the names of sessions. */
  setDevices(names, sessions) {
    this.names = sessions;
    if (names.length === this.devices.length && names.every((one, place) => one === this.devices[place])) return;
    this.devices = names;
    this.#redraw();
  }

  /** Take a message of runs; an old one is of before the page was opened. */
  add(message, { isOld = false } = {}) {
    if (this.messages.some((one) => one.seq === message.seq)) return;
    this.messages.push(message);
    if (isOld) this.messages.sort((a, b) => a.seq - b.seq);
    if (this.messages.length > KEPT) this.messages.shift();
    if (!isOld) {
      this.open = message.open;
      this.spans.push(message.span);
      if (this.spans.length > 8) this.spans.shift();
      this.stride = message.stride;
    }
    this.queue.push(message);
    if (this.queue.length > KEPT) this.queue.shift();
  }

  forget() {
    this.messages = [];
    this.queue = [];
    this.open = [];
    this.#redraw();
  }

  /** Colours have changed. */
  recolour() {
    this.#redraw();
  }

  show(seconds) {
    this.seconds = seconds;
    for (const one of this.windows.children) mark(one, "aria-pressed", String(Number(one.dataset.seconds) === seconds));
    this.#redraw();
  }

  pause() {
    this.pausedAt = this.pausedAt === null ? this.edge : null;
    mark(this.pauseButton, "aria-pressed", String(this.pausedAt !== null));
    say(this.pauseButton, this.pausedAt === null ? "Pause" : "Go on");
    if (this.pausedAt === null) this.#redraw();
  }

  #key(event) {
    const steps = { ArrowLeft: -0.1, ArrowRight: 0.1 };
    if (event.key === " ") this.pause();
    else if (event.key === "+" || event.key === "-") {
      const place = WINDOWS.indexOf(this.seconds) + (event.key === "-" ? 1 : -1);
      if (WINDOWS[place]) this.show(WINDOWS[place]);
    } else if (event.key in steps && this.pausedAt !== null) {
      this.pausedAt += steps[event.key] * this.seconds * 1000;
      this.#redraw();
    } else return;
    event.preventDefault();
  }

  // Time and place

  /** The time at the right edge: late enough for the bars to have come. */
  get edge() {
    if (this.pausedAt !== null) return this.pausedAt;
    const late = Math.max(...this.spans, 500) * 1.5 + 150;
    const now = this.clock.now - late;
    return this.isStepping ? Math.floor(now / 1000) * 1000 : now;
  }

  get isStepping() {
    return STILL.matches;
  }

  get height() {
    return this.devices.length * DEVICE + AXIS;
  }

  #top(device, kind) {
    let top = this.devices.indexOf(device) * DEVICE + HEADER;
    for (const one of KINDS) {
      if (one === kind) return top;
      top += HEIGHTS[one] + 2;
    }
    return top;
  }

  // Drawing

  #redraw() {
    this.nothing.hidden = this.devices.length > 0;
    this.frameElement.hidden = this.devices.length === 0;
    const { width } = fit(this.canvas, this.height);
    this.width = width;
    this.perMs = width / (this.seconds * 1000);
    this.scale = Math.min(3, devicePixelRatio || 1);
    // A tape holds what is seen, and what comes while the oldest leaves.
    this.ring = Math.ceil((this.seconds * 1000 + 6000) * this.perMs * this.scale);
    this.tape.width = this.ring;
    this.tape.height = Math.max(1, Math.round(this.height * this.scale));
    this.pen = this.tape.getContext("2d");
    this.pen.scale(1, this.scale);
    this.clearedUntil = this.edge - this.seconds * 1000;
    this.queue = this.messages.slice();
    this.drawnAt = this.toldAt = null;
  }

  #turn() {
    this.frame = requestAnimationFrame(() => this.#turn());
    if (!this.isSeen || document.hidden || this.devices.length === 0 || !this.width) return;
    const edge = this.edge;
    this.#clearTo(edge + 4000);
    for (let done = 0; this.queue.length && done < REDRAWN_A_FRAME; done += 1) this.#drawMessage(this.queue.shift(), edge);
    // Half of a pixel is not seen to move.
    if (this.drawnAt !== null && this.queue.length === 0 && Math.abs(edge - this.drawnAt) * this.perMs * this.scale < 0.5) return;
    this.drawnAt = edge;
    this.#show(edge);
    this.#tell(edge);
  }

  #clearTo(ms) {
    if (ms <= this.clearedUntil) return;
    const from = Math.max(this.clearedUntil, ms - this.ring / this.perMs / this.scale);
    this.#onRing(from, ms, (x, width) => this.pen.clearRect(x, 0, width, this.height));
    this.clearedUntil = ms;
  }

  /** Call for each part of the ring that has the time from `a` to `b`: pixels of the tape. */
  #onRing(a, b, call) {
    const perMs = this.perMs * this.scale;
    const width = Math.min((b - a) * perMs, this.ring);
    const x = (a * perMs) % this.ring;
    const first = Math.min(width, this.ring - x);
    call(x, first, 0);
    if (width > first) call(0, width - first, first);
  }

  #drawMessage(message, edge) {
    const oldest = edge - this.seconds * 1000;
    if (message.at < oldest) return;
    const { bars, lanes, at } = message;
    const tops = lanes.map(([device, kind]) => (this.devices.includes(device) ? this.#top(device, kind) : -1));
    const least = 0.8;
    for (let place = 0; place < bars.length; place += FIELDS) {
      const top = tops[bars[place]];
      if (top < 0) continue;
      const began = at + bars[place + 1] / 1000;
      const ended = Math.min(began + bars[place + 2] / 1000, this.clearedUntil);
      const from = Math.max(began, oldest);
      if (ended < oldest) continue;
      const kind = lanes[bars[place]][1];
      const share = bars[place + 3] / bars[place + 2];
      this.pen.fillStyle = kind === "turn" ? this.#waitColour : colours.session(bars[place + 4]);
      this.pen.globalAlpha = kind === "compute" ? 0.3 + 0.65 * Math.min(1, share) : 0.75;
      this.#onRing(from, Math.max(ended, from), (x, width) => this.pen.fillRect(x, top, Math.max(width, least), HEIGHTS[kind]));
    }
    this.pen.globalAlpha = 1;
  }

  get #waitColour() {
    return colours.isDark() ? "#c9a400" : "#b58900";
  }

  #show(edge) {
    const { context, width, height } = fit(this.canvas, this.height);
    const left = edge - this.seconds * 1000;
    context.clearRect(0, 0, width, height);
    context.fillStyle = colours.named("lane");
    this.devices.forEach((_, place) => context.fillRect(0, place * DEVICE + HEADER - 1, width, DEVICE - GAP - HEADER + 1));
    this.#grid(context, edge, left, width, height);
    this.#onRing(left, edge, (x, part, skipped) => {
      if (part > 0) context.drawImage(this.tape, x, 0, part, this.tape.height, skipped / this.scale, 0, part / this.scale, height);
    });
    for (const one of this.open) this.#drawOpen(context, one, left, width);
    context.font = "600 12px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "left";
    context.fillStyle = colours.named("text");
    this.devices.forEach((one, place) => context.fillText(one, 4, place * DEVICE + HEADER / 2 - 1));
  }

  #grid(context, edge, left, width, height) {
    const seconds = this.seconds / (width < 500 ? 5 : 10);
    context.strokeStyle = colours.named("line");
    context.fillStyle = colours.named("faint");
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "top";
    context.textAlign = "center";
    for (let at = Math.ceil(left / 1000 / seconds) * seconds * 1000; at < edge; at += seconds * 1000) {
      const x = Math.round((at - left) * this.perMs) + 0.5;
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, height - AXIS + 4);
      context.stroke();
      if (x > 26 && x < width - 26) context.fillText(time(at).slice(0, 8), x, height - AXIS + 7);
    }
  }

  #drawOpen(context, one, left, width) {
    const x = Math.max(0, (one.at - left) * this.perMs);
    context.fillStyle = one.phase === "turn" ? this.#waitColour : colours.session(one.session);
    context.globalAlpha = 0.55;
    for (const device of one.devices.length ? one.devices : this.devices.slice(0, 1)) {
      if (this.devices.includes(device)) context.fillRect(x, this.#top(device, one.phase), Math.max(0, width - x), HEIGHTS[one.phase]);
    }
    context.globalAlpha = 1;
  }

  // Telling

  #tell(edge) {
    if (this.toldAt && Math.abs(edge - this.toldAt) < 1000) return;
    this.toldAt = edge;
    const from = edge - this.seconds * 1000;
    const sessions = new Map();
    for (const message of this.messages) {
      if (message.at < from) continue;
      for (let place = 4; place < message.bars.length; place += FIELDS) {
        sessions.set(message.bars[place], (sessions.get(message.bars[place]) ?? 0) + message.bars[place + 1]);
      }
    }
    const shown = [...sessions].sort((a, b) => b[1] - a[1]).slice(0, 8);
    const items = [...shown.map(([number]) => [number === 0 ? "several sessions" : `#${number} ${this.names.get(number) ?? ""}`.trim(), colours.session(number)]),
      ["waits for its turn", this.#waitColour]];
    while (this.legend.children.length > items.length) this.legend.lastChild.remove();
    items.forEach(([name, colour], place) => {
      let item = this.legend.children[place];
      if (!item) {
        item = el("li", {}, el("span", { class: "swatch" }), el("span", { class: "name" }));
        this.legend.append(item);
      }
      item.firstChild.style.background = colour;
      say(item.lastChild, name);
    });
    const sampled = this.stride > 1 ? `, one of ${this.stride} runs is drawn` : "";
    const missed = this.missed ? `, ${this.missed} messages missed` : "";
    say(this.note, `three rows each: turns, copies, computing${sampled}${missed}`);
    if (this.details.open) this.#fillTable(from);
    const runs = [...sessions.values()].reduce((a, b) => a + b, 0);
    this.canvas.setAttribute("aria-label", `Timeline of ${this.devices.length} devices in ${this.seconds} seconds: ${count(runs)} runs and splits of ${sessions.size} sessions. Space pauses, arrows move the paused time, plus and minus change the time shown.`);
  }

  #fillTable(from) {
    const lanes = new Map();
    for (const message of this.messages) {
      if (message.at < from) continue;
      for (let place = 0; place < message.bars.length; place += FIELDS) {
        const [device, kind] = message.lanes[message.bars[place]];
        const name = `${device}\n${kind}`;
        const found = lanes.get(name) ?? { device, kind, busy: 0, runs: 0, sessions: new Set() };
        found.busy += message.bars[place + 3];
        found.runs += message.bars[place + 5];
        found.sessions.add(message.bars[place + 4]);
        lanes.set(name, found);
      }
    }
    this.rows.replaceChildren(...[...lanes.values()].map((one) => el("tr", {}, el("th", { scope: "row" }, one.device), el("td", {}, one.kind),
      el("td", {}, micros(one.busy)), el("td", {}, count(one.runs)), el("td", {}, [...one.sessions].map((n) => (n ? `#${n}` : "several")).join(", ")))));
  }

  #hover(x, y) {
    const place = Math.floor(y / DEVICE);
    const device = this.devices[place];
    const kind = KINDS.find((one) => y >= this.#top(device, one) - 1 && y < this.#top(device, one) + HEIGHTS[one] + 1);
    if (!device || !kind) return this.#untip();
    const at = this.edge - this.seconds * 1000 + x / this.perMs;
    const found = this.#barAt(device, kind, at, 3 / this.perMs);
    if (!found) return this.#untip();
    const [message, bar] = found;
    const [, began, long, busy, session, parts] = message.bars.slice(bar, bar + FIELDS);
    const who = session ? `session ${session} ${this.names.get(session) ?? ""}`.trim() : "several sessions";
    const what = parts > 1 ? `${count(parts)} in ${micros(long)}, ${micros(busy / parts)} each` : micros(long);
    this.tip.replaceChildren(el("b", {}, `${device} · ${kind}`), el("span", {}, who), el("span", {}, what), el("span", {}, time(message.at + began / 1000)));
    this.tip.hidden = false;
    this.tip.style.left = `${Math.min(x + 14, this.width - this.tip.offsetWidth - 4)}px`;
    this.tip.style.top = `${y + 14}px`;
  }

  #barAt(device, kind, at, near) {
    let best = null;
    let least = near;
    for (const message of this.messages) {
      const lane = message.lanes.findIndex(([name, one]) => name === device && one === kind);
      if (lane < 0) continue;
      for (let place = 0; place < message.bars.length; place += FIELDS) {
        if (message.bars[place] !== lane) continue;
        const began = message.at + message.bars[place + 1] / 1000;
        const ended = began + message.bars[place + 2] / 1000;
        const away = at < began ? began - at : at > ended ? at - ended : 0;
        if (away < least || (away === 0 && least === 0)) {
          least = away;
          best = [message, place];
        }
      }
    }
    return best;
  }

  #untip() {
    this.tip.hidden = true;
  }
}
