/** The panel that measures time against resolution. */

import { LABELS, lineChart } from "./charts.js";
import { byId, fillTable } from "./elements.js";

const X = { label: "side of the image in pixels", from: 32, to: 1024, ticks: [32, 64, 128, 256, 512, 1024], log: true };
const Y = { label: "milliseconds", from: 0.01, to: 1e4, ticks: [0.01, 1, 100, 10000], log: true };

export function prepareTiming() {
  byId("measure").addEventListener("click", measure);
}

function measure() {
  const times = { softmax: [], linear: [] };
  const worker = new Worker(new URL("./timing_worker.js", import.meta.url), { type: "module" });
  byId("measure").disabled = true;
  byId("measuring").textContent = "Measuring …";
  worker.onmessage = ({ data: { done, name, side, tokens, time } }) => {
    if (done) {
      worker.terminate();
      byId("measure").disabled = false;
      byId("measuring").textContent = "Done.";
      return;
    }
    times[name].push({ side, tokens, time });
    show(times);
  };
}

function show(times) {
  const series = Object.entries(times).map(([name, rows]) => ({ name, points: rows.map(({ side, time }) => [side, time]) }));
  lineChart(byId("time-chart"), "Milliseconds of one attention against the side of the image", X, Y, series, { dots: true });
  const cell = (name, i) => (times[name][i] ? `${Number(times[name][i].time.toPrecision(2))} ms` : "–");
  const rows = times.linear.map(({ side, tokens }, i) => [`${side} px`, String(tokens), cell("softmax", i), cell("linear", i)]);
  fillTable(byId("times"), [["image", "patches", LABELS.softmax, LABELS.linear], ...rows], "Times by resolution");
}
