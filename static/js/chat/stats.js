// An answer's figures, all from the engine's own counts, and its receipts, as elements.

import { brief, count, el, icon, plural, seconds } from "../page.js";

const REASONS = {
  stop: "finished",
  length: "cut at max tokens",
  abort: "stopped",
  timeout: "timed out",
  error: "failed",
};

/** Tokens per second after the first one, or null. */
function decodeRate(stats) {
  return stats.decode_s > 0 && stats.num_output_tokens > 1 ? (stats.num_output_tokens - 1) / stats.decode_s : null;
}

/** [name, value, explanation] of everything that was measured. */
function rows(stats, requestId) {
  return [
    ["Prompt", plural(stats.num_prompt_tokens, "token"), "Tokens of the conversation as the model read it"],
    ["From the prefix cache", plural(stats.num_cached_tokens, "token"), "Prompt tokens whose keys and values were still there"],
    ["Answer", plural(stats.num_output_tokens, "token"), "Tokens that were produced"],
    ["Queue", seconds(stats.queue_s), "From arrival until first scheduled"],
    ["Prefill", seconds(stats.prefill_s), "From first scheduled until the first token"],
    ["First token (TTFT)", seconds(stats.ttft_s), "From arrival until the first token"],
    ["Decode", seconds(stats.decode_s), "From the first token to the last"],
    ["Total", seconds(stats.e2e_s), "From arrival to the end"],
    ["Speed", decodeRate(stats) === null ? "–" : `${brief(decodeRate(stats))} tok/s`, "Tokens after the first, per second of decode"],
    ["Between tokens, p50 / p99", `${seconds(stats.itl_p50_s)} / ${seconds(stats.itl_p99_s)}`, "Inter-token latency"],
    ["Blocks at most", count(stats.peak_num_blocks), "KV blocks held at the same time"],
    ["Preemptions", count(stats.num_preemptions), "Times its blocks were taken for another request"],
    ["Computed again", plural(stats.num_recomputed_tokens, "token"), "Work repeated because of preemptions"],
    ["Last step", count(stats.finish_step), "The engine's step at which it ended"],
    ["Request", requestId ?? "–", "Its name on the Engine page and in the log"],
  ];
}

function summary(stats, reason) {
  const rate = decodeRate(stats);
  return [
    plural(stats.num_output_tokens, "token"),
    rate === null ? null : `${brief(rate)} tok/s`,
    `first token ${seconds(stats.ttft_s)}`,
    stats.queue_s >= 0.05 ? `queued ${seconds(stats.queue_s)}` : null,
    `${count(stats.num_cached_tokens)} of ${count(stats.num_prompt_tokens)} cached`,
    `peak ${plural(stats.peak_num_blocks, "block")}`,
    stats.num_preemptions ? plural(stats.num_preemptions, "preemption") : null,
    REASONS[reason] ?? reason,
  ].filter(Boolean);
}

/** One line that opens to the whole table; null without statistics. */
export function statsElement(node) {
  if (!node.stats) return null;
  const line = el("summary.stats-line", { title: "Show all figures" }, icon("chevron", "icon-small stats-chevron"));
  for (const part of summary(node.stats, node.finish_reason)) line.append(el("span", {}, part));
  const list = el("dl.stats-table");
  for (const [name, value, hint] of rows(node.stats, node.request_id)) list.append(el("div", { title: hint }, el("dt", {}, name), el("dd.num", {}, value)));
  return el("details.stats", {}, line, list);
}

function stopText(receipt) {
  if (receipt.state !== "aborted") return `Stop came after the end (${receipt.state.replace("finished:", "")}), at step ${count(receipt.step)}.`;
  return `Stopped at step ${count(receipt.step)}: ${plural(receipt.blocks_freed, "block")} freed, ${plural(receipt.output_tokens, "token")} produced.`;
}

/** Receipts: preemptions and Stop, each a sentence with its numbers. */
export function receiptElements(node, receipts) {
  const lines = receipts.map((receipt) => el("p.receipt", { "data-receipt": "preempted" }, el("span.swatch.swatch-preempted", { "aria-hidden": "true" }), el("span", {}, preemptionText(receipt))));
  if (node.stop_receipt) lines.push(el("p.receipt", { "data-receipt": "stop" }, icon("stop", "icon-small"), el("span", {}, stopText(node.stop_receipt))));
  return lines;
}

/** "Preempted at step 1,204 for chat-71: 6 blocks freed, 96 tokens to compute again." */
function preemptionText({ step, by, by_source: source, blocks, tokens }) {
  const whom = by === null || by === undefined ? "because the pool was made smaller" : `for ${by}${source && !by.startsWith(source) ? ` (${source})` : ""}`;
  return `Preempted at step ${count(step)} ${whom}: ${plural(blocks, "block")} freed, ${plural(tokens, "token")} to compute again.`;
}

const STATUS = {
  sending: "Sending",
  queued: "Waiting in the queue",
  prefilling: "Reading the conversation",
  running: "Writing",
  preempted: "Preempted, waiting for blocks",
  reconnecting: "Finding the answer again",
};

/** What an unfinished answer is doing, in words: [text, detail]. */
export function statusText(link, isConnected) {
  if (!isConnected && link.generationId) return ["Connection lost", "reconnecting; an answer goes on without this page and is fetched then"];
  if (link.wantsStop) return ["Stopping", null];
  // The receipt is shown by itself, and that it waits is said already: what is left is why.
  const detail = link.detail?.split("; ").at(-1).replace(/^waits: /, "");
  if (link.status === "running" && link.numOutputTokens > 0) {
    const parts = [plural(link.numOutputTokens, "token"), link.rate ? `${brief(link.rate)} tok/s` : null];
    return [STATUS.running, parts.filter(Boolean).join(" · ")];
  }
  return [STATUS[link.status] ?? link.status, detail ?? null];
}
