/**
 * The score matrices of linvit.ops.attention_scores, row by row, in double precision.
 *
 * With κ the feature map, α the weights of the keys (Σ_j α_j = 1), R the rotation, s = 1/√width and a the magnitude by
 * which κ(q), or for softmax q, is multiplied after α is known:
 *
 *     num_ij = a Rκ(q_i)·Rκ(k_j)     num_i = Σ_j α_j num_ij     den_i = Σ_j α_j a κ(q_i)·κ(k_j)
 *     A_ij = α_j (gain_i (num_ij - num_i) + level_i)
 *
 * where the normalizer computes gain and level from num_i and den_i. With blocks, the queries of each have weights of
 * their own: α_j times how much the block weighs that of j, set to the sum one again.
 *
 * @typedef {{query: ArrayLike<number>, key: ArrayLike<number>, value: ArrayLike<number>, tokens: number, width: number}}
 *     Head  One head of an attention layer; all three are row-major, tokens × width.
 * @typedef {{cos: Float64Array, sin: Float64Array}} Rotary  tokens × (width / 2), row-major.
 * @typedef {{featureMap?: string, weighting?: string, strength?: number, normalizer?: string, rotary?: Rotary | null,
 *     blocks?: Blocks | null, eps?: number}} Options
 * @typedef {{rows: number, columns: number, grid: [number, number]}} Blocks  A grid of tokens cut into rows × columns,
 *     which weigh each other by the matrix that MHLA starts with.
 * @typedef {{tokens: number, row: (query: number, magnitude?: number) => Float64Array,
 *     column: (key: number, magnitude?: number) => Float64Array}} Scores
 */

const elementwise = (f) => (x) => Float64Array.from(x, f);

/** κ by name: functions of a row-major array (tokens × width) and its width, named as in linvit.formulas.feature_map. */
export const FEATURE_MAPS = {
  elu1: elementwise((x) => (x > 0 ? x + 1 : Math.exp(x))),
  relu: elementwise((x) => Math.max(x, 0)),
  exp: elementwise(Math.exp),
  identity: elementwise((x) => x),
  unit: byToken((token) => {
    const norm = Math.max(Math.hypot(...token), 1e-12);
    return token.map((x) => x / norm);
  }),
  softmax: byToken(softmax),
};

/** Gain and level of a row by name of the normalizer, as in linvit.formulas.normalizer. */
export const NORMALIZERS = {
  divide: (num, den, mass, s, eps) => [1 / (den + eps), num / (den + eps)],
  magnitude: (num, den, mass, s, eps) => {
    const share = s / (s * den + eps);
    return [s + share, s * (num - den) + share * num];
  },
  magnitude_no_beta: (num, den, mass, s) => [s, s * (num - den)],
  magnitude_no_gamma: (num, den, mass, s, eps) => {
    const gain = s + s / (s * den + eps);
    return [gain, gain * num];
  },
  subtract: (num, den, mass, s) => [s, s * (num - den) + 1],
  none: (num) => [1, num],
  sum: (num, den, mass) => [mass, mass * num],
};

export const WEIGHTINGS = ["uniform", "query_mean"];

/** Options of the mechanisms, as in linvit.layers.mechanisms; null for softmax attention. */
export const MECHANISMS = {
  softmax: null,
  linear: {},
  rala: { weighting: "query_mean" },
  mala: { normalizer: "magnitude" },
};

/**
 * The scores of one head.
 *
 * @param {Head} head
 * @param {Options | null} axes  of the mechanism; null for softmax attention
 * @param {Rotary | null} rotary
 * @returns {Scores}
 */
export function scoresOf(head, axes, rotary = null) {
  return axes === null ? softmaxScores(head, rotary) : linearScores(head, { ...axes, rotary });
}

/** @param {Head} head @param {Options} options @returns {Scores} */
export function linearScores(head, options) {
  const { normalizer = "divide", eps = 1e-6, blocks = null } = options;
  const { tokens, width } = head;
  const { query, key, rotatedQuery, rotatedKey, weights, mass } = mapped(head, options);
  const blockOf = blocks ? blocksOf(blocks) : new Int32Array(tokens);
  const seen = (blocks ? initialMixing(blocks) : [[1]]).map((shares) => {
    const mixed = vector(tokens, (j) => shares[blockOf[j]] * weights[j]);
    const share = mixed.reduce((sum, x) => sum + x, 0);
    const of = mixed.map((x) => x / share);
    return {
      weights: of,
      mass: mass * share,
      keySum: weightedSum(key, of, width),
      rotatedSum: weightedSum(rotatedKey, of, width),
    };
  });
  const normalize = (i, magnitude) => {
    const { keySum, rotatedSum, mass } = seen[blockOf[i]];
    const num = magnitude * dot(rotatedQuery, i, rotatedSum, 0, width);
    const den = magnitude * dot(query, i, keySum, 0, width);
    return [num, ...NORMALIZERS[normalizer](num, den, mass, width ** -0.5, eps)];
  };
  const entry = (i, j, magnitude, [num, gain, level]) =>
    seen[blockOf[i]].weights[j] * (gain * (magnitude * dot(rotatedQuery, i, rotatedKey, j, width) - num) + level);
  return {
    tokens,
    row(i, magnitude = 1) {
      const normalized = normalize(i, magnitude);
      return vector(tokens, (j) => entry(i, j, magnitude, normalized));
    },
    column(j, magnitude = 1) {
      return vector(tokens, (i) => entry(i, j, magnitude, normalize(i, magnitude)));
    },
  };
}

/** @param {Head} head @param {Rotary | null} rotary @returns {Scores} */
export function softmaxScores(head, rotary = null) {
  const { tokens, width } = head;
  const query = rotate(Float64Array.from(head.query), rotary, width);
  const key = rotate(Float64Array.from(head.key), rotary, width);
  const logit = (i, j, magnitude) => (magnitude * dot(query, i, key, j, width)) / Math.sqrt(width);
  const logits = (i, magnitude) => vector(tokens, (j) => logit(i, j, magnitude));
  let sums = null; // log of the sum of each row's exponentials: a column needs those of all rows
  let sumsAt = NaN;
  return {
    tokens,
    row: (i, magnitude = 1) => softmax(logits(i, magnitude)),
    column(j, magnitude = 1) {
      if (sumsAt !== magnitude) {
        sums = vector(tokens, (i) => logSumExp(logits(i, magnitude)));
        sumsAt = magnitude;
      }
      return sums.map((sum, i) => Math.exp(logit(i, j, magnitude) - sum));
    },
  };
}

/** The mean over several heads. @param {Scores[]} heads @returns {Scores} */
export function meanScores(heads) {
  const mean = (vectors) => vectors[0].map((_, i) => vectors.reduce((sum, x) => sum + x[i], 0) / vectors.length);
  return {
    tokens: heads[0].tokens,
    row: (i, magnitude = 1) => mean(heads.map((head) => head.row(i, magnitude))),
    column: (j, magnitude = 1) => mean(heads.map((head) => head.column(j, magnitude))),
  };
}

/**
 * Σ_j α_j Rκ(k_j) ⊗ v_j, the state that every query of linear attention reads; row-major, width × width.
 *
 * @param {Head} head @param {Options} options @returns {Float64Array}
 */
export function stateOf(head, options) {
  const { tokens, width } = head;
  const { rotatedKey, weights } = mapped(head, options);
  const state = new Float64Array(width * width);
  for (let j = 0; j < tokens; j++) {
    for (let c = 0; c < width; c++) {
      const feature = weights[j] * rotatedKey[j * width + c];
      for (let v = 0; v < width; v++) state[c * width + v] += feature * head.value[j * width + v];
    }
  }
  return state;
}

/** The block of each token, as linvit.ops.mixing.blocks_of_grid: sides differ by one token at most. @param {Blocks} _ */
function blocksOf({ rows, columns, grid: [height, width] }) {
  const along = (place, length, count) => Math.ceil(((place + 1) * count) / length) - 1;
  return Int32Array.from(
    { length: height * width },
    (_, i) => along(Math.floor(i / width), height, rows) * columns + along(i % width, width, columns),
  );
}

/** How much each block weighs the others at first, as linvit.ops.initial_mixing. @param {Blocks} _ */
export function initialMixing({ rows, columns }) {
  const places = Array.from({ length: rows * columns }, (_, b) => [Math.floor(b / columns), b % columns]);
  const farthest = Math.max(Math.hypot(rows - 1, columns - 1), 1);
  const near = places.map(([y, x]) => places.map(([v, u]) => 1 - Math.hypot(y - v, x - u) / farthest));
  const sums = places.map((_, b) => near.reduce((sum, row) => sum + row[b], 0));
  return near.map((row) => row.map((x, b) => x / sums[b]));
}

/**
 * The rotation of a grid of tokens in row-major order, as linvit.ops.rotary_2d.
 *
 * @param {[number, number]} grid  height, width @param {number} width  of a head, a multiple of 4 @returns {Rotary}
 */
export function rotary2d([height, columns], width) {
  const pairs = width / 4; // for rows, and as many for columns
  const cos = new Float64Array(height * columns * 2 * pairs);
  const sin = new Float64Array(cos.length);
  for (let place = 0, at = 0; place < height * columns; place++) {
    for (const index of [Math.floor(place / columns), place % columns]) {
      for (let pair = 0; pair < pairs; pair++, at++) {
        const angle = index * 10000 ** (pairs > 1 ? -pair / (pairs - 1) : 0);
        cos[at] = Math.cos(angle);
        sin[at] = Math.sin(angle);
      }
    }
  }
  return { cos, sin };
}

/** Adjacent channels turned as pairs; x itself without a rotation. */
export function rotate(x, rotary, width) {
  if (!rotary) return x;
  const turned = new Float64Array(x.length);
  for (let pair = 0; pair < x.length / 2; pair++) {
    const [even, odd, cos, sin] = [x[2 * pair], x[2 * pair + 1], rotary.cos[pair], rotary.sin[pair]];
    turned[2 * pair] = even * cos - odd * sin;
    turned[2 * pair + 1] = even * sin + odd * cos;
  }
  return turned;
}

/**
 * How a row is spread, as linvit.analysis.scores.score_measures: entropy of |A|/Σ|A| in nats, the largest of these
 * shares, the share of negative entries in Σ|A|, and the sum of the entries.
 *
 * @param {ArrayLike<number>} row
 */
export function measures(row) {
  let [total, negative, sum, largest] = [0, 0, 0, 0];
  for (const x of row) {
    total += Math.abs(x);
    negative -= Math.min(x, 0);
    sum += x;
    largest = Math.max(largest, Math.abs(x));
  }
  if (total === 0) return { entropy: 0, largest: 0, negative: 0, sum };
  let entropy = 0;
  for (const x of row) {
    const share = Math.abs(x) / total;
    if (share > 0) entropy -= share * Math.log(share);
  }
  return { entropy, largest: largest / total, negative: negative / total, sum };
}

/** κ(q), κ(k), both rotated, the keys' weights, and the total weight before it was set to one. */
function mapped(head, { featureMap = "elu1", weighting = "uniform", strength = 1, rotary = null }) {
  const { tokens, width } = head;
  const query = FEATURE_MAPS[featureMap](head.query, width);
  const key = FEATURE_MAPS[featureMap](head.key, width);
  const exponents = new Float64Array(tokens);
  if (weighting === "query_mean") {
    const mean = weightedSum(query, new Float64Array(tokens).fill(1 / tokens), width);
    for (let j = 0; j < tokens; j++) exponents[j] = (strength * dot(mean, 0, key, j, width)) / Math.sqrt(width);
  }
  return {
    query,
    key,
    rotatedQuery: rotate(query, rotary, width),
    rotatedKey: rotate(key, rotary, width),
    weights: softmax(exponents),
    mass: Math.exp(logSumExp(exponents)),
  };
}

/** The values of f at 0 … length - 1; many times faster than Float64Array.from. */
function vector(length, f) {
  const values = new Float64Array(length);
  for (let i = 0; i < length; i++) values[i] = f(i);
  return values;
}

function byToken(f) {
  return (x, width) => {
    const y = Float64Array.from(x);
    for (let start = 0; start < y.length; start += width) y.set(f(y.slice(start, start + width)), start);
    return y;
  };
}

function weightedSum(x, weights, width) {
  const sum = new Float64Array(width);
  for (let j = 0; j < weights.length; j++) {
    for (let c = 0; c < width; c++) sum[c] += weights[j] * x[j * width + c];
  }
  return sum;
}

function dot(x, i, y, j, width) {
  let sum = 0;
  for (let c = 0; c < width; c++) sum += x[i * width + c] * y[j * width + c];
  return sum;
}

function softmax(x) {
  const sum = logSumExp(x);
  return x.map((value) => Math.exp(value - sum));
}

function logSumExp(x) {
  let largest = -Infinity;
  for (let i = 0; i < x.length; i++) largest = Math.max(largest, x[i]);
  let sum = 0;
  for (let i = 0; i < x.length; i++) sum += Math.exp(x[i] - largest);
  return largest + Math.log(sum);
}
