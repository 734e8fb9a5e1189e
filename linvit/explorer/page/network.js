/**
 * The networks, which run in onnxruntime-web.
 *
 * @typedef {import("./attention.js").Head} Head
 * @typedef {{output: string, name: string, heads: number, width: number, stride: number}} Layer
 * @typedef {{file: string, name: string, classes: string[], size: number, layers: Layer[]}} Network
 */

import * as ort from "./runtime/ort.wasm.bundle.min.mjs";

ort.env.wasm.numThreads = 1; // more would need headers that simple servers do not send
ort.env.logLevel = "error";

const FOLDER = new URL("./networks/", import.meta.url);
const RUNTIME = new URL("./runtime/ort-wasm-simd-threaded.wasm", import.meta.url);
const MEGABYTE = 1e6;
const sessions = new Map();
const coming = { bytes: 0, of: 0, tell: (/** @type {string} */ _) => {} };

/** Calls this with words such as "9.4 of 16.0 MB" while the runtime and the networks are downloaded. */
export function onDownload(tell) {
  coming.tell = tell;
}

/** @returns {Promise<Network[]>} */
export async function networks() {
  return (await fetched(new URL("networks.json", FOLDER))).json();
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
    sessions.set(network.file, session(network.file));
  }
  return sessions.get(network.file);
}

async function session(name) {
  const needed = [downloaded(new URL(name, FOLDER))];
  if (!ort.env.wasm.wasmBinary) needed.push(downloaded(RUNTIME));
  const [file, runtime] = await Promise.all(needed);
  if (runtime) ort.env.wasm.wasmBinary = runtime;
  return ort.InferenceSession.create(file, { executionProviders: ["wasm"] });
}

async function downloaded(address) {
  const response = await fetched(address);
  const length = response.headers.get("Content-Length");
  coming.of += length && !response.headers.has("Content-Encoding") ? Number(length) : NaN; // compressed ones are shorter
  const reader = response.body.getReader();
  const parts = [];
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    parts.push(part.value);
    coming.bytes += part.value.length;
    const total = coming.of ? ` of ${(coming.of / MEGABYTE).toFixed(1)}` : "";
    coming.tell(`${(coming.bytes / MEGABYTE).toFixed(1)}${total} MB`);
  }
  return new Uint8Array(await new Blob(parts).arrayBuffer());
}

async function fetched(address) {
  const response = await fetch(address);
  const name = address.pathname.split("/").slice(-2).join("/");
  if (!response.ok) throw new Error(`${name} could not be loaded (status ${response.status}).`);
  return response;
}
