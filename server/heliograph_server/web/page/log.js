// The newest lines of the log, filtered here.

import { el, head, mark, say } from "./dom.js";
import { time } from "./format.js";

const KEPT = 1000;
const SHOWN = 300;
const LEVELS = ["debug", "info", "warning", "error"];

export class Log {
  constructor(section) {
    this.lines = [];
    this.dropped = 0;
    this.filter = el("input", { type: "search", placeholder: "Filter the lines", "aria-label": "Filter lines of the log", oninput: () => this.#show() });
    this.level = el("select", { "aria-label": "Least level shown", onchange: () => this.#show() }, ...LEVELS.map((one) => el("option", { value: one }, one === "debug" ? "all levels" : `${one} and above`)));
    this.hold = el("button", { type: "button", class: "quiet", "aria-pressed": "false", onclick: () => this.#hold() }, "Hold");
    this.note = head(section, "Log", "", this.filter, this.level, this.hold);
    this.list = el("ol", { class: "lines" });
    this.scroller = el("div", { class: "scroller log", tabindex: "0", role: "log", "aria-live": "off", "aria-label": "Lines of the log" }, this.list);
    this.nothing = el("p", { class: "empty" }, "No lines yet.");
    section.append(el("div", { class: "card flush" }, this.nothing, this.scroller));
    this.#show();
  }

  forget() {
    this.lines = [];
    this.newest = 0;
    this.#show();
  }

  /** Take the lines that the daemon has kept. */
  fill(lines) {
    const oldest = this.lines[0]?.[0] ?? Infinity;
    this.lines.unshift(...lines.filter((one) => one[0] < oldest));
    this.newest = this.lines.at(-1)?.[0] ?? 0;
    this.#show();
  }

  add(message) {
    const lines = message.lines.filter((one) => one[0] > (this.newest ?? 0));
    this.newest = lines.at(-1)?.[0] ?? this.newest;
    this.dropped += message.dropped;
    this.lines.push(...lines);
    if (this.lines.length > KEPT) this.lines.splice(0, this.lines.length - KEPT);
    if (this.isHeld) {
      say(this.note, `held; ${lines.length} new lines`);
      return;
    }
    const fitting = lines.filter((one) => this.#fits(one));
    if (!fitting.length) return;
    const isAtEnd = this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight < 40;
    this.list.append(...fitting.map((one) => row(one)));
    while (this.list.children.length > SHOWN) this.list.firstChild.remove();
    this.#tell();
    if (isAtEnd) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  #hold() {
    this.isHeld = !this.isHeld;
    mark(this.hold, "aria-pressed", String(this.isHeld));
    say(this.hold, this.isHeld ? "Go on" : "Hold");
    if (!this.isHeld) this.#show();
  }

  #fits([, , level, logger, text, session]) {
    if (LEVELS.indexOf(level) < LEVELS.indexOf(this.level.value)) return false;
    const wanted = this.filter.value.trim().toLowerCase();
    return !wanted || `${text} ${logger} #${session}`.toLowerCase().includes(wanted);
  }

  #show() {
    this.list.replaceChildren(...this.lines.filter((one) => this.#fits(one)).slice(-SHOWN).map((one) => row(one)));
    this.#tell();
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  #tell() {
    const shown = this.list.children.length;
    this.nothing.hidden = shown > 0;
    this.scroller.hidden = shown === 0;
    say(this.nothing, this.lines.length ? "No line fits the filter." : "No lines yet.");
    say(this.note, `${shown} lines${this.dropped ? `, ${this.dropped} left out` : ""}`);
  }
}

function row([, at, level, logger, text, session]) {
  return el("li", { "data-level": level }, el("time", { datetime: new Date(at).toISOString() }, time(at)), el("span", { class: "level" }, level),
    el("span", { class: "text" }, text), el("span", { class: "logger" }, session ? `${logger} #${session}` : logger));
}
