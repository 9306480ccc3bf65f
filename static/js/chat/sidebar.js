// The list of conversations: which are being written, which have news, and which is open.

import { el, icon, setText } from "../page.js";
import { store, titleOf } from "./store.js";

export class Sidebar {
  /** `onOpen(id)`, `onDelete(id)`. */
  constructor({ list, onOpen, onDelete }) {
    Object.assign(this, { list, onOpen, onDelete });
    this.items = new Map();
    list.addEventListener("click", (event) => {
      const item = event.target.closest("[data-conversation]");
      if (!item) return;
      if (event.target.closest("[data-action=delete]")) this.confirmDelete(item);
      else if (event.target.closest("[data-action=keep]")) this.reset(item);
      else if (event.target.closest("[data-action=delete-now]")) this.onDelete(item.dataset.conversation);
      else if (event.target.closest("[data-action=open]")) this.onOpen(item.dataset.conversation);
    });
  }

  confirmDelete(item) {
    item.classList.add("conv-confirm");
    item.querySelector("[data-action=delete-now]").focus();
  }

  reset(item) {
    item.classList.remove("conv-confirm");
    item.querySelector("[data-action=delete]").focus();
  }

  create(entry) {
    const open = el("button.conv-open", { type: "button", "data-action": "open" }, el("span.conv-title.truncate"), el("span.conv-badge"));
    const remove = el("button.btn.btn-quiet.btn-small.btn-icon.conv-delete", { type: "button", "data-action": "delete" }, icon("trash", "icon-small"));
    const confirm = el("span.conv-ask", {}, el("span.grow", {}, "Delete?"), el("button.btn.btn-small.btn-danger", { type: "button", "data-action": "delete-now" }, "Delete"), el("button.btn.btn-small", { type: "button", "data-action": "keep" }, "Keep"));
    return el("li.conv", { "data-conversation": entry.id }, open, remove, confirm);
  }

  draw(activeId) {
    const entries = store.list();
    const wanted = new Set(entries.map((entry) => entry.id));
    for (const [id, item] of this.items) {
      if (wanted.has(id)) continue;
      item.remove();
      this.items.delete(id);
    }
    let before = null;
    for (const entry of entries) {
      let item = this.items.get(entry.id);
      if (!item) {
        item = this.create(entry);
        this.items.set(entry.id, item);
      }
      this.update(item, entry, entry.id === activeId);
      if (before ? before.nextElementSibling !== item : this.list.firstElementChild !== item) {
        if (before) before.after(item);
        else this.list.prepend(item);
      }
      before = item;
    }
  }

  update(item, entry, isActive) {
    const title = entry.title || "New conversation";
    const open = item.querySelector(".conv-open");
    setText(item.querySelector(".conv-title"), title);
    open.title = title;
    item.querySelector(".conv-delete").setAttribute("aria-label", `Delete “${title}”`);
    if (isActive) open.setAttribute("aria-current", "true");
    else open.removeAttribute("aria-current");
    item.classList.toggle("conv-active", isActive);
    const numRunning = Object.keys(entry.running ?? {}).length;
    const badge = item.querySelector(".conv-badge");
    const state = numRunning ? "writing" : entry.unread && !isActive ? "new" : "";
    if (badge.dataset.state !== state) {
      badge.dataset.state = state;
      setText(badge, state);
      badge.className = state ? `conv-badge conv-badge-${state}` : "conv-badge";
    }
  }
}

/** Keeps the title in the list equal to the conversation's. */
export function syncTitle(conversation) {
  const title = titleOf(conversation);
  store.updateEntry(conversation.id, (entry) => (entry.title = title));
}
