/** The page: what the user chooses, and what is drawn again when it changes. */

import { FEATURE_MAPS, MECHANISMS, NORMALIZERS, meanScores, measures, rotary2d, scoresOf } from "./attention.js";
import { LABELS } from "./charts.js";
import { byId, element, fill, fillTable } from "./elements.js";
import { background, fromAddress, fromFile, pixelsOf, scaled } from "./image.js";
import { drawMagnitude } from "./magnitude.js";
import { drawImage, drawMap } from "./maps.js";
import { networks, onDownload, probabilities, run } from "./network.js";
import { Ranks } from "./ranks.js";
import { prepareTiming } from "./speed.js";

const SIZES = [32, 64, 128, 192]; // a column of softmax scores takes a second at 192
const SAMPLES = { ship: "Ship", car: "Car", bird: "Bird" };
const MAP_PIXELS = 512; // of the canvases
const MEAN = "mean";
const LISTED = 10;

/** What is shown; `scores` and `heads` follow from the choices, `query` is the index of a patch. */
const shown = {
  all: /** @type {import("./network.js").Network[]} */ ([]),
  square: /** @type {import("./image.js").Square | null} */ (null),
  image: /** @type {HTMLCanvasElement | null} */ (null),
  grey: /** @type {HTMLCanvasElement | null} */ (null),
  layers: /** @type {import("./attention.js").Head[][]} */ ([]),
  heads: /** @type {import("./attention.js").Head[]} */ ([]),
  scores: /** @type {Record<string, import("./attention.js").Scores>} */ ({}),
  grid: 1,
  query: 0,
  held: false,
  runs: 0,
};
const ranks = new Ranks();

const network = () => shown.all[byId("network").value];
const magnitude = () => 2 ** byId("magnitude").value;
const rotary = () => (byId("rotation").checked ? rotary2d([shown.grid, shown.grid], shown.heads[0].width) : null);
const mechanisms = () => ({ ...MECHANISMS, mix: mix() });
const mix = () => ({
  featureMap: byId("mix-map").value,
  normalizer: byId("mix-normalizer").value,
  weighting: "query_mean",
  strength: Number(byId("mix-strength").value),
  blocks: blocks(Number(byId("mix-blocks").value)),
});
const blocks = (side) => (side ? { rows: side, columns: side, grid: [shown.grid, shown.grid] } : null);

async function start() {
  prepareChoices();
  listen();
  onDownload((share) => (byId("place").textContent = `Loading the network: ${share} …`));
  shown.all = await networks();
  fill(byId("network"), shown.all.map(({ label }, i) => [i, label]));
  await openSample("ship");
}

function prepareChoices() {
  fill(byId("size"), SIZES.map((size) => [size, `${size} × ${size} px`]));
  byId("size").value = 128;
  fill(byId("mix-map"), Object.keys(FEATURE_MAPS).map((name) => [name, name]));
  fill(byId("mix-normalizer"), Object.keys(NORMALIZERS).map((name) => [name, name]));
  byId("mix-normalizer").value = "magnitude";
  fill(byId("mix-blocks"), [[0, "none"], ...[2, 4, 8].map((side) => [side, `${side} × ${side}`])]);
  for (const [name, text] of Object.entries(SAMPLES)) {
    const button = element("button", { type: "button", "data-sample": name }, text);
    button.addEventListener("click", () => guarded(() => openSample(name)));
    byId("samples").append(button);
  }
  for (const figure of document.querySelectorAll("figure")) {
    figure.prepend(element("canvas", { width: MAP_PIXELS, height: MAP_PIXELS, role: "img" }));
    (figure.querySelector("b") ?? figure.firstChild).after(element("span", { class: "numbers" }));
  }
}

function listen() {
  const onChange = (ids, change) => ids.forEach((id) => byId(id).addEventListener("input", () => guarded(change)));
  const onceLoaded = (ids, change) => onChange(ids, () => shown.layers.length && change()); // read when it is, too
  onChange(["network", "size"], compute);
  onceLoaded(["layer"], changeLayer);
  onceLoaded(["head", "rotation", "mix-map", "mix-normalizer", "mix-strength", "mix-blocks"], changeScores);
  onceLoaded(["direction", "scale"], draw);
  onceLoaded(["magnitude"], () => (draw(), measureRanks()));
  onceLoaded(["matrix"], measureRanks);
  onChange(["file"], () => openFile(byId("file").files[0]));
  for (const canvas of [byId("chooser"), byId("maps")]) listenToPointer(canvas);
  byId("chooser").addEventListener("keydown", moveByKey);
  listenToFiles();
  prepareTiming();
}

// Images

async function openSample(name) {
  await openImage(await fromAddress(`samples/${name}.svg`));
  for (const button of document.querySelectorAll("[data-sample]")) {
    button.setAttribute("aria-pressed", String(button.dataset.sample === name));
  }
}

async function openFile(file) {
  if (!file) return;
  byId("file").value = "";
  await openImage(await fromFile(file, file.name || "What was pasted"));
  document.querySelectorAll("[data-sample]").forEach((button) => button.setAttribute("aria-pressed", "false"));
}

async function openImage(square) {
  shown.square = square;
  shown.image = scaled(square, MAP_PIXELS).canvas;
  shown.grey = background(square, MAP_PIXELS);
  byId("image").getContext("2d").drawImage(shown.image, 0, 0); // while the network loads
  await compute();
}

function listenToFiles() {
  const page = document.documentElement;
  const mark = (event, dropping) => (event.preventDefault(), page.classList.toggle("dropping", dropping));
  page.addEventListener("dragover", (event) => mark(event, true));
  page.addEventListener("dragleave", (event) => mark(event, false));
  page.addEventListener("drop", (event) => {
    mark(event, false);
    guarded(() => openFile(event.dataTransfer.files[0]));
  });
  document.addEventListener("paste", (event) => guarded(() => openFile(event.clipboardData.files[0])));
}

// From the image to scores

async function compute() {
  const run = ++shown.runs;
  document.querySelector("main").setAttribute("aria-busy", "true");
  const size = Number(byId("size").value);
  const { layers } = await runOn(size);
  const { logits } = await runOn(network().size);
  if (run !== shown.runs) return; // the user has gone on
  shown.layers = layers;
  showPrediction(probabilities(logits));
  const known = network().layers.map(({ stride }, i) => [i, `${i + 1}: ${size / stride} × ${size / stride} patches`]);
  const first = !byId("layer").options.length;
  fill(byId("layer"), known.filter((_, i) => layers[i][0].tokens > 1));
  if (first) byId("layer").value = 1;
  changeLayer();
  document.querySelector("main").setAttribute("aria-busy", "false");
}

const runOn = (size) => run(network(), pixelsOf(shown.square, size), size);

function changeLayer() {
  const heads = shown.layers[byId("layer").value];
  const before = shown.grid;
  shown.grid = Math.sqrt(heads[0].tokens);
  const [row, column] = before === 1 ? [0.55, 0.4].map((x) => x * shown.grid) : moved(before);
  shown.query = Math.floor(row) * shown.grid + Math.floor(column);
  fill(byId("head"), [...heads.map((_, i) => [i, `${i + 1} of ${heads.length}`]), [MEAN, "mean of all"]]);
  changeScores();
}

/** Row and column of the patch at the same place in another grid. */
function moved(before) {
  const place = [Math.floor(shown.query / before), shown.query % before];
  return place.map((x) => ((x + 0.5) / before) * shown.grid);
}

function changeScores() {
  const heads = shown.layers[byId("layer").value];
  const chosen = byId("head").value;
  shown.heads = chosen === MEAN ? heads : [heads[chosen]];
  const turned = rotary();
  shown.scores = Object.fromEntries(
    Object.entries(mechanisms()).map(([name, axes]) => [
      name,
      meanScores(shown.heads.map((head) => scoresOf(head, axes, turned))),
    ]),
  );
  draw();
  measureRanks();
}

function measureRanks() {
  const matrix = byId("matrix").value;
  ranks.measure({
    heads: shown.heads,
    of: matrix,
    mechanisms: mechanisms(),
    rotary: rotary(),
    magnitude: matrix === "state" ? 1 : magnitude(),
  });
}

// Drawing

function draw() {
  byId("magnitude-value").textContent = plain(magnitude());
  byId("mix-strength-value").textContent = byId("mix-strength").value;
  const direction = byId("direction").value;
  const vectors = Object.fromEntries(
    Object.entries(shown.scores).map(([name, scores]) => [name, scores[direction](shown.query, magnitude())]),
  );
  drawMaps(vectors);
  drawMagnitude(shown.scores, shown.query, magnitude());
  showPlace(vectors);
  showValues(vectors);
}

function drawMaps(vectors) {
  const largest = Object.fromEntries(Object.entries(vectors).map(([name, scores]) => [name, largestOf(scores)]));
  const most = Math.max(...Object.values(largest));
  for (const figure of document.querySelectorAll("figure")) {
    const name = figure.dataset.mechanism;
    const full = byId("scale").value === "shared" ? most : largest[name];
    drawMap(figure.querySelector("canvas"), shown.grey, vectors[name], full, shown.query);
    figure.querySelector("canvas").setAttribute("aria-label", described(name, vectors[name]));
    figure.querySelector(".numbers").textContent = numbers(vectors[name]);
  }
  drawImage(byId("image"), shown.image, shown.query, shown.grid, shown.held);
}

const largestOf = (scores) => scores.reduce((most, score) => Math.max(most, Math.abs(score)), 0);
const percent = (share) => `${plain(100 * share)}\u00a0%`;
const plain = (x) => String(Number(x.toPrecision(2)));

function numbers(scores) {
  const { entropy, largest, negative } = measures(scores);
  const spread = `over ≈ ${Math.exp(entropy).toFixed(0)} of ${scores.length} patches, largest ${percent(largest)}`;
  return negative > 0.0005 ? `${spread}, ${percent(negative)} negative` : spread;
}

function described(name, scores) {
  const place = patch(strongest(scores)[0]);
  return `${LABELS[name]}: spread ${numbers(scores)}; the largest at ${place}`;
}

const patch = (index) => `row ${Math.floor(index / shown.grid) + 1}, column ${(index % shown.grid) + 1}`;
const strongest = (scores) => [...scores.keys()].sort((a, b) => Math.abs(scores[b]) - Math.abs(scores[a]));

function showPlace(vectors) {
  const place = patch(shown.query);
  byId("place").textContent = `Patch at ${place}${shown.held ? " (held)" : ""}.`;
  byId("chooser").setAttribute("aria-label", `Patch at ${place} of ${shown.grid} × ${shown.grid}`);
  clearTimeout(showPlace.later);
  const text = () => Object.keys(MECHANISMS).map((name) => described(name, vectors[name]));
  showPlace.later = setTimeout(() => (byId("spoken").textContent = `${place}. ${text().join(". ")}.`), 400);
}

function showValues(vectors) {
  const names = Object.keys(vectors);
  const orders = names.map((name) => strongest(vectors[name]));
  const cell = (rank) => (name, i) => {
    const index = orders[i][rank];
    const score = vectors[name][index].toPrecision(2);
    return `${score.replace("-", "−")} (${Math.floor(index / shown.grid) + 1}, ${(index % shown.grid) + 1})`;
  };
  const rows = orders[0].slice(0, LISTED).map((_, rank) => [String(rank + 1), ...names.map(cell(rank))]);
  fillTable(byId("values"), [["", ...names.map((name) => LABELS[name])], ...rows], "Score (row, column) by mechanism");
}

function showPrediction(shares) {
  const { classes, size } = network();
  const best = [...shares.keys()].sort((a, b) => shares[b] - shares[a]).slice(0, 5);
  const bar = (i) => element("progress", { max: 1, value: shares[i], "aria-hidden": "true" });
  const entry = (i) =>
    element("li", {}, element("span", {}, classes[i]), bar(i), element("span", {}, `${(100 * shares[i]).toFixed(1)}\u00a0%`));
  byId("prediction").replaceChildren(...best.map(entry));
  byId("prediction-note").textContent =
    `The five likeliest of the ${classes.length} classes of CIFAR-10, for the image at ${size} × ${size} px, the size ` +
    "that the network was trained with. It names one of them whatever the image shows.";
}

// Choosing a patch

function listenToPointer(box) {
  box.addEventListener("pointermove", (event) => shown.held || event.pointerType === "touch" || choose(event));
  box.addEventListener("click", (event) => {
    if (!shown.layers.length || event.target.tagName !== "CANVAS") return;
    const hold = !shown.held;
    shown.held = false;
    choose(event);
    shown.held = hold && event.pointerType !== "touch";
    draw();
  });
}

function choose(event) {
  if (!shown.layers.length || event.target.tagName !== "CANVAS") return;
  const box = event.target.getBoundingClientRect();
  const at = (share) => Math.min(shown.grid - 1, Math.max(0, Math.floor(share * shown.grid)));
  const row = at((event.clientY - box.top) / box.height);
  const column = at((event.clientX - box.left) / box.width);
  chooseIndex(row * shown.grid + column);
}

function chooseIndex(index) {
  if (index === shown.query) return;
  shown.query = index;
  cancelAnimationFrame(chooseIndex.frame);
  chooseIndex.frame = requestAnimationFrame(draw);
}

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

function moveByKey(event) {
  if (!(event.key in STEPS) || !shown.layers.length) return;
  event.preventDefault();
  const [down, right] = STEPS[event.key];
  const inside = (x) => Math.min(shown.grid - 1, Math.max(0, x));
  const row = inside(Math.floor(shown.query / shown.grid) + down);
  chooseIndex(row * shown.grid + inside((shown.query % shown.grid) + right));
}

/** Runs a step; a failure becomes one message in the page. */
async function guarded(step) {
  const problem = byId("problem");
  problem.hidden = true;
  try {
    await step();
  } catch (error) {
    problem.textContent = error instanceof Error ? error.message : String(error);
    problem.hidden = false;
    document.querySelector("main").setAttribute("aria-busy", "false");
  }
}

await guarded(start);
