// Questions that were being sent when their page was closed or loaded again: the server may have taken them, but nobody
// learned under which id. Such an answer is found again among those the stream tells of, and else given up.

import { api } from "../page.js";
import { messagesFor, store } from "./store.js";

const GIVE_UP_MS = 30_000;

/** [{conversationId, nodeId, node}] of messages that wait for an id, of which `isMine(nodeId)` knows nothing. */
export function orphans(isMine) {
  const found = [];
  for (const entry of store.list()) {
    for (const [nodeId, generationId] of Object.entries(entry.running ?? {})) {
      if (generationId || isMine(nodeId)) continue;
      found.push({ conversationId: entry.id, nodeId, node: store.get(entry.id)?.nodes[nodeId] ?? null });
    }
  }
  return found;
}

function isKnown(generationId) {
  return store.list().some((entry) => Object.values(store.get(entry.id)?.nodes ?? {}).some((node) => node.generation_id === generationId));
}

/**
 * The orphan that `generation` answers, or null. Only when there is no doubt: one orphan, an answer no message has, and a
 * prompt of exactly as many tokens.
 */
export async function findOrphan(generation, isMine) {
  const candidates = orphans(isMine);
  if (candidates.length !== 1 || !candidates[0].node || isKnown(generation.generation_id)) return null;
  const [orphan] = candidates;
  const conversation = store.get(orphan.conversationId);
  const answer = await api("POST", "/chat/api/tokenize", { messages: messagesFor(conversation, orphan.node.parent) });
  const isStillOne = orphans(isMine).some((other) => other.nodeId === orphan.nodeId);
  return isStillOne && answer.num_prompt_tokens === generation.num_prompt_tokens ? orphan : null;
}

/** Ends what has waited too long, so that nothing is called "writing" for ever. */
export function giveUp(isMine) {
  for (const { conversationId, nodeId, node } of orphans(isMine)) {
    if (node && Date.now() - node.created_at < GIVE_UP_MS) continue;
    store.updateEntry(conversationId, (entry) => delete entry.running[nodeId]);
  }
}
