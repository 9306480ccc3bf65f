// Conversations of this browser, in localStorage: one entry each, and a list of what the side bar shows.
//
// A conversation is a tree: an edited question or a second answer is a sibling, and `selected` says which child of each
// message is looked at. Several tabs write: each change reads what is stored, alters it and writes it back at once.

import { randomId, storage } from "../page.js";

const INDEX = "pagedeck.chat.index";
const entryKey = (id) => `pagedeck.chat.c.${id}`;
const ROOT = "root";

function parse(text, otherwise) {
  try {
    return text ? JSON.parse(text) : otherwise;
  } catch {
    return otherwise;
  }
}

/** Messages that are looked at, from the first to the last. */
export function path(conversation) {
  const nodes = [];
  for (let id = conversation.selected[ROOT]; id; id = conversation.selected[id]) {
    const node = conversation.nodes[id];
    if (!node) break;
    nodes.push(node);
  }
  return nodes;
}

/** A message and those it could be exchanged for, oldest first. */
export function siblings(conversation, node) {
  return Object.values(conversation.nodes)
    .filter((other) => other.parent === node.parent && other.role === node.role)
    .sort((a, b) => a.created_at - b.created_at);
}

/** Adds a message below `parent` (null: at the beginning) and selects it. */
export function addNode(conversation, parent, node) {
  const full = { id: randomId(8), parent, created_at: Date.now(), ...node };
  conversation.nodes[full.id] = full;
  conversation.selected[parent ?? ROOT] = full.id;
  return full;
}

/** Looks at `node` instead of its sibling. */
export function select(conversation, node) {
  conversation.selected[node.parent ?? ROOT] = node.id;
}

/** What is sent to the model for an answer below `leaf`: the system prompt and the messages that were not trimmed. */
export function messagesFor(conversation, leafId) {
  const nodes = path(conversation);
  const end = leafId === undefined ? nodes.length : nodes.findIndex((node) => node.id === leafId) + 1;
  const cut = conversation.trim_before ? nodes.findIndex((node) => node.id === conversation.trim_before) : -1;
  const sent = nodes.slice(Math.max(0, cut), end).filter((node) => node.content);
  const messages = sent.map(({ role, content }) => ({ role, content }));
  if (conversation.system?.trim()) messages.unshift({ role: "system", content: conversation.system });
  return messages;
}

/** Events: "list" (the side bar changed), "conversation" with detail {id} (another tab changed it), "full". */
class Store extends EventTarget {
  constructor() {
    super();
    this.memory = new Map(); // what could not be stored lives as long as the page
    addEventListener("storage", (event) => {
      if (event.key === INDEX) this.dispatchEvent(new Event("list"));
      else if (event.key?.startsWith(entryKey(""))) this.tell("conversation", { id: event.key.slice(entryKey("").length) });
    });
  }

  tell(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }

  write(key, value) {
    if (storage.set(key, value)) {
      this.memory.delete(key);
      return;
    }
    this.memory.set(key, value);
    this.tell("full", {});
  }

  read(key) {
    return this.memory.get(key) ?? storage.get(key);
  }

  /** [{id, title, updated_at, running: {node id: generation id or ""}, unread}], latest first. */
  list() {
    return parse(this.read(INDEX), []).sort((a, b) => b.updated_at - a.updated_at);
  }

  get(id) {
    return parse(this.read(entryKey(id)), null);
  }

  create(settings) {
    const now = Date.now();
    const conversation = {
      id: randomId(8), title: "", created_at: now, updated_at: now, system: settings.system, params: settings.params,
      nodes: {}, selected: {}, trim_before: null,
    };
    this.write(entryKey(conversation.id), JSON.stringify(conversation));
    this.writeList([...this.list(), { id: conversation.id, title: "", updated_at: now, running: {}, unread: false }]);
    return conversation;
  }

  /** Alters a conversation; returns it, or null if it was deleted meanwhile. */
  update(id, change) {
    const conversation = this.get(id);
    if (!conversation) return null;
    change(conversation);
    this.write(entryKey(id), JSON.stringify(conversation));
    return conversation;
  }

  /** Alters a conversation's line in the list. */
  updateEntry(id, change) {
    const list = this.list();
    const entry = list.find((other) => other.id === id);
    if (!entry) return;
    const before = JSON.stringify(entry);
    change(entry);
    if (JSON.stringify(entry) !== before) this.writeList(list);
  }

  writeList(list) {
    this.write(INDEX, JSON.stringify(list));
    this.dispatchEvent(new Event("list"));
  }

  remove(id) {
    this.memory.delete(entryKey(id));
    try {
      localStorage.removeItem(entryKey(id));
    } catch {
      // No storage: it was in memory only.
    }
    this.writeList(this.list().filter((entry) => entry.id !== id));
  }
}

export const store = new Store();

/** The title of a conversation, made from its first question if nobody gave one. */
export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = path(conversation).find((node) => node.role === "user");
  return first ? first.content.trim().replace(/\s+/g, " ").slice(0, 80) : "New conversation";
}
