// Hosts with their devices, and the links between them.

import { Meter, el, head, mark, say } from "./dom.js";
import { bytes, host, micros, percent, rate } from "./format.js";
import { Table } from "./table.js";

export class Hosts {
  constructor(section) {
    this.note = head(section, "Devices", "");
    this.cards = el("div", { class: "hosts" });
    this.hosts = new Map();
    this.links = new Table({
      caption: "Links between hosts",
      key: (one) => `${one.a}\n${one.b}`,
      sort: "a",
      empty: "There are no links: the daemon is no head of a pool.",
      columns: [
        { name: "a", title: "From", get: (one) => one.a, show: (one) => host(one.a), first: true },
        { name: "b", title: "To", get: (one) => one.b, show: (one) => host(one.b) },
        { name: "trip", title: "Round trip", number: true, get: (one) => one.trip, show: (one) => micros(one.trip * 1e6) },
        { name: "rate", title: "Bandwidth", number: true, get: (one) => one.rate, show: (one) => rate(one.rate) },
        { name: "state", title: "State", get: (one) => reach(one), show: (one) => reach(one) },
      ],
    });
    this.linkCard = el("div", { class: "card" }, el("h3", {}, "Links"), this.links.element);
    section.append(this.cards, this.linkCard);
  }

  update(state) {
    const members = [{ name: "", address: "", state: "", why: "", server: state.server }, ...state.members];
    const known = new Set(members.map((one) => one.name));
    for (const [name, card] of this.hosts) {
      if (!known.has(name)) {
        card.element.remove();
        this.hosts.delete(name);
      }
    }
    for (const member of members) {
      const devices = state.devices.filter((one) => one.host === member.name || (member.name && one.host.startsWith(`${member.name}/`)));
      if (!member.name && devices.length === 0 && members.length > 1) continue;
      this.#host(member, devices);
    }
    const lost = state.devices.filter((one) => one.lost).length;
    say(this.note, `${state.devices.length} on ${members.length === 1 ? "one host" : `${members.length} hosts`}${lost ? `, ${lost} lost` : ""}`);
    this.linkCard.hidden = state.links.length === 0;
    this.links.set(state.links);
  }

  #host(member, devices) {
    let card = this.hosts.get(member.name);
    if (!card) {
      card = { title: el("h3", {}), state: el("span", { class: "pill" }), about: el("p", { class: "about" }), list: el("ul", { class: "devices" }), devices: new Map() };
      card.element = el("article", { class: "card host" }, el("div", { class: "host-head" }, card.title, card.state), card.about, card.list);
      this.cards.append(card.element);
      this.hosts.set(member.name, card);
    }
    say(card.title, member.name || "This daemon");
    const isWell = !member.name || member.state === "ready";
    say(card.state, member.name ? member.state.replaceAll("_", " ") : "here");
    mark(card.state, "data-kind", isWell ? "good" : "bad");
    say(card.about, [member.address, member.server, member.why].filter(Boolean).join(" · "));
    const known = new Set(devices.map((one) => one.name));
    for (const [name, row] of card.devices) {
      if (!known.has(name)) {
        row.element.remove();
        card.devices.delete(name);
      }
    }
    for (const device of devices) this.#device(card, device);
  }

  #device(card, device) {
    let row = card.devices.get(device.name);
    if (!row) {
      row = { about: el("span", { class: "about" }), busy: new Meter(`Busy time of ${device.name}`), memory: new Meter(`Memory of ${device.name}`), busyText: el("span", { class: "figure" }), memoryText: el("span", { class: "figure" }), state: el("span", { class: "pill", "data-kind": "bad" }) };
      row.busyLine = el("div", { class: "measure" }, el("span", { class: "label" }, "busy"), row.busy.element, row.busyText);
      row.element = el("li", {}, el("div", { class: "device-head" }, el("b", {}, device.name), row.state), row.about, row.busyLine,
        el("div", { class: "measure" }, el("span", { class: "label" }, "memory"), row.memory.element, row.memoryText));
      card.list.append(row.element);
      card.devices.set(device.name, row);
    }
    say(row.about, `${device.about} (${device.backend})`);
    row.busyLine.hidden = device.busy === undefined;
    row.busy.set(device.busy ?? 0, percent(device.busy ?? 0));
    say(row.busyText, percent(device.busy ?? 0));
    const used = device.total - device.free;
    row.memory.set(device.total ? used / device.total : 0, `${bytes(used)} of ${bytes(device.total)}`);
    say(row.memoryText, `${bytes(used)} of ${bytes(device.total)}`);
    const told = device.lost ? `lost: ${device.lost}` : device.silent ? "does not answer" : device.draining ? "drains" : "";
    row.state.hidden = !told;
    say(row.state, told);
  }
}

function reach(one) {
  if (one.reachable === false) return `relayed${one.why ? `: ${one.why}` : ""}`;
  return one.measured ? "direct, measured" : one.reachable ? "direct, assumed rates" : "not tried yet";
}
