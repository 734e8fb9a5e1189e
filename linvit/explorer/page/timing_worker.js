/** Measures both attentions at growing numbers of tokens and posts each time as soon as it is known. */

import { linearAttention, milliseconds, randomTokens, softmaxAttention } from "./timing.js";

const SIDES = [32, 64, 96, 128, 192, 256, 384, 512, 768, 1024]; // of square images, in pixels
const STRIDE = 4; // pixels per token
const LONGEST = 300; // milliseconds: the next size takes up to five times as long

const attentions = { softmax: softmaxAttention, linear: linearAttention };
for (const side of SIDES) {
  const tokens = (side / STRIDE) ** 2;
  const inputs = [1, 2, 3].map(() => randomTokens(tokens));
  for (const [name, attention] of Object.entries(attentions)) {
    const time = milliseconds(() => attention(...inputs));
    postMessage({ name, side, tokens, time });
    if (time > LONGEST) delete attentions[name];
  }
}
postMessage({ done: true });
