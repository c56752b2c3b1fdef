// Numbers for people. Pure.

const BYTES = ["B", "KiB", "MiB", "GiB", "TiB"];

/** A size in bytes with three digits: 1.46 GiB. */
export function bytes(size) {
  if (!(size > 0)) return "0 B";
  let place = 0;
  while (size >= 1000 && place < BYTES.length - 1) {
    size /= 1024;
    place += 1;
  }
  return `${digits(size, place === 0)} ${BYTES[place]}`;
}

/** A rate in bytes a second: 1.8 GB/s. */
export function rate(size) {
  if (!(size > 0)) return "0";
  for (const unit of ["B/s", "kB/s", "MB/s", "GB/s"]) {
    if (size < 1000 || unit === "GB/s") return `${digits(size, unit === "B/s")} ${unit}`;
    size /= 1000;
  }
  return "";
}

/** A duration in microseconds: 240 µs, 1.35 ms, 2.1 s. */
export function micros(us) {
  if (!(us > 0)) return "–";
  if (us < 1000) return `${digits(us, us >= 100)} µs`;
  if (us < 1e6) return `${digits(us / 1e3)} ms`;
  return `${digits(us / 1e6)} s`;
}

/** A number with separators, one digit behind the point below ten. */
export function count(value) {
  if (!(value > 0)) return "0";
  return value < 10 && !Number.isInteger(value) ? value.toFixed(1) : Math.round(value).toLocaleString("en-US");
}

/** A time span in seconds: 12 s, 4 min, 3 h 12 min, 2 d 4 h. */
export function span(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

export const percent = (share) => `${Math.round(100 * share)} %`;

/** The time of day of the daemon's clock, in the viewer's zone. */
export function time(ms) {
  const at = new Date(ms);
  const two = (value) => String(value).padStart(2, "0");
  return `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}.${String(at.getMilliseconds()).padStart(3, "0")}`;
}

/** The name of a host; that of the daemon itself is empty. */
export const host = (name) => name || "this daemon";

function digits(value, isWhole = false) {
  if (isWhole) return String(Math.round(value));
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}
