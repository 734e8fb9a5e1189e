/** Softmax and linear attention of one head in plain JavaScript, written with the same care, and their times. */

export const WIDTH = 16; // channels of a head, as in the networks of this page
const SHORTEST = 60; // milliseconds: faster functions are repeated
const ROUNDS = 3;

/**
 * softmax(q kᵀ / √width) v, a row at a time: the N×N matrix is never stored.
 *
 * @param {Float32Array} query @param {Float32Array} key @param {Float32Array} value  tokens × width, row-major
 */
export function softmaxAttention(query, key, value, width = WIDTH) {
  const tokens = query.length / width;
  const out = new Float32Array(query.length);
  const logits = new Float32Array(tokens);
  const scale = 1 / Math.sqrt(width);
  for (let i = 0; i < tokens; i++) {
    let largest = -Infinity;
    for (let j = 0; j < tokens; j++) {
      let sum = 0;
      for (let c = 0; c < width; c++) sum += query[i * width + c] * key[j * width + c];
      logits[j] = sum * scale;
      if (logits[j] > largest) largest = logits[j];
    }
    let total = 0;
    for (let j = 0; j < tokens; j++) {
      const weight = Math.exp(logits[j] - largest);
      total += weight;
      for (let c = 0; c < width; c++) out[i * width + c] += weight * value[j * width + c];
    }
    for (let c = 0; c < width; c++) out[i * width + c] /= total;
  }
  return out;
}

/** κ(q) (Σ_j κ(k_j) ⊗ v_j) / (κ(q)·Σ_j κ(k_j)) with κ = elu + 1: the keys are summed up before any query reads them. */
export function linearAttention(query, key, value, width = WIDTH) {
  const tokens = query.length / width;
  const out = new Float32Array(query.length);
  const state = new Float64Array(width * width);
  const keySum = new Float64Array(width);
  for (let j = 0; j < tokens; j++) {
    for (let c = 0; c < width; c++) {
      const feature = elu1(key[j * width + c]);
      keySum[c] += feature;
      for (let v = 0; v < width; v++) state[c * width + v] += feature * value[j * width + v];
    }
  }
  for (let i = 0; i < tokens; i++) {
    let total = 1e-6 * tokens;
    for (let c = 0; c < width; c++) {
      const feature = elu1(query[i * width + c]);
      total += feature * keySum[c];
      for (let v = 0; v < width; v++) out[i * width + v] += feature * state[c * width + v];
    }
    for (let v = 0; v < width; v++) out[i * width + v] /= total;
  }
  return out;
}

const elu1 = (x) => (x > 0 ? x + 1 : Math.exp(x));

/**
 * Milliseconds of one call: the median of three rounds, each repeated until it lasts long enough to be measured.
 *
 * @param {() => unknown} call
 */
export function milliseconds(call) {
  repeated(call); // until it is compiled
  const rounds = Array.from({ length: ROUNDS }, () => repeated(call));
  return rounds.sort((a, b) => a - b)[ROUNDS >> 1];
}

/** Mean milliseconds of the calls that fit into SHORTEST, one or more. */
function repeated(call) {
  const start = performance.now();
  let calls = 0;
  do {
    call();
    calls++;
  } while (performance.now() - start < SHORTEST);
  return (performance.now() - start) / calls;
}

/** Random numbers about zero, tokens × width. */
export function randomTokens(tokens, width = WIDTH) {
  return Float32Array.from({ length: tokens * width }, () => 2 * Math.random() + 2 * Math.random() - 2);
}
