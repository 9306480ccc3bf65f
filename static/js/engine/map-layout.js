// Where each block stands on the map. Pure geometry in device pixels; nothing here knows a canvas.

/**
 * @typedef {object} Layout
 * @property {number} cell      edge of a cell with its gap
 * @property {number} gap       pixels left free at the right and the bottom of a cell
 * @property {number} cols
 * @property {number} rows
 * @property {number} left      where the cells begin (labels stand to the left)
 * @property {number} top
 * @property {Int32Array} order   position -> block id, -1 where nothing stands
 * @property {Int32Array} place   block id -> position
 * @property {{row: number, text: string, id: string|null}[]} labels
 */

const MAX_CELL_CSS = 72;
const NUMBERED_CSS = 34; // cells of this edge and more carry their block id themselves

/** The largest whole cell with which `n` cells fit into width x height; at least 1. */
export function largestCell(n, width, height, maxCell) {
  let low = 1;
  let high = Math.max(1, Math.min(maxCell, width, height));
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (Math.floor(width / middle) * Math.floor(height / middle) >= n) low = middle;
    else high = middle - 1;
  }
  return low;
}

function gapFor(cell, dpr) {
  const css = cell / dpr;
  if (css >= 24) return Math.round(2 * dpr);
  return css >= 4 ? Math.max(1, Math.round(dpr)) : 0;
}

function rowLabels(cols, rows, cell, dpr, numBlocks) {
  const every = Math.max(1, Math.ceil((14 * dpr) / cell));
  const labels = [];
  for (let row = 0; row < rows; row += every) {
    if (row * cols < numBlocks) labels.push({ row, text: String(row * cols), id: null });
  }
  return labels;
}

/**
 * Blocks in the order of their ids.
 * @returns {Layout}
 */
export function physicalLayout(numBlocks, width, height, dpr) {
  let left = 0;
  let free = width;
  const maxCell = Math.round(MAX_CELL_CSS * dpr);
  let cell = largestCell(numBlocks, width, height, maxCell);
  if (cell < NUMBERED_CSS * dpr) {
    left = Math.round((12 + 6.5 * String(Math.max(0, numBlocks - 1)).length) * dpr);
    free = Math.max(1, width - left);
    cell = largestCell(numBlocks, free, height, Math.min(maxCell, cell));
  }
  let cols = Math.max(1, Math.floor(free / cell));
  // Rows of 8, 16, 32 ... are easy to count along, when that still fits at this size.
  for (const nice of [64, 32, 16, 8]) {
    const rounded = Math.floor(cols / nice) * nice;
    if (rounded > 0 && Math.ceil(numBlocks / rounded) * cell <= height) {
      cols = rounded;
      break;
    }
  }
  const rows = Math.max(1, Math.ceil(numBlocks / cols));
  const order = new Int32Array(rows * cols).fill(-1);
  const place = new Int32Array(numBlocks);
  for (let id = 0; id < numBlocks; id += 1) {
    order[id] = id;
    place[id] = id;
  }
  const labels = left > 0 ? rowLabels(cols, rows, cell, dpr, numBlocks) : [];
  return { cell, gap: gapFor(cell, dpr), cols, rows, left, top: 0, order, place, labels };
}

/**
 * Blocks grouped: each running sequence in the order of its block table, then cached, then free. A block that several
 * sequences refer to stands once, with the first of them. Groups begin on a new row with a label while there is room,
 * else they follow each other with one cell between.
 *
 * @param {{name: string, id: string|null, blocks: number[]}[]} groups
 * @param {number} maxCell  upper bound for the cell, so that the map doesn't grow and shrink while it is watched
 * @returns {Layout}
 */
export function groupedLayout(numBlocks, groups, width, height, dpr, maxCell) {
  const left = Math.round(92 * dpr);
  const free = Math.max(1, width - left);
  const filled = groups.filter((group) => group.blocks.length > 0);
  const least = Math.round(10 * dpr);
  for (let cell = Math.min(maxCell, Math.round(MAX_CELL_CSS * dpr)); cell >= least; cell -= Math.max(1, cell >> 4)) {
    const cols = Math.floor(free / cell);
    if (cols < 1) continue;
    let rows = 0;
    for (const group of filled) rows += Math.ceil(group.blocks.length / cols);
    if (rows * cell <= height) return placeRows(numBlocks, filled, cell, cols, rows, left, dpr);
  }
  return placePacked(numBlocks, filled, width, height, dpr, maxCell);
}

function placeRows(numBlocks, groups, cell, cols, rows, left, dpr) {
  const order = new Int32Array(rows * cols).fill(-1);
  const place = new Int32Array(numBlocks).fill(-1);
  const labels = [];
  let row = 0;
  for (const group of groups) {
    labels.push({ row, text: group.name, id: group.id });
    group.blocks.forEach((block, i) => {
      order[row * cols + i] = block;
      place[block] = row * cols + i;
    });
    row += Math.ceil(group.blocks.length / cols);
  }
  return { cell, gap: gapFor(cell, dpr), cols, rows, left, top: 0, order, place, labels };
}

function placePacked(numBlocks, groups, width, height, dpr, maxCell) {
  const total = numBlocks + groups.length;
  const cell = largestCell(total, width, height, maxCell);
  const cols = Math.max(1, Math.floor(width / cell));
  const rows = Math.max(1, Math.ceil(total / cols));
  const order = new Int32Array(rows * cols).fill(-1);
  const place = new Int32Array(numBlocks).fill(-1);
  let position = 0;
  for (const group of groups) {
    for (const block of group.blocks) {
      order[position] = block;
      place[block] = position;
      position += 1;
    }
    position += 1;
  }
  return { cell, gap: gapFor(cell, dpr), cols, rows, left: 0, top: 0, order, place, labels: [] };
}

/** The position under a point in device pixels, -1 if none. */
export function positionAt(layout, x, y) {
  const col = Math.floor((x - layout.left) / layout.cell);
  const row = Math.floor((y - layout.top) / layout.cell);
  if (col < 0 || row < 0 || col >= layout.cols || row >= layout.rows) return -1;
  return row * layout.cols + col;
}

/** Upper left corner of a position in device pixels. */
export function cornerOf(layout, position) {
  return [
    layout.left + (position % layout.cols) * layout.cell,
    layout.top + Math.floor(position / layout.cols) * layout.cell,
  ];
}

/** The next position with a block from `position` in direction (dx, dy); the same one at an edge. */
export function neighbour(layout, position, dx, dy) {
  const { order, cols } = layout;
  if (dx) {
    for (let p = position + dx; p >= 0 && p < order.length; p += dx) if (order[p] >= 0) return p;
    return position;
  }
  for (let p = position + dy * cols; p >= 0 && p < order.length; p += dy * cols) {
    if (order[p] >= 0) return p;
    // A short row: the nearest block to the left on it.
    for (let q = p; q >= p - (p % cols); q -= 1) if (order[q] >= 0) return q;
  }
  return position;
}
