// What this page draws: the stream's folded state, and what changed in it since the last frame.

import { engineStream } from "../stream.js";

const CACHED = 1;
const USED = 2;

/** Read-only access by name to `engineStream.state`; nothing is copied. */
export class View {
  get raw() {
    return engineStream.state;
  }

  get numBlocks() {
    return this.raw.blocks.state.length;
  }

  get blockSize() {
    return this.raw.kv?.block_size ?? 16;
  }

  /** By block id: 0 free, 1 cached, 2 used, 3 shared. */
  get state() {
    return this.raw.blocks.state;
  }

  get ref() {
    return this.raw.blocks.ref;
  }

  /** By block id: index into `owners`, or -1. */
  get owner() {
    return this.raw.blocks.owner;
  }

  get owners() {
    return this.raw.blocks.owners;
  }

  row(id) {
    return this.raw.rows.get(id);
  }

  /** Rows in the order of admission. */
  running() {
    return this.#rows(this.raw.running);
  }

  /** Rows in the order of the queue; the first ones only when it is long, see `waitingTotal`. */
  waiting() {
    return this.#rows(this.raw.waiting);
  }

  #rows(ids) {
    const rows = [];
    for (const id of ids) {
      const row = this.raw.rows.get(id);
      if (row) rows.push(row);
    }
    return rows;
  }

  get waitingTotal() {
    return this.raw.waiting_total;
  }

  /** First owner of a block, or null. */
  ownerOf(block) {
    const index = this.owner[block];
    return index >= 0 ? (this.owners[index] ?? null) : null;
  }

  /** All sequences that refer to a block, with its index in their tables. */
  ownersOf(block) {
    const owners = [];
    for (const row of this.running()) {
      const index = row.block_table?.indexOf(block) ?? -1;
      if (index >= 0) owners.push({ id: row.id, index, row });
    }
    return owners;
  }
}

/** Follows the blocks from frame to frame, to tell which were preempted or evicted just now. */
export class LossWatcher {
  /** @param {View} view */
  constructor(view) {
    this.view = view;
    this.states = new Uint8Array(0);
    this.tables = new Map();
  }

  /** Starts from the view's present state. */
  reset() {
    this.states = Uint8Array.from(this.view.state);
    this.tables.clear();
    for (const row of this.view.running()) this.tables.set(row.id, row.block_table ?? []);
  }

  /**
   * Block ids that this delta, already folded into the view, took from a sequence or from the cache.
   * @returns {{preempted: Set<number>, evicted: Set<number>}}
   */
  losses(delta) {
    const preempted = new Set();
    const evicted = new Set();
    for (const event of delta.events ?? []) {
      if (event.kind !== "preempted") continue;
      for (const block of this.tables.get(event.id) ?? []) preempted.add(block);
    }
    const evictions = (delta.events ?? []).some((event) => event.kind === "evicted" || event.kind === "reset");
    for (const [first, count, state] of delta.blocks ?? []) {
      for (let block = first; block < first + count; block += 1) {
        if (evictions && this.states[block] === CACHED && this.#isEvicted(block, state)) evicted.add(block);
        this.states[block] = state;
      }
    }
    for (const id of delta.removed ?? []) this.tables.delete(id);
    for (const row of delta.rows ?? []) {
      if (row.status !== "RUNNING") this.tables.delete(row.id);
      else this.tables.set(row.id, this.view.row(row.id)?.block_table ?? []);
    }
    for (const [index] of delta.tails ?? []) {
      const row = this.view.row(this.view.raw.running[index]);
      if (row) this.tables.set(row.id, row.block_table);
    }
    return { preempted, evicted };
  }

  /** A cached block that is free now lost its content; one that is used now did too, unless it is its owner's hit. */
  #isEvicted(block, state) {
    if (state < USED) return state !== CACHED;
    const id = this.view.ownerOf(block);
    const row = id === null ? undefined : this.view.row(id);
    const index = row?.block_table?.indexOf(block) ?? -1;
    return index >= 0 && (index + 1) * this.view.blockSize > row.num_cached_tokens;
  }
}
