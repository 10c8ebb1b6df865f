// Memory by module: bands on top of each other, for the plain step and for the planned one.

// Fixed parts have the greys that they have everywhere. Modules have hues of their own, in the order of forward,
// paler than the colours of fates; neighbours differ in lightness.
function bandColour(n, count) {
  const hue = 185 + (count > 1 ? (190 * n) / (count - 1) : 0);
  return [`hsl(${hue % 360} 42% ${n % 2 ? 74 : 63}%)`, `hsl(${hue % 360} 30% ${n % 2 ? 47 : 38}%)`];
}

function stackChart(place, stacks, budget) {
  const sums = (stack) => stack.times.map((_, n) => stack.bands.reduce((sum, band) => sum + band[2][n], 0));
  const totals = stacks.map(sums);
  const end = Math.max(...stacks.map(({ times }) => times[times.length - 1]));
  const most = Math.max(budget || 0, ...totals.flat());
  let shown = stacks.length - 1, lit = -1;
  let x, y;

  const chart = new Chart(place, (self) => {
    const { left, right, top, bottom, small } = self.box;
    const stack = stacks[shown];
    x = scale(0, end, left, right);
    y = scale(0, most * 1.06, bottom, top);
    self.axes(x, y, secondsTicks(0, end, small ? 4 : 8), bytesTicks(0, most * 1.06, 5), "time in the step", "allocated memory");
    const last = x(stack.times[stack.times.length - 1]);
    let floor = stack.times.map(() => 0);
    stack.bands.forEach(([name, kind, bytes], n) => {
      const roof = floor.map((each, at) => each + bytes[at]);
      const upper = steps(stack.times, roof, x, y, last);
      const lower = steps(stack.times, floor, x, y, last).reverse();
      const points = [...upper, ...lower].map((point) => point.map((each) => each.toFixed(1)).join(" "));
      const path = draw(self.svg, "path", { class: `band ${kind}`, "data-band": n, d: `M${points.join("L")}Z` });
      if (!kind) paint(path, n - 2, stack.bands.length - 2);
      draw(path, "title", {}, name);
      floor = roof;
    });
    phases(self, stack, x);
    if (budget) {
      draw(self.svg, "line", { class: "budget-line", x1: left, x2: right, y1: y(budget), y2: y(budget) });
      draw(self.svg, "text", { class: "halo budget", x: right, y: y(budget) - 7, "text-anchor": "end" }, `budget ${bytesText(budget)}`);
    }
    links(self, stack, x);
    light(lit);
  });

  const key = document.getElementById("stack-key");
  stacks[shown].bands.forEach(([name, kind], n) => {
    const item = make("li", kind);
    const swatch = make("i", "swatch");
    if (!kind) paint(swatch, n - 2, stacks[shown].bands.length - 2);
    item.append(swatch, name);
    item.addEventListener("pointerenter", () => light(n));
    item.addEventListener("pointerleave", () => light(-1));
    key.append(item);
  });

  function light(band) {
    lit = band;
    for (const path of place.querySelectorAll(".band")) path.classList.toggle("dim", band >= 0 && Number(path.dataset.band) !== band);
  }

  const buttons = [...document.querySelectorAll("#stack-switch button")];
  buttons.forEach((button, n) => button.addEventListener("click", () => {
    shown = n;
    buttons.forEach((each, other) => each.setAttribute("aria-pressed", other === n));
    chart.wide = 0;
    chart.redraw();
  }));

  let height = 0;
  const at = (position) => {
    const stack = stacks[shown];
    const time = x.back(chart.box.left + position);
    const n = stack.times.findLastIndex((each) => each <= time);
    chart.lit.replaceChildren();
    draw(chart.lit, "line", { class: "cross", x1: x(time), x2: x(time), y1: chart.box.top, y2: chart.box.bottom });
    if (time > stack.times[stack.times.length - 1]) return chart.show(x(time), chart.box.top + 8, secondsText(time), [["", stack.name, "step is over"]]);
    let sum = 0;
    const under = stack.bands.findIndex((band) => { sum += band[2][n]; return sum >= height; });
    const sizes = stack.bands.map(([name, , bytes], band) => [band, name, bytes[n]]).sort((a, b) => b[2] - a[2]);
    const named = sizes.slice(0, 4);
    if (under >= 0 && !named.some(([band]) => band === under)) named.push(sizes.find(([band]) => band === under));
    const pairs = named.filter(([, , bytes]) => bytes).map(([band, name, bytes]) => [band === under ? "here" : "", name, bytesText(bytes)]);
    return chart.show(x(time), chart.box.top + 8, `${secondsText(time)}: ${bytesText(totals[shown][n])}`, pairs);
  };
  const count = () => Math.floor(chart.box.right - chart.box.left) + 1;
  steer(chart, count, (px, py) => { height = y.back(py); return Math.round(px - chart.box.left); }, at);
}

// The corners of a curve that holds each value until the next.
function steps(times, values, x, y, last) {
  return times.flatMap((time, n) => [[x(time), y(values[n])], [n + 1 < times.length ? x(times[n + 1]) : last, y(values[n])]]);
}

function paint(element, n, count) {
  const [light, dark] = bandColour(n, count);
  element.style.setProperty("--light", light);
  element.style.setProperty("--dark", dark);
  element.classList.add("module-band");
}

// When the link to the host is busy: two thin rows at the top.
function links(self, stack, x) {
  [["to host", stack.out], ["from host", stack.back]].filter(([, spans]) => spans.length).forEach(([name, spans], row) => {
    const top = self.box.top + 2 + 13 * row;
    for (const [start, end] of spans) {
      draw(self.svg, "rect", { class: "link offloaded", x: x(start), y: top, width: Math.max(0.5, x(end) - x(start)), height: 6 });
    }
    const [first] = spans[0], [, last] = spans[spans.length - 1];
    const fits = x(last) + 60 < self.box.right;
    draw(self.svg, "text", { class: "halo offloaded link-name", x: fits ? x(last) + 6 : x(first) - 6, y: top + 7, "text-anchor": fits ? "start" : "end" }, name);
  });
}
