// Ten minutes of memory, load and times.

import { Chart } from "./charts.js";
import { el, head, say } from "./dom.js";
import { bytes, count, micros, percent } from "./format.js";

const MOST = 600;
/** The tenant of a daemon that has none. */
const NOBODY = "all callers";
const NO_COLUMNS = { tenants: {}, sessions: {}, busy: {}, used: {} };

export class Memory {
  constructor(section) {
    this.note = head(section, "Memory and load", "");
    this.names = new Map();
    this.charts = {
      tenants: new Chart({ title: "Device memory by tenant", stacked: true, show: bytes, isSize: true }),
      sessions: new Chart({ title: "Device memory by session", stacked: true, show: bytes, isSize: true, names: (name) => `#${name} ${this.names.get(Number(name)) ?? ""}`.trim() }),
      busy: new Chart({ title: "Busy time of devices", show: percent, most: 1 }),
      used: new Chart({ title: "Device memory in use by device", show: bytes, isSize: true }),
      runs: new Chart({ title: "Runs a second", show: count }),
      times: new Chart({ title: "Time of a run", show: micros }),
    };
    section.append(el("div", { class: "charts" }, ...Object.values(this.charts).map((one) => el("div", { class: "card" }, one.element))));
    this.forget();
  }

  forget() {
    this.at = [];
    this.single = { runs: [], p50: [], p99: [] };
    this.columns = structuredClone(NO_COLUMNS);
  }

  /** Take the history of the daemon, in place of what is here. */
  fill(table) {
    this.at = table.at;
    this.single = { runs: table.runs, p50: table.p50, p99: table.p99 };
    const { "": nobody, ...tenants } = table.tenants;
    if (nobody) tenants[NOBODY] = nobody;
    this.columns = { tenants, sessions: table.sessions, busy: table.busy, used: table.used };
    this.tell();
    this.draw();
  }

  /** The charts, to draw one after the other. */
  get pictures() {
    return Object.values(this.charts);
  }

  update(state, column) {
    if (this.at.length && state.at <= this.at.at(-1)) return;
    this.at.push(state.at);
    this.single.runs.push(state.run_rates.ended);
    this.single.p50.push(state.run_rates.p50);
    this.single.p99.push(state.run_rates.p99);
    const memory = column("memory");
    const number = column("number");
    this.#push("tenants", state.tenants.map((one) => [one.name || NOBODY, one.memory]));
    this.#push("used", state.devices.map((one) => [one.name, one.total - one.free]));
    this.#push("sessions", this.#largest(state.sessions.filter((one) => one[memory] > 0).map((one) => [String(one[number]), one[memory]])));
    this.#push("busy", state.devices.filter((one) => one.busy !== undefined).map((one) => [one.name, one.busy]));
    const client = column("client");
    this.names = new Map(state.sessions.map((one) => [one[number], one[client]]));
    while (this.at.length > MOST) {
      this.at.shift();
      for (const one of [this.single, ...Object.values(this.columns)]) for (const values of Object.values(one)) values.shift();
    }
    for (const one of Object.values(this.columns)) {
      for (const [name, values] of Object.entries(one)) if (values.every((value) => value === null)) delete one[name];
    }
    this.tell();
  }

  /** The values of at most twelve series: those that are there already, then the largest. */
  #largest(values) {
    const there = this.columns.sessions;
    const ranked = values.sort((a, b) => (b[0] in there) - (a[0] in there) || b[1] - a[1]);
    const rest = ranked.slice(11).reduce((sum, one) => sum + one[1], 0);
    return rest ? [...ranked.slice(0, 11), ["", rest]] : ranked;
  }

  #push(kind, values) {
    const columns = this.columns[kind];
    const length = this.at.length;
    for (const [name, value] of values) {
      columns[name] ??= Array(length - 1).fill(null);
      columns[name].push(value);
    }
    for (const one of Object.values(columns)) if (one.length < length) one.push(null);
  }

  draw() {
    for (const one of this.pictures) one.draw();
  }

  /** Give the charts their values. */
  tell() {
    this.charts.tenants.set(this.at, this.columns.tenants);
    this.charts.sessions.set(this.at, this.columns.sessions);
    this.charts.busy.element.parentElement.hidden = Object.keys(this.columns.busy).length === 0;
    this.charts.busy.set(this.at, this.columns.busy);
    this.charts.used.set(this.at, this.columns.used);
    this.charts.runs.set(this.at, { "runs": this.single.runs });
    this.charts.times.set(this.at, { p50: this.single.p50, p99: this.single.p99 });
    const minutes = this.at.length ? (this.at.at(-1) - this.at[0]) / 60_000 : 0;
    say(this.note, `the last ${minutes < 1 ? "minute" : `${Math.round(minutes)} minutes`}; the daemon keeps ten while a page is open`);
  }
}
