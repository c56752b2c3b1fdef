// The daemon's clock, as far as a browser knows it. Pure but for the browser's own clock.
//
// Both clocks may differ by hours, and the browser's may jump. Times on the page are the daemon's; the
// difference is that of the message that came fastest lately.

const KEPT = 30;

export class Clock {
  constructor(now = () => performance.timeOrigin + performance.now()) {
    this.own = now;
    this.differences = [];
    this.offset = 0;
  }

  /** Note a message that the daemon made at this time by its clock, in milliseconds. */
  heard(at) {
    this.differences.push(at - this.own());
    if (this.differences.length > KEPT) this.differences.shift();
    this.offset = Math.max(...this.differences);
  }

  /** A daemon that has restarted may have another clock. */
  forget() {
    this.differences = [];
  }

  /** The daemon's time now, in milliseconds. */
  get now() {
    return this.own() + this.offset;
  }
}

/** What to tell of a browser's clock that differs from the daemon's by so many milliseconds, or "". */
export function difference(ms) {
  const seconds = Math.abs(ms) / 1000;
  if (seconds < 5) return "";
  const much = seconds < 120 ? `${Math.round(seconds)} s` : seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
  return `The clock of this computer is ${much} ${ms > 0 ? "behind" : "ahead of"} the daemon's. Times on this page are the daemon's.`;
}
