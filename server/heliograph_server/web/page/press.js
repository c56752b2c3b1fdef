// Presses of a pointer: what lies under it stays there until it is let go, so that a press does what it aimed at.

/** A pointer that is held for longer, or whose end no browser told, holds nothing. */
const MOST_MS = 5000;
let until = 0;

/** True while a pointer is down, for some seconds at most. */
export const isPressed = () => performance.now() < until;

document.addEventListener("pointerdown", () => { until = performance.now() + MOST_MS; }, { capture: true });
for (const end of ["pointerup", "pointercancel"]) document.addEventListener(end, () => { until = 0; }, { capture: true });
