// The block map: a canvas for the blocks, one above it for hover, selection, cursor and flashes.

import * as geometry from "./map-layout.js";
import {
  CACHED, FREE, GlyphPainter, PixelPainter, USED, hasGlyphs, paintDim, paintFrame, paintLabels, paintLoss,
} from "./map-paint.js";
import { shortId } from "./format.js";
import { OwnerColours, onThemeChange, readPalette } from "./palette.js";

const FLASH_MS = 1000;
const FADE_FRAME_MS = 50;
const STATE_WORDS = ["free", "cached", "used", "shared"];

/**
 * Emits on `element`: "block-hover" {block, x, y} (block -1: nothing), "block-cursor" {block}, "block-select" {block}.
 * `view` is the state to draw, see view.js. Call `stateChanged()` after it changed; drawing waits for the next frame.
 */
export class BlockMap {
  /** @param {HTMLElement} element  holds two canvases  @param {import("./view.js").View} view */
  constructor(element, view) {
    this.element = element;
    this.view = view;
    [this.canvas, this.overlay] = element.querySelectorAll("canvas");
    this.context = this.canvas.getContext("2d", { alpha: true });
    this.overlayContext = this.overlay.getContext("2d");
    this.pixels = new PixelPainter();
    this.glyphs = new GlyphPainter();
    this.owners = new OwnerColours();
    this.palette = readPalette(element);
    this.arrangement = "physical";
    this.colour = "state";
    this.hovered = -1;
    this.cursor = -1;
    this.selected = null;
    this.filter = null;
    this.flashes = new Map(); // block -> {at, isPreempted}
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.fill = new Float32Array(0);
    this.layout = null;
    this.settledCell = Infinity;
    this.size = { width: 0, height: 0 };
    this.needs = { layout: true, blocks: true, overlay: true };
    this.frame = 0;
    this.owners.reset(this.palette.isDark);
    this.#listen();
  }

  #listen() {
    // Sizes come from the observer: asking the element in every frame would make the browser lay out the page.
    new ResizeObserver(([entry]) => this.#resize(entry.contentRect)).observe(this.element);
    onThemeChange(() => {
      this.palette = readPalette(this.element);
      this.owners.reset(this.palette.isDark);
      this.#repaintAll();
    });
    this.#watchPixelRatio();
    this.element.addEventListener("pointermove", (event) => this.#hover(event));
    this.element.addEventListener("pointerleave", () => this.#setHover(-1, 0, 0));
    this.element.addEventListener("click", (event) => {
      const block = this.#blockAt(event);
      if (block >= 0) this.cursor = block;
      this.#emit("block-select", { block });
    });
    this.element.addEventListener("keydown", (event) => this.#key(event));
    this.element.addEventListener("focus", () => {
      if (this.cursor < 0 && this.layout) this.cursor = Math.max(0, this.layout.order.find((block) => block >= 0) ?? -1);
      this.#emit("block-cursor", { block: this.cursor });
      this.#request("overlay");
    });
    this.element.addEventListener("blur", () => {
      this.#setHover(-1, 0, 0);
      this.#request("overlay");
    });
  }

  #watchPixelRatio() {
    const query = matchMedia(`(resolution: ${devicePixelRatio}dppx)`);
    query.addEventListener("change", () => {
      this.#resize(this.size);
      this.#watchPixelRatio();
    }, { once: true });
  }

  #emit(name, detail) {
    this.element.dispatchEvent(new CustomEvent(name, { detail }));
  }

  // What may change -----------------------------------------------------------------------------------------------

  /** "physical" or "request". */
  setArrangement(arrangement) {
    this.arrangement = arrangement;
    this.settledCell = Infinity;
    this.glyphs.reset();
    this.#request("layout", "blocks", "overlay");
  }

  /** "state" or "owner". */
  setColour(colour) {
    this.colour = colour;
    this.#repaintAll();
  }

  /** Highlights the blocks of one sequence; null: none. */
  select(id) {
    this.selected = id;
    this.#request("overlay", "layout");
  }

  /** Dims the blocks of sequences that don't pass. @param {((row: object) => boolean)|null} matches */
  setFilter(matches) {
    this.filter = matches;
    this.#request("overlay");
  }

  /** Marks blocks that were lost just now, for a second. @param {{preempted: Set<number>, evicted: Set<number>}} lost */
  flash({ preempted, evicted }) {
    const at = performance.now();
    for (const block of evicted) this.flashes.set(block, { at, isPreempted: false });
    for (const block of preempted) this.flashes.set(block, { at, isPreempted: true });
    if (preempted.size || evicted.size) this.#request("overlay");
  }

  /** The view's blocks or rows changed. */
  stateChanged() {
    this.#request("blocks", "overlay");
    if (this.arrangement === "request") this.#request("layout");
  }

  /** Another pool or another process: start over. */
  reset() {
    this.flashes.clear();
    this.settledCell = Infinity;
    this.cursor = -1;
    this.hovered = -1;
    this.glyphs.reset();
    this.#request("layout", "blocks", "overlay");
  }

  #repaintAll() {
    this.glyphs.reset();
    this.#request("blocks", "overlay", "layout");
  }

  #resize({ width, height }) {
    this.size = { width, height };
    this.settledCell = Infinity;
    this.glyphs.reset();
    this.#request("layout", "blocks", "overlay");
  }

  #request(...what) {
    for (const name of what) this.needs[name] = true;
    if (!this.frame) this.frame = requestAnimationFrame(() => this.#draw());
  }

  // Drawing -------------------------------------------------------------------------------------------------------

  #draw() {
    this.frame = 0;
    const { view } = this;
    const dpr = devicePixelRatio;
    const width = Math.floor(this.size.width * dpr);
    const height = Math.floor(this.size.height * dpr);
    if (!view.numBlocks || width < 8 || height < 8) return;
    if (this.canvas.width !== width || this.canvas.height !== height) {
      for (const canvas of [this.canvas, this.overlay]) {
        canvas.width = width;
        canvas.height = height;
      }
      this.paintedLabels = null;
      this.glyphs.reset();
      this.needs = { layout: true, blocks: true, overlay: true };
    }
    if (this.needs.layout || this.layout === null) this.#arrange(width, height, dpr);
    if (this.needs.blocks) this.#drawBlocks(dpr);
    if (this.needs.overlay) this.#drawOverlay(dpr);
    this.needs = { layout: false, blocks: false, overlay: false };
    if (this.flashes.size) setTimeout(() => this.#request("overlay"), FADE_FRAME_MS);
  }

  #arrange(width, height, dpr) {
    const before = this.layout;
    const { view } = this;
    const inner = width - Math.ceil(5 * dpr); // room for a frame around the first and the last cell
    if (this.arrangement === "physical") {
      this.layout = geometry.physicalLayout(view.numBlocks, inner, height - Math.ceil(4 * dpr), dpr);
      this.layout.top = Math.ceil(2 * dpr);
    } else {
      this.layout = geometry.groupedLayout(
        view.numBlocks, this.#groups(), inner, height - Math.ceil(4 * dpr), dpr, this.settledCell,
      );
      this.layout.top = Math.ceil(2 * dpr);
      this.settledCell = Math.min(this.settledCell, this.layout.cell);
    }
    const { layout } = this;
    layout.left = Math.max(layout.left, Math.ceil(2 * dpr)); // room for a frame around the first cell
    if (!before || before.cell !== layout.cell || before.tall !== layout.tall || before.cols !== layout.cols || before.left !== layout.left) {
      this.glyphs.reset();
    }
    this.needs.blocks = true;
    this.needs.overlay = true;
  }

  #groups() {
    const { view } = this;
    const placed = new Uint8Array(view.numBlocks);
    const groups = [];
    for (const row of view.running()) {
      const blocks = [];
      for (const block of row.block_table ?? []) {
        if (placed[block] || view.state[block] < USED) continue;
        placed[block] = 1;
        blocks.push(block);
      }
      groups.push({ name: shortId(row.id), id: row.id, blocks });
    }
    const others = [];
    const cached = [];
    const free = [];
    for (let block = 0; block < view.numBlocks; block += 1) {
      if (placed[block]) continue;
      const state = view.state[block];
      (state === FREE ? free : state === CACHED ? cached : others).push(block);
    }
    groups.push({ name: "others", id: null, blocks: others });
    groups.push({ name: "cached", id: null, blocks: cached });
    groups.push({ name: "free", id: null, blocks: free });
    return groups;
  }

  #drawBlocks(dpr) {
    const { layout, view } = this;
    const colours = this.colour === "owner" ? this.owners : null;
    if (hasGlyphs(layout, dpr)) {
      this.#computeFill();
      const scene = { state: view.state, ref: view.ref, owner: view.owner, owners: view.owners, fill: this.fill };
      this.glyphs.paint(this.context, layout, scene, this.palette, colours, dpr);
    } else {
      this.pixels.paint(this.context, layout, view, this.palette, colours);
    }
    const labels = layout.labels.map((label) => label.text).join();
    const key = `${labels} ${this.selected} ${layout.left} ${layout.tall} ${this.palette.ink} ${this.canvas.width} ${this.canvas.height}`;
    if (key === this.paintedLabels) return;
    this.paintedLabels = key;
    paintLabels(this.context, layout, this.palette, dpr, this.selected);
  }

  /** How much of each block is computed, from the tables of the running sequences. */
  #computeFill() {
    const { view } = this;
    if (this.fill.length !== view.numBlocks) this.fill = new Float32Array(view.numBlocks);
    this.fill.fill(1);
    for (const row of view.running()) {
      const table = row.block_table ?? [];
      for (let i = Math.floor(row.num_computed_tokens / view.blockSize); i < table.length; i += 1) {
        const part = row.num_computed_tokens / view.blockSize - i;
        this.fill[table[i]] = Math.min(1, Math.max(0, part));
      }
    }
  }

  #drawOverlay(dpr) {
    const { overlayContext: context, layout, view, palette } = this;
    context.clearRect(0, 0, this.overlay.width, this.overlay.height);
    const keep = this.#highlighted();
    if (keep) paintDim(context, layout, keep, palette);
    const now = performance.now();
    for (const [block, { at, isPreempted }] of this.flashes) {
      const left = 1 - (now - at) / FLASH_MS;
      const position = layout.place[block];
      if (left <= 0 || position === undefined) this.flashes.delete(block);
      else if (position >= 0) paintLoss(context, layout, position, palette, dpr, this.still.matches ? 1 : left, isPreempted);
    }
    if (this.hovered >= 0 && layout.place[this.hovered] >= 0) {
      paintFrame(context, layout, layout.place[this.hovered], palette, dpr, false);
    }
    if (document.activeElement === this.element && this.cursor >= 0 && layout.place[this.cursor] >= 0) {
      paintFrame(context, layout, layout.place[this.cursor], palette, dpr, true);
    }
  }

  #highlighted() {
    const { view } = this;
    if (this.selected !== null) return view.row(this.selected)?.block_table ?? [];
    if (this.filter === null) return null;
    const keep = [];
    for (const row of view.running()) if (this.filter(row)) keep.push(...(row.block_table ?? []));
    return keep;
  }

  // Pointer and keyboard ------------------------------------------------------------------------------------------

  #blockAt(event) {
    if (!this.layout) return -1;
    const box = this.element.getBoundingClientRect();
    const dpr = devicePixelRatio;
    const position = geometry.positionAt(
      this.layout, (event.clientX - box.left) * dpr, (event.clientY - box.top) * dpr,
    );
    return position < 0 ? -1 : (this.layout.order[position] ?? -1);
  }

  #hover(event) {
    this.#setHover(this.#blockAt(event), event.clientX, event.clientY);
  }

  #setHover(block, x, y) {
    if (block !== this.hovered) {
      this.hovered = block;
      this.#request("overlay");
    }
    this.#emit("block-hover", { block, x, y });
  }

  #key(event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const { layout } = this;
    if (!layout || event.altKey || event.ctrlKey || event.metaKey) return;
    let position = Math.max(0, layout.place[Math.max(0, this.cursor)]);
    if (moves[event.key]) position = geometry.neighbour(layout, position, ...moves[event.key]);
    else if (event.key === "Home") position = layout.order.findIndex((block) => block >= 0);
    else if (event.key === "End") position = layout.order.findLastIndex((block) => block >= 0);
    else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.#emit("block-select", { block: this.cursor });
      return;
    } else return;
    event.preventDefault();
    this.cursor = layout.order[position];
    this.#emit("block-cursor", { block: this.cursor });
    this.#request("overlay");
  }

  /** Middle of a block on the screen, for a tooltip; null when it is not drawn. */
  pointOf(block) {
    const position = this.layout?.place[block] ?? -1;
    if (position < 0) return null;
    const [x, y] = geometry.cornerOf(this.layout, position);
    const box = this.element.getBoundingClientRect();
    const { cell, tall } = this.layout;
    return { x: box.left + (x + cell / 2) / devicePixelRatio, y: box.top + (y + tall / 2) / devicePixelRatio };
  }
}

/** A block in words: the tooltip, the keyboard cursor and the table view say the same. */
export function describeBlock(view, block, known = null) {
  const state = view.state[block];
  const owners = known ?? (state >= USED ? view.ownersOf(block) : []);
  return {
    block,
    state: STATE_WORDS[state],
    refs: view.ref[block],
    owners: owners.map(({ id, index, row }) => ({
      id,
      first: index * view.blockSize,
      last: (index + 1) * view.blockSize - 1,
      computed: Math.max(0, Math.min(view.blockSize, row.num_computed_tokens - index * view.blockSize)),
    })),
  };
}

/** The same as one sentence. */
export function blockSentence(view, block) {
  const { state, refs, owners } = describeBlock(view, block);
  const held = owners.map((o) => `${shortId(o.id)} tokens ${o.first} to ${o.last}`);
  const by = held.length ? `, held by ${held.slice(0, 4).join("; ")}${held.length > 4 ? ` and ${held.length - 4} more` : ""}` : "";
  return `Block ${block}: ${state}${refs > 1 ? `, ${refs} references` : ""}${by}`;
}
