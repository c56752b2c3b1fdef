// Elements. Text is only ever set as text, so markup in names and lines stays text.

/** Make an element: attributes, "on…" handlers, "class", and children that are elements or texts. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((one) => one !== null && one !== undefined));
  return made;
}

/** Set the text of an element if it differs. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Set or remove an attribute if it differs. */
export function mark(element, name, value) {
  if (value === null || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) {
    element.setAttribute(name, value);
  }
}

export const byId = (id) => document.getElementById(id);

/** The head of a panel: its title, a note at the side, and controls. */
export function head(section, title, note, ...controls) {
  const told = el("p", { class: "note" }, note);
  const row = el("div", { class: "head" }, el("h2", { id: `${section.id}-title` }, title), told,
    el("div", { class: "controls" }, ...controls));
  section.append(row);
  return told;
}

/** A bar that is filled in part, with a text for those who cannot see it. */
export class Meter {
  constructor(label) {
    this.fill = el("span", { class: "meter-fill" });
    this.element = el("span", { class: "meter", role: "meter", "aria-label": label, "aria-valuemin": "0",
      "aria-valuemax": "100", "aria-valuenow": "0" }, this.fill);
  }

  /** `share` from 0 to 1. */
  set(share, text) {
    const percent = Math.round(100 * Math.min(1, Math.max(0, share)));
    mark(this.element, "aria-valuenow", percent);
    mark(this.element, "aria-valuetext", text);
    mark(this.element, "data-level", percent >= 90 ? "high" : percent >= 70 ? "some" : null);
    const width = `${(100 * Math.min(1, Math.max(0, share))).toFixed(1)}%`;
    if (this.fill.style.width !== width) this.fill.style.width = width;
  }
}

/** Ask in a dialog. Returns the values of its fields, or null if it was called off. */
export function ask(title, content, act, { danger = false } = {}) {
  return new Promise((resolve) => {
    const form = el("form", { method: "dialog" }, el("h2", { id: "ask-title" }, title), content,
      el("div", { class: "buttons" },
        el("button", { type: "button", class: "quiet", onclick: () => dialog.close("") }, "Cancel"),
        el("button", { type: "submit", class: danger ? "danger" : "primary", value: "yes" }, act)));
    const dialog = el("dialog", { "aria-labelledby": "ask-title" }, form);
    dialog.addEventListener("close", () => {
      const values = Object.fromEntries(new FormData(form));
      dialog.remove();
      resolve(dialog.returnValue === "yes" ? values : null);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Tell something that the page has done, or could not do; it goes away after a while. */
export function notice(text, kind = "info", key = "") {
  const place = byId("notices");
  const before = key && place.querySelector(`[data-key="${key}"]`);
  if (before) {
    say(before.firstChild, text);
    return before;
  }
  const made = el("div", { class: `notice ${kind}`, "data-key": key || null }, el("span", {}, text),
    el("button", { type: "button", class: "quiet", "aria-label": "Close this message", onclick: () => made.remove() }, "Close"));
  place.append(made);
  if (!key) setTimeout(() => made.remove(), 8000);
  return made;
}

/** Take back a notice that stays. */
export function unnotice(key) {
  byId("notices").querySelector(`[data-key="${key}"]`)?.remove();
}
