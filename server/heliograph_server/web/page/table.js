// A table whose rows stay while their values change; columns sort by a press on their heads.

import { el, mark, say } from "./dom.js";
import { isPressed } from "./press.js";

/** The rows that are made at once; the others follow in the next frames. */
const ROWS_A_FRAME = 40;

/**
 * `columns`: {name, title, get(row), show(row) -> text or element, number, first, narrow}. A column with
 * `cell(td, row)` fills its cells itself. `key(row)` names a row. `pick(row)` is called for a pressed row.
 */
export class Table {
  constructor({ caption, columns, key, pick, sort, descending = false, empty }) {
    Object.assign(this, { columns, key, pick, empty });
    this.sorted = { column: columns.find((one) => one.name === sort), descending };
    this.rows = new Map();
    this.data = [];
    this.chosen = null;
    this.heads = columns.map((one) => this.#head(one));
    this.body = el("tbody");
    this.table = el("table", {}, el("caption", { class: "sr" }, caption), el("thead", {}, el("tr", {}, ...this.heads)), this.body);
    this.nothing = el("p", { class: "empty" }, empty);
    this.scroller = el("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": caption }, this.table);
    this.element = el("div", { class: "table" }, this.scroller, this.nothing);
    this.set([]);
  }

  #head(column) {
    const cell = el("th", { scope: "col", class: column.number ? "number" : null, "data-narrow": column.narrow ? "" : null });
    if (!column.get) {
      cell.append(el("span", { class: column.title ? null : "sr" }, column.title || column.label || ""));
      return cell;
    }
    cell.append(el("button", { type: "button", title: column.help ?? null, onclick: () => this.#sortBy(column) }, column.title));
    return cell;
  }

  #sortBy(column) {
    const isSame = this.sorted.column === column;
    this.sorted = { column, descending: isSame ? !this.sorted.descending : Boolean(column.number) };
    this.set(this.data);
  }

  set(data) {
    this.data = data;
    const { column, descending } = this.sorted;
    let rows = data;
    if (column) {
      const sign = descending ? -1 : 1;
      rows = data
        .map((row, place) => [column.get(row), place, row])
        .sort(([a, i], [b, j]) => (a < b ? -sign : a > b ? sign : i - j))
        .map(([, , row]) => row);
    }
    this.columns.forEach((one, place) => {
      mark(this.heads[place], "aria-sort", one === column ? (descending ? "descending" : "ascending") : null);
    });
    this.nothing.hidden = data.length > 0;
    this.scroller.hidden = data.length === 0;
    this.#fill(rows, 0, (this.turn = (this.turn ?? 0) + 1));
  }

  /** Fill some rows now and the others later, unless newer ones came. New texts make columns move. */
  #fill(rows, from, turn) {
    if (turn !== this.turn) return;
    if (isPressed()) {
      requestAnimationFrame(() => this.#fill(rows, from, turn));
      return;
    }
    let made = 0;
    let place = from;
    for (; place < rows.length && made < ROWS_A_FRAME; place += 1) {
      const name = String(this.key(rows[place]));
      let row = this.rows.get(name);
      if (!row) {
        row = this.#row(name);
        made += 1;
      }
      this.#update(row, rows[place]);
      const there = this.body.children[place];
      if (there !== row.element) this.body.insertBefore(row.element, there ?? null);
    }
    if (place < rows.length) {
      requestAnimationFrame(() => this.#fill(rows, place, turn));
      return;
    }
    while (this.body.children.length > rows.length) {
      const last = this.body.lastElementChild;
      this.rows.delete(last.dataset.key);
      last.remove();
    }
  }

  #row(name) {
    const cells = this.columns.map((one) => el(one.first ? "th" : "td", {
      class: one.number ? "number" : one.first ? "first" : null,
      scope: one.first ? "row" : null,
      "data-narrow": one.narrow ? "" : null,
    }));
    const element = el("tr", { "data-key": name }, ...cells);
    const row = { element, cells, now: null };
    if (this.pick) {
      element.classList.add("pickable");
      element.addEventListener("click", (event) => {
        if (!event.target.closest("button, a, input")) this.pick(row.now);
      });
    }
    this.rows.set(name, row);
    return row;
  }

  #update(row, data) {
    row.now = data;
    mark(row.element, "aria-current", this.chosen !== null && this.chosen === row.element.dataset.key ? "true" : null);
    this.columns.forEach((one, place) => {
      if (one.cell) one.cell(row.cells[place], data);
      else say(row.cells[place], one.show(data));
    });
  }

  /** Mark the row of a key as the chosen one; null: none. */
  choose(key) {
    this.chosen = key === null ? null : String(key);
    for (const [name, row] of this.rows) mark(row.element, "aria-current", name === this.chosen ? "true" : null);
  }
}
