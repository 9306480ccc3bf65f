// Where each block stands on the map. Pure geometry in device pixels; nothing here knows a canvas.

/**
 * @typedef {object} Layout
 * @property {number} cell      width of a cell with its gap
 * @property {number} tall      height of a cell with its gap; more than the width only where cells are tiny
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
const TINY_CSS = 4;

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

function rowLabels(cols, rows, tall, dpr, numBlocks) {
  const every = Math.max(1, Math.ceil((18 * dpr) / tall));
  const labels = [];
  for (let row = 0; row < rows; row += every) {
    if (row * cols < numBlocks) labels.push({ row, text: (row * cols).toLocaleString("en-US"), id: null });
  }
  return labels;
}

/** Tiny cells may be taller than wide, so that the map fills its place. */
function tallness(cell, rows, height, dpr) {
  if (cell >= TINY_CSS * dpr) return cell;
  return Math.max(cell, Math.min(cell * 2, Math.floor(height / rows)));
}

/** Columns and cell: rows of 16, 32, 64 ... blocks are easy to count along, if that costs little of the size. */
function roundColumns(numBlocks, width, height, largest, dpr) {
  const rounds = largest < TINY_CSS * dpr ? [16, 8] : [64, 32, 16];
  for (let cell = largest; cell >= Math.max(1, largest * 0.84); cell -= 1) {
    for (const nice of rounds) {
      const cols = Math.floor(Math.floor(width / cell) / nice) * nice;
      if (cols > 0 && Math.ceil(numBlocks / cols) * cell <= height) return { cell, cols };
    }
  }
  return { cell: largest, cols: Math.max(1, Math.floor(width / largest)) };
}

/**
 * Blocks in the order of their ids.
 * @returns {Layout}
 */
export function physicalLayout(numBlocks, width, height, dpr) {
  const maxCell = Math.round(MAX_CELL_CSS * dpr);
  let left = 0;
  let cell = largestCell(numBlocks, width, height, maxCell);
  let cols = Math.max(1, Math.floor(width / cell));
  if (cell < NUMBERED_CSS * dpr) {
    left = Math.round((12 + 7 * numBlocks.toLocaleString("en-US").length) * dpr);
    const free = Math.max(1, width - left);
    ({ cell, cols } = roundColumns(numBlocks, free, height, largestCell(numBlocks, free, height, cell), dpr));
  }
  const rows = Math.max(1, Math.ceil(numBlocks / cols));
  const tall = tallness(cell, rows, height, dpr);
  const order = new Int32Array(rows * cols).fill(-1);
  const place = new Int32Array(numBlocks);
  for (let id = 0; id < numBlocks; id += 1) {
    order[id] = id;
    place[id] = id;
  }
  const labels = left > 0 ? rowLabels(cols, rows, tall, dpr, numBlocks) : [];
  return { cell, tall, gap: gapFor(cell, dpr), cols, rows, left, top: 0, order, place, labels };
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
  return { cell, tall: cell, gap: gapFor(cell, dpr), cols, rows, left, top: 0, order, place, labels };
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
  const tall = tallness(cell, rows, height, dpr);
  return { cell, tall, gap: gapFor(cell, dpr), cols, rows, left: 0, top: 0, order, place, labels: [] };
}

/** The position under a point in device pixels, -1 if none. */
export function positionAt(layout, x, y) {
  const col = Math.floor((x - layout.left) / layout.cell);
  const row = Math.floor((y - layout.top) / layout.tall);
  if (col < 0 || row < 0 || col >= layout.cols || row >= layout.rows) return -1;
  return row * layout.cols + col;
}

/** Upper left corner of a position in device pixels. */
export function cornerOf(layout, position) {
  return [
    layout.left + (position % layout.cols) * layout.cell,
    layout.top + Math.floor(position / layout.cols) * layout.tall,
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
