/** The panel of singular values: a worker computes them, so that the page keeps answering. */

import { LABELS, lineChart } from "./charts.js";
import { byId, fillTable } from "./elements.js";
import { rankMeasures } from "./spectrum.js";

const PATIENCE = 250; // milliseconds without a change, so that a slider does not start a computation at every step
const SMALLEST = 1e-6;

export class Ranks {
  constructor() {
    this.worker = null;
    this.results = {};
    this.request = null;
    this.later = 0;
  }

  /** Measures and draws; a call replaces those before it. See spectrum_worker.js for the request. */
  measure(request) {
    clearTimeout(this.later);
    this.later = setTimeout(() => this.start(request), PATIENCE);
  }

  start(request) {
    this.worker?.terminate();
    const known = this.request && sameBut(this.request, request) ? this.results : {};
    this.results = {};
    const wanted = {};
    for (const [name, axes] of Object.entries(request.mechanisms)) {
      const same = known[name] && JSON.stringify(axes) === JSON.stringify(this.request.mechanisms[name]);
      if (same) this.results[name] = known[name];
      else wanted[name] = axes;
    }
    this.request = request;
    this.worker = new Worker(new URL("./spectrum_worker.js", import.meta.url), { type: "module" });
    this.worker.onmessage = ({ data: { name, ...result } }) => {
      this.results[name] = result;
      this.draw();
    };
    this.worker.postMessage({ ...request, mechanisms: wanted });
    this.draw();
  }

  draw() {
    const order = Object.keys(this.request.mechanisms).filter((name) => name in this.results);
    const longest = Math.max(2, ...order.map((name) => this.results[name].values.length));
    const x = { label: "number of the singular value", from: 1, to: longest, ticks: ticks(longest), log: true };
    const y = { label: "σ / largest σ", from: SMALLEST, to: 1, ticks: [1, 1e-2, 1e-4, 1e-6], log: true, format: power };
    const series = order.map((name) => ({ name, points: points(this.results[name].values) }));
    lineChart(byId("spectrum-chart"), "Singular values by mechanism, largest first", x, y, series);
    const rows = order.map((name) => {
      const { rank, effective } = rankMeasures(this.results[name].values);
      return [LABELS[name], String(rank), effective.toFixed(1)];
    });
    fillTable(byId("ranks"), [["", "rank", "effective rank"], ...rows], "Ranks by mechanism");
    byId("rank-note").textContent = note(this.request, this.results[order[0]]);
  }
}

const sameBut = (a, b) =>
  a.heads.length === b.heads.length &&
  a.heads.every((head, i) => head === b.heads[i]) &&
  a.of === b.of &&
  a.magnitude === b.magnitude &&
  (a.rotary === null) === (b.rotary === null);

const power = (x) => (x === 1 ? "1" : `10${"⁰¹²³⁴⁵⁶⁷⁸⁹"[-Math.round(Math.log10(x))].padStart(2, "⁻")}`);
const ticks = (longest) => [1, 4, 16, 64, 256].filter((tick) => tick <= longest);

/** σ/σ₁ until it is too small to be shown. */
function points(values) {
  const shown = Array.from(values, (value, i) => [i + 1, values[0] > 0 ? value / values[0] : 0]);
  const end = shown.findIndex(([, share]) => share < SMALLEST);
  return end < 0 ? shown : shown.slice(0, end + 1);
}

function note({ of, heads }, result) {
  const measure = "Rank: singular values above a thousandth of the largest. Effective rank: e to the entropy of σ/Σσ.";
  if (!result) return "Computing …";
  const several = heads.length > 1;
  if (of === "state") {
    const which = several ? " of the first head" : "";
    return `${measure} The state${which} is Σ α Rκ(k) ⊗ v, ${result.rows} × ${result.columns} numbers; softmax has none.`;
  }
  const rows = result.rows < result.columns ? `${result.rows} evenly chosen rows of the` : "The";
  const which = several ? "mean matrix of the heads" : "matrix of this head";
  return `${measure} ${rows} ${which}, ${result.rows} × ${result.columns}, with the query’s magnitude as set above.`;
}
