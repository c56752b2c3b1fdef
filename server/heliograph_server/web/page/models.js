// Served models and their requests.

import { el, head, say } from "./dom.js";
import { count, micros } from "./format.js";
import { Table } from "./table.js";

export class Models {
  constructor(section) {
    this.note = head(section, "Models", "");
    const number = (name, title, show, narrow) => ({ name, title, number: true, narrow, get: (row) => row[name], show: (row) => show(row[name]) });
    this.table = new Table({
      caption: "Served models",
      key: (row) => `${row.name}\n${row.version}`,
      sort: "name",
      empty: "No model is served here. --kserve and --kserve-http serve those of a folder.",
      columns: [
        { name: "name", title: "Model", first: true, get: (row) => row.name, show: (row) => row.name },
        { name: "version", title: "Version", get: (row) => row.version, show: (row) => row.version },
        number("rate", "Requests/s", count),
        number("waiting", "Waiting", count),
        number("p50", "p50", micros),
        number("p99", "p99", micros),
        number("ok", "Answered", count, true),
        number("failed", "Failed", count),
      ],
    });
    this.languages = new Table({
      caption: "Servers of language models",
      key: (row) => row.name,
      sort: "name",
      empty: "No server of language models is named. --web-llm names one.",
      columns: [
        { name: "name", title: "Language model", first: true, get: (row) => row.name, show: (row) => row.name },
        { name: "state", title: "State", get: (row) => row.state, show: (row) => row.state },
        number("answers", "Answers", count),
        number("waiting", "Waiting", count),
        number("requests", "Requests/s", count),
        number("tokens", "Tokens/s", count),
        number("first", "First token, p50", micros),
        number("pages", "Cache in use", (share) => `${Math.round(100 * share)} %`),
      ],
    });
    this.languageCard = el("div", { class: "card flush" }, this.languages.element);
    section.append(el("div", { class: "card flush" }, this.table.element), this.languageCard);
  }

  update(state) {
    const languages = state.language_models ?? [];
    say(this.note, state.models.length ? `${state.models.length} loaded` : "");
    this.table.set(state.models);
    this.languageCard.hidden = languages.length === 0;
    this.languages.set(languages);
  }
}
