// The engine's state as a fold of the admin stream. The same code folds in the shared worker and in each page.
// Field names are the server's; see the admin stream in app/README.md.

const MAX_STEPS = 600;
const MAX_EVENTS = 200;
const MAX_OWNERS = 4096;
const SCALARS = [
  "seq", "step", "server_time", "paused", "pause_reason", "draining", "dead", "limits", "limits_version", "rates", "num_viewers",
  "waiting_total",
];
const FIELDWISE = ["kv", "counters"]; // of these a delta says the fields that changed

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
    stuck: null, // {step, running_s, limit_s} while a step takes too long
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
    recent_steps: [], // [step, prefill, decode, preempted, ms, running, waiting, used, shared, cached], oldest first
    recent_events: [], // oldest first
  };
}

function takeScalars(state, frame) {
  for (const name of SCALARS) if (name in frame) state[name] = frame[name];
  for (const name of FIELDWISE) if (name in frame) state[name] = { ...state[name], ...frame[name] };
  state.stuck = frame.stuck ?? null;
}

/** What a tick says of the state: it comes when nothing else does. */
export function applyTick(state, tick) {
  if (tick.server_time !== undefined) state.server_time = tick.server_time;
  state.stuck = tick.stuck ?? null;
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

function applyBlocks(blocks, runs, running) {
  if (blocks.owners.length > MAX_OWNERS) compactOwners(blocks);
  const known = new Map(blocks.owners.map((id, index) => [id, index]));
  for (const [first, count, blockState, ref, place] of runs) {
    let owner = -1;
    if (place >= 0) {
      const id = running[place];
      owner = known.get(id) ?? blocks.owners.push(id) - 1;
      known.set(id, owner);
    }
    blocks.state.fill(blockState, first, first + count);
    blocks.ref.fill(ref, first, first + count);
    blocks.owner.fill(owner, first, first + count);
  }
}

/** The ids that stayed in `before`, and those that came, where they came to. */
function applyOrder(name, before, delta, stays) {
  const whole = delta[`${name}_order`];
  if (whole) return whole;
  let order = before.filter(stays);
  for (const [after, ...moved] of delta[`${name}_moves`] ?? []) {
    const ids = new Set(moved);
    order = order.filter((id) => !ids.has(id));
    order.splice(after === null ? 0 : order.indexOf(after) + 1, 0, ...moved);
  }
  return order;
}

/** Folds one delta into the state (in place). */
export function applyDelta(state, delta) {
  takeScalars(state, delta);
  for (const id of delta.removed ?? []) state.rows.delete(id);
  // Of a row that is known come its id, its status and what changed.
  for (const change of delta.rows ?? []) state.rows.set(change.id, { ...state.rows.get(change.id), ...change });
  if (delta.rows || delta.removed || delta.running_order || delta.waiting_order) {
    const isRunning = (id) => state.rows.get(id)?.status === "RUNNING";
    state.running = applyOrder("running", state.running, delta, isRunning);
    state.waiting = applyOrder("waiting", state.waiting, delta, (id) => state.rows.has(id) && !isRunning(id));
  }
  for (const [index, output] of (delta.outputs ?? []).entries()) {
    if (!output) continue;
    const row = state.rows.get(state.running[index]);
    const computed = row.num_prompt_tokens + output - 1;
    state.rows.set(row.id, { ...row, num_output_tokens: output, num_computed_tokens: computed });
  }
  for (const [index, start, ...tail] of delta.tails ?? []) {
    const row = state.rows.get(state.running[index]);
    // A new array: whoever holds the old one keeps what was.
    const table = [...row.block_table.slice(0, start), ...tail];
    state.rows.set(row.id, { ...row, block_table: table, num_blocks: table.length });
  }
  if (delta.blocks) applyBlocks(state.blocks, delta.blocks, state.running);
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
