// Requests to the daemon, and the stream of its events.

/** A request that the daemon refused, or did not get. `status` is 0 if there was no answer. */
export class Refused extends Error {
  constructor(status, message, advice = "") {
    super(message);
    this.status = status;
    this.advice = advice;
  }

  get told() {
    return this.advice ? `${this.message}: ${this.advice}` : this.message;
  }
}

const SECONDS = 15;
/** The longest message of the stream, in characters. */
const MOST_TEXT = 8 * 1024 * 1024;

async function request(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { cache: "no-store", credentials: "same-origin", signal: AbortSignal.timeout(SECONDS * 1000), ...options });
  } catch {
    throw new Refused(0, "the daemon does not answer");
  }
  let body = {};
  try {
    body = await answer.json();
  } catch {
    // Told by its status below.
  }
  if (!answer.ok) throw new Refused(answer.status, body.error || `status ${answer.status}`, body.advice);
  return body;
}

export const get = (path) => request(path);

export const post = (path, body = {}) => request(path, {
  method: "POST",
  headers: { "content-type": "application/json", "x-heliograph": "1" },
  body: JSON.stringify(body),
});

/**
 * The stream of events, which is opened again until `close`.
 *
 * `on` has functions: `open`, `event(kind, content)`, `ended(reason)` when the daemon ended it,
 * `refused(Refused)` when it did not begin, and `lost(seconds)` when it broke and how long the wait is.
 */
export class Stream {
  constructor(path, on) {
    this.path = path;
    this.on = on;
    this.waits = 0;
    this.isOver = true;
  }

  open() {
    if (!this.isOver) return;
    this.isOver = false;
    this.waits = 0;
    this.#turn();
  }

  close() {
    this.isOver = true;
    clearTimeout(this.timer);
    this.abort?.abort();
  }

  /** Try again now. */
  again() {
    clearTimeout(this.timer);
    if (!this.isOver) this.#turn();
  }

  async #turn() {
    const abort = (this.abort = new AbortController());
    try {
      const answer = await fetch(this.path, { cache: "no-store", credentials: "same-origin", signal: abort.signal });
      if (!answer.ok) {
        const body = await answer.json().catch(() => ({}));
        const error = new Refused(answer.status, body.error || `status ${answer.status}`, body.advice);
        if (this.on.refused(error)) {
          this.isOver = true;
          return;
        }
        throw error;
      }
      this.on.open();
      await this.#read(answer.body.pipeThrough(new TextDecoderStream()).getReader());
    } catch {
      // Told by `lost`.
    }
    if (this.isOver || abort !== this.abort) return;
    const seconds = Math.min(15, 0.5 * 2 ** this.waits) * (0.75 + 0.5 * Math.random());
    this.waits += 1;
    this.on.lost(seconds);
    this.timer = setTimeout(() => this.#turn(), seconds * 1000);
  }

  async #read(reader) {
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      if (text.length > MOST_TEXT) {
        await reader.cancel();
        return;
      }
      for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
        this.#event(text.slice(0, end));
        text = text.slice(end + 2);
      }
    }
  }

  #event(text) {
    let kind = "";
    let data = "";
    for (const line of text.split("\n")) {
      if (line.startsWith("event: ")) kind = line.slice(7);
      else if (line.startsWith("data: ")) data += line.slice(6);
    }
    if (!kind) return;
    this.waits = 0;
    const content = JSON.parse(data);
    if (kind === "end") {
      if (this.on.ended(content.reason)) this.isOver = true;
      return;
    }
    this.on.event(kind, content);
  }
}
