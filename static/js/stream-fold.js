// The engine's state as a fold of the admin stream. The same code folds in the shared worker and in each page.
// Field names are the server's; see the admin stream in app/README.md.

const MAX_STEPS = 600;
const MAX_EVENTS = 200;
const MAX_OWNERS = 4096;
const SCALARS = [
  "seq", "step", "server_time", "paused", "pause_reason", "draining", "dead", "limits", "limits_version", "kv", "counters",
  "rates", "num_viewers",
];

/** A state before the first keyframe: nothing known. */
export function emptyState() {
  return {
    ready: false,
    epoch: null,
    seq: 0,
    step: null,
    server_time: null,
    paused: false,
    pause_reason: null,
    draining: false,
    dead: null,
    limits: null,
    limits_version: null,
    kv: null,
    counters: null,
    rates: null,
    num_viewers: null,
    rows: new Map(), // sequence id -> row, running and waiting
    running: [], // sequence ids in the order of admission
    waiting: [], // sequence ids in the order of the queue, the first 200 at most
    waiting_total: 0,
    // By block id: state 0 free 1 cached 2 used 3 shared; ref_count; index into owners of the first owner, or -1.
    blocks: { state: new Uint8Array(0), ref: new Uint16Array(0), owner: new Int32Array(0), owners: [] },
    recent_steps: [], // [step, prefill, decode, preempted, ms, running, waiting], oldest first
    recent_events: [], // oldest first
  };
}

function takeScalars(state, frame) {
  for (const name of SCALARS) if (name in frame) state[name] = frame[name];
}

function keepLast(list, added, max) {
  if (!added?.length) return;
  list.push(...added);
  if (list.length > max) list.splice(0, list.length - max);
}

/** Replaces the whole state by a keyframe (in place: others hold the object). */
export function applyKey(state, key) {
  takeScalars(state, key);
  state.ready = true;
  state.rows = new Map();
  for (const row of key.running) state.rows.set(row.id, row);
  for (const row of key.waiting) state.rows.set(row.id, row);
  state.running = key.running.map((row) => row.id);
  state.waiting = key.waiting.map((row) => row.id);
  state.waiting_total = key.waiting_total ?? key.waiting.length;
  const blocks = key.blocks ?? { state: [], ref: [], owner: [], owners: [] };
  state.blocks = {
    state: Uint8Array.from(blocks.state),
    ref: Uint16Array.from(blocks.ref),
    owner: Int32Array.from(blocks.owner),
    owners: [...blocks.owners],
  };
  state.recent_steps = (key.recent_steps ?? []).slice(-MAX_STEPS);
  state.recent_events = (key.recent_events ?? []).slice(-MAX_EVENTS);
}

/** Index of an owner in the table, added if new. `indexes` is rebuilt by the caller when the table is compacted. */
function ownerIndex(blocks, indexes, id) {
  if (id === null || id === undefined) return -1;
  let index = indexes.get(id);
  if (index === undefined) {
    index = blocks.owners.push(id) - 1;
    indexes.set(id, index);
  }
  return index;
}

/** Drops owners that own nothing any more, so that a page open for days does not grow. */
function compactOwners(blocks) {
  const kept = new Map();
  const owners = [];
  for (let block = 0; block < blocks.owner.length; block += 1) {
    const old = blocks.owner[block];
    if (old < 0) continue;
    if (!kept.has(old)) kept.set(old, owners.push(blocks.owners[old]) - 1);
    blocks.owner[block] = kept.get(old);
  }
  blocks.owners = owners;
}

function applyBlocks(blocks, changed) {
  if (blocks.owners.length > MAX_OWNERS) compactOwners(blocks);
  const indexes = new Map(blocks.owners.map((id, index) => [id, index]));
  for (const [id, blockState, ref, owner] of changed) {
    if (id >= blocks.state.length) continue;
    blocks.state[id] = blockState;
    blocks.ref[id] = ref;
    blocks.owner[id] = ownerIndex(blocks, indexes, owner);
  }
}

/** Folds one delta into the state (in place). */
export function applyDelta(state, delta) {
  takeScalars(state, delta);
  for (const id of delta.removed ?? []) state.rows.delete(id);
  for (const row of delta.rows ?? []) {
    const before = state.rows.get(row.id);
    // Of a row that is known come its id, its status and what changed.
    state.rows.set(row.id, before ? { ...before, ...row } : row);
  }
  if (delta.rows?.length || delta.removed?.length || delta.running_order) {
    const isRunning = (id) => state.rows.get(id)?.status === "RUNNING";
    state.running = (delta.running_order ?? state.running).filter(isRunning);
    const known = new Set(state.running);
    for (const row of delta.rows ?? []) if (row.status === "RUNNING" && !known.has(row.id)) state.running.push(row.id);
    if (!delta.waiting_order) {
      state.waiting = state.waiting.filter((id) => state.rows.has(id) && !isRunning(id));
      const queued = new Set(state.waiting);
      for (const row of delta.rows ?? []) if (row.status !== "RUNNING" && !queued.has(row.id)) state.waiting.push(row.id);
    }
  }
  if (delta.waiting_order) state.waiting = delta.waiting_order;
  state.waiting_total = delta.waiting_total ?? state.waiting.length;
  if (delta.blocks?.length) applyBlocks(state.blocks, delta.blocks);
  keepLast(state.recent_steps, delta.steps, MAX_STEPS);
  keepLast(state.recent_events, delta.events, MAX_EVENTS);
}

/** Code points of a text: the server counts these, JavaScript's length counts UTF-16 units. */
export function numCodePoints(text) {
  let n = 0;
  for (const _ of text) n += 1;
  return n;
}

/**
 * Folds one event of the chat stream into `generations` (id -> generation).
 * Returns the generation, or null when text is missing before the delta and the whole must be fetched again.
 */
export function applyChat(generations, event, data) {
  const id = data.generation_id;
  let generation = generations.get(id);
  if (event === "snapshot") {
    generation = { ...data, offset: data.offset ?? numCodePoints(data.text ?? ""), text: data.text ?? "" };
    if (data.finish_reason) generation.status = "done";
    generations.set(id, generation);
    return generation;
  }
  if (!generation) {
    generation = { generation_id: id, text: "", offset: 0, status: "queued" };
    generations.set(id, generation);
  }
  if (event === "delta") {
    if (data.offset > generation.offset) return null;
    const added = data.offset === generation.offset ? data.text : [...data.text].slice(generation.offset - data.offset).join("");
    generation.text += added;
    generation.offset += numCodePoints(added);
    if (data.num_output_tokens !== undefined) generation.num_output_tokens = data.num_output_tokens;
  } else if (event === "status") {
    generation.status = data.status;
    generation.detail = data.detail ?? null;
    // A preemption is told with each status while it lasts.
    const receipts = generation.preemptions ?? [];
    if (data.receipt && !receipts.some((known) => known.step === data.receipt.step)) generation.preemptions = [...receipts, data.receipt];
  } else if (event === "done") {
    generation.status = "done";
    generation.detail = null;
    generation.finish_reason = data.finish_reason;
    generation.error = data.error ?? null;
    generation.stats = data.stats ?? null;
    if (data.preemptions) generation.preemptions = data.preemptions;
    if (data.offset !== undefined && data.offset > generation.offset) return null;
  }
  return generation;
}
