// Paints the blocks. Small cells: one pixel per block in an ImageData, scaled without smoothing. Large cells: a glyph
// per block, painted again only where it changed.

import { shortId } from "./format.js";
import { cornerOf } from "./map-layout.js";

export const FREE = 0;
export const CACHED = 1;
export const USED = 2;
export const SHARED = 3;

const GLYPH_CSS = 11; // cells of this edge and more get glyphs
const TEXT_CSS = 31; // of this one, without its gap, their block id, which makes labels at the side superfluous
const OWNER_CSS = 48; // and of this one the beginning of their owner's id

/** Whether the cells of a layout are large enough for glyphs. */
export function hasGlyphs(layout, dpr) {
  return layout.cell >= GLYPH_CSS * dpr;
}

/**
 * What a painter reads.
 * @typedef {object} Scene
 * @property {Uint8Array} state
 * @property {ArrayLike<number>} ref
 * @property {Int32Array} owner           index into `owners` of the first owner of each block, -1 if none
 * @property {string[]} owners
 * @property {Float32Array} fill          part of the block that is computed, 0..1 (large cells only)
 */

export class PixelPainter {
  constructor() {
    this.canvas = document.createElement("canvas");
    this.context = this.canvas.getContext("2d");
    this.image = null;
  }

  /** Paints all blocks of `scene` on `target`. */
  paint(target, layout, scene, palette, colours) {
    const { cols, rows, order } = layout;
    if (this.image === null || this.canvas.width !== cols || this.canvas.height !== rows) {
      this.canvas.width = cols;
      this.canvas.height = rows;
      this.image = this.context.createImageData(cols, rows);
    }
    const words = new Uint32Array(this.image.data.buffer);
    const { pixels } = palette;
    const { state, owner, owners } = scene;
    for (let p = 0; p < order.length; p += 1) {
      const block = order[p];
      if (block < 0) words[p] = 0;
      else if (colours !== null && owner[block] >= 0) words[p] = colours.word(owners[owner[block]]);
      else words[p] = pixels[state[block]];
    }
    this.context.putImageData(this.image, 0, 0);
    target.imageSmoothingEnabled = false;
    target.clearRect(layout.left, 0, target.canvas.width - layout.left, target.canvas.height);
    target.drawImage(this.canvas, layout.left, layout.top, cols * layout.cell, rows * layout.tall);
    if (layout.gap > 0) paintGaps(target, layout, palette);
  }
}

function paintGaps(target, layout, palette) {
  const { cols, rows, cell, gap, left, top } = layout;
  target.fillStyle = palette.background;
  for (let c = 1; c <= cols; c += 1) target.fillRect(left + c * cell - gap, top, gap, rows * cell);
  for (let r = 1; r <= rows; r += 1) target.fillRect(left, top + r * cell - gap, cols * cell, gap);
}

export class GlyphPainter {
  constructor() {
    this.painted = [];
  }

  /** Forgets what was painted; the next paint starts from an empty canvas. */
  reset() {
    this.painted = [];
  }

  paint(target, layout, scene, palette, colours, dpr) {
    const { order } = layout;
    if (this.painted.length !== order.length) {
      this.painted = new Array(order.length).fill("");
      target.clearRect(layout.left, 0, target.canvas.width - layout.left, target.canvas.height);
    }
    for (let p = 0; p < order.length; p += 1) {
      const block = order[p];
      const key = block < 0 ? "" : glyphKey(block, scene, layout.cell, colours);
      if (this.painted[p] === key) continue;
      this.painted[p] = key;
      const [x, y] = cornerOf(layout, p);
      target.clearRect(x, y, layout.cell, layout.cell);
      if (block >= 0) paintGlyph(target, block, x, y, layout.cell - layout.gap, scene, palette, colours, dpr);
    }
  }
}

function glyphKey(block, scene, cell, colours) {
  const state = scene.state[block];
  if (state < USED) return `${block} ${state}`;
  const fill = Math.round(scene.fill[block] * cell);
  const owner = colours || cell >= OWNER_CSS ? scene.owners[scene.owner[block]] : "";
  return `${block} ${state} ${fill} ${state === SHARED ? scene.ref[block] : ""} ${owner}`;
}

function paintGlyph(target, block, x, y, edge, scene, palette, colours, dpr) {
  const state = scene.state[block];
  const isByOwner = colours !== null && scene.owner[block] >= 0;
  const color = isByOwner ? colours.of(scene.owners[scene.owner[block]]) : palette.state[state];
  if (state === CACHED) {
    const stroke = Math.max(1, Math.round(edge / 9));
    target.strokeStyle = color;
    target.lineWidth = stroke;
    target.strokeRect(x + stroke / 2, y + stroke / 2, edge - stroke, edge - stroke);
  } else if (state === USED) {
    // The part that isn't computed yet stays pale: the tail of a sequence, and a prompt that is still being read.
    const height = Math.round(edge * scene.fill[block]);
    target.globalAlpha = 0.3;
    target.fillStyle = color;
    target.fillRect(x, y, edge, edge - height);
    target.globalAlpha = 1;
    target.fillRect(x, y + edge - height, edge, height);
  } else {
    target.fillStyle = color;
    target.fillRect(x, y, edge, edge);
  }
  if (state === SHARED) paintDots(target, x, y, edge, palette.onShared);
  if (edge >= TEXT_CSS * dpr) paintText(target, block, x, y, edge, scene, palette, state, dpr);
}

function paintDots(target, x, y, edge, color) {
  const radius = Math.max(1, edge * 0.09);
  target.fillStyle = color;
  for (const part of [0.34, 0.66]) {
    target.beginPath();
    target.arc(x + edge * part, y + edge / 2, radius, 0, 7);
    target.fill();
  }
}

function paintText(target, block, x, y, edge, scene, palette, state, dpr) {
  const fill = state === USED ? scene.fill[block] : 1;
  const inset = state === CACHED ? Math.round(edge / 9) + 3 * dpr : 4 * dpr;
  const onColour = state === SHARED ? palette.onShared : palette.onUsed;
  target.font = `${Math.round(10 * dpr)}px system-ui, sans-serif`;
  target.textBaseline = "top";
  target.textAlign = "left";
  target.fillStyle = state < USED ? palette.muted : fill > 0.93 ? onColour : palette.ink;
  target.fillText(String(block), x + inset, y + inset);
  if (state < USED) return;
  target.textBaseline = "bottom";
  const bottom = y + edge - 3 * dpr;
  if (edge >= OWNER_CSS * dpr && scene.owner[block] >= 0) {
    target.fillStyle = fill > 0.3 ? onColour : palette.ink;
    target.fillText(shortId(scene.owners[scene.owner[block]]).slice(0, 4), x + inset, bottom);
  }
  if (state === SHARED) {
    target.textAlign = "right";
    target.fillStyle = onColour;
    target.fillText(`×${scene.ref[block]}`, x + edge - 4 * dpr, bottom);
  }
}

/** Ids of the first block of a row, or names of groups, to the left of the cells. */
export function paintLabels(target, layout, palette, dpr, selected) {
  target.clearRect(0, 0, layout.left, target.canvas.height);
  if (!layout.labels.length || layout.left === 0) return;
  target.textBaseline = "middle";
  for (const { row, text, id } of layout.labels) {
    const strong = id !== null && id === selected;
    target.font = `${strong ? "600 " : ""}${Math.round((id === null ? 10 : 11) * dpr)}px system-ui, sans-serif`;
    target.fillStyle = strong || id !== null ? palette.ink : palette.muted;
    target.textAlign = id === null ? "right" : "left";
    const y = Math.max(6 * dpr, layout.top + row * layout.tall + (layout.tall - layout.gap) / 2);
    target.fillText(text, id === null ? layout.left - 6 * dpr : 0, y, layout.left - 6 * dpr);
  }
}

/** Dims everything but the blocks of `keep`. */
export function paintDim(target, layout, keep, palette) {
  target.globalAlpha = 0.72;
  target.fillStyle = palette.background;
  target.fillRect(layout.left, layout.top, layout.cols * layout.cell, layout.rows * layout.tall);
  target.globalAlpha = 1;
  for (const block of keep) {
    const position = layout.place[block];
    if (position === undefined || position < 0) continue;
    const [x, y] = cornerOf(layout, position);
    target.clearRect(x, y, layout.cell, layout.tall);
  }
}

/** A frame around one cell that is visible on every state colour. */
export function paintFrame(target, layout, position, palette, dpr, isCursor) {
  const [x, y] = cornerOf(layout, position);
  const edge = layout.cell - layout.gap;
  const tall = layout.tall - layout.gap;
  const width = Math.max(1, Math.round((isCursor ? 2 : 1.5) * dpr));
  for (const [color, line] of [[palette.background, width * 3], [isCursor ? palette.accent : palette.ink, width]]) {
    target.lineWidth = line;
    target.strokeStyle = color;
    target.strokeRect(x - width / 2, y - width / 2, edge + width, tall + width);
  }
}

/**
 * A mark over a block that lost its content just now; `strength` fades from 1 to 0. A preemption is a cross in a frame;
 * an eviction, which is the daily business of a full prefix cache, is one stroke.
 */
export function paintLoss(target, layout, position, palette, dpr, strength, isPreempted) {
  const [x, y] = cornerOf(layout, position);
  const edge = layout.cell - layout.gap;
  target.globalAlpha = Math.min(1, strength * 1.6);
  if (edge < GLYPH_CSS * dpr) {
    target.fillStyle = palette.preempted;
    target.fillRect(x, y, edge, isPreempted ? layout.tall - layout.gap : Math.max(1, edge >> 1));
  } else {
    const inset = edge * (isPreempted ? 0.22 : 0.3);
    target.lineCap = "round";
    for (const [color, width] of [[palette.background, isPreempted ? 0.26 : 0.16], [palette.preempted, isPreempted ? 0.13 : 0.07]]) {
      target.strokeStyle = color;
      target.lineWidth = Math.max(1.5 * dpr, edge * width);
      target.beginPath();
      if (isPreempted) {
        target.moveTo(x + inset, y + inset);
        target.lineTo(x + edge - inset, y + edge - inset);
      }
      target.moveTo(x + edge - inset, y + inset);
      target.lineTo(x + inset, y + edge - inset);
      target.stroke();
    }
    if (isPreempted) {
      target.strokeStyle = palette.preempted;
      target.lineWidth = Math.max(1, 2 * dpr);
      target.strokeRect(x + dpr, y + dpr, edge - 2 * dpr, edge - 2 * dpr);
    }
  }
  target.globalAlpha = 1;
}
