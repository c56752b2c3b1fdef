// Plans: where their splits run, what is copied, and the times of the last run.

import { get } from "./api.js";
import { session as colourOf, series } from "./colours.js";
import { el, head, say } from "./dom.js";
import { bytes, count, micros } from "./format.js";
import { Picture } from "./picture.js";
import { Table } from "./table.js";

const SECONDS = 2;
/** The looks at a plan whose runs its rates and times are of. */
const LOOKS = 12;
const SVG = "http://www.w3.org/2000/svg";

export class Plans {
  constructor(section, { failed }) {
    this.failed = failed;
    this.session = null;
    this.chosen = null;
    this.clear = el("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.show(null) }, "All sessions");
    this.note = head(section, "Plans", "", this.clear);
    const number = (name, title, show, narrow) => ({ name, title, number: true, narrow, get: (row) => row[name], show: (row) => show(row[name]) });
    this.table = new Table({
      caption: "Plans of sessions",
      key: (row) => `${row.session} ${row.plan}`,
      sort: "session",
      empty: "No session has a plan. session.compile(graph) makes one.",
      pick: (row) => this.pick(row),
      columns: [
        { name: "ports", title: "Plan", first: true, get: (row) => row.inputs.join(), cell: (cell, row) => this.#name(cell, row) },
        { name: "session", title: "Session", number: true, get: (row) => row.session, show: (row) => String(row.session) },
        { name: "devices", title: "Devices", get: (row) => row.devices.join(), show: (row) => row.devices.join(", ") },
        number("nodes", "Nodes", count),
        number("splits", "Splits", count),
        number("memory", "Memory", bytes),
        number("took", "Last run", micros),
        number("predicted", "Predicted", micros, true),
      ],
    });
    this.detail = el("div", { class: "card plan-detail", hidden: true, "aria-live": "off" });
    this.picture = new Picture();
    section.append(el("div", { class: "card flush" }, this.table.element), this.detail, this.picture.element);
    this.isSeen = false;
    new IntersectionObserver(([entry]) => {
      this.isSeen = entry.isIntersecting;
      if (this.isSeen) this.look();
    }).observe(section);
  }

  /** Show the plans of a session; null: of all. */
  show(session) {
    this.session = session;
    this.clear.hidden = session === null;
    this.look();
  }

  start() {
    this.timer ??= setInterval(() => this.isSeen && !document.hidden && this.look(), SECONDS * 1000);
    this.look();
  }

  stop() {
    clearInterval(this.timer);
    this.timer = undefined;
  }

  async look() {
    if (this.timer === undefined || this.isLooking) return;
    this.isLooking = true;
    try {
      const { plans, count: all } = await get("api/plans");
      const rows = plans.filter((one) => this.session === null || one.session === this.session);
      say(this.note, this.session === null ? `${count(all)} compiled` : `${count(rows.length)} of session ${this.session}`);
      this.table.set(rows);
      if (this.chosen) await this.#explain();
    } catch (error) {
      this.failed(error);
    } finally {
      this.isLooking = false;
    }
  }

  pick(row) {
    this.chosen = row;
    this.table.choose(`${row.session} ${row.plan}`);
    this.picture.show(row.session, row.plan);
    this.#explain().catch((error) => this.failed(error));
  }

  async #explain() {
    const { session, plan } = this.chosen;
    let found;
    try {
      found = await get(`api/plans/${session}/${plan}`);
    } catch (error) {
      if (error.status === 401 || error.status === 0) throw error;
      this.detail.replaceChildren(el("p", { class: "empty" }, error.message));
      this.detail.hidden = false;
      return;
    }
    if (this.looks?.[0]?.plan !== plan || this.looks[0].session !== session) this.looks = [];
    this.looks = [...this.looks, found].slice(-LOOKS);
    const text = JSON.stringify({ ...found, at: 0 });
    if (text === this.told) return;
    this.told = text;
    this.#tell(found);
  }

  #name(cell, row) {
    if (!cell.firstChild) cell.append(el("button", { type: "button", class: "link", onclick: () => this.pick(row) }));
    say(cell.firstChild, `${short(row.inputs) || "no input"} → ${short(row.outputs) || "no output"}`);
  }

  #tell(plan) {
    this.detail.hidden = false;
    const devices = plan.devices.map((one) => one.name);
    const memory = el("ul", { class: "shares" }, ...plan.devices.map((one, place) => {
      const swatch = el("span", { class: "swatch" });
      swatch.style.background = series(place);
      return el("li", {}, swatch, el("b", {}, one.name), el("span", {}, `weights ${bytes(one.weights)}, variables ${bytes(one.variables)}, computing ${bytes(one.compute)}`));
    }));
    const heads = ["Split", "Device", "Nodes", "Ops", "Copied in", "From", "Copy", "Compute", "Predicted", "Note"];
    const rows = plan.splits.map((one) => el("tr", {}, el("th", { scope: "row" }, String(one.number)), ...[one.device, count(one.nodes),
      one.ops.slice(0, 4).map(([op, n]) => (n > 1 ? `${n} ${op}` : op)).join(", "), one.copied ? bytes(one.copied) : "–", one.sources.join(", ") || "–",
      micros(one.copy), micros(one.compute), micros(one.predicted_compute), one.note || "–"].map((text) => el("td", {}, text))));
    const rest = plan.split_count > plan.splits.length ? el("p", { class: "hint" }, `The first ${plan.splits.length} of ${plan.split_count} splits.`) : null;
    this.detail.replaceChildren(
      el("h3", {}, `Plan ${plan.plan} of session ${plan.session}`),
      el("p", { class: "about" }, `${count(plan.nodes)} nodes in ${count(plan.split_count)} splits; the last run took ${micros(plan.took)}${plan.predicted ? `, predicted ${micros(plan.predicted)}` : ""}`),
      el("p", { class: "about lately" }, lately(this.looks)),
      memory, this.#gantt(plan, devices),
      el("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": "Splits of the plan" },
        el("table", {}, el("caption", { class: "sr" }, "Splits in the order of their runs"), el("thead", {}, el("tr", {}, ...heads.map((one) => el("th", { scope: "col" }, one)))), el("tbody", {}, ...rows))),
      ...(rest ? [rest] : []),
    );
  }

  /** The last run as bars over time, a row for each device; as predicted if there was none. */
  #gantt(plan, devices) {
    const isMeasured = plan.splits.some((one) => one.compute > 0 && one.began + one.compute > 0);
    const part = (one) => (isMeasured ? [one.began, one.copy, one.compute] : [one.predicted_began, one.predicted_copy, one.predicted_compute]);
    const end = Math.max(...plan.splits.map((one) => part(one).reduce((a, b) => a + b, 0)), 0);
    if (!(end > 0)) return el("p", { class: "empty" }, "It has not run yet, and its time is not predicted.");
    const height = devices.length * 26;
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 1000 ${height}`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `${isMeasured ? "Last" : "Predicted"} run of ${micros(end)}: ${plan.splits.length} splits on ${devices.join(", ")}`);
    const box = (x, width, y, h, colour, opacity) => {
      const rect = document.createElementNS(SVG, "rect");
      for (const [name, value] of Object.entries({ x, width: Math.max(1, width), y, height: h, fill: colour, "fill-opacity": opacity, rx: 2 })) rect.setAttribute(name, value);
      return rect;
    };
    for (const one of plan.splits) {
      const place = devices.indexOf(one.device);
      const [began, copy, compute] = part(one);
      const x = (us) => (us / end) * 1000;
      if (copy > 0) svg.append(box(x(began), x(copy), place * 26 + 8, 10, colourOf(0), 0.6));
      const bar = box(x(began + copy), x(compute), place * 26 + 3, 20, series(place), 0.9);
      const title = document.createElementNS(SVG, "title");
      title.textContent = `split ${one.number} on ${one.device}: ${micros(compute)}`;
      bar.append(title);
      svg.append(bar);
    }
    const labels = el("ul", { class: "gantt-labels" }, ...devices.map((one) => el("li", {}, one)));
    return el("figure", { class: "gantt" }, el("figcaption", {}, `${isMeasured ? "The last run" : "A run, as predicted"}: ${micros(end)}`), el("div", { class: "gantt-body" }, labels, svg));
  }
}

/** The runs of a plan between the oldest and the newest look, or all of them if there were none. */
function lately(looks) {
  const [old, now] = [looks[0], looks[looks.length - 1]];
  const before = new Map(now.runs > old.runs ? old.times : []);
  const times = now.times.map(([took, runs]) => [took, runs - (before.get(took) ?? 0)]);
  const runs = times.reduce((sum, one) => sum + one[1], 0);
  const quantile = (part) => {
    let left = part * runs;
    return times.find(([, count]) => (left -= count) <= 0)?.[0] ?? 0;
  };
  const rate = now.at > old.at ? (now.runs - old.runs) / (now.at - old.at) : 0;
  const [step, steps] = now.loop;
  const state = steps ? `loop at step ${count(step)} of ${count(steps)}` : now.running ? `${count(now.running)} running` : "idle";
  const waited = (now.waited - (now.runs > old.runs ? old.waited : 0)) / Math.max(1, runs);
  const facts = runs ? `; ${rate.toFixed(rate < 10 ? 1 : 0)} runs a second of ${micros(quantile(0.5))} (p50) and ${micros(quantile(0.99))} (p99), each after ${micros(waited)} in its queue` : "";
  return `Now ${state}${now.waiting ? `, ${count(now.waiting)} wait` : ""}; ${count(now.runs)} runs so far${facts}`;
}

function short(names) {
  return names.length > 3 ? `${names.slice(0, 3).join(", ")} and ${names.length - 3} more` : names.join(", ");
}
