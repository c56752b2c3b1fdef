// What operators do: drain, take that back, set the level of the log.

import { post } from "./api.js";
import { ask, el, head, notice, say } from "./dom.js";
import { span } from "./format.js";

const LEVELS = ["debug", "info", "warning", "error"];

export class Operate {
  constructor(section) {
    head(section, "Operate", "recorded in the audit log");
    this.told = el("p", { class: "about" });
    this.drainButton = el("button", { type: "button", class: "primary", onclick: () => this.drain() }, "Drain…");
    this.undoButton = el("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.#act("api/undo-drain", {}, "The drain was undone: new sessions are accepted.") }, "Undo the drain");
    this.level = el("select", { id: "log-level", onchange: () => this.#setLevel() }, ...LEVELS.map((one) => el("option", { value: one }, one)));
    section.append(el("div", { class: "card operate" },
      el("div", {}, el("h3", {}, "Drain"), this.told, el("div", { class: "buttons" }, this.drainButton, this.undoButton)),
      el("div", {}, el("h3", {}, el("label", { for: "log-level" }, "Level of the log")), el("p", { class: "about" }, "Of the daemon's own log, and of what this page can show."), this.level)));
  }

  update(state) {
    const { drain, level } = state;
    const left = drain.remaining ? `, ${span(drain.remaining)} left` : "";
    say(this.told, {
      serving: "New sessions are accepted.",
      draining: `New sessions are refused; ${drain.busy} at work${left}. Then the daemon ${drain.stay ? "stays, until this is undone" : "stops"}.`,
      drained: "Drained: no session is left, and new ones are refused.",
      stopping: "The daemon is about to stop.",
    }[drain.state] ?? drain.state);
    this.undoButton.hidden = drain.state === "serving" || drain.state === "stopping";
    this.drainButton.hidden = drain.state !== "serving";
    if (document.activeElement !== this.level && level) this.level.value = level;
  }

  async drain() {
    const content = el("div", {}, el("p", {}, "New sessions are refused at once. Running work has this time to end."),
      el("label", { for: "seconds" }, "Seconds; empty: as configured"), el("input", { id: "seconds", name: "seconds", type: "number", min: "0", max: "86400", step: "1" }),
      el("fieldset", {}, el("legend", {}, "Afterwards the daemon"),
        el("label", { class: "option" }, el("input", { type: "radio", name: "after", value: "stay", checked: true }), "stays, until the drain is undone"),
        el("label", { class: "option" }, el("input", { type: "radio", name: "after", value: "stop" }), "stops")));
    const values = await ask("Drain this daemon?", content, "Drain", { danger: true });
    if (values) await this.#act("api/drain", { seconds: Number(values.seconds) || 0, stay: values.after !== "stop" }, "The daemon drains.");
  }

  async #setLevel() {
    await this.#act("api/log-level", { level: this.level.value }, `The level of the log is ${this.level.value}.`);
  }

  async #act(path, body, told) {
    try {
      await post(path, body);
      notice(told, "good");
    } catch (error) {
      notice(error.told, "bad");
    }
  }
}
