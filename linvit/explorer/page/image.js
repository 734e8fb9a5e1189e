/** Images: from files of the user, as pixels for the network, and as the grey background of the maps. */

/**
 * A square image that the browser can draw, cut from the middle.
 *
 * @typedef {{source: HTMLImageElement, left: number, top: number, side: number}} Square
 */

const CONTRAST = 0.6; // of the grey background, so that colours stand out
const DARKEST = 50;

/** @param {Blob} file  of the user @param {string} name @returns {Promise<Square>} */
export async function fromFile(file, name) {
  const address = URL.createObjectURL(file);
  try {
    return await fromAddress(address);
  } catch {
    throw new Error(`${name} is not an image that this browser can read: choose a PNG, JPEG, WebP or GIF file.`);
  } finally {
    URL.revokeObjectURL(address);
  }
}

/** @param {string} address @returns {Promise<Square>} */
export async function fromAddress(address) {
  const source = new Image();
  source.src = address;
  await source.decode();
  const { naturalWidth: width, naturalHeight: height } = source;
  const side = Math.min(width, height);
  if (!side) throw new Error("The image has no size.");
  return { source, left: (width - side) / 2, top: (height - side) / 2, side };
}

/** The pixels, channel by channel, 3 × size × size; what is transparent becomes white. @returns {Uint8Array} */
export function pixelsOf(square, size) {
  const { data } = scaled(square, size).getImageData(0, 0, size, size);
  const area = size * size;
  const pixels = new Uint8Array(3 * area);
  for (let i = 0; i < area; i++) {
    for (let channel = 0; channel < 3; channel++) pixels[channel * area + i] = data[4 * i + channel];
  }
  return pixels;
}

/** The image in muted grey on a canvas. @returns {HTMLCanvasElement} */
export function background(square, size) {
  const context = scaled(square, size);
  const image = context.getImageData(0, 0, size, size);
  for (let i = 0; i < image.data.length; i += 4) {
    const [red, green, blue] = image.data.subarray(i, i + 3);
    image.data.fill(DARKEST + CONTRAST * (0.299 * red + 0.587 * green + 0.114 * blue), i, i + 3);
  }
  context.putImageData(image, 0, 0);
  return context.canvas;
}

/** The image on a canvas of this size; halved step by step, because browsers skip pixels in one large step. */
export function scaled({ source, left, top, side }, size) {
  let steps = Math.max(0, Math.floor(Math.log2(side / size)));
  let context = blank(size * 2 ** Math.min(steps, 3));
  let width = context.canvas.width;
  context.drawImage(source, left, top, side, side, 0, 0, width, width);
  while (width > size) {
    const smaller = blank(Math.max(size, width / 2));
    smaller.drawImage(context.canvas, 0, 0, smaller.canvas.width, smaller.canvas.width);
    context = smaller;
    width = context.canvas.width;
  }
  return context;
}

function blank(size) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = size;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingQuality = "high";
  context.fillStyle = "white";
  context.fillRect(0, 0, size, size);
  return context;
}
