// Totals since the start of the process.

import { setText } from "../page.js";
import { integer, percent, short } from "./format.js";

const sum = (counts) => Object.values(counts ?? {}).reduce((total, n) => total + n, 0);

/** By reason, the largest first: "stop 900 · length 190". */
function reasons(counts) {
  const parts = Object.entries(counts ?? {}).sort((a, b) => b[1] - a[1]).map(([reason, n]) => `${reason} ${integer(n)}`);
  return parts.join(" · ");
}

/** [value, detail, exact value for the title] of each counter. */
const COUNTERS = {
  requests: (c) => [short(c.num_requests), "accepted", integer(c.num_requests)],
  finished: (c) => [short(sum(c.finished)), reasons(c.finished) || "sequences", integer(sum(c.finished))],
  rejected: (c) => [short(sum(c.rejected)), reasons(c.rejected) || "requests", integer(sum(c.rejected))],
  preemptions: (c) => [short(c.num_preemptions), "times", integer(c.num_preemptions)],
  recomputed: (c) => [short(c.prompt_tokens_recomputed), "tokens", integer(c.prompt_tokens_recomputed)],
  prompt: (c) => [short(c.prompt_tokens), "tokens", integer(c.prompt_tokens)],
  generated: (c) => [short(c.generation_tokens), "tokens", integer(c.generation_tokens)],
  cached: (c) => [
    percent(c.prefix_cache_hits, c.prefix_cache_queries),
    `${short(c.prefix_cache_hits)} of ${short(c.prefix_cache_queries)} tokens`,
    `${integer(c.prefix_cache_hits)} of ${integer(c.prefix_cache_queries)}`,
  ],
};

export class CounterStrip {
  constructor(list) {
    this.items = [...list.querySelectorAll("[data-counter]")].map((item) => ({
      read: COUNTERS[item.dataset.counter],
      value: item.querySelector(".counter-value"),
      detail: item.querySelector(".counter-detail"),
      item,
    }));
  }

  refresh(counters) {
    if (!counters) return;
    for (const { read, value, detail, item } of this.items) {
      const [number, words, exact] = read(counters);
      setText(value, number);
      setText(detail, words);
      const title = `${exact} ${words}`;
      if (item.title !== title) item.title = title;
    }
  }
}
