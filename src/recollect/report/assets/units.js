"use strict";
// Numbers as recollect.report.units writes them, and axes.

const BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const TIMES = [["s", 1], ["ms", 1e3], ["µs", 1e6], ["ns", 1e9]];

// As Python rounds: a tie goes to the even digit. Halves of a MiB make ties.
function fixed(value, digits) {
  const scaled = value * 10 ** digits;
  const low = Math.floor(scaled);
  if (scaled - low !== 0.5) return value.toFixed(digits);
  return ((low % 2 === 0 ? low : low + 1) / 10 ** digits).toFixed(digits);
}

function bytesText(count) {
  let amount = count, unit = 0;
  while (unit < BINARY.length - 1 && Number(fixed(amount, 2)) >= 1024) { amount /= 1024; unit += 1; }
  return `${fixed(amount, unit ? 2 : 0)} ${BINARY[unit]}`;
}

function secondsText(seconds) {
  let [unit, factor] = TIMES[0];
  for (let n = 1; n < TIMES.length && seconds !== 0 && seconds * factor < 0.9995; n += 1) [unit, factor] = TIMES[n];
  const amount = seconds * factor;
  const digits = amount >= 99.95 || amount === 0 ? 0 : amount >= 9.995 ? 1 : 2;
  return `${fixed(amount, digits)} ${unit}`;
}

function percentText(fraction) {
  if (fraction !== 0 && Math.abs(fraction) < 0.0005) return "<0.1%";
  return fraction === 0 ? "0%" : `${fixed(fraction * 100, 1)}%`;
}

// Round steps of `unit` between low and high: [[value, text], ...].
function ticks(low, high, wanted, unit, name, steps = [1, 2, 5, 10]) {
  const rough = (high - low) / unit / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * steps.find((each) => each * power >= rough * 0.999);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const found = [];
  for (let n = Math.ceil(low / unit / step - 1e-9); n * step * unit <= high * (1 + 1e-12); n += 1) {
    found.push([n * step * unit, `${(n * step).toFixed(digits)}${name}`]);
  }
  return found;
}

function bytesTicks(low, high, wanted) {
  let power = 0;
  while (power < BINARY.length - 1 && high >= 1024 ** (power + 1)) power += 1;
  return ticks(low, high, wanted, 1024 ** power, ` ${BINARY[power]}`, [1, 2, 4, 5, 10]);
}

function secondsTicks(low, high, wanted) {
  const [name, factor] = TIMES.find(([, each]) => high * each >= 1) || TIMES[TIMES.length - 1];
  return ticks(low, high, wanted, 1 / factor, ` ${name}`);
}
