// The modules as a tree in a table. Rows are made when they come into sight: there may be thousands,
// and a browser needs seconds to lay those out.

// So many rows are open at first, and so many matches of a filter are all shown at once.
const AT_FIRST = 26;
const MATCHES = 200;
// So many rows are made at once.
const CHUNK = 300;

function newNode(name, parent) {
  return { name, parent, depth: parent ? parent.depth + 1 : -1, children: [], byName: new Map(), isOpen: false, key: parent ? `${parent.key}.${name}` : "" };
}

// The rows that match, as a tree with sums. An op is a node without children of its own.
function treeOf(rows, matches, fates) {
  const root = newNode("", null);
  root.isOpen = true;
  for (const row of rows) {
    if (!matches(row)) continue;
    let node = root;
    for (const part of row.path ? row.path.split(".") : []) {
      if (!node.byName.has(part)) {
        node.byName.set(part, newNode(part, node));
        node.children.push(node.byName.get(part));
      }
      node = node.byName.get(part);
    }
    node.children.push({ row, parent: node, depth: node.depth + 1, children: [] });
  }
  groupEqual(root);
  addUp(root, fates);
  return root;
}

// Numbered layers whose ops have the same fates and bytes become one node, such as 0-3,7. Returns what makes
// `node` equal to another, apart from its name.
function groupEqual(node) {
  if (node.row) {
    const { op, fate, bytes, reason } = node.row;
    return [op, fate, bytes, reason].join("|");
  }
  const alike = new Map(), prints = [];
  for (const child of node.children) {
    const print = groupEqual(child);
    const isLayer = !child.row && /^\d+$/.test(child.name);
    const key = isLayer ? print : child;
    if (!alike.has(key)) alike.set(key, []);
    alike.get(key).push(child);
    prints.push(child.row ? print : `${isLayer ? "" : child.name}(${print})`);
  }
  node.children = [...alike.values()].map((children) => (children.length > 1 ? merged(children) : children[0]));
  return prints.join(";");
}

// One node for equal ones: the sums of all of them, at every level.
function merged(nodes) {
  const [first] = nodes;
  if (first.row) {
    const seconds = nodes.reduce((sum, { row }) => sum + row.seconds, 0);
    const bytes = nodes.reduce((sum, { row }) => sum + row.bytes, 0);
    return { ...first, row: { ...first.row, seconds, bytes, count: nodes.reduce((sum, { row }) => sum + (row.count || 1), 0) } };
  }
  const isLayer = nodes.some(({ name }) => name !== first.name);
  const node = isLayer ? newNode(ranges(nodes.map(({ name }) => Number(name))), first.parent) : newNode(first.name, first.parent);
  node.layers = isLayer ? nodes.length : 0;
  node.children = first.children.map((_, n) => merged(nodes.map((each) => each.children[n])));
  for (const child of node.children) child.parent = node;
  return node;
}

// Such as 0-3,7: as recollect.report.rows writes them.
function ranges(numbers) {
  const runs = [];
  for (const number of [...numbers].sort((a, b) => a - b)) {
    const run = runs[runs.length - 1];
    if (run && number === run[1] + 1) run[1] = number; else runs.push([number, number]);
  }
  return runs.map(([from, to]) => (from === to ? `${from}` : `${from}-${to}`)).join(",");
}

function addUp(node, fates) {
  node.bytes = fates.map(() => 0);
  node.seconds = fates.map(() => 0);
  node.ops = node.row ? node.row.count || 1 : 0;
  if (node.row) {
    node.bytes[node.row.fate] = node.row.bytes;
    node.seconds[node.row.fate] = node.row.seconds;
  }
  for (const child of node.children) {
    addUp(child, fates);
    node.ops += child.ops;
    for (let n = 0; n < fates.length; n += 1) { node.bytes[n] += child.bytes[n]; node.seconds[n] += child.seconds[n]; }
  }
  node.total = node.bytes.reduce((sum, each) => sum + each, 0);
}

class Tree {
  constructor(place, rows, fates) {
    this.rows = rows;
    this.fates = fates;
    this.isTimed = rows.some(({ seconds }) => seconds > 0);
    // On a phone four amounts have no room side by side.
    place.style.setProperty("--columns", fates.length > 3 ? 2 : fates.length);
    this.body = place.querySelector("tbody");
    this.status = document.getElementById("matches");
    this.filter = document.getElementById("filter");
    this.sorting = { by: "order", down: false };
    this.open = null;
    this.heads = [...place.querySelectorAll("thead th")];
    for (const head of this.heads) head.querySelector("button").addEventListener("click", () => this.sortBy(head.dataset.by));
    let waiting = 0;
    this.filter.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(() => this.build(), 80); });
    document.getElementById("expand").addEventListener("click", () => this.openAll(true));
    document.getElementById("collapse").addEventListener("click", () => this.openAll(false));
    this.body.addEventListener("click", (event) => this.clicked(event));
    this.body.addEventListener("keydown", (event) => this.typed(event));
    this.sight = new IntersectionObserver((entries) => { if (entries.some((entry) => entry.isIntersecting)) this.more(); }, { rootMargin: "600px" });
    this.build();
  }

  build() {
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const matches = (row) => words.every((word) => row.text.includes(word));
    // What is open is remembered by path, over every change of the filter.
    if (this.root && !this.isFiltered) this.open = this.openKeys();
    this.isFiltered = words.length > 0;
    this.root = treeOf(this.rows, matches, this.fates);
    this.each(this.root, (node) => { node.isOpen = node === this.root || (this.open || new Set()).has(node.key); });
    if (!this.open) this.openFirst();
    if (this.isFiltered && this.root.ops <= MATCHES) this.each(this.root, (node) => { node.isOpen = true; });
    const of = this.isFiltered ? ` of ${this.rows.length}` : "";
    this.status.textContent = `${this.root.ops}${of} ops, ${bytesText(this.root.total)}`;
    this.render();
  }

  // Open whole levels, from outside, while few rows are to be seen.
  openFirst() {
    let level = this.root.children.filter((node) => !node.row), seen = this.root.children.length;
    while (level.length) {
      seen += level.reduce((sum, node) => sum + node.children.length, 0);
      if (seen > AT_FIRST) break;
      for (const node of level) node.isOpen = true;
      level = level.flatMap((node) => node.children).filter((node) => !node.row);
    }
    this.open = this.openKeys();
  }

  openKeys() {
    const keys = new Set();
    this.each(this.root, (node) => { if (node.isOpen) keys.add(node.key); });
    return keys;
  }

  each(node, act) {
    if (node.row) return;
    act(node);
    for (const child of node.children) this.each(child, act);
  }

  openAll(isOpen) {
    this.each(this.root, (node) => { node.isOpen = isOpen || node === this.root; });
    this.render();
  }

  sortBy(by) {
    const same = this.sorting.by === by;
    this.sorting = by === "order" ? { by, down: false } : { by, down: same ? !this.sorting.down : true };
    this.render();
  }

  inOrder(children) {
    const { by, down } = this.sorting;
    if (by === "order") return children;
    const value = (node) => (by === "total" ? node.total : node.bytes[this.fates.indexOf(by)]);
    return [...children].sort((a, b) => (down ? value(b) - value(a) : value(a) - value(b)));
  }

  render() {
    for (const head of this.heads) {
      if (head.dataset.by === this.sorting.by && this.sorting.by !== "order") head.setAttribute("aria-sort", this.sorting.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
    this.body.replaceChildren(this.root.ops ? this.line(this.root, this.root.total) : this.nothing());
    this.more();
  }

  nothing() {
    const row = make("tr"), cell = make("td", "empty", "Nothing matches.");
    cell.colSpan = 2 + this.fates.length;
    row.append(cell);
    return row;
  }

  // All below `node` that is open, with what its bar is compared with: [[node, most], ...].
  below(node, into = []) {
    if (node.row || !node.isOpen) return into;
    const most = node.children.reduce((high, child) => Math.max(high, child.total), 0);
    for (const child of this.inOrder(node.children)) {
      into.push([child, most]);
      this.below(child, into);
    }
    return into;
  }

  lines(items) {
    const rows = document.createDocumentFragment();
    for (const [node, most] of items) rows.append(this.line(node, most));
    return rows;
  }

  // Make the rows that follow the last one, and leave a mark that calls for the next.
  more() {
    const mark = this.body.querySelector(".more");
    if (mark) { this.sight.unobserve(mark); mark.remove(); }
    const last = this.body.lastChild.node;
    const all = this.below(this.root);
    const done = all.findIndex(([node]) => node === last) + 1;
    this.body.append(this.lines(all.slice(done, done + CHUNK)));
    if (done + CHUNK < all.length) this.body.append(this.mark(all.length - done - CHUNK));
  }

  mark(left) {
    const row = make("tr", "more"), cell = make("td");
    const button = make("button", "", `Show more: ${left} rows are left`);
    button.type = "button";
    button.addEventListener("click", () => this.more());
    cell.colSpan = 2 + this.fates.length;
    cell.append(button);
    row.append(cell);
    this.sight.observe(row);
    return row;
  }

  line(node, most) {
    const kind = node === this.root ? "total" : node.row ? "leaf" : "module";
    const row = make("tr", kind);
    row.node = node;
    row.style.setProperty("--depth", Math.max(0, node.depth));
    row.setAttribute("role", "row");
    row.append(this.label(node), this.bar(node, most));
    this.fates.forEach((name, n) => {
      const cell = make("td", `sum ${name}`);
      cell.dataset.label = name[0].toUpperCase() + name.slice(1);
      cell.setAttribute("role", "cell");
      if (!node.bytes[n] && !node.seconds[n]) {
        cell.classList.add("zero");
        cell.append(make("span", "none", "–"));
      } else {
        cell.append(make("span", "bytes", bytesText(node.bytes[n])));
        if (this.isTimed) cell.append(" ", make("span", "time", secondsText(node.seconds[n])));
      }
      row.append(cell);
    });
    return row;
  }

  label(node) {
    const cell = make("th");
    cell.scope = "row";
    cell.setAttribute("role", "rowheader");
    const label = make("div", "label");
    if (node.row) {
      const op = make("span", "op", node.row.count > 1 ? `${node.row.op} ×${node.row.count}` : node.row.op);
      if (node.row.reason) op.append(" ", make("span", "note", node.row.reason));
      label.append(op);
    } else if (node === this.root) {
      label.append(make("span", "", this.isFiltered ? "All that match" : "All modules"), make("span", "count", `${node.ops} ops`));
    } else {
      const toggle = make("button", "toggle");
      toggle.type = "button";
      toggle.setAttribute("aria-expanded", node.isOpen);
      toggle.setAttribute("aria-label", node.key.slice(1));
      label.append(toggle, make("span", "name", node.name), make("span", "count", `${node.layers ? `${node.layers} equal, ` : ""}${node.ops} op${node.ops === 1 ? "" : "s"}`));
      cell.title = node.key.slice(1);
    }
    cell.append(label);
    return cell;
  }

  bar(node, most) {
    const cell = make("td", "c-bar");
    cell.setAttribute("role", "cell");
    const bar = make("div", "bar");
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", `${bytesText(node.total)} in all`);
    this.fates.forEach((name, n) => {
      if (!node.bytes[n]) return;
      const part = make("i", name);
      part.style.width = `${(100 * node.bytes[n]) / most}%`;
      bar.append(part);
    });
    cell.append(bar);
    return cell;
  }

  clicked(event) {
    const row = event.target.closest("tr.module");
    if (row && !String(window.getSelection())) this.toggle(row, !row.node.isOpen);
  }

  toggle(row, isOpen) {
    const node = row.node;
    if (node.isOpen === isOpen) return;
    node.isOpen = isOpen;
    row.querySelector(".toggle").setAttribute("aria-expanded", isOpen);
    if (isOpen) {
      const added = this.below(node);
      row.after(this.lines(added.slice(0, CHUNK)));
      // What is too much at once takes the rows after it along, to be made again.
      if (added.length > CHUNK) this.cutAfter(added[CHUNK - 1][0]);
    } else {
      while (row.nextSibling && row.nextSibling.node && row.nextSibling.node.depth > node.depth) row.nextSibling.remove();
      this.more();
    }
  }

  cutAfter(node) {
    const rows = [...this.body.children];
    for (const row of rows.slice(rows.findIndex((each) => each.node === node) + 1)) row.remove();
    this.more();
  }

  typed(event) {
    if (!event.target.matches(".toggle")) return;
    const row = event.target.closest("tr");
    const acts = {
      ArrowRight: () => this.toggle(row, true),
      ArrowLeft: () => this.toggle(row, false),
      ArrowDown: () => this.focusFrom(row, "nextSibling"),
      ArrowUp: () => this.focusFrom(row, "previousSibling"),
    };
    if (!(event.key in acts)) return;
    event.preventDefault();
    acts[event.key]();
  }

  focusFrom(row, way) {
    let other = row[way];
    while (other && !other.matches(".module")) other = other[way];
    if (other) other.querySelector(".toggle").focus();
  }
}
