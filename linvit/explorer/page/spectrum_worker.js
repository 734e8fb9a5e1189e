/**
 * Singular values of score matrices or states, off the page's own thread.
 *
 * A message has an id, the heads (see attention.js), `of` ("scores" or "state"), the mechanisms' axes by name, the
 * rotation and the magnitude. Answered mechanism by mechanism with {id, name, values, rows, columns}.
 */

import { meanScores, scoresOf, stateOf } from "./attention.js";
import { evenly, singularValues } from "./spectrum.js";

const MOST_ROWS = 256;

onmessage = ({ data: { id, heads, of, mechanisms, rotary, magnitude } }) => {
  for (const [name, axes] of Object.entries(mechanisms)) {
    if (of === "state" && (axes === null || axes.blocks)) continue; // softmax has no state, and blocks have one each
    const matrix = of === "state" ? stateMatrix(heads, axes, rotary) : scoreMatrix(heads, axes, rotary, magnitude);
    postMessage({ id, name, values: singularValues(matrix), rows: matrix.rows, columns: matrix.columns });
  }
};

/** Some evenly chosen rows of the matrix, mean over the heads. */
function scoreMatrix(heads, axes, rotary, magnitude) {
  const scores = meanScores(heads.map((head) => scoresOf(head, axes, rotary)));
  const queries = evenly(scores.tokens, MOST_ROWS);
  const data = new Float64Array(queries.length * scores.tokens);
  queries.forEach((query, i) => data.set(scores.row(query, magnitude), i * scores.tokens));
  return { data, rows: queries.length, columns: scores.tokens };
}

/** The state of one head; of several, that of the first. */
function stateMatrix([head], axes, rotary) {
  return { data: stateOf(head, { ...axes, rotary }), rows: head.width, columns: head.width };
}
