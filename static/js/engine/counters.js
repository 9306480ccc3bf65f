// Totals since the start of the process.

import { setText } from "../page.js";
import { integer, percent } from "./format.js";

const sum = (counts) => Object.values(counts ?? {}).reduce((total, n) => total + n, 0);

/** By reason, the largest first: "stop 900 · length 190". */
function reasons(counts) {
  const parts = Object.entries(counts ?? {}).sort((a, b) => b[1] - a[1]).map(([reason, n]) => `${reason} ${integer(n)}`);
  return parts.join(" · ");
}

/** [value, detail] of each counter. */
const COUNTERS = {
  requests: (c) => [integer(c.num_requests), "accepted"],
  finished: (c) => [integer(sum(c.finished)), reasons(c.finished) || "sequences"],
  rejected: (c) => [integer(sum(c.rejected)), reasons(c.rejected) || "requests"],
  preemptions: (c) => [integer(c.num_preemptions), "times"],
  recomputed: (c) => [integer(c.prompt_tokens_recomputed), "tokens"],
  prompt: (c) => [integer(c.prompt_tokens), "tokens"],
  generated: (c) => [integer(c.generation_tokens), "tokens"],
  cached: (c) => [percent(c.prefix_cache_hits, c.prefix_cache_queries), `${integer(c.prefix_cache_hits)} of ${integer(c.prefix_cache_queries)} tokens`],
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
      const [number, words] = read(counters);
      setText(value, number);
      setText(detail, words);
      if (item.title !== words) item.title = words;
    }
  }
}
