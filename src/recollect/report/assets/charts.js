// Charts: memory over the step, peaks against times, throughput against size. Each is drawn again at every width.

const SVG = "http://www.w3.org/2000/svg";

function draw(parent, name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

function make(name, className, text) {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function scale(low, high, from, to) {
  const span = high - low || 1;
  const at = (value) => from + ((value - low) / span) * (to - from);
  at.back = (pixel) => low + ((pixel - from) / (to - from)) * span;
  return at;
}

// The frame of a chart: an SVG as wide as its place, axes, and a box for what is pointed at.
class Chart {
  constructor(place, render) {
    this.place = place;
    this.render = render;
    this.tip = make("div", "tip");
    this.tip.hidden = true;
    this.wide = 0;
    new ResizeObserver(() => this.redraw()).observe(place);
    place.addEventListener("pointerleave", () => this.hide());
    place.addEventListener("blur", () => this.hide());
    this.redraw();
  }

  redraw() {
    const width = this.place.clientWidth;
    if (!width || width === this.wide) return;
    this.wide = width;
    const small = width < 560;
    const height = small ? 260 : 340;
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    svg.setAttribute("aria-hidden", "true");
    this.place.replaceChildren(svg, this.tip);
    this.hide();
    this.box = { left: 58, right: width - 14, top: 34, bottom: height - 44, small };
    this.svg = svg;
    this.render(this);
    this.lit = draw(svg, "g", { class: "lights" });
  }

  axes(x, y, xTicks, yTicks, xTitle, yTitle) {
    const { left, right, top, bottom } = this.box;
    for (const [value, text] of yTicks) {
      draw(this.svg, "line", { class: "grid y", x1: left, x2: right, y1: y(value), y2: y(value) });
      draw(this.svg, "text", { class: "tick y", x: left - 8, y: y(value) + 4, "text-anchor": "end" }, text);
    }
    for (const [value, text] of xTicks) {
      draw(this.svg, "line", { class: "grid x", x1: x(value), x2: x(value), y1: bottom, y2: bottom + 5 });
      draw(this.svg, "text", { class: "tick x", x: x(value), y: bottom + 19, "text-anchor": "middle" }, text);
    }
    draw(this.svg, "line", { class: "grid", x1: left, x2: right, y1: bottom, y2: bottom });
    draw(this.svg, "text", { x: 0, y: 11 }, yTitle);
    draw(this.svg, "text", { x: right, y: bottom + 38, "text-anchor": "end" }, xTitle);
    this.top = top;
  }

  // Show `pairs` beside (x, y), and say them to a screen reader.
  show(x, y, title, pairs) {
    this.tip.replaceChildren(make("div", "title", title));
    for (const [kind, label, value] of pairs) {
      const pair = make("div", `pair ${kind}`);
      const name = make("span");
      if (kind) name.append(make("i", "swatch"));
      name.append(label);
      pair.append(name, make("span", "value", value));
      this.tip.append(pair);
    }
    this.tip.hidden = false;
    const room = this.place.clientWidth - this.tip.offsetWidth;
    const beside = x + 16 > room ? x - this.tip.offsetWidth - 16 : x + 16;
    this.tip.style.left = `${Math.max(0, Math.min(room, beside))}px`;
    this.tip.style.top = `${Math.max(0, y)}px`;
    const words = pairs.map(([, label, value]) => `${label} ${value}`).join(", ");
    this.place.setAttribute("aria-valuetext", `${title}: ${words}`);
  }

  hide() {
    this.tip.hidden = true;
    if (this.lit) this.lit.replaceChildren();
  }
}

// Pointer and arrow keys move the same thing: `go(position)`, of which there are `count()`.
// A click, or the enter key, is for `use(position)`.
function steer(chart, count, nearest, go, use) {
  const place = chart.place;
  let position = 0;
  const move = (to) => {
    position = Math.max(0, Math.min(count() - 1, to));
    place.setAttribute("aria-valuemax", count() - 1);
    place.setAttribute("aria-valuenow", position);
    go(position);
  };
  const point = (event) => {
    const rect = place.getBoundingClientRect();
    move(nearest(event.clientX - rect.left, event.clientY - rect.top));
  };
  place.addEventListener("pointermove", point);
  place.addEventListener("pointerdown", point);
  if (use) place.addEventListener("click", () => use(position));
  place.addEventListener("focus", () => { if (place.matches(":focus-visible")) move(position); });
  place.addEventListener("keydown", (event) => {
    const page = Math.ceil(count() / 10);
    const steps = {
      ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, PageDown: -page, PageUp: page, Home: -Infinity, End: Infinity,
    };
    if (event.key === "Escape") chart.hide();
    if (event.key === "Enter" && use) use(position);
    if (!(event.key in steps)) return;
    event.preventDefault();
    move(position + steps[event.key]);
  });
}

// --- labels --------------------------------------------------------------------------------------

function overlap(a, b) {
  return Math.max(0, Math.min(a.right, b.right) - Math.max(a.left, b.left)) * Math.max(0, Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top));
}

// Put `label` beside (x, y), where it covers least of `taken` and crosses no edge.
function placeLabel(label, x, y, taken, box, spots) {
  const width = label.getComputedTextLength();
  let best = null;
  (spots || besidePoint)(width).forEach(([dx, dy], rank) => {
    const area = { left: x + dx - 2, right: x + dx + width + 2, top: y + dy - 12, bottom: y + dy + 4 };
    const outside = Math.max(0, box.left - area.left) + Math.max(0, area.right - box.right - 10) + Math.max(0, box.top - 16 - area.top) + Math.max(0, area.bottom - box.bottom);
    const cost = rank + outside * 1000 + taken.reduce((sum, other) => sum + overlap(area, other), 0);
    if (!best || cost < best.cost) best = { cost, area, x: x + dx, y: y + dy };
  });
  label.setAttribute("x", best.x);
  label.setAttribute("y", best.y);
  taken.push(best.area);
}

// Near first: right, left, above, below, at the corners; then the same further away.
function besidePoint(width) {
  const half = -width / 2;
  const near = [[12, 4], [half, -12], [-12 - width, 4], [half, 22], [9, -9], [9, 18], [-9 - width, -9], [-9 - width, 18]];
  const far = [[half, -28], [half, 38], [half, 56], [9, -26], [9, 34], [-9 - width, -26], [-9 - width, 34]];
  return [...near, ...far];
}

function around(x, y, r) {
  return { left: x - r, right: x + r, top: y - r, bottom: y + r };
}

// Where a curve goes, in boxes a few pixels wide.
function footprints(curve, x, y) {
  const boxes = new Map();
  for (let n = 0; n < curve.times.length; n += 1) {
    const until = n + 1 < curve.times.length ? x(curve.times[n + 1]) : x(curve.times[n]);
    for (let column = Math.floor(x(curve.times[n]) / 6); column <= Math.floor(until / 6); column += 1) {
      const box = boxes.get(column) || { left: column * 6, right: column * 6 + 6, top: Infinity, bottom: -Infinity };
      box.top = Math.min(box.top, y(curve.bytes[n]) - 2);
      box.bottom = Math.max(box.bottom, y(curve.bytes[n]) + 2);
      boxes.set(column, box);
    }
  }
  return [...boxes.values()];
}

// --- memory over the step ---------------------------------------------------------------------

// Memory at `time`: that of the last change. Nothing before the first and after the last.
function memoryAt(curve, time) {
  const { times, bytes } = curve;
  if (time < times[0] || time > times[times.length - 1]) return null;
  let low = 0, high = times.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (times[middle] <= time) low = middle; else high = middle - 1;
  }
  return bytes[low];
}

function stairs(curve, x, y) {
  const path = [`M${x(curve.times[0]).toFixed(1)} ${y(curve.bytes[0]).toFixed(1)}`];
  for (let n = 1; n < curve.times.length; n += 1) {
    path.push(`H${x(curve.times[n]).toFixed(1)}V${y(curve.bytes[n]).toFixed(1)}`);
  }
  return path.join("");
}

// Where backward begins: of the plan, if there is one. Plain's is at about the same share of its time.
// Returns the boxes of the labels.
function phases(chart, curve, x) {
  if (curve.turn === null || curve.turn <= curve.times[0]) return [];
  const { top, bottom } = chart.box;
  const at = x(curve.turn);
  const boxes = [];
  const put = (x0, text, anchor) => {
    const label = draw(chart.svg, "text", { class: "phase", x: x0, y: top - 4, "text-anchor": anchor }, text);
    const from = anchor === "end" ? x0 - label.getComputedTextLength() : x0;
    boxes.push({ left: from, right: from + label.getComputedTextLength(), top: top - 16, bottom: top });
  };
  const line = (x0) => draw(chart.svg, "line", { class: "turn", x1: x0, x2: x0, y1: top - 14, y2: bottom });
  line(at);
  put(at - 6, "forward", "end");
  put(at + 6, "backward", "start");
  // What follows backward: the step of the optimizer.
  if (curve.over !== null && x(curve.over) - at > 70) {
    line(x(curve.over));
    if (chart.box.right - x(curve.over) > 70) put(x(curve.over) + 6, "optimizer", "start");
  }
  return boxes;
}

// What runs at `time`: module and op, or nothing if that is not known.
function runningAt(curve, time) {
  const { marks, texts } = curve;
  if (!marks.length || time < marks[0][0]) return [];
  let low = 0, high = marks.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (marks[middle][0] <= time) low = middle; else high = middle - 1;
  }
  const [, path, op] = marks[low];
  if (curve.over !== null && time >= curve.over) return [["", "after backward", "optimizer"]];
  const isBackward = curve.turn !== null && time >= curve.turn;
  const found = [["", isBackward ? "backward of" : "forward of", texts[path] || "the model itself"]];
  if (texts[op]) found.push(["", "op", texts[op]]);
  return found;
}

function memoryChart(place, curves, budget) {
  const start = Math.min(...curves.map((curve) => curve.times[0]));
  const end = Math.max(...curves.map((curve) => curve.times[curve.times.length - 1]));
  const most = Math.max(budget || 0, ...curves.map((curve) => curve.peak[1]));
  let x, y;

  const chart = new Chart(place, (self) => {
    const { left, right, top, bottom, small } = self.box;
    x = scale(start, end, left, right);
    y = scale(0, most * 1.06, bottom, top);
    self.axes(x, y, secondsTicks(start, end, small ? 4 : 8), bytesTicks(0, most * 1.06, 5), "time in the step", "allocated memory");
    const labels = phases(self, curves[curves.length - 1], x);
    for (const curve of curves) {
      const path = stairs(curve, x, y);
      const last = x(curve.times[curve.times.length - 1]).toFixed(1);
      draw(self.svg, "path", { class: `area ${curve.kind}`, d: `${path}V${bottom}H${x(curve.times[0]).toFixed(1)}Z` });
      draw(self.svg, "path", { class: `curve ${curve.kind}`, d: path, "data-end": last });
    }
    // Labels keep clear of the curves, of the budget and of each other.
    const taken = [...labels, ...curves.flatMap((curve) => footprints(curve, x, y))];
    const put = (kind, text, px, py, spots) => {
      const label = draw(self.svg, "text", { class: `halo ${kind}` }, text);
      placeLabel(label, px, py, taken, self.box, spots);
    };
    if (budget) {
      const line = y(budget);
      draw(self.svg, "line", { class: "budget-line", x1: left, x2: right, y1: line, y2: line });
      taken.push({ left, right, top: line - 2, bottom: line + 2 });
      put("budget", `budget ${bytesText(budget)}`, right, line, (width) => [[-width, -7], [-width, 17], [left - right, -7], [left - right, 17]]);
    }
    for (const curve of curves) {
      const [time, bytes] = curve.peak;
      draw(self.svg, "circle", { class: `mark peak ${curve.kind}`, cx: x(time), cy: y(bytes), r: 5 });
      taken.push(around(x(time), y(bytes), 6));
    }
    // The highest first, whose label is then above the others.
    for (const curve of [...curves].sort((one, other) => other.peak[1] - one.peak[1])) {
      const [time, bytes] = curve.peak;
      put(curve.kind, `peak ${bytesText(bytes)}`, x(time), y(bytes));
    }
  });

  const at = (pixel) => {
    const { left, right } = chart.box;
    const peak = curves.map((curve) => curve.peak[0]).find((time) => Math.abs(x(time) - pixel) <= 4);
    const time = peak === undefined ? x.back(Math.max(left, Math.min(right, pixel))) : peak;
    const found = curves.map((curve) => [curve, memoryAt(curve, time)]);
    const lights = found.filter(([, bytes]) => bytes !== null);
    chart.lit.replaceChildren();
    draw(chart.lit, "line", { class: "cross", x1: x(time), x2: x(time), y1: chart.box.top, y2: chart.box.bottom });
    for (const [curve, bytes] of lights) draw(chart.lit, "circle", { class: `mark ${curve.kind}`, cx: x(time), cy: y(bytes), r: 4 });
    const pairs = found.map(([curve, bytes]) => [curve.kind, curve.name, bytes === null ? "step is over" : bytesText(bytes)]);
    const last = curves[curves.length - 1];
    if (memoryAt(last, time) !== null) pairs.push(...runningAt(last, time));
    chart.show(x(time), chart.box.top + 8, secondsText(time), pairs);
  };
  const count = () => Math.floor(chart.box.right - chart.box.left) + 1;
  steer(chart, count, (pixel) => Math.round(pixel - chart.box.left), (position) => at(chart.box.left + position));
}

// --- peaks against times ----------------------------------------------------------------------

const SHAPES = {
  plan: (g, x, y) => draw(g, "circle", { class: "mark plan", cx: x, cy: y, r: 4.5 }),
  chosen: (g, x, y) => {
    draw(g, "circle", { class: "ring chosen", cx: x, cy: y, r: 9 });
    draw(g, "circle", { class: "mark chosen", cx: x, cy: y, r: 5.5 });
  },
  plain: (g, x, y) => draw(g, "rect", { class: "mark plain", x: x - 5, y: y - 5, width: 10, height: 10 }),
  baseline: (g, x, y) => draw(g, "path", { class: "mark baseline", d: `M${x} ${y - 6}L${x + 6} ${y}L${x} ${y + 6}L${x - 6} ${y}Z` }),
};

function frontierChart(place, points, plainTime, budget) {
  const relative = (point) => (plainTime > 0 ? point.seconds / plainTime : point.seconds);
  const spread = (values) => {
    const low = Math.min(...values), high = Math.max(...values);
    const edge = (high - low) * 0.07 || high * 0.05 || 1;
    return [Math.max(0, low - edge), high + edge];
  };
  // On a phone there is no room for names: letters stand for the baselines, with a key below.
  const letters = new Map(points.filter(({ kind }) => kind === "baseline").map((point, n) => [point, String.fromCharCode(65 + (n % 26))]));
  const key = document.getElementById("frontier-key");
  for (const [point, letter] of letters) {
    const item = make("li", "baseline");
    item.append(make("b", "", letter), ` ${point.name}`);
    key.append(item);
  }
  const ours = points.filter(({ kind }) => kind === "plan" || kind === "chosen");
  const [left, right] = spread([...points.map(({ peak }) => peak), ...(budget ? [budget] : [])]);
  const [low, high] = spread(points.map(relative));
  let x, y;

  const chart = new Chart(place, (self) => {
    const { box, svg } = self;
    key.hidden = !box.small || !letters.size;
    x = scale(left, right, box.left, box.right);
    y = scale(low, high, box.bottom, box.top);
    const yTicks = plainTime > 0 ? ticks(low, high, 5, 1, "×") : secondsTicks(low, high, 5);
    const inTheWay = [];
    self.axes(x, y, bytesTicks(left, right, box.small ? 3 : 8), yTicks, "peak memory", plainTime > 0 ? "step time, plain = 1" : "step time");
    if (budget) {
      draw(svg, "line", { class: "budget-line", x1: x(budget), x2: x(budget), y1: box.top, y2: box.bottom });
      const anchor = x(budget) > box.right - 70 ? "end" : "start";
      const label = draw(svg, "text", { class: "halo budget", x: x(budget) + (anchor === "start" ? 6 : -6), y: box.top + 8, "text-anchor": anchor }, "budget");
      const { x: lx, y: ly, width, height } = label.getBBox();
      inTheWay.push({ left: lx, right: lx + width, top: ly, bottom: ly + height });
    }
    const line = ours.map((point) => `${x(point.peak).toFixed(1)} ${y(relative(point)).toFixed(1)}`);
    if (line.length > 1) draw(svg, "path", { class: "curve plan", d: `M${line.join("L")}` });
    const taken = [...inTheWay, ...points.map((point) => around(x(point.peak), y(relative(point)), 8))];
    // The line itself is in the way of labels too.
    for (let n = 1; n < ours.length; n += 1) {
      for (let part = 1; part < 8; part += 1) {
        const mixed = (value) => value(ours[n - 1]) + ((value(ours[n]) - value(ours[n - 1])) * part) / 8;
        taken.push(around(mixed((p) => x(p.peak)), mixed((p) => y(relative(p))), 3));
      }
    }
    if (budget) taken.push({ left: x(budget) - 2, right: x(budget) + 2, top: box.top, bottom: box.bottom });
    // Plans are the line: hundreds of dots would hide it.
    for (const kind of ours.length > 1 ? ["baseline", "plain", "chosen"] : ["plan", "baseline", "plain", "chosen"]) {
      for (const point of points.filter((each) => each.kind === kind)) {
        const g = draw(svg, "g", { class: `point ${kind}` });
        SHAPES[kind](g, x(point.peak), y(relative(point)));
      }
    }
    for (const kind of ["chosen", "plain", "baseline"]) {
      for (const point of points.filter((each) => each.kind === kind)) {
        const label = draw(svg, "text", { class: `halo ${kind}` }, self.box.small ? letters.get(point) || point.name : point.name);
        placeLabel(label, x(point.peak), y(relative(point)), taken, box);
      }
    }
  });

  const nearest = (px, py) => {
    const far = points.map((point) => (x(point.peak) - px) ** 2 + (y(relative(point)) - py) ** 2);
    return far.indexOf(Math.min(...far));
  };
  const go = (position) => {
    const point = points[position];
    const px = x(point.peak), py = y(relative(point));
    chart.lit.replaceChildren();
    if (point.kind === "plan") SHAPES.plan(chart.lit, px, py);
    draw(chart.lit, "circle", { class: "lit", cx: px, cy: py, r: 11 });
    const pairs = [["", "peak", bytesText(point.peak)], ["", "step", secondsText(point.seconds)]];
    if (plainTime > 0) pairs.push(["", "relative to plain", `${fixed(relative(point), 3)}×`]);
    if (ours.includes(point)) pairs.push(...trades(ours, point));
    chart.show(px, Math.min(py + 14, chart.box.bottom - 90), point.name, pairs);
  };
  steer(chart, () => points.length, nearest, go, (position) => usePoint(ours, points[position]));
}

// What some memory more or less does to the time of `point`: pairs for the tip.
function trades(ours, point) {
  const peaks = ours.map(({ peak }) => peak);
  const range = Math.max(...peaks) - Math.min(...peaks);
  let unit = 1024 ** Math.max(0, Math.floor(Math.log2(range / 4 || 1) / 10));
  while (unit * 10 <= range / 4) unit *= 10;
  const best = (most) => Math.min(...ours.filter(({ peak }) => peak <= most).map(({ seconds }) => seconds));
  const found = [];
  for (const [sign, change] of [["+", unit], ["−", -unit]]) {
    const seconds = best(point.peak + change);
    const more = seconds / point.seconds - 1;
    if (!Number.isFinite(seconds) || Math.abs(more) < 0.0005) continue;
    found.push(["", `${sign}${bytesText(unit).replace(".00", "")}`, `${more < 0 ? "−" : "+"}${percentText(Math.abs(more))} time`]);
  }
  return found;
}

// Below the chart: how to use the plan that was clicked. A budget is rounded up, so that the plan fits.
function usePoint(ours, point) {
  const place = document.getElementById("frontier-use");
  place.hidden = !ours.includes(point);
  let unit = 0;
  while (unit < 3 && point.peak >= 1024 ** (unit + 1)) unit += 1;
  const budget = `${(Math.ceil((point.peak / 1024 ** unit) * 100) / 100).toFixed(2)}${BINARY[unit]}`;
  const words = trades(ours, point).map(([, change, effect]) => `${change}: ${effect}`).join(", ");
  place.replaceChildren(make("code", "", `model = recollect.fit(model, budget="${budget}")`), make("span", "trade", words));
}

// --- throughput against size ---------------------------------------------------------------------

// Sizes double from tick to tick: plain ones are small, and close together.
function sizesChart(place, points, plainSize) {
  const sizes = points.map(({ size }) => Math.log2(size));
  const low = Math.min(...sizes), high = Math.max(...sizes);
  const edge = (high - low) * 0.05 || 0.5;
  const most = Math.max(...points.map(({ rate }) => rate)) * 1.1;
  const shape = ({ kind }) => SHAPES[kind === "predicted" ? "baseline" : kind];
  let x, y;

  const chart = new Chart(place, (self) => {
    const { box, svg } = self;
    const logarithmic = scale(low - edge, high + edge, box.left, box.right);
    x = (size) => logarithmic(Math.log2(size));
    y = scale(0, most, box.bottom, box.top);
    const stride = Math.max(1, Math.ceil((high - low) / (box.small ? 4 : 9)));
    const xTicks = [];
    for (let power = Math.ceil(low - edge); power <= high + edge; power += stride) xTicks.push([2 ** power, `${2 ** power}`]);
    self.axes(x, y, xTicks, ticks(0, most, 5, 1, ""), "size", "samples per second");
    const line = points.map((point) => `${x(point.size).toFixed(1)} ${y(point.rate).toFixed(1)}`);
    if (line.length > 1) draw(svg, "path", { class: "curve plan", d: `M${line.join("L")}` });
    const taken = points.map((point) => around(x(point.size), y(point.rate), 8));
    for (const point of points) shape(point)(draw(svg, "g", { class: `point ${point.kind}` }), x(point.size), y(point.rate));
    const named = points.filter(({ kind, size }) => kind === "chosen" || size === plainSize);
    for (const point of named) {
      const text = point.kind === "chosen" ? `largest: ${point.size}` : `plain: ${point.size}`;
      const label = draw(svg, "text", { class: `halo ${point.kind}` }, text);
      placeLabel(label, x(point.size), y(point.rate), taken, box);
    }
  });

  const nearest = (px) => {
    const far = points.map((point) => Math.abs(x(point.size) - px));
    return far.indexOf(Math.min(...far));
  };
  const go = (position) => {
    const point = points[position];
    const px = x(point.size), py = y(point.rate);
    chart.lit.replaceChildren();
    draw(chart.lit, "circle", { class: "lit", cx: px, cy: py, r: 11 });
    const pairs = [["", "samples per second", fixed(point.rate, point.rate < 100 ? 1 : 0)], ["", "per sample", secondsText(1 / point.rate)], ["", "peak", bytesText(point.peak)]];
    chart.show(px, Math.min(py + 14, chart.box.bottom - 90), `size ${point.size}, ${point.kind}`, pairs);
  };
  steer(chart, () => points.length, nearest, go);
}
