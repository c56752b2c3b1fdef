// Colours of sessions, tenants and devices: Okabe and Ito's, which people with any colour vision tell apart.

const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#b05590", "#a87400", "#3f8fc4", "#6b5bb5", "#5b6b2a"];
const DARK = ["#56b4e9", "#ff9a52", "#2fc79a", "#e08fc0", "#e6b422", "#8fcdf5", "#a99bf0", "#b3c46a"];

const SYSTEM = matchMedia("(prefers-color-scheme: dark)");
/** Looking a colour up makes the browser compute styles, which is too much for every frame. */
const known = new Map();

/** True if the page is dark now. */
export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : SYSTEM.matches;
}

/** The colours have changed. */
export function forget() {
  known.clear();
}

/** The colour of the series of a place. */
export const series = (place) => (isDark() ? DARK : LIGHT)[((place % 8) + 8) % 8];

/** The colour of a session; 0 stands for several. */
export const session = (number) => (number === 0 ? (isDark() ? "#8b98a8" : "#7a8797") : series(number - 1));

/** A colour of the style sheet. */
export function named(name) {
  if (!known.has(name)) known.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return known.get(name);
}
