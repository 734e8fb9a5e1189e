/** How the spread and the peak of a row answer to the magnitude of its query. */

import { measures } from "./attention.js";
import { lineChart } from "./charts.js";
import { byId } from "./elements.js";

const FACTORS = Array.from({ length: 25 }, (_, i) => 2 ** (-6 + i / 2));
const TICKS = [1 / 64, 1 / 8, 1, 8, 64];
const fraction = (x) => (x < 1 ? `1/${1 / x}` : String(x));
const AXIS = { label: "magnitude ×", from: 1 / 64, to: 64, ticks: TICKS, log: true, format: fraction };

/**
 * @param {Record<string, import("./attention.js").Scores>} scores @param {number} query @param {number} magnitude
 */
export function drawMagnitude(scores, query, magnitude) {
  const curves = Object.entries(scores).map(([name, matrix]) => ({
    name,
    rows: FACTORS.map((factor) => measures(matrix.row(query, factor))),
  }));
  const tokens = scores.softmax.tokens;
  const series = (value) => curves.map(({ name, rows }) => ({ name, points: rows.map((row, i) => [FACTORS[i], value(row)]) }));
  const spread = { label: "patches read", from: 1, to: tokens, ticks: powers(tokens), log: true };
  lineChart(
    byId("spread-chart"),
    "Patches read against the query’s magnitude",
    AXIS,
    spread,
    series((row) => Math.exp(row.entropy)),
    { marker: magnitude },
  );
  const percent = (x) => `${Number((100 * x).toPrecision(2))} %`;
  const peak = { label: "largest share", from: 1 / tokens, to: 1, ticks: powers(tokens).map((x) => 1 / x), log: true };
  lineChart(
    byId("peak-chart"),
    "Largest share of a patch against the query’s magnitude",
    AXIS,
    { ...peak, format: percent },
    series((row) => row.largest),
    { marker: magnitude },
  );
}

/** 1, 4, 16 … up to a power of four. */
const powers = (tokens) => Array.from({ length: Math.log2(tokens) / 2 + 1 }, (_, i) => 4 ** i);
