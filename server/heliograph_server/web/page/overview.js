// The figures at a glance.

import { Spark } from "./charts.js";
import { el, head, say } from "./dom.js";
import { bytes, count, micros, span } from "./format.js";

const KEPT = 120;

export class Overview {
  constructor(section) {
    this.note = head(section, "Overview", "");
    this.tiles = el("dl", { class: "tiles" });
    this.made = new Map();
    section.append(this.tiles);
  }

  update(state) {
    const { run_rates: runs, queues, devices } = state;
    const used = devices.reduce((sum, one) => sum + one.total - one.free, 0);
    const total = devices.reduce((sum, one) => sum + one.total, 0);
    this.#tile("Runs", `${count(runs.ended)}/s`, runs.failed ? `${count(runs.failed)}/s failed` : "none failed", runs.ended);
    this.#tile("Time of a run", micros(runs.p50), `p99 ${micros(runs.p99)}`, runs.p99);
    this.#tile("Wait for a turn", micros(runs.turn_p50), `p99 ${micros(runs.turn_p99)}`, runs.turn_p99);
    this.#tile("Under way", count(queues.running), `${count(queues.waiting)} wait for their turn`, queues.running + queues.waiting);
    this.#tile("Sessions", count(state.session_count), `${count(queues.commands)} open commands`, state.session_count);
    this.#tile("Device memory", bytes(used), `of ${bytes(total)}`, used);
    if ("lag" in state) this.#tile("Event loop lag", micros(state.lag * 1e6), `${bytes(queues.staged)} staged`, state.lag);
    say(this.note, `up ${span(state.up)}`);
  }

  /** The lines of the tiles, to draw one after the other. */
  get pictures() {
    return [...this.made.values()].map((one) => one.spark);
  }

  #tile(name, value, more, number) {
    let tile = this.made.get(name);
    if (!tile) {
      tile = { value: el("b", {}), more: el("span", { class: "more" }), spark: new Spark(), numbers: [] };
      this.tiles.append(el("div", { class: "tile" }, el("dt", {}, name), el("dd", {}, tile.value, tile.more, tile.spark.element)));
      this.made.set(name, tile);
    }
    say(tile.value, value);
    say(tile.more, more);
    tile.numbers.push(number);
    if (tile.numbers.length > KEPT) tile.numbers.shift();
    tile.spark.set(tile.numbers);
  }
}
