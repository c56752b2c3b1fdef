// The graph of a plan: a page that the daemon draws, in a frame that can read nothing of this one.

import { isDark } from "./colours.js";
import { el, mark, say } from "./dom.js";

export class Picture {
  constructor() {
    this.path = "";
    this.told = el("p", { class: "hint", role: "status" });
    this.again = el("button", { type: "button", class: "quiet", onclick: () => this.draw() }, "Draw again");
    this.alone = el("a", { target: "_blank", rel: "noopener", href: "" }, "Open in a tab");
    this.room = el("div");
    this.element = el("figure", { class: "plan-picture", hidden: true },
      el("div", { class: "row" }, this.told, this.again, this.alone), this.room);
  }

  /** Show a plan; the same one is not drawn again. */
  show(session, plan) {
    const path = `api/plans/${session}/${plan}/picture`;
    if (path === this.path) return;
    this.path = path;
    this.title = `Graph of plan ${plan} of session ${session}`;
    mark(this.alone, "href", path);
    this.element.hidden = false;
    this.draw();
  }

  /** Draw it as it is now, with the times of its last run. */
  draw() {
    this.again.disabled = true;
    say(this.told, "The daemon draws the graph.");
    // A new frame, since one that goes elsewhere is a step back in the history of the page.
    this.frame = el("iframe", { sandbox: "allow-scripts", title: this.title, src: this.#address(), onload: () => this.#loaded() });
    this.room.replaceChildren(this.frame);
  }

  /** Show it in the colours of the page. */
  recolour() {
    this.frame?.contentWindow.location.replace(this.#address());
  }

  #address() {
    return `${this.path}#${isDark() ? "dark" : "light"}`;
  }

  #loaded() {
    this.again.disabled = false;
    say(this.told, `Drawn at ${new Date().toLocaleTimeString()}`);
  }
}
