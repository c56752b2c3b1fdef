// Sessions: who uses the daemon, for what, and how much. Operators may end one.

import { ask, el, head, notice, say } from "./dom.js";
import { bytes, count, rate, span } from "./format.js";
import { post } from "./api.js";
import { Table } from "./table.js";

export class Sessions {
  constructor(section, { pick }) {
    this.filter = el("input", { type: "search", placeholder: "Filter by client or tenant", "aria-label": "Filter sessions", oninput: () => this.#show() });
    this.note = head(section, "Sessions", "", this.filter);
    this.isOperator = false;
    const at = (name) => (row) => row[this.places[name]];
    const number = (name, title, show, help, narrow) => ({ name, title, number: true, narrow, help, get: at(name), show: (row) => show(at(name)(row)) });
    this.table = new Table({
      caption: "Open sessions",
      key: at("number"),
      sort: "number",
      empty: "No session is open. hg.connect(url) opens one.",
      pick: (row) => pick(at("number")(row)),
      columns: [
        { name: "client", title: "Client", first: true, get: at("client"), cell: (cell, row) => this.#client(cell, at("number")(row), at("client")(row), pick) },
        { name: "number", title: "No.", number: true, get: at("number"), show: (row) => String(at("number")(row)) },
        { name: "tenant", title: "Tenant", narrow: true, get: at("tenant"), show: (row) => at("tenant")(row) || "–" },
        { name: "lease", title: "Connection", get: (row) => lease(row, this.places), show: (row) => lease(row, this.places) },
        number("runs", "Runs/s", count),
        number("running", "Under way", count),
        number("waiting", "Waiting", count, "Runs that wait for their turn"),
        number("commands", "Commands/s", count, "", true),
        number("memory", "Memory", bytes, "On all devices"),
        number("received", "In", rate, "Bytes of tensors and weights"),
        number("sent", "Out", rate, "Bytes of tensors"),
        number("plans", "Plans", count, "", true),
        number("tensors", "Tensors", count, "", true),
        number("age", "Age", span, "Since it opened"),
        { name: "actions", label: "Actions", cell: (cell, row) => this.#actions(cell, at("number")(row), at("client")(row)) },
      ],
    });
    section.append(el("div", { class: "card flush" }, this.table.element));
  }

  update(state, column) {
    this.places = Object.fromEntries(state.session_columns.map((name) => [name, column(name)]));
    this.state = state;
    this.#show();
  }

  #show() {
    if (!this.state) return;
    const { client, tenant, credential } = this.places;
    const wanted = this.filter.value.trim().toLowerCase();
    const rows = this.state.sessions.filter((row) => !wanted || [row[client], row[tenant], row[credential]].some((one) => one.toLowerCase().includes(wanted)));
    const { session_count: all, sessions } = this.state;
    const shown = all > sessions.length ? `the ${sessions.length} most active of ${count(all)}` : `${count(all)} open`;
    say(this.note, wanted ? `${rows.length} of ${count(all)} match` : shown);
    this.table.set(rows);
  }

  #client(cell, number, client, pick) {
    if (!cell.firstChild) cell.append(el("button", { type: "button", class: "link", onclick: () => pick(number) }));
    say(cell.firstChild, client);
  }

  #actions(cell, number, client) {
    if (this.isOperator && !cell.firstChild) {
      cell.append(el("button", { type: "button", class: "quiet small", "aria-label": `End session ${number}`, onclick: () => this.end(number, client) }, "End…"));
    }
  }

  async end(number, client) {
    const content = el("div", {}, el("p", {}, `Session ${number} of ${client} ends at once: its runs fail, and its tensors are freed.`),
      el("label", { for: "reason" }, "Reason, told to its client"), el("input", { id: "reason", name: "reason", maxlength: "200" }));
    const values = await ask(`End session ${number}?`, content, "End session", { danger: true });
    if (!values) return;
    try {
      await post("api/end-session", { number, reason: values.reason });
      notice(`Session ${number} has ended.`, "good");
    } catch (error) {
      notice(error.told, "bad");
    }
  }
}

/** The state of a session's connection. A daemon that keeps sessions by a lease tells it. */
function lease(row, places) {
  const told = places.lease === undefined ? "" : row[places.lease];
  return told || (row[places.attached] ? "attached" : "not attached");
}
