// Uploads under way.

import { Meter, el, head, say } from "./dom.js";
import { bytes, percent, rate } from "./format.js";
import { Table } from "./table.js";

export class Uploads {
  constructor(section) {
    this.note = head(section, "Uploads", "");
    this.before = new Map();
    this.meters = new WeakMap();
    this.table = new Table({
      caption: "Uploads under way",
      key: (row) => row.key,
      sort: "session",
      empty: "Nothing is being uploaded.",
      columns: [
        { name: "session", title: "Session", first: true, get: (row) => row.session, show: (row) => `Session ${row.session}` },
        { name: "kind", title: "Of", get: (row) => row.kind, show: (row) => (row.relayed ? `${row.kind}, passed on` : row.kind) },
        { name: "share", title: "Arrived", get: (row) => row.received / row.size, cell: (cell, row) => this.#meter(cell, row) },
        { name: "size", title: "Size", number: true, get: (row) => row.size, show: (row) => bytes(row.size) },
        { name: "rate", title: "Rate", number: true, get: (row) => row.rate, show: (row) => rate(row.rate) },
      ],
    });
    section.append(el("div", { class: "card flush" }, this.table.element));
  }

  update(state) {
    const seen = new Map();
    const now = new Map();
    const rows = state.uploads.map((one) => {
      const name = `${one.session} ${one.kind} ${one.size}`;
      const place = seen.get(name) ?? 0;
      seen.set(name, place + 1);
      const key = `${name} ${place}`;
      now.set(key, { at: state.at, received: one.received });
      const before = this.before.get(key);
      const speed = before && state.at > before.at ? (1000 * (one.received - before.received)) / (state.at - before.at) : 0;
      return { ...one, key, rate: Math.max(0, speed) };
    });
    this.before = now;
    say(this.note, rows.length ? `${rows.length} under way` : "");
    this.table.set(rows);
  }

  #meter(cell, row) {
    let meter = this.meters.get(cell);
    if (!meter) {
      meter = new Meter("Part that has arrived");
      this.meters.set(cell, meter);
      cell.append(meter.element);
    }
    const share = row.size ? row.received / row.size : 0;
    meter.set(share, percent(share));
  }
}
