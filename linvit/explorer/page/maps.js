/** Score maps: one row or column of a score matrix over the image. */

const POSITIVE = [255, 122, 0]; // orange and blue differ for every kind of colour blindness
const NEGATIVE = [47, 123, 255];
const STRONGEST = 0.92; // opacity

/**
 * Draws scores over the grey image: the stronger the colour, the larger |score| / largest.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {HTMLCanvasElement} image
 * @param {Float64Array} scores  in row-major order of a square grid
 * @param {number} largest  the score of full colour
 * @param {number} query  index of the patch that is outlined
 */
export function drawMap(canvas, image, scores, largest, query) {
  const context = canvas.getContext("2d");
  const grid = Math.round(Math.sqrt(scores.length));
  context.imageSmoothingEnabled = true;
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  context.imageSmoothingEnabled = false;
  context.drawImage(colours(scores, grid, largest), 0, 0, canvas.width, canvas.height);
  outline(context, query, grid);
}

/** Draws the image itself with the chosen patch. */
export function drawImage(canvas, image, query, grid, held) {
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  outline(context, query, grid, held);
}

/** One pixel per score. */
function colours(scores, grid, largest) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = grid;
  const context = canvas.getContext("2d");
  const image = context.createImageData(grid, grid);
  scores.forEach((score, i) => {
    const opacity = largest > 0 ? Math.min(1, Math.abs(score) / largest) : 0;
    image.data.set([...(score < 0 ? NEGATIVE : POSITIVE), 255 * STRONGEST * opacity], 4 * i);
  });
  context.putImageData(image, 0, 0);
  return canvas;
}

/** White in black, to be seen on every image; thicker if the patch is held. */
function outline(context, place, grid, held = false) {
  const side = context.canvas.width / grid;
  const margin = Math.max(0, (12 - side) / 2); // small patches get a larger frame
  const [left, top] = [(place % grid) * side - margin, Math.floor(place / grid) * side - margin];
  for (const [width, colour] of [[held ? 11 : 7, "black"], [held ? 6 : 3, "white"]]) {
    context.lineWidth = width;
    context.strokeStyle = colour;
    context.strokeRect(left, top, side + 2 * margin, side + 2 * margin);
  }
}
