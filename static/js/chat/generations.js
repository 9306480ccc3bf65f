// Answers being written: asks for them, follows them on the chat stream by their id, stops them, and keeps their text.
// An answer belongs to a message of a conversation, open or not: nothing here depends on what is on the screen.

import { ApiError, api, clientId } from "../page.js";
import { chatStream } from "../stream.js";
import { findOrphan, giveUp } from "./orphans.js";
import { addNode, messagesFor, store } from "./store.js";

const SAVE_MS = 1000;
const ORPHAN_MS = 2500; // after the stream is back, how long an answer may stay unmentioned before it is asked for

/** Events: "change" {conversationId, nodeId}: text or status; "begin", "end": the same with {node}; "connection", "engine". */
export class Generations extends EventTarget {
  constructor() {
    super();
    this.links = new Map(); // generation id -> link
    this.byNode = new Map(); // node id -> link
    this.isConnected = true;
    this.engine = { dead: null, stuck: null };
    this.openConversation = null; // the one on the screen: what ends elsewhere is marked unread
    chatStream.subscribe((event, data, generation) => this.receive(event, data, generation));
    this.linkStored();
    store.addEventListener("list", () => this.linkStored());
    setInterval(() => this.save(), SAVE_MS);
    setInterval(() => giveUp((nodeId) => this.byNode.has(nodeId)), ORPHAN_MS);
    addEventListener("pagehide", () => this.save());
  }

  /** The live state of a message, or null when it isn't being written. */
  live(nodeId) {
    return this.byNode.get(nodeId) ?? null;
  }

  isRunning(conversationId) {
    for (const link of this.byNode.values()) if (link.conversationId === conversationId) return true;
    return false;
  }

  /** The message that is being written in a conversation; the latest if there are several. */
  runningIn(conversationId) {
    return [...this.byNode.values()].filter((link) => link.conversationId === conversationId).at(-1) ?? null;
  }

  newLink(conversationId, nodeId, generationId) {
    const link = {
      conversationId, nodeId, generationId, requestId: null, text: "", status: "sending", detail: null, numOutputTokens: 0, firstAt: null, firstTokens: 0,
      rate: null, isDirty: false, isSeen: false, wantsStop: false, receipts: [],
    };
    this.byNode.set(nodeId, link);
    if (generationId) this.links.set(generationId, link);
    return link;
  }

  unlink(link) {
    this.byNode.delete(link.nodeId);
    this.links.delete(link.generationId);
  }

  /** Follows what the list says is running: after a reload, and when another tab began it. */
  linkStored() {
    for (const entry of store.list()) {
      for (const [nodeId, generationId] of Object.entries(entry.running ?? {})) {
        if (this.byNode.has(nodeId) || this.links.has(generationId)) continue;
        if (!generationId) continue;
        const node = store.get(entry.id)?.nodes[nodeId];
        if (!node) continue;
        const link = this.newLink(entry.id, nodeId, generationId);
        link.text = node.content;
        link.receipts = node.receipts ?? [];
        link.status = "reconnecting";
        const known = chatStream.generations.get(generationId);
        if (known) this.receive("snapshot", known, known);
      }
    }
    this.checkOrphans();
  }

  /** Asks after an answer that the stream does not mention: an unknown one ended with the server's process. */
  checkOrphans() {
    clearTimeout(this.orphanTimer);
    this.orphanTimer = setTimeout(async () => {
      if (!this.isConnected) return;
      for (const link of [...this.links.values()].filter((other) => !other.isSeen)) {
        try {
          const data = await api("GET", `/chat/api/generations/${encodeURIComponent(link.generationId)}`);
          this.receive("snapshot", data, data);
        } catch (error) {
          if (error instanceof ApiError && error.status === 404) {
            this.fail(link, "The server no longer has this answer: it was restarted or has dropped it. The text up to here is kept.");
          }
        }
      }
    }, ORPHAN_MS);
  }

  /** Asks for an answer below the message `parentId`. Resolves when the server took it, or the message says why not. */
  async begin(conversationId, parentId) {
    let node = null;
    const conversation = store.update(conversationId, (c) => {
      node = addNode(c, parentId, { role: "assistant", content: "", status: "sending" });
      c.updated_at = Date.now();
    });
    if (!conversation) return;
    const link = this.newLink(conversationId, node.id, null);
    store.updateEntry(conversationId, (entry) => {
      entry.running = { ...entry.running, [node.id]: "" };
      entry.updated_at = Date.now();
    });
    this.tell("begin", link, { node });
    try {
      const answer = await api("POST", "/chat/api/generations", {
        client_id: clientId(),
        messages: messagesFor(conversation, parentId),
        params: conversation.params,
      });
      this.accepted(link, answer);
    } catch (error) {
      const isAnswer = error instanceof ApiError;
      const message = isAnswer ? error.message : "The server could not be reached. Nothing was lost: try again.";
      const extra = isAnswer ? { error_code: error.code, num_prompt_tokens: error.detail.num_prompt_tokens, max_context: error.detail.max_context } : {};
      this.fail(link, message, extra);
    }
  }

  accepted(link, answer) {
    link.generationId = answer.generation_id;
    link.requestId = answer.request_id ?? null;
    this.links.set(link.generationId, link);
    store.update(link.conversationId, (c) => {
      const node = c.nodes[link.nodeId];
      if (node) Object.assign(node, { status: "running", generation_id: link.generationId, num_prompt_tokens: answer.num_prompt_tokens });
    });
    store.updateEntry(link.conversationId, (entry) => {
      if (entry.running && link.nodeId in entry.running) entry.running[link.nodeId] = link.generationId;
    });
    if (link.status === "sending") link.status = "queued";
    const known = chatStream.generations.get(link.generationId); // the stream may have been faster than the answer
    if (known) this.receive("snapshot", known, known);
    if (link.wantsStop) this.stop(link.nodeId);
    this.tell("change", link);
  }

  receive(event, data, generation) {
    if (event === "connection") {
      this.isConnected = data.open;
      if (data.open) {
        for (const link of this.links.values()) link.isSeen = false;
        this.checkOrphans();
      }
      this.dispatchEvent(new CustomEvent("connection", { detail: data }));
      for (const link of this.links.values()) this.tell("change", link);
      return;
    }
    if (event === "tick") {
      this.tellEngine(data);
      return;
    }
    if (this.engine.stuck) this.tellEngine({ ...this.engine, stuck: null }); // what comes now came from a step
    const link = this.links.get(data.generation_id);
    if (!link) {
      if (event === "snapshot") this.adopt(generation);
      return;
    }
    link.isSeen = true;
    if (generation.text !== link.text) {
      link.text = generation.text;
      link.isDirty = true;
    }
    link.requestId = generation.request_id ?? link.requestId;
    if (generation.preemptions && generation.preemptions.length !== link.receipts.length) {
      link.receipts = generation.preemptions;
      link.isDirty = true;
    }
    link.status = generation.status;
    link.detail = generation.detail ?? null;
    this.countTokens(link, generation.num_output_tokens ?? 0);
    if (generation.status === "done") this.finish(link, generation);
    else this.tell("change", link);
  }

  /** How the engine is, as far as who only chats is told. */
  tellEngine(engine) {
    this.engine = engine;
    this.dispatchEvent(new CustomEvent("engine", { detail: engine }));
  }

  /** Joins an answer to the question of an earlier page that never learned its id. */
  async adopt(generation) {
    try {
      const orphan = await findOrphan(generation, (nodeId) => this.byNode.has(nodeId));
      if (!orphan) return;
      const link = this.newLink(orphan.conversationId, orphan.nodeId, null);
      this.accepted(link, generation);
    } catch {
      // The server is away: the next snapshot comes with the next connection.
    }
  }

  /** Tokens are the engine's count; the rate is of this page's clock since it first heard of any. */
  countTokens(link, numTokens) {
    if (!numTokens || numTokens === link.numOutputTokens) return;
    link.numOutputTokens = numTokens;
    const now = performance.now();
    if (link.firstAt === null) {
      link.firstAt = now;
      link.firstTokens = numTokens;
    } else if (now - link.firstAt > 300) {
      link.rate = (numTokens - link.firstTokens) / ((now - link.firstAt) / 1000);
    }
  }

  finish(link, generation) {
    this.end(link, {
      content: generation.text,
      status: generation.error ? "error" : "done",
      finish_reason: generation.finish_reason ?? null,
      error: generation.error ?? null,
      stats: generation.stats ?? null,
    });
  }

  fail(link, message, extra = {}) {
    this.end(link, { content: link.text, status: "error", error: message, ...extra });
  }

  end(link, values) {
    this.unlink(link);
    let node = null;
    store.update(link.conversationId, (c) => {
      node = c.nodes[link.nodeId] ?? null;
      if (node) Object.assign(node, values, { receipts: link.receipts, request_id: link.requestId });
      c.updated_at = Date.now();
    });
    store.updateEntry(link.conversationId, (entry) => {
      delete entry.running?.[link.nodeId];
      entry.updated_at = Date.now();
      if (link.conversationId !== this.openConversation) entry.unread = true;
    });
    if (node) this.tell("end", link, { node });
  }

  /** Stops an answer. Idempotent: asked twice, the receipt is the same. */
  async stop(nodeId) {
    const link = this.byNode.get(nodeId);
    if (!link) return;
    link.wantsStop = true;
    this.tell("change", link);
    if (!link.generationId) return; // as soon as the server has named it
    try {
      const receipt = await api("DELETE", `/chat/api/generations/${encodeURIComponent(link.generationId)}`);
      store.update(link.conversationId, (c) => {
        const node = c.nodes[nodeId];
        if (node) node.stop_receipt = receipt;
      });
      this.tell("receipt", link);
    } catch (error) {
      link.wantsStop = false;
      this.dispatchEvent(new CustomEvent("problem", { detail: `Stop failed: ${error.message}` }));
      this.tell("change", link);
    }
  }

  /** Stops all of a conversation that is being deleted. */
  stopAll(conversationId) {
    for (const link of [...this.byNode.values()]) if (link.conversationId === conversationId) this.stop(link.nodeId);
  }

  tell(name, link, more = {}) {
    this.dispatchEvent(new CustomEvent(name, { detail: { conversationId: link.conversationId, nodeId: link.nodeId, ...more } }));
  }

  /** Keeps unfinished text too: should the server die, what was written is still there. */
  save() {
    for (const link of this.byNode.values()) {
      if (!link.isDirty) continue;
      link.isDirty = false;
      store.update(link.conversationId, (c) => {
        const node = c.nodes[link.nodeId];
        if (node) Object.assign(node, { content: link.text, receipts: link.receipts });
      });
    }
  }
}
