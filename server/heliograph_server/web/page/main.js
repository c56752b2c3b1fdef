// The page: signs in, follows the stream of events, and hands its messages to the panels.

import { Stream, get, post } from "./api.js";
import { Clock, difference } from "./clock.js";
import { forget } from "./colours.js";
import { byId, mark, notice, say, unnotice } from "./dom.js";
import { Hosts } from "./hosts.js";
import { Log } from "./log.js";
import { Memory } from "./memory.js";
import { Models } from "./models.js";
import { Operate } from "./operate.js";
import { Overview } from "./overview.js";
import { Plans } from "./plans.js";
import { isPressed } from "./press.js";
import { Sessions } from "./sessions.js";
import { Timeline } from "./timeline.js";
import { Uploads } from "./uploads.js";

/** A stream without a message for so long is not live. */
const STALE_MS = 5000;
/** A page that nobody sees for so long lets its stream go. */
const HIDDEN_MS = 60_000;
/** The work of one frame. */
const FRAME_MS = 4;

const clock = new Clock();
let panels = null;
let account = null;
let life = "";
let heardAt = 0;
let work = [];

function build() {
  const section = (name) => byId(name);
  const plans = new Plans(section("plans"), { failed });
  const sessions = new Sessions(section("sessions"), {
    pick: (number) => {
      plans.show(number);
      section("plans").scrollIntoView();
    },
  });
  return {
    overview: new Overview(section("overview")),
    hosts: new Hosts(section("hosts")),
    timeline: new Timeline(section("timeline"), clock),
    memory: new Memory(section("memory")),
    sessions,
    plans,
    uploads: new Uploads(section("uploads")),
    models: new Models(section("models")),
    log: new Log(section("log")),
    operate: new Operate(section("operate")),
  };
}

// Messages

/** Do these in the next frames, a few milliseconds in each; newer ones take their place. */
function schedule(jobs) {
  const isIdle = work.length === 0;
  work = jobs;
  if (isIdle) requestAnimationFrame(turn);
}

function turn() {
  const until = performance.now() + FRAME_MS;
  while (work.length && !isPressed() && performance.now() < until) work.shift()();
  if (work.length) requestAnimationFrame(turn);
}

function onState(state) {
  clock.heard(state.at);
  if (life && state.life !== life) {
    notice("The daemon has restarted: what this page knew of the one before is gone.", "info");
    for (const one of [panels.timeline, panels.memory, panels.log]) one.forget();
    fillHistory();
  }
  life = state.life;
  const told = difference(state.at - Date.now());
  if (told) notice(told, "info", "clock");
  else unnotice("clock");
  const column = (name) => state.session_columns.indexOf(name);
  const [number, client] = [column("number"), column("client")];
  panels.timeline.setDevices(state.devices.map((one) => one.name), new Map(state.sessions.map((one) => [one[number], one[client]])));
  say(byId("where"), `${state.server} · ${location.host}`);
  const { state: drain } = state.drain;
  byId("drain-state").hidden = drain === "serving";
  say(byId("drain-state"), drain);
  schedule([
    () => panels.overview.update(state),
    () => panels.hosts.update(state),
    () => panels.memory.update(state, column),
    ...panels.memory.pictures.map((one) => () => one.draw()),
    ...panels.overview.pictures.map((one) => () => one.draw()),
    () => panels.sessions.update(state, column),
    () => panels.uploads.update(state),
    () => panels.models.update(state),
    () => panels.operate.update(state),
  ]);
}

function onEvent(kind, content) {
  heardAt = performance.now();
  if (kind === "state") onState(content);
  else if (kind === "log") panels.log.add(content);
  else if (kind === "missed") panels.timeline.missed = content.messages;
  else if (kind === "runs") {
    clock.heard(content.at);
    panels.timeline.add(content);
  }
}

async function fillHistory() {
  try {
    const found = await get("api/history?seconds=600");
    if (!found.history) return;
    panels.memory.fill(found.history);
    panels.log.fill(found.log);
    for (const one of found.timeline) panels.timeline.add(one, { isOld: true });
  } catch (error) {
    failed(error);
  }
}

// The stream

const stream = new Stream("api/events", {
  open() {
    heardAt = performance.now();
    unnotice("lost");
    fillHistory();
  },
  event: onEvent,
  ended(reason) {
    if (reason === "stopping") return false;
    signIn(`${reason[0].toUpperCase()}${reason.slice(1)}.`);
    return true;
  },
  refused(error) {
    if (error.status === 401 || error.status === 403) {
      signIn(error.told);
      return true;
    }
    notice(`The daemon refuses this page: ${error.told}.`, "bad", "lost");
    return false;
  },
  lost(seconds) {
    link("bad", `Not connected; tries again in ${Math.max(1, Math.round(seconds))} s`);
    if (life) notice("The daemon does not answer. What you see is the last that it told.", "bad", "lost");
  },
});

function link(kind, text) {
  const state = byId("link-state");
  mark(state, "data-kind", kind);
  say(state, text);
}

function failed(error) {
  if (error.status === 401) signIn(error.told);
}

setInterval(() => {
  if (!account || stream.isOver || !heardAt) return;
  const ago = performance.now() - heardAt;
  if (ago < STALE_MS) link("good", "Live");
  else if (byId("link-state").dataset.kind === "good") link("some", "Nothing new for some seconds");
}, 500);

document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (document.hidden) hiding = setTimeout(() => stream.close(), HIDDEN_MS);
  else if (account && stream.isOver) stream.open();
});
let hiding = 0;

// Signing in

function signIn(told = "") {
  account = null;
  stream.close();
  panels?.plans.stop();
  byId("app").hidden = true;
  byId("account").hidden = true;
  byId("sign-in").hidden = false;
  link("some", "Signed out");
  say(byId("sign-in-error"), told);
  document.title = "Sign in · Heliograph";
  byId("token").focus();
}

function enter(found) {
  account = found;
  byId("sign-in").hidden = true;
  byId("app").hidden = false;
  panels ??= build();
  panels.sessions.isOperator = found.operator;
  byId("operate").hidden = byId("operate-link").hidden = !found.operator;
  byId("account").hidden = !found.signed_in;
  say(byId("account-name"), found.name + (found.tenant && !found.operator ? ` (tenant ${found.tenant})` : ""));
  document.title = `${location.host} · Heliograph`;
  link("some", "Connecting");
  panels.plans.start();
  stream.open();
}

byId("sign-in-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const field = byId("token");
  const token = field.value.trim();
  say(byId("sign-in-error"), "");
  try {
    const found = await post("api/sign-in", { token });
    field.value = "";
    enter(found);
  } catch (error) {
    say(byId("sign-in-error"), error.told);
  }
});

byId("sign-out").addEventListener("click", async () => {
  await post("api/sign-out").catch(() => {});
  signIn("You are signed out.");
});

async function begin() {
  try {
    enter(await get("api/me"));
  } catch (error) {
    if (error.status === 401 || error.status === 403) signIn(error.status === 403 ? error.told : "");
    else {
      link("bad", "The daemon does not answer");
      setTimeout(begin, 2000);
    }
  }
}

// Colours

const THEMES = { "": ["Auto", "as the system"], light: ["Light", "light"], dark: ["Dark", "dark"] };

function useTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  const [short, long] = THEMES[theme];
  say(byId("theme"), short);
  mark(byId("theme"), "aria-label", `${short}: colours ${long}`);
  forget();
  panels?.timeline.recolour();
  panels?.memory.draw();
  panels?.plans.picture.recolour();
}

byId("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(document.documentElement.dataset.theme ?? "") + 1) % names.length];
  try {
    localStorage.setItem("heliograph-theme", next);
  } catch {
    // The choice lasts as long as the page.
  }
  useTheme(next);
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => useTheme(document.documentElement.dataset.theme ?? ""));

// The panel that is seen is marked in the list of panels.
const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) target.toggleAttribute("data-seen", isIntersecting);
  const first = document.querySelector("main > section[data-seen]");
  for (const one of document.querySelectorAll(".rail a")) {
    mark(one, "aria-current", first && one.hash === `#${first.id}` ? "true" : null);
  }
}, { rootMargin: "-80px 0px -40% 0px" });
for (const one of document.querySelectorAll("#main > section")) seen.observe(one);

let stored = "";
try {
  stored = localStorage.getItem("heliograph-theme") ?? "";
} catch {
  // Without storage the system's colours are used.
}
useTheme(stored in THEMES ? stored : "");
begin();
