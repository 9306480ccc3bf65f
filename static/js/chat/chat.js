// The chat page: joins the conversations, the answers being written, the transcript, the composer and the settings.

import { api, copyText, el, page, plural, randomId, setText, toast } from "../page.js";
import { showBanner } from "../banner.js";
import { showState } from "../state-chip.js";
import { Composer } from "./composer.js";
import { curlCommand } from "./curl.js";
import { Generations } from "./generations.js";
import { Panels } from "./panels.js";
import { Settings } from "./settings.js";
import { Sidebar, syncTitle } from "./sidebar.js";
import { addNode, messagesFor, path, select, store, titleOf } from "./store.js";
import { Transcript } from "./transcript.js";

const byId = (id) => document.getElementById(id);
const draftKey = (id) => `pagedeck.chat.draft.${id ?? "new"}`;

const generations = new Generations();
const panels = new Panels();
let current = null; // the open conversation as it was last read; null: a new one that has no message yet

const transcript = new Transcript({ scroller: byId("scroller"), root: byId("transcript"), pill: byId("new-text"), generations });
const settings = new Settings(byId("settings-form"), (value) => {
  if (current) current = store.update(current.id, (c) => Object.assign(c, value)) ?? current;
  composer.countSoon();
});
const sidebar = new Sidebar({ list: byId("conv-list"), onOpen: openById, onDelete: remove });
const composer = new Composer({
  form: byId("composer"),
  input: byId("draft"),
  button: byId("send"),
  counter: byId("counter"),
  onSend: (text) => send(text),
  onStop: stop,
  messages: draftMessages,
  onCount: showOverflow,
});

function announce(text) {
  setText(byId("announcer"), text);
}

/** What would be sent: the conversation with the draft as its last message. */
function draftMessages(draft) {
  const value = settings.value();
  const base = current ? messagesFor({ ...current, system: value.system }) : value.system.trim() ? [{ role: "system", content: value.system }] : [];
  return draft ? [...base, { role: "user", content: draft }] : base;
}

// Opening -------------------------------------------------------------------------------------------------------

function saveDraft() {
  try {
    if (composer.text) sessionStorage.setItem(draftKey(current?.id), composer.text);
    else sessionStorage.removeItem(draftKey(current?.id));
  } catch {
    // Without storage a draft lives as long as the page.
  }
}

function loadDraft() {
  try {
    return sessionStorage.getItem(draftKey(current?.id)) ?? "";
  } catch {
    return "";
  }
}

function openById(id) {
  panels.closeDrawer();
  if (id && id === current?.id) return;
  location.hash = id ?? "";
}

function open(id) {
  saveDraft();
  current = id ? store.get(id) : null;
  if (id && !current) history.replaceState(null, "", location.pathname + location.search);
  generations.openConversation = current?.id ?? null;
  if (current) store.updateEntry(current.id, (entry) => (entry.unread = false));
  settings.show(current ?? settings.last());
  composer.text = loadDraft();
  closeEditor();
  show();
  sidebar.draw(current?.id);
}

/** Draws what depends on the open conversation. */
function show() {
  const isEmpty = !current || path(current).length === 0;
  byId("welcome").hidden = !isEmpty;
  const title = current ? titleOf(current) : "";
  const titleInput = byId("chat-title");
  if (document.activeElement !== titleInput) titleInput.value = title;
  titleInput.disabled = !current;
  document.title = `${title || "Chat"} · pagedeck`;
  transcript.show(current);
  showWriting();
}

function showWriting() {
  const link = current ? generations.runningIn(current.id) : null;
  composer.setWriting(Boolean(link), Boolean(link?.wantsStop));
}

function reread() {
  if (current) current = store.get(current.id);
  show();
}

// Sending -------------------------------------------------------------------------------------------------------

function ensureConversation() {
  if (current) return current;
  current = store.create(settings.value());
  generations.openConversation = current.id;
  history.pushState(null, "", `#${current.id}`);
  return current;
}

function send(text, id = randomId(8)) {
  composer.text = "";
  saveDraft();
  const conversation = ensureConversation();
  let node = null;
  current = store.update(conversation.id, (c) => {
    node = addNode(c, path(c).at(-1)?.id ?? null, { id, role: "user", content: text });
    c.updated_at = Date.now();
  });
  syncTitle(current);
  transcript.isFollowing = true;
  byId("overflow").hidden = true;
  generations.begin(current.id, node.id);
}

function stop() {
  const link = current ? generations.runningIn(current.id) : null;
  if (link) generations.stop(link.nodeId);
}

function regenerate(node) {
  if (generations.isRunning(current.id)) {
    toast("An answer is being written here. Stop it first.");
    return;
  }
  transcript.isFollowing = true;
  generations.begin(current.id, node.parent);
}

// Too long for the context ---------------------------------------------------------------------------------------

function showOverflow({ numTokens, maxContext, isTooLong }) {
  const note = byId("overflow");
  const draft = composer.text.trim();
  // A question that was refused for its length says so itself, with the same button.
  const isSaid = !draft && current && path(current).at(-1)?.error_code === "context_length_exceeded";
  note.hidden = !isTooLong || isSaid;
  if (note.hidden) return;
  const over = numTokens - maxContext + 1;
  const canTrim = current && path(current).length > 0;
  document.querySelector("[data-action=trim-send]").hidden = !canTrim;
  setText(byId("overflow-text"), `This ${canTrim ? "conversation" : "message"} is ${plural(over, "token")} too long for the context of ${plural(maxContext, "token")}, so the engine can’t take it.`);
  setText(byId("overflow-button"), draft ? "Trim the oldest turns and send" : "Trim the oldest turns");
}

/** Where to cut so that the messages up to `leafId` fit: the id of the first message still sent, or null if none does. */
async function findCut(conversation, leafId) {
  const nodes = path(conversation);
  const end = nodes.findIndex((node) => node.id === leafId) + 1;
  const starts = nodes.slice(0, end).filter((node) => node.role === "user").map((node) => node.id);
  const room = Math.max(1, Math.min(settings.value().params.max_tokens ?? 256, 256)); // for the answer
  const fits = async (start) => {
    const messages = messagesFor({ ...conversation, trim_before: start }, leafId);
    const answer = await api("POST", "/chat/api/tokenize", { messages });
    return answer.num_prompt_tokens + room <= answer.max_context;
  };
  // The later the cut the shorter the text, so halving finds the first cut that fits.
  let low = 0;
  let high = starts.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (await fits(starts[middle])) high = middle;
    else low = middle + 1;
  }
  return starts[low] ?? null;
}

async function trimAndSend() {
  if (!current || generations.isRunning(current.id)) return;
  const draft = composer.text.trim();
  const trial = structuredClone(current);
  const last = path(trial).at(-1);
  const question = draft ? addNode(trial, last?.id ?? null, { role: "user", content: draft }) : null;
  const leafId = question?.id ?? (last?.role === "assistant" ? last.parent : last?.id);
  try {
    const cut = await findCut(trial, leafId);
    if (!cut) {
      toast("Even the last message alone is too long for the context. Shorten it, or the system prompt.", { error: true });
      return;
    }
    current = store.update(current.id, (c) => (c.trim_before = cut)) ?? current;
    if (question) send(draft, question.id);
    else if (last?.role === "assistant" && last.error) generations.begin(current.id, last.parent);
    else reread();
    composer.countSoon();
  } catch (error) {
    toast(`Trimming failed: ${error.message}`, { error: true });
  }
}

// Messages ------------------------------------------------------------------------------------------------------

async function copy(text, what) {
  const done = await copyText(text);
  if (done) toast(`${what} copied`, { ms: 1600 });
  else toast("The browser did not allow copying.", { error: true });
}

let editor = null;

function closeEditor() {
  editor?.form.remove();
  editor?.view.classList.remove("msg-editing");
  editor = null;
}

function edit(node, view) {
  closeEditor();
  const area = el("textarea.textarea", { rows: "3", "aria-label": "Edit the message" });
  area.value = node.content;
  const form = el("form.msg-editor", {}, area, el("div.row.end", {}, el("button.btn.btn-small", { type: "button", onclick: closeEditor }, "Cancel"), el("button.btn.btn-small.btn-primary", { type: "submit" }, "Send")));
  const submit = () => {
    const text = area.value.trim();
    if (!text || generations.isRunning(current.id)) return;
    closeEditor();
    let added = null;
    current = store.update(current.id, (c) => (added = addNode(c, node.parent, { role: "user", content: text }))) ?? current;
    syncTitle(current);
    transcript.isFollowing = true;
    generations.begin(current.id, added.id);
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229) {
      event.preventDefault();
      submit();
    } else if (event.key === "Escape") {
      event.stopPropagation();
      closeEditor();
      view.querySelector("[data-action=edit]")?.focus();
    }
  });
  view.classList.add("msg-editing");
  view.append(form);
  editor = { form, view };
  area.focus();
}

byId("transcript").addEventListener("click", (event) => {
  const button = event.target.closest("[data-action]");
  const view = event.target.closest("[data-node]");
  const node = current?.nodes[view?.dataset.node];
  if (!button || !node) return;
  switch (button.dataset.action) {
    case "copy":
      copy(node.content, "Message");
      break;
    case "copy-code":
      copy(button.closest(".codeblock").querySelector("code").textContent, "Code");
      break;
    case "curl":
      copy(curlCommand(messagesFor(current, node.parent), current.params), "curl command");
      break;
    case "regenerate":
      regenerate(node);
      break;
    case "edit":
      if (generations.isRunning(current.id)) toast("An answer is being written here. Stop it first.");
      else edit(node, view);
      break;
    case "trim":
      trimAndSend();
      break;
    case "untrim":
      current = store.update(current.id, (c) => (c.trim_before = null)) ?? current;
      reread();
      composer.countSoon();
      break;
    case "sibling":
      current = store.update(current.id, (c) => select(c, c.nodes[button.dataset.to])) ?? current;
      reread();
      composer.countSoon();
      break;
  }
});

// Events of the answers --------------------------------------------------------------------------------------------

generations.addEventListener("begin", ({ detail }) => {
  if (detail.conversationId === current?.id) {
    reread();
    announce("The answer begins.");
  }
});
generations.addEventListener("change", ({ detail }) => {
  if (detail.conversationId !== current?.id) return;
  transcript.soon(detail.nodeId);
  showWriting();
});
generations.addEventListener("end", ({ detail }) => {
  const isOpen = detail.conversationId === current?.id;
  if (isOpen) {
    reread();
    composer.countSoon();
  }
  const numTokens = detail.node.stats?.num_output_tokens;
  const what = detail.node.error ? "The answer failed" : detail.node.finish_reason === "abort" ? "The answer was stopped" : "The answer is complete";
  announce(`${what}${numTokens ? `: ${plural(numTokens, "token")}` : ""}${isOpen ? "." : " in another conversation."}`);
});
generations.addEventListener("receipt", ({ detail }) => {
  if (detail.conversationId === current?.id) reread();
});
generations.addEventListener("problem", ({ detail }) => toast(detail, { error: true }));
// Who may not see the engine sees at least whether it is there.
if (page.role === "inference") {
  const showEngine = () => {
    const { dead, stuck } = generations.engine;
    const status = !generations.isConnected ? "DISCONNECTED" : dead ? "ENGINE DEAD" : stuck ? "ENGINE STUCK" : "LIVE";
    showState({ status, age_ms: null });
    showBanner(generations.engine);
  };
  generations.addEventListener("connection", showEngine);
  generations.addEventListener("engine", showEngine);
}

store.addEventListener("list", () => {
  // Another tab, in which this conversation isn't open, may have marked it.
  if (current && document.visibilityState === "visible") store.updateEntry(current.id, (entry) => (entry.unread = false));
  sidebar.draw(current?.id);
});
store.addEventListener("conversation", ({ detail }) => {
  if (detail.id === current?.id) {
    if (store.get(detail.id)) reread();
    else open(null);
  }
});
let isFullSaid = false;
store.addEventListener("full", () => {
  if (!isFullSaid) toast("This browser’s storage is full or off: conversations last only as long as this page. Delete some.", { error: true });
  isFullSaid = true;
});

// The page --------------------------------------------------------------------------------------------------------

function remove(id) {
  generations.stopAll(id);
  store.remove(id);
  if (id === current?.id) {
    current = null;
    history.replaceState(null, "", location.pathname + location.search);
    open(null);
  }
  byId("draft").focus();
}

function startNew() {
  panels.closeDrawer();
  if (current) {
    history.pushState(null, "", location.pathname);
    open(null);
  }
  byId("draft").focus();
}

for (const button of document.querySelectorAll("[data-action=new]")) button.addEventListener("click", startNew);
document.querySelector("[data-action=trim-send]").addEventListener("click", trimAndSend);
byId("chat-title").addEventListener("change", (event) => {
  if (!current) return;
  current = store.update(current.id, (c) => (c.title = event.target.value.trim())) ?? current;
  syncTitle(current);
  show();
});
byId("chat-title").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.isComposing) byId("draft").focus();
});
byId("examples").addEventListener("click", (event) => {
  const example = event.target.closest(".example");
  if (!example) return;
  composer.text = example.textContent;
  byId("draft").focus();
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented || event.isComposing || event.keyCode === 229) return;
  if (panels.closeDrawer()) return;
  stop();
});
addEventListener("popstate", () => {
  const id = location.hash.slice(1) || null;
  if (id !== (current?.id ?? null)) open(id);
});
addEventListener("pagehide", saveDraft);

open(location.hash.slice(1) || null);
// A link may fill the composer; sending is left to the person.
const query = new URLSearchParams(location.search).get("q");
if (query) {
  composer.text = query;
  history.replaceState(null, "", location.pathname + location.hash); // once, not with each reload
}
if (matchMedia("(hover: hover)").matches) byId("draft").focus();
