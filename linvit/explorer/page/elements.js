/** Small helpers to make elements; text is always set as text, never as HTML. */

const SVG = "http://www.w3.org/2000/svg";

/** The element with this id. @param {string} id @returns {any} */
export const byId = (id) => document.getElementById(id);

/** @param {string} tag @param {Record<string, string | number>} attributes @param {...(Node | string)} children */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function drawn(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** Options of a select, which keeps its value if there still is such an option. */
export function fill(select, options) {
  const before = select.value;
  select.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
  if (options.some(([value]) => String(value) === before)) select.value = before;
}

/** A table of rows of text, the first of them headings. @param {HTMLTableElement} table @param {string[][]} rows */
export function fillTable(table, [headings, ...rows], caption) {
  const cells = (tag, row, attributes) => element("tr", {}, ...row.map((text) => element(tag, attributes, text)));
  table.replaceChildren(
    element("caption", { class: "unseen" }, caption),
    element("thead", {}, cells("th", headings, { scope: "col" })),
    element("tbody", {}, ...rows.map((row) => cells("td", row, {}))),
  );
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  made.append(...children);
  return made;
}
