/**
 * The networks, which run in onnxruntime-web.
 *
 * @typedef {import("./attention.js").Head} Head
 * @typedef {{output: string, name: string, heads: number, width: number, stride: number}} Layer
 * @typedef {{file: string, name: string, classes: string[], size: number, layers: Layer[]}} Network
 */

import * as ort from "./runtime/ort.wasm.bundle.min.mjs";

ort.env.wasm.wasmPaths = { wasm: new URL("./runtime/ort-wasm-simd-threaded.wasm", import.meta.url).href };
ort.env.wasm.numThreads = 1; // more would need headers that simple servers do not send
ort.env.logLevel = "error";

const FOLDER = new URL("./networks/", import.meta.url);
const sessions = new Map();

/** @returns {Promise<Network[]>} */
export async function networks() {
  return (await fetched("networks.json")).json();
}

/**
 * The logits of an image, and the heads of every layer.
 *
 * @param {Network} network
 * @param {Uint8Array} pixels  3 × size × size
 * @param {number} size
 * @returns {Promise<{logits: Float32Array, layers: Head[][]}>}
 */
export async function run(network, pixels, size) {
  const session = await opened(network);
  const images = new ort.Tensor("uint8", pixels, [1, 3, size, size]);
  const outputs = await session.run({ images });
  return { logits: outputs.logits.data, layers: network.layers.map(({ output }) => headsOf(outputs[output])) };
}

/** Softmax of the logits. @param {ArrayLike<number>} logits @returns {number[]} */
export function probabilities(logits) {
  const largest = Math.max(...logits);
  const powers = Array.from(logits, (x) => Math.exp(x - largest));
  const total = powers.reduce((sum, x) => sum + x, 0);
  return powers.map((x) => x / total);
}

/** The heads in a tensor of queries, keys and values, (3, 1, heads, tokens, width). */
function headsOf({ data, dims: [, , heads, tokens, width] }) {
  const length = tokens * width;
  const at = (kind, head) => data.slice((kind * heads + head) * length, (kind * heads + head + 1) * length);
  return Array.from({ length: heads }, (_, head) => ({
    query: at(0, head),
    key: at(1, head),
    value: at(2, head),
    tokens,
    width,
  }));
}

function opened(network) {
  if (!sessions.has(network.file)) {
    const loading = fetched(network.file)
      .then((response) => response.arrayBuffer())
      .then((file) => ort.InferenceSession.create(new Uint8Array(file), { executionProviders: ["wasm"] }));
    sessions.set(network.file, loading);
  }
  return sessions.get(network.file);
}

async function fetched(name) {
  const response = await fetch(new URL(name, FOLDER));
  if (!response.ok) throw new Error(`networks/${name} could not be loaded (status ${response.status}).`);
  return response;
}
