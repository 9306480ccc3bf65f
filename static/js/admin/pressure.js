// What bears on each limit right now, and what a new value would do, both from the live state.

import { age, count, integer } from "../engine/format.js";

const rowsOf = (state, ids) => ids.map((id) => state.rows.get(id)).filter(Boolean);
const usable = (state) => state.kv?.num_usable_blocks ?? 0;
const held = (state) => (state.kv ? state.kv.used + state.kv.shared : 0);

/** Blocks that an admission must leave available: a whole number, rounded down as the scheduler does. */
export function watermarkBlocks(watermark, state) {
  return Math.trunc(watermark * usable(state));
}

function oldest(state, ids, now) {
  const ages = rowsOf(state, ids).map((row) => now - row.arrival_unix);
  return ages.length ? Math.max(...ages) : null;
}

const PRESSURES = {
  max_num_seqs: (s) => ratio("running", s.running.length, s.limits.max_num_seqs),
  max_num_batched_tokens: (s) => {
    const step = s.recent_steps[s.recent_steps.length - 1];
    if (!step) return plain("no step yet");
    const tokens = step[1] + step[2];
    return { text: `last step ${count(tokens, "token")}`, part: tokens / s.limits.max_num_batched_tokens };
  },
  long_prefill_token_threshold: (s) => {
    const left = rowsOf(s, s.running).map((row) => row.num_prompt_tokens - row.num_computed_tokens).filter((n) => n > 0);
    return plain(left.length ? `longest prompt being read: ${count(Math.max(...left), "token")} left` : "no prompt is being read");
  },
  max_prefill_tokens_while_decoding: (s) => {
    const step = s.recent_steps[s.recent_steps.length - 1];
    if (!step) return plain("no step yet");
    if (!step[2]) return plain(`last step ${count(step[1], "prompt token")}, nothing decoded`);
    const cap = s.limits.max_prefill_tokens_while_decoding;
    const text = `last step ${count(step[1], "prompt token")} beside ${count(step[2], "decode")}`;
    return { text, part: cap ? step[1] / cap : null };
  },
  watermark: (s) => plain(`keeps ${count(watermarkBlocks(s.limits.watermark, s), "block")}; ${integer(Math.max(0, usable(s) - held(s)))} available`),
  num_usable_blocks: (s) => ratio("in use", held(s), usable(s)),
  max_num_queued_reqs: (s) => ratio("waiting", s.waiting_total, s.limits.max_num_queued_reqs),
  queue_timeout_s: (s, now) => {
    const longest = oldest(s, s.waiting, now);
    return plain(longest === null ? "nothing waits" : `longest wait ${age(longest)}`);
  },
  request_timeout_s: (s, now) => {
    const longest = oldest(s, [...s.running, ...s.waiting], now);
    return plain(longest === null ? "no requests" : `oldest request ${age(longest)}`);
  },
  scheduling_policy: (s) => {
    const priorities = rowsOf(s, s.waiting).map((row) => row.priority);
    if (!priorities.length) return plain("nothing waits");
    const [low, high] = [Math.min(...priorities), Math.max(...priorities)];
    return plain(low === high ? `all that wait have priority ${low}` : `priorities ${low} to ${high} wait`);
  },
};

const plain = (text) => ({ text, part: null });
const ratio = (word, n, of) => ({ text: `${word} ${integer(n)} of ${integer(of)}`, part: of > 0 ? n / of : n > 0 ? 1 : 0 });

/** @returns {{text: string, part: number|null}}  part: how full, for a meter */
export function pressure(name, state, now) {
  if (!state.ready || !PRESSURES[name]) return plain("–");
  return PRESSURES[name](state, now);
}

const CONSEQUENCES = {
  max_num_seqs: (v, s) => {
    const running = s.running.length;
    if (v < running) return `${integer(running)} run on; nothing is admitted until fewer than ${integer(v)} run`;
    if (s.waiting_total > 0 && v > running) return `up to ${integer(Math.min(v - running, s.waiting_total))} of those waiting may start at the next step`;
    return "next step";
  },
  max_num_batched_tokens: () => "next step; long prompts are cut into chunks of at most this",
  long_prefill_token_threshold: (v) => (v === 0 ? "next step; a prompt may take the whole step" : "next step; longer prompts take several steps"),
  max_prefill_tokens_while_decoding: (v) => (v === 0 ? "next step; decodes wait for whole prompts" : "next step; prompts take more steps while others decode"),
  watermark: (v, s) => `an admission leaves ${count(watermarkBlocks(v, s), "block")} available`,
  num_usable_blocks: (v, s) => {
    const over = held(s) - v;
    return over > 0 ? `preempts until ${count(over, "block")} are given back` : `${integer(v - held(s))} available at once`;
  },
  max_num_queued_reqs: (v, s) => (v < s.waiting_total ? "those that wait stay; new ones are refused" : `room for ${integer(v - s.waiting_total)} more`),
  queue_timeout_s: (v) => (v === null ? "requests from now on wait without end" : "for requests that arrive from now on"),
  request_timeout_s: (v) => (v === null ? "requests from now on may live for ever" : "for requests that arrive from now on"),
  scheduling_policy: (v, s) => (s.waiting_total ? `the ${integer(s.waiting_total)} waiting are put in order by ${v === "priority" ? "(priority, arrival)" : "arrival"}` : "next step"),
};

/** What a new value would do, as far as the present state tells. */
export function consequence(name, value, state) {
  return state.ready && CONSEQUENCES[name] ? CONSEQUENCES[name](value, state) : "next step";
}
