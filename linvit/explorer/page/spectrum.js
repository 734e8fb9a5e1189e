/**
 * Singular values, and the ranks that linvit.analysis.rank counts.
 *
 * @typedef {{data: Float64Array, rows: number, columns: number}} Matrix  row-major
 */

const NEGLIGIBLE = 1e-14; // of the largest column: below it is rounding
const ORTHOGONAL = 1e-15;
const MOST_SWEEPS = 40;

/**
 * The singular values of a matrix, largest first; those that rounding hides are 0.
 *
 * @param {Matrix} matrix @returns {Float64Array} min(rows, columns) values
 */
export function singularValues(matrix) {
  const length = Math.min(matrix.rows, matrix.columns);
  const vectors = matrix.rows <= matrix.columns ? rowsOf(matrix) : columnsOf(matrix);
  const triangle = pivoted(vectors);
  makeOrthogonal(triangle);
  const values = new Float64Array(length);
  values.set(triangle.map((row) => Math.sqrt(product(row, row))).sort((a, b) => b - a));
  return values;
}

/**
 * rank: singular values above 1/1000 of the largest. effective: exp of the entropy of σ/Σσ (Roy and Vetterli, 2007).
 *
 * @param {Float64Array} values  largest first
 */
export function rankMeasures(values) {
  const total = values.reduce((sum, x) => sum + x, 0);
  if (total === 0) return { rank: 0, effective: 0 };
  const entropy = values.reduce((sum, x) => (x > 0 ? sum - (x / total) * Math.log(x / total) : sum), 0);
  return { rank: values.filter((x) => x > 1e-3 * values[0]).length, effective: Math.exp(entropy) };
}

/** At most `most` indices spread evenly from 0 to length - 1, both included. */
export function evenly(length, most) {
  const count = Math.min(length, most);
  if (count === 1) return [0];
  return Array.from({ length: count }, (_, i) => Math.round((i * (length - 1)) / (count - 1)));
}

/**
 * The rows of R in a QR decomposition of the vectors as columns, by Gram and Schmidt with pivoting: it ends where only
 * rounding is left, so a matrix of low rank has few rows. R has the singular values of the vectors.
 */
function pivoted(vectors) {
  const triangle = [];
  const left = new Set(vectors.keys());
  let first = 0;
  while (left.size) {
    const [norm, pivot] = longest(vectors, left);
    first = first || norm;
    if (norm <= NEGLIGIBLE * first) break;
    const unit = vectors[pivot].map((x) => x / norm);
    const row = new Float64Array(vectors.length);
    row[pivot] = norm;
    left.delete(pivot);
    for (const i of left) {
      row[i] = product(unit, vectors[i]);
      subtract(vectors[i], unit, row[i]);
    }
    triangle.push(row);
  }
  return triangle;
}

function longest(vectors, among) {
  let [best, pivot] = [-1, -1];
  for (const i of among) {
    const square = product(vectors[i], vectors[i]);
    if (square > best) [best, pivot] = [square, i];
  }
  return [Math.sqrt(best), pivot];
}

/** Jacobi's rotations of pairs of rows, in place, until all are orthogonal; singular values do not change. */
function makeOrthogonal(rows) {
  for (let sweep = 0, turned = true; turned && sweep < MOST_SWEEPS; sweep++) {
    turned = false;
    for (let p = 0; p < rows.length; p++) {
      for (let q = p + 1; q < rows.length; q++) turned = turn(rows[p], rows[q]) || turned;
    }
  }
}

function turn(x, y) {
  const [xx, yy, xy] = [product(x, x), product(y, y), product(x, y)];
  if (Math.abs(xy) <= ORTHOGONAL * Math.sqrt(xx * yy)) return false;
  const zeta = (yy - xx) / (2 * xy);
  const tangent = (zeta < 0 ? -1 : 1) / (Math.abs(zeta) + Math.hypot(1, zeta));
  const cos = 1 / Math.hypot(1, tangent);
  const sin = cos * tangent;
  for (let i = 0; i < x.length; i++) {
    const [a, b] = [x[i], y[i]];
    x[i] = cos * a - sin * b;
    y[i] = sin * a + cos * b;
  }
  return true;
}

function product(x, y) {
  let sum = 0;
  for (let i = 0; i < x.length; i++) sum += x[i] * y[i];
  return sum;
}

function subtract(x, unit, factor) {
  for (let i = 0; i < x.length; i++) x[i] -= factor * unit[i];
}

function rowsOf({ data, rows, columns }) {
  return Array.from({ length: rows }, (_, i) => data.slice(i * columns, (i + 1) * columns));
}

function columnsOf({ data, rows, columns }) {
  return Array.from({ length: columns }, (_, j) => Float64Array.from({ length: rows }, (_, i) => data[i * columns + j]));
}
