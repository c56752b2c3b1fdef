// Views of plans: draws what is open, opens and folds scopes, finds nodes, and shows their facts.
// Coordinates are those of coordinates.py. Texts from graphs are set as text, never as markup.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const [BOX, UPPER, LOWER, BEND] = [0, 1, 2, 3];
const MOST_SHOWN = 1500, MOST_FOUND = 40, STRIPE = 6, TIP = 6;

function element(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "rect", "path", "text", "title", "defs", "marker"].includes(name);
  const made = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes))
    if (value !== null && value !== undefined) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function sizeText(bytes) {
  let size = bytes;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (size < 1024 || unit === "GiB") return unit === "B" ? `${bytes} B` : `${size.toFixed(1)} ${unit}`;
    size /= 1024;
  }
  return "";
}

function percentText(share) {
  return `${Number((share * 100).toPrecision(2))} %`;
}

function timeText(us) {
  for (const [unit, name] of [[1e6, "s"], [1e3, "ms"], [1, "us"]])
    if (us >= unit) return `${Number((us / unit).toPrecision(3))} ${name}`;
  return us ? `${Number(us.toPrecision(2))} us` : "-";
}

// The places of all boxes that are shown, given which scopes are open.
class Placing {
  constructor(data, opened) {
    Object.assign(this, { data, opened, found: new Map(), by: data.lengths });
    const shown = [0];
    for (const number of shown) if (this.isOpen(number)) shown.push(...data.members[number]);
    this.shown = shown;
    for (const number of [...shown].reverse())
      this.found.set(number, this.isOpen(number) ? this.open(number) : this.folded(number));
  }

  isOpen(number) {
    return number in this.data.scopes && (number === 0 || this.opened.has(number));
  }

  sizeOf(number) {
    const box = this.data.boxes[number], [width, height] = this.by.SIZES[box.kind];
    return [width, height + this.by.LINE * box.lines.length];
  }

  folded(number) {
    const [width, height] = this.sizeOf(number), [uppers, lowers] = this.data.wired[number] || [[], []];
    const spread = ports => new Map(ports.map((port, at) => [port, (at - (ports.length - 1) / 2) * this.by.PORT]));
    return {
      width: Math.max(width, this.by.PORT * Math.max(uppers.length, lowers.length) + 8), height,
      uppers: spread(uppers), lowers: spread(lowers), isOpen: false,
    };
  }

  open(number) {
    const scope = this.data.scopes[number], by = this.by;
    const boxAt = at => this.found.get(scope.vertices[at][1]);
    const widths = scope.vertices.map(([kind], at) =>
      kind === BOX ? boxAt(at).width : kind === BEND ? by.BEND : by.PORT);
    const heights = scope.vertices.map(([kind], at) => (kind === BOX ? boxAt(at).height : 0));
    const centres = this.centres(scope, widths);
    let least = Infinity, most = -Infinity;
    centres.forEach((x, at) => {
      least = Math.min(least, x - widths[at] / 2);
      most = Math.max(most, x + widths[at] / 2);
    });
    const inner = most - least, head = this.sizeOf(number)[0];
    const left = by.PAD + Math.max(0, head - inner) / 2 - least;
    const made = {
      width: Math.max(inner, head) + 2 * by.PAD, centres: centres.map(x => x + left), edges: [],
      rowOf: [], uppers: new Map(), lowers: new Map(), isOpen: true,
    };
    let y = by.HEADER + by.LINE * this.data.boxes[number].lines.length;
    scope.rows.forEach((row, rank) => {
      const height = Math.max(0, ...row.map(at => heights[at]));
      made.edges.push([y, y + height]);
      for (const at of row) {
        const [kind, place] = scope.vertices[at], x = made.centres[at];
        made.rowOf[at] = rank;
        if (kind === BOX) {
          const box = this.found.get(place);
          Object.assign(box, { x: x - box.width / 2, y: y + (height - box.height) / 2, row: rank });
        } else if (kind !== BEND) (kind === UPPER ? made.uppers : made.lowers).set(place, x - made.width / 2);
      }
      y += height + by.ROW_GAP;
    });
    made.height = y - by.ROW_GAP + by.FOOT;
    return made;
  }

  centres(scope, widths) {
    const centres = widths.map(() => 0), above = widths.map(() => []), below = widths.map(() => []);
    const at = (vertex, port, side) => {
      const ports = port < 0 ? null : this.found.get(scope.vertices[vertex][1])[side];
      return ports?.size === 1 ? ports.get(port) : 0;
    };
    for (const [upper, lower, out, into, weight] of scope.links) {
      const shift = at(upper, out, "lowers") - at(lower, into, "uppers");
      above[lower].push([upper, shift, weight]);
      below[upper].push([lower, -shift, weight]);
    }
    for (const row of scope.rows) this.settle(scope, row, widths, centres, row.map(() => [0, 1]));
    for (let pass = 0; pass < this.by.PASSES; pass++) {
      const pulls = pass % 2 ? below : above;
      for (const row of pass % 2 ? [...scope.rows].reverse() : scope.rows)
        this.settle(scope, row, widths, centres, row.map(one => {
          const weight = pulls[one].reduce((sum, pull) => sum + pull[2], 0);
          if (!weight) return [centres[one], 0.01];
          return [pulls[one].reduce((sum, [other, shift, w]) => sum + (centres[other] + shift) * w, 0) / weight, weight];
        }));
    }
    return centres;
  }

  // The least squares of distances under order and gaps: adjacent violators are pooled.
  settle(scope, row, widths, centres, wanted) {
    const starts = [0], pools = [];
    for (let at = 1; at < row.length; at++) {
      const bent = [row[at - 1], row[at]].some(one => scope.vertices[one][0] === BEND);
      const gap = bent ? this.by.BEND_GAP : this.by.GAP;
      starts.push(starts[at - 1] + (widths[row[at - 1]] + widths[row[at]]) / 2 + gap);
    }
    wanted.forEach(([x, weight], at) => {
      let pool = [(x - starts[at]) * weight, weight, 1];
      while (pools.length && pools.at(-1)[0] * pool[1] >= pool[0] * pools.at(-1)[1]) {
        const last = pools.pop();
        pool = [last[0] + pool[0], last[1] + pool[1], last[2] + pool[2]];
      }
      pools.push(pool);
    });
    let at = 0;
    for (const [total, weight, count] of pools)
      for (const end = at + count; at < end; at++) centres[row[at]] = total / weight + starts[at];
  }
}

// A view of one plan: its picture, and the controls around it.
class View {
  constructor(root, data) {
    this.root = root;
    this.data = prepared(data);
    this.opened = new Set(data.open);
    this.zoom = 1;
    this.current = data.members[0][0];
    this.find = name => root.querySelector(`[data-part="${name}"]`);
    this.search = this.find("search");
    this.find("fold").addEventListener("click", () => this.foldAll());
    this.find("open").addEventListener("click", () => this.openLevel());
    this.find("larger").addEventListener("click", () => this.scale(this.zoom * 1.25));
    this.find("smaller").addEventListener("click", () => this.scale(this.zoom / 1.25));
    this.find("fit").addEventListener("click", () => this.fit());
    this.find("colour").addEventListener("change", () => this.draw());
    this.search.addEventListener("input", () => this.searched());
    this.search.addEventListener("keydown", event => {
      if (event.key === "Enter") this.find("found").querySelector("button")?.click();
    });
    this.find("picture").addEventListener("keydown", event => this.pressed(event));
    this.find("picture").addEventListener("click", event => this.clicked(event));
    this.dragging();
    this.draw();
    this.fit();
    this.facts(0);
  }

  say(text) {
    this.find("said").textContent = text;
  }

  // Drawing

  draw() {
    const placing = (this.placing = new Placing(this.data, this.opened)), whole = placing.found.get(0);
    const svg = element("svg", { class: `picture by-${this.find("colour").value}`, role: "tree",
      "aria-label": `Plan: ${this.data.title}`, viewBox: `0 0 ${whole.width} ${whole.height}` });
    svg.append(...this.inner(0, 1));
    this.size = [whole.width, whole.height];
    this.find("picture").replaceChildren(svg);
    this.scale(this.zoom);
    this.mark();
  }

  inner(number, level) {
    const made = this.wires(number);
    for (const member of this.data.members[number]) {
      const box = this.data.boxes[member], at = this.placing.found.get(member), isScope = member in this.data.scopes;
      const group = element("g", { class: `box ${box.kind}${at.isOpen ? " open" : ""}${this.data.marked.has(member) ? " marked" : ""}`, role: "treeitem",
        "data-box": member, tabindex: -1, "aria-level": level, transform: `translate(${at.x} ${at.y})`,
        "aria-expanded": isScope ? String(at.isOpen) : null, "aria-label": this.spoken(member) });
      group.append(element("title", {}, this.pathOf(member)), ...this.body(box, at));
      if (at.isOpen) group.append(element("g", { role: "group" }, ...this.inner(member, level + 1)));
      group.append(...this.texts(box, at));
      made.push(group);
    }
    return made;
  }

  body(box, at) {
    const rx = ["input", "variable", "output"].includes(box.kind) ? at.height / 2 : 6;
    const size = { width: at.width, height: at.height, rx };
    const made = [element("rect", { class: "body", ...size })];
    const colour = device => this.data.colours[device % this.data.colours.length];
    if (!at.isOpen && box.heat) made.push(element("rect", { class: "heat", ...size, opacity: box.heat }));
    if (!at.isOpen && box.devices.length === 1)
      made.push(element("rect", { class: "tint", ...size, fill: colour(box.devices[0][0]) }));
    let y = 3;
    const height = (at.isOpen ? this.data.lengths.HEADER - 8 : at.height) - 6;
    for (const [device, share] of box.devices) {
      made.push(element("rect", { x: 3, y, width: STRIPE, height: height * share, rx: 2, fill: colour(device) }));
      y += height * share;
    }
    return made;
  }

  texts(box, at) {
    const { LINE, HEADER } = this.data.lengths, lines = LINE * box.lines.length;
    const text = (kind, x, y, words) => element("text", { class: kind, x, y }, words);
    const made = [], middle = (at.height - lines) / 2;
    if (at.isOpen) made.push(text("name", 16, 20, box.title), text("small end", at.width - 12, 20, box.detail));
    else if (!box.detail) made.push(text("small", 16, middle + 4, box.title));
    else made.push(text("name", 16, middle - 3, box.title), text("small", 16, middle + 13, box.detail));
    const top = at.isOpen ? HEADER : at.height - lines;
    box.lines.forEach((line, row) => made.push(text("small line", 16, top + LINE * row + 5, line)));
    return made;
  }

  wires(number) {
    const scope = this.data.scopes[number], here = this.placing.found.get(number), made = [];
    const routes = scope.routes.map(route => [route, scope.wires[route[0]][2][route[1]][2]]);
    for (const [route, crosses] of routes.sort((a, b) => a[1] - b[1])) {
      const kind = crosses ? "copy" : "wire", wire = scope.wires[route[0]];
      made.push(element("path", { class: `${kind}${route[3] ? " back" : ""}`, d: this.path(here, wire, route),
        "marker-end": `url(#${kind}-end)` }, ...(crosses && wire[4] ? [element("title", {}, wire[4])] : [])));
    }
    for (const wire of scope.wires) {
      const [source, , targets, bytes] = wire;
      if (source < 0 || !bytes || this.data.boxes[source].kind === "view") continue;
      const [x, y] = this.start(here, wire), copied = targets.some(one => one[2]) ? " copied" : "";
      made.push(element("text", { class: `size${copied}`, x: x + 5, y: y + 13 }, sizeText(bytes)));
    }
    for (const member of this.data.members[number]) {
      const count = this.data.namers[member], at = this.placing.found.get(member);
      if (count) made.push(element("text", { class: "size", x: at.x + 16, y: at.y + at.height + 13 }, `↳ ${count} readers`));
    }
    return made;
  }

  start(here, [box, port]) {
    if (box < 0) return [here.width / 2 + here.uppers.get(port), 0];
    const at = this.placing.found.get(box);
    return [at.x + at.width / 2 + at.lowers.get(port), at.y + at.height];
  }

  end(here, [box, port]) {
    if (box < 0) return [here.width / 2 + here.lowers.get(port), here.height];
    const at = this.placing.found.get(box);
    return [at.x + at.width / 2 + at.uppers.get(port), at.y];
  }

  path(here, wire, [, target, bends, isBack]) {
    let [x, y] = this.start(here, wire);
    const goal = wire[2][target], [endX, endY] = this.end(here, goal), d = [`M${x} ${y}`];
    if (isBack) return `${d[0]}C${x} ${y + 60} ${endX} ${endY - 60} ${endX} ${endY - TIP}`;
    const curve = (toX, toY) => {
      const middle = (y + toY) / 2;
      d.push(Math.abs(toX - x) < 0.05 ? `V${toY}` : `C${x} ${middle} ${toX} ${middle} ${toX} ${toY}`);
    };
    const row = here.edges[wire[0] < 0 ? 0 : this.placing.found.get(wire[0]).row];
    if (row[1] > y) d.push(`V${(y = row[1])}`);
    for (const bend of bends) {
      const [top, bottom] = here.edges[here.rowOf[bend]];
      curve(here.centres[bend], top);
      [x, y] = [here.centres[bend], bottom];
      if (bottom > top) d.push(`V${bottom}`);
    }
    const top = here.edges.at(goal[0] < 0 ? -1 : this.placing.found.get(goal[0]).row)[0];
    curve(endX, Math.min(top, endY) - TIP);
    if (endY > top) d.push(`V${endY - TIP}`);
    return d.join("");
  }

  spoken(number) {
    const box = this.data.boxes[number], parts = [box.name, box.detail, ...box.lines];
    if (this.data.marked.has(number)) parts.push("differs");
    if (box.share && this.data.timing !== "work") parts.push(`${percentText(box.share)} of the time`);
    if (box.devices.length) parts.push(`on ${box.devices.map(([device]) => this.data.devices[device]).join(", ")}`);
    return parts.filter(Boolean).join(", ").replaceAll("◆", "weights").replaceAll("↳", "reads").replaceAll(" · ", ", ");
  }

  pathOf(number) {
    const names = [];
    for (let one = number; one > 0; one = this.data.boxes[one].parent)
      if (this.data.boxes[one].kind !== "group" || one === number) names.unshift(this.data.boxes[one].name);
    return names.join("/");
  }

  // Moving around

  scale(zoom) {
    this.zoom = Math.min(4, Math.max(0.05, zoom));
    const svg = this.find("picture").firstElementChild;
    svg.setAttribute("width", this.size[0] * this.zoom);
    svg.setAttribute("height", this.size[1] * this.zoom);
  }

  fit() {
    const room = this.find("picture");
    this.scale(Math.min(1, (room.clientWidth - 24) / this.size[0]));
  }

  dragging() {
    const room = this.find("picture");
    let from = null;
    room.addEventListener("pointerdown", event => {
      if (event.button === 0 && event.pointerType === "mouse")
        from = [event.clientX, event.clientY, room.scrollLeft, room.scrollTop, false];
    });
    room.addEventListener("pointermove", event => {
      if (!from || !event.buttons) return;
      const [x, y] = [event.clientX - from[0], event.clientY - from[1]];
      from[4] ||= Math.hypot(x, y) > 4;
      if (from[4]) room.scrollTo(from[2] - x, from[3] - y);
    });
    room.addEventListener("click", event => {
      if (from?.[4]) event.stopImmediatePropagation();
      from = null;
    }, true);
    room.addEventListener("wheel", event => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      this.scale(this.zoom * Math.exp(-event.deltaY / 300));
    }, { passive: false });
  }

  nodeOf(number) {
    return this.find("picture").querySelector(`[data-box="${number}"]`);
  }

  mark() {
    let node = this.nodeOf(this.current);
    if (!node) node = this.nodeOf((this.current = this.data.members[0][0]));
    for (const one of this.find("picture").querySelectorAll(".current")) {
      one.classList.remove("current");
      one.setAttribute("tabindex", -1);
      one.removeAttribute("aria-selected");
    }
    node.classList.add("current");
    node.setAttribute("tabindex", 0);
    node.setAttribute("aria-selected", "true");
    return node;
  }

  select(number, focus = true) {
    this.current = number;
    const node = this.mark();
    if (focus) node.focus({ preventScroll: true });
    this.facts(number);
    this.bringIntoView(node);
  }

  bringIntoView(node) {
    const room = this.find("picture"), outer = room.getBoundingClientRect(), inner = node.getBoundingClientRect();
    if (inner.top < outer.top || inner.bottom > outer.bottom)
      room.scrollTop += inner.top - outer.top - Math.max(20, (outer.height - inner.height) / 2);
    if (inner.left < outer.left || inner.right > outer.right)
      room.scrollLeft += inner.left - outer.left - Math.max(20, (outer.width - inner.width) / 2);
  }

  toggle(number) {
    const isOpen = this.opened.has(number), node = this.nodeOf(number), room = this.find("picture");
    const before = node.getBoundingClientRect();
    if (isOpen) this.opened.delete(number);
    else this.opened.add(number);
    this.draw();
    this.select(number);
    const after = this.nodeOf(number).getBoundingClientRect();
    room.scrollTop += after.top - before.top;
    room.scrollLeft += after.left - before.left;
    this.say(`${this.data.boxes[number].name} ${isOpen ? "folded" : "open"}`);
  }

  // Shows a box, whatever is folded around it.
  reveal(number, focus = true) {
    for (let one = this.data.boxes[number].parent; one > 0; one = this.data.boxes[one].parent) this.opened.add(one);
    this.draw();
    this.select(number, focus);
  }

  foldAll() {
    this.opened.clear();
    this.draw();
    this.fit();
    this.say("all scopes folded");
  }

  openLevel() {
    const inner = this.placing.shown.filter(one => one && one in this.data.scopes && !this.opened.has(one));
    const more = inner.reduce((sum, one) => sum + this.data.members[one].length, 0);
    if (this.placing.shown.length + more > MOST_SHOWN)
      return this.say(`the next level has ${more.toLocaleString("en")} boxes: open scopes one by one`);
    inner.forEach(one => this.opened.add(one));
    this.draw();
    this.fit();
    this.say(inner.length ? `${inner.length} scopes opened` : "all scopes are open");
  }

  clicked(event) {
    const box = event.target.closest?.("[data-box]");
    if (!box) return;
    const number = Number(box.dataset.box);
    if (number in this.data.scopes && (!this.opened.has(number) || isHeader(event, box))) this.toggle(number);
    else this.select(number);
  }

  pressed(event) {
    const number = this.current, box = this.data.boxes[number], isScope = number in this.data.scopes;
    const order = [...this.find("picture").querySelectorAll("[data-box]")].map(one => Number(one.dataset.box));
    const place = order.indexOf(number);
    const steps = {
      ArrowDown: () => this.select(order[Math.min(order.length - 1, place + 1)]),
      ArrowUp: () => this.select(order[Math.max(0, place - 1)]),
      Home: () => this.select(order[0]),
      End: () => this.select(order.at(-1)),
      ArrowRight: () => (isScope && !this.opened.has(number) ? this.toggle(number) : isScope && this.select(this.data.members[number][0])),
      ArrowLeft: () => (this.opened.has(number) ? this.toggle(number) : box.parent > 0 && this.select(box.parent)),
      Enter: () => (isScope ? this.toggle(number) : this.facts(number)),
      " ": () => (isScope ? this.toggle(number) : this.facts(number)),
      "+": () => this.scale(this.zoom * 1.25),
      "-": () => this.scale(this.zoom / 1.25),
      "/": () => this.search.focus(),
    };
    if (!(event.key in steps) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    steps[event.key]();
  }

  // Finding

  searched() {
    const words = this.search.value.trim().toLowerCase(), list = this.find("found");
    list.replaceChildren();
    if (!words) return this.say("");
    const hits = this.data.names.filter(([name]) => name.includes(words));
    for (const [, shown, box] of hits.slice(0, MOST_FOUND)) {
      const button = element("button", { type: "button" }, shown);
      button.addEventListener("click", () => this.reveal(box));
      list.append(element("li", {}, button));
    }
    const more = hits.length > MOST_FOUND ? `; the first ${MOST_FOUND} are listed` : "";
    this.say(`${hits.length.toLocaleString("en")} found${more}`);
  }

  // Facts

  facts(number) {
    const box = this.data.boxes[number], rows = [], data = this.data;
    const add = (name, ...what) => what.some(one => one !== "" && one !== undefined) && rows.push([name, what]);
    add("name", number ? this.pathOf(number) : data.title);
    if (box.kind === "node" || box.kind === "view") this.nodeFacts(box, add);
    else if (number in data.scopes) this.scopeFacts(number, box, add);
    else if (box.kind === "output") add("output of", this.link(data.outputs[box.number][1]));
    else {
      const [role, , type, bytes] = data.leaves[box.number];
      add("kind", role);
      add("type", type);
      add("bytes", sizeText(bytes));
      add("copied", ...data.copies.filter(one => one[0] === box.number).map(one => element("span", {}, one[1])));
      add("read by", ...this.links(data.readers.get(box.number) || []));
    }
    const list = this.find("facts");
    list.replaceChildren();
    for (const [name, what] of rows) list.append(element("dt", {}, name), element("dd", {}, ...what));
  }

  nodeFacts(box, add) {
    const data = this.data, node = data.nodes[box.number], leaves = data.leaves.length;
    add("op", node.op);
    add("result", node.type);
    add("bytes", box.kind === "view" ? "none of its own: a view" : sizeText(node.bytes));
    add("device", `${data.devices[node.device]}: ${node.why}`);
    add("split", String(node.split));
    if (node.step) add("step", node.together > 1 ? `${node.step}, computed together with ${node.together - 1} others` : String(node.step));
    if (data.timing !== "work") add("time", `${timeText(node.time)} (${percentText(box.share)}), ${data.timingText}`);
    else add("work", `${percentText(box.share)} of all bytes and operations`);
    add("reads", ...this.links(node.operands));
    add("read by", ...this.links(data.readers.get(leaves + box.number) || []));
    add("copied", ...data.copies.filter(one => one[0] === leaves + box.number).map(one => element("span", {}, one[1])));
    add("built by", node.source);
  }

  scopeFacts(number, box, add) {
    const data = this.data;
    add("kind", number ? (box.kind === "group" ? "group of nodes that follow each other" : "scope") : "plan");
    add("nodes", box.nodes.toLocaleString("en"));
    if (data.timing !== "work") add("time", `${timeText(box.time)} (${percentText(box.share)}), ${data.timingText}`);
    add("weights", box.weights ? sizeText(box.weights) : "");
    add("devices", box.devices.map(([device, share]) => `${data.devices[device]} ${Math.round(share * 100)} %`).join(", "));
    if (!number) add("summary", data.summary);
  }

  links(values) {
    const made = values.slice(0, 12).map(value => this.link(value));
    if (values.length > 12) made.push(element("span", {}, `and ${values.length - 12} more`));
    return made;
  }

  // A value, and a way to its box.
  link(value) {
    const data = this.data, leaf = data.leaves[value], node = data.nodes[value - data.leaves.length];
    const name = leaf ? `${leaf[1]} ${leaf[2]}` : `${node.name} ${node.type}`;
    const box = leaf ? data.leafBox.get(value) : data.boxOf[value - data.leaves.length];
    if (box === undefined) return element("span", { class: "value" }, `${name}, ${leaf[0]}, ${sizeText(leaf[3])}`);
    const button = element("button", { type: "button", class: "value" }, name);
    button.addEventListener("click", () => this.reveal(box));
    return button;
  }
}

function isHeader(event, box) {
  const top = box.querySelector(".body").getBoundingClientRect();
  return event.clientY - top.top < (36 * top.width) / Number(box.querySelector(".body").getAttribute("width"));
}

// Names the columns, and finds members and readers.
function prepared(data) {
  const keys = ["kind", "name", "parent", "number", "title", "detail", "lines", "heat", "share", "nodes", "time", "weights", "devices"];
  data.boxes = data.boxes.map(row => Object.fromEntries(keys.map((key, at) => [key, row[at]])));
  data.nodes = data.nodes.map(([name, op, type, operands, device, split, why, bytes, time, step, together, source]) => ({
    name, op: data.texts[op], type: data.texts[type], operands, device, split, why: data.texts[why], bytes, time, step,
    together, source: data.texts[source],
  }));
  data.marked = new Set(data.marked);
  data.members = data.boxes.map(() => []);
  data.leafBox = new Map();
  data.boxes.forEach((box, number) => {
    if (number) data.members[box.parent].push(number);
    if (box.kind === "input" || box.kind === "variable") data.leafBox.set(box.number, number);
  });
  data.readers = new Map();
  const leaves = data.leaves.length;
  data.nodes.forEach((node, number) => {
    for (const value of new Set(node.operands)) {
      if (!data.readers.has(value)) data.readers.set(value, []);
      data.readers.get(value).push(leaves + number);
    }
  });
  data.names = [
    ...data.nodes.map((node, number) => [`${node.name} ${node.op}`.toLowerCase(), node.name, data.boxOf[number]]),
    ...[...data.leafBox].map(([leaf, box]) => [data.leaves[leaf][1].toLowerCase(), data.leaves[leaf][1], box]),
  ];
  return data;
}

function tabs() {
  const list = [...document.querySelectorAll("[role=tab]")];
  if (!list.length) return;
  const show = chosen => {
    for (const one of list) {
      one.setAttribute("aria-selected", String(one === chosen));
      one.tabIndex = one === chosen ? 0 : -1;
      document.getElementById(one.getAttribute("aria-controls")).hidden = one !== chosen;
    }
  };
  list.forEach((one, at) => {
    one.addEventListener("click", () => show(one));
    one.addEventListener("keydown", event => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = list[(at + step + list.length) % list.length];
      next.focus();
      show(next);
    });
  });
  show(list[0]);
}

// A page around this one chooses the colours by the fragment, #dark or #light; without one, the system does.
const DARK = "(prefers-color-scheme: dark)";
const darkRules = [...document.styleSheets].filter(sheet => sheet.ownerNode.localName === "style")
  .flatMap(sheet => [...sheet.cssRules]).filter(rule => rule.media?.mediaText === DARK);

function colour() {
  const chosen = location.hash.slice(1), media = { dark: "all", light: "not all" }[chosen];
  for (const rule of darkRules) rule.media.mediaText = media || DARK;
  document.documentElement.style.colorScheme = media ? chosen : "";
}

addEventListener("hashchange", colour);
colour();
const views = [...document.querySelectorAll("[data-view]")].map(root =>
  new View(root, JSON.parse(document.getElementById(root.dataset.view).textContent)));
tabs();
// Rows of differences lead to their nodes in both plans.
for (const button of document.querySelectorAll("[data-nodes]"))
  button.addEventListener("click", () => {
    document.querySelector("[role=tab]").click();
    button.dataset.nodes.split(",").forEach((number, at) => {
      if (number !== "" && views[at]) views[at].reveal(views[at].data.boxOf[Number(number)], at === 0);
    });
  });
