"use strict";

/** The number at the start of a cell such as "91.24 ± 0.35", "1,797", "< 0.001" or "2.41 M"; NaN for words. */
function numberIn(text) {
  const match = text.replaceAll(",", "").match(/^[<≤\s]*([-+−]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)\s*([kMG]?)/i);
  const factors = { k: 1e3, M: 1e6, G: 1e9 };
  return match ? Number(match[1].replace("−", "-")) * (factors[match[2]] ?? 1) : NaN;
}

/** Numbers by size, words by alphabet, words after numbers. */
function compare(first, second) {
  const [a, b] = [numberIn(first), numberIn(second)];
  if (Number.isNaN(a) && Number.isNaN(b)) return first.localeCompare(second);
  return (Number.isNaN(a) ? 1 : 0) - (Number.isNaN(b) ? 1 : 0) || a - b;
}

function sortBy(table, column, head) {
  const ascending = head.getAttribute("aria-sort") !== "ascending";
  const rows = [...table.tBodies[0].rows];
  const text = (row) => row.cells[column].textContent;
  rows.sort((a, b) => (ascending ? 1 : -1) * compare(text(a), text(b)));
  table.tBodies[0].append(...rows);
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
}

for (const table of document.querySelectorAll("table.sorts")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    button.addEventListener("click", () => sortBy(table, column, head));
    head.replaceChildren(button);
  });
}
