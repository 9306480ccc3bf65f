// Why a sequence waits, as one sentence with the numbers of the test that failed.

import { count, integer, shortId } from "./format.js";

/**
 * @param {{constraint: string, needed: number, available: number, watermark: number, behind: string|null}|null} why
 * @param {{limits: Record<string, any>, numRunning: number, paused: boolean}} context
 * @returns {{text: string, icon: string, constraint: string}}
 */
export function whyText(why, context) {
  if (!why) {
    if (context.paused) return { text: "engine paused", icon: "pause", constraint: "paused" };
    return { text: "next in line: the next step looks at it", icon: "next", constraint: "next" };
  }
  if (why.behind) return { text: `behind ${shortId(why.behind)}`, icon: "behind", constraint: "behind" };
  return { text: sentence(why, context), icon: why.constraint, constraint: why.constraint };
}

function sentence(why, { limits, numRunning }) {
  switch (why.constraint) {
    case "slots": {
      const limit = limits?.max_num_seqs;
      const taken = limit === undefined ? numRunning : Math.max(numRunning, limit - why.available);
      const many = why.needed > 1 ? `; needs ${integer(why.needed)}` : "";
      return `max_num_seqs: ${integer(taken)} of ${integer(limit)} slots taken${many}`;
    }
    case "token_budget":
      return `needs ${count(why.needed, "token")}, ${integer(why.available)} left in this step's budget of ` +
        `${integer(limits?.max_num_batched_tokens)}`;
    case "prefill_budget":
      return `needs ${count(why.needed, "token")}, ${integer(why.available)} left of the ` +
        `${integer(limits?.max_prefill_tokens_while_decoding)} a step gives prompts while others decode`;
    case "blocks": {
      const left = Math.max(0, why.available - why.watermark);
      const above = why.watermark > 0 ? ` above the watermark of ${integer(why.watermark)}` : "";
      const missing = Math.max(1, why.needed + why.watermark - why.available);
      return `needs ${count(why.needed, "block")}, ${integer(left)} available${above}; ` +
        `${integer(missing)} more would admit it`;
    }
    case "preemption":
      return "the last step preempted: no admission in the same step";
    case "paused":
      return "engine paused";
    case "behind":
      return "behind others";
    default:
      return `${why.constraint}: needs ${integer(why.needed)}, ${integer(why.available)} available`;
  }
}
