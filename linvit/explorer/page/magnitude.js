/** How the scores of a row answer to the magnitude of its query. */

import { measures } from "./attention.js";
import { LABELS, keys, lineChart } from "./charts.js";
import { byId } from "./elements.js";

const FACTORS = Array.from({ length: 25 }, (_, i) => 2 ** (-6 + i / 2));
const TICKS = [1 / 64, 1 / 8, 1, 8, 64];
const WIDTH = 280;

const fraction = (x) => (x < 1 ? `1/${1 / x}` : String(x));
const percent = (x) => `${Number((100 * x).toPrecision(2))} %`;
const AXIS = { label: "magnitude ×", from: 1 / 64, to: 64, ticks: TICKS, log: true, format: fraction };

/**
 * @param {Record<string, import("./attention.js").Scores>} scores @param {number} query @param {number} magnitude
 */
export function drawMagnitude(scores, query, magnitude) {
  const curves = Object.entries(scores).map(([name, matrix]) => ({
    name,
    rows: FACTORS.map((factor) => measures(matrix.row(query, factor))),
    now: measures(matrix.row(query, magnitude)),
  }));
  const draw = (id, title, axis, value) => {
    const now = curves.map((curve) => `${LABELS[curve.name]} ${value(curve.now).toPrecision(2)}`).join(", ");
    const series = curves.map(({ name, rows }) => ({ name, points: rows.map((row, i) => [FACTORS[i], value(row)]) }));
    const more = { marker: magnitude, width: WIDTH, keyed: false };
    lineChart(byId(id), `${title} against the query’s magnitude; now: ${now}`, AXIS, { label: title, ...axis }, series, more);
  };
  const { tokens } = scores.softmax;
  const ticks = powers(tokens);
  const shares = { from: 1 / tokens, to: 1, ticks: ticks.map((x) => 1 / x), log: true, format: percent };
  draw("spread-chart", "patches read", { from: 1, to: tokens, ticks, log: true }, (row) => Math.exp(row.entropy));
  draw("peak-chart", "largest share", shares, (row) => row.largest);
  const halves = { from: 0, to: 1, ticks: [0, 0.5, 1], format: percent };
  draw("negative-chart", "negative share", halves, (row) => row.negative);
  byId("magnitude-keys").replaceChildren(keys(curves));
}

/** 1, 4, 16 … up to a power of four. */
const powers = (tokens) => Array.from({ length: Math.log2(tokens) / 2 + 1 }, (_, i) => 4 ** i);
