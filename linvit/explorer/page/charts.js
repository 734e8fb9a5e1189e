/**
 * Line charts as SVG.
 *
 * @typedef {{name: string, points: [number, number][]}} Series  name: of a mechanism
 * @typedef {{label: string, from: number, to: number, ticks: number[], log?: boolean, format?: (x: number) => string}} Axis
 */

import { drawn, element } from "./elements.js";

const HEIGHT = 190;
const [LEFT, RIGHT, TOP, BOTTOM] = [60, 16, 8, 36];
const DASHES = { softmax: "none", linear: "7 4", rala: "2 3", mala: "10 3 2 3", mix: "4 2" };
export const LABELS = { softmax: "Softmax", linear: "Linear", rala: "RALA", mala: "MALA", mix: "your mix" };

/**
 * Replaces what is in a box by a chart.
 *
 * @param {HTMLElement} box @param {string} title  for screen readers
 * @param {Axis} x @param {Axis} y @param {Series[]} series
 * @param {{marker?: number, dots?: boolean, width?: number, keyed?: boolean}} more  keyed: whether it says which line is which
 */
export function lineChart(box, title, x, y, series, { marker, dots = false, width = 380, keyed = true } = {}) {
  const across = scale(x, LEFT, width - RIGHT);
  const up = scale(y, HEIGHT - BOTTOM, TOP);
  const chart = drawn("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": title });
  chart.append(...axes(x, y, across, up, width), ...series.flatMap((one) => lines(one, across, up, dots)));
  if (marker !== undefined) {
    const at = across(marker);
    chart.append(drawn("line", { class: "marker", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }));
  }
  box.replaceChildren(chart, ...(keyed ? [keys(series)] : []));
}

function axes(x, y, across, up, width) {
  const [bottom, right] = [HEIGHT - BOTTOM, width - RIGHT];
  const text = (axis, tick) => (axis.format ? axis.format(tick) : String(tick));
  return [
    ...y.ticks.flatMap((tick) => [
      drawn("line", { class: "axis", x1: LEFT, x2: right, y1: up(tick), y2: up(tick) }),
      drawn("text", { x: LEFT - 5, y: up(tick) + 4, "text-anchor": "end" }, text(y, tick)),
    ]),
    ...x.ticks.map((tick) => drawn("text", { x: across(tick), y: bottom + 14, "text-anchor": "middle" }, text(x, tick))),
    drawn("text", { x: (LEFT + right) / 2, y: HEIGHT - 5, "text-anchor": "middle" }, x.label),
    drawn("text", { x: 11, y: TOP, transform: `rotate(-90 11 ${TOP})`, "text-anchor": "end" }, y.label),
  ];
}

function lines({ name, points }, across, up, dots) {
  const shown = points.filter(([x, y]) => Number.isFinite(across(x)) && Number.isFinite(up(y)));
  const path = shown.map(([x, y], i) => `${i ? "L" : "M"}${across(x).toFixed(1)} ${up(y).toFixed(1)}`).join("");
  const marks = dots ? shown.map(([x, y]) => drawn("circle", { class: "dot", cx: across(x), cy: up(y), r: 3 })) : [];
  const line = drawn("path", { class: "line", d: path, "stroke-dasharray": DASHES[name] });
  return [drawn("g", { "data-mechanism": name }, line, ...marks)];
}

/** Which line is which. @param {{name: string}[]} series */
export function keys(series) {
  const sample = (name) =>
    drawn(
      "svg",
      { viewBox: "0 0 30 10", "aria-hidden": "true" },
      drawn("path", { class: "line", d: "M0 5h30", "stroke-dasharray": DASHES[name] }),
    );
  const entries = series.map(({ name }) => element("li", { "data-mechanism": name }, sample(name), ` ${LABELS[name]}`));
  return element("ul", { class: "keys" }, ...entries);
}

/** A function from values to pixels, which keeps to the chart. */
function scale({ from, to, log }, first, last) {
  const place = log ? Math.log10 : (value) => value;
  return (value) => {
    const share = (place(value) - place(from)) / (place(to) - place(from));
    return first + Math.min(1, Math.max(0, share)) * (last - first);
  };
}
