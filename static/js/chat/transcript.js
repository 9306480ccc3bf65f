// The transcript: one view per message, keyed by its id, so that what is finished is never drawn again.

import { el, icon, setText } from "../page.js";
import { receiptElements, statsElement, statusText } from "./stats.js";
import { path, siblings } from "./store.js";

const FOLLOW_PX = 64;

// Fetched beside the page, not before it: the composer works while this is on its way.
let MarkdownView = null;
const loading = import("./markdown.js").catch(() => import("./plain.js"));

function actionButton(action, glyph, label) {
  return el("button.btn.btn-quiet.btn-small.btn-icon", { type: "button", "data-action": action, title: label, "aria-label": label }, icon(glyph, "icon-small"));
}

/** ‹ 2/3 › between answers, or between versions of a question. */
function siblingArrows(conversation, node) {
  const all = siblings(conversation, node);
  if (all.length < 2) return null;
  const at = all.findIndex((other) => other.id === node.id);
  const what = node.role === "user" ? "version of the question" : "answer";
  const arrow = (step, label) =>
    el("button.btn.btn-quiet.btn-small.btn-icon", { type: "button", "data-action": "sibling", "data-to": all[at + step]?.id ?? "", disabled: !all[at + step], "aria-label": label }, icon("chevron", step < 0 ? "icon-small flip" : "icon-small"));
  return el("span.siblings", {}, arrow(-1, `Previous ${what}`), el("span.siblings-count", {}, `${at + 1}/${all.length}`), arrow(1, `Next ${what}`));
}

class UserView {
  constructor(node) {
    this.text = el("div.msg-text", {}, node.content);
    this.actions = el("div.msg-actions");
    this.element = el("article.msg.msg-user", { "data-node": node.id, "aria-label": "Your message" }, this.text, this.actions);
  }

  update(node, conversation) {
    const key = siblings(conversation, node).map((other) => other.id).join();
    if (key === this.key) return;
    this.key = key;
    setText(this.text, node.content);
    const arrows = siblingArrows(conversation, node);
    this.actions.replaceChildren(actionButton("edit", "edit", "Edit and send again"), actionButton("copy", "copy", "Copy message"), ...(arrows ? [arrows] : []));
  }
}

class AnswerView {
  constructor(node) {
    this.body = el("div.msg-body.markdown");
    this.status = el("p.msg-status", { hidden: true }, el("span.msg-pulse", { "aria-hidden": "true" }), el("span.msg-status-word"), el("span.msg-status-detail"));
    this.error = el("div.msg-error", { role: "alert", hidden: true });
    this.receipts = el("div.msg-receipts");
    this.foot = el("div.msg-foot", { hidden: true });
    this.element = el("article.msg.msg-answer", { "data-node": node.id, "aria-label": "Answer" }, this.body, this.error, this.status, this.receipts, this.foot);
    this.markdown = new MarkdownView(this.body);
  }

  /** `link` is the live state while the answer is being written, else null. */
  update(node, conversation, link, isConnected) {
    this.element.setAttribute("aria-busy", link ? "true" : "false");
    const text = link ? link.text : node.content;
    if (text !== this.shownText || !link !== this.shownDone) {
      this.shownText = text;
      this.shownDone = !link;
      this.markdown.update(text, !link);
    }
    this.showStatus(link, isConnected);
    this.showReceipts(node, link);
    if (link) {
      this.foot.hidden = true;
      this.footKey = null;
    } else {
      this.showEnd(node, conversation);
    }
  }

  showStatus(link, isConnected) {
    this.status.hidden = !link;
    if (!link) return;
    const [word, detail] = statusText(link, isConnected);
    setText(this.status.children[1], word);
    setText(this.status.children[2], detail ?? "");
  }

  showReceipts(node, link) {
    const receipts = link ? link.receipts : (node.receipts ?? []);
    const key = `${receipts.length}${JSON.stringify(node.stop_receipt ?? null)}`;
    if (key === this.receiptsKey) return;
    this.receiptsKey = key;
    this.receipts.replaceChildren(...receiptElements(node, receipts));
  }

  showEnd(node, conversation) {
    const key = siblings(conversation, node).map((other) => other.id).join() + node.status + (node.stats ? 1 : 0) + (node.error ?? "");
    if (key === this.footKey) return;
    this.footKey = key;
    const problem = this.problem(node);
    this.error.hidden = !problem;
    this.error.replaceChildren(...(problem ?? []));
    const isEmpty = !node.content && !problem && node.finish_reason !== "abort";
    this.body.classList.toggle("msg-empty", isEmpty && Boolean(node.finish_reason));
    const actions = el("div.msg-actions");
    const arrows = siblingArrows(conversation, node);
    if (node.content) actions.append(actionButton("copy", "copy", "Copy answer as Markdown"));
    actions.append(actionButton("regenerate", "retry", "Write another answer"), actionButton("curl", "terminal", "Copy the request as curl"));
    if (arrows) actions.append(arrows);
    const stats = statsElement(node);
    this.foot.replaceChildren(actions, ...(stats ? [stats] : []));
    this.foot.hidden = false;
  }

  /** What went wrong and what can be done about it; null if nothing did. */
  problem(node) {
    if (node.status === "sending" || node.status === "running") {
      return [icon("alert"), el("span.grow", {}, "The page was closed before the server answered."), el("button.btn.btn-small", { type: "button", "data-action": "regenerate" }, "Ask again")];
    }
    if (!node.error) return null;
    const isLong = node.error_code === "context_length_exceeded";
    const button = isLong
      ? el("button.btn.btn-small", { type: "button", "data-action": "trim" }, "Trim the oldest turns and send")
      : el("button.btn.btn-small", { type: "button", "data-action": "regenerate" }, "Try again");
    return [icon("alert"), el("span.grow", {}, node.error), button];
  }
}

/** Draws a conversation and keeps the reader where they are, or at the end if they were there. */
export class Transcript {
  constructor({ scroller, root, pill, generations }) {
    Object.assign(this, { scroller, root, pill, generations });
    this.views = new Map();
    this.conversation = null;
    this.isFollowing = true;
    this.frame = null;
    this.changed = new Set(); // ids of messages to draw at the next frame
    scroller.addEventListener("scroll", () => this.onScroll(), { passive: true });
    // Said before the scroll event comes, so that a reader who leaves the end isn't pulled back by the next token.
    scroller.addEventListener("wheel", (event) => {
      if (event.deltaY < 0 && this.scroller.scrollTop > 0) this.isFollowing = false;
    }, { passive: true });
    pill.addEventListener("click", () => this.toEnd());
    new ResizeObserver(() => this.settle()).observe(scroller);
    loading.then((module) => {
      MarkdownView = module.MarkdownView;
      this.draw();
    });
  }

  /** Shows a conversation, or the same one after a change. */
  show(conversation) {
    const isOther = conversation?.id !== this.conversation?.id;
    this.conversation = conversation;
    if (isOther) {
      this.views.clear();
      this.root.replaceChildren();
      this.isFollowing = true;
    }
    this.draw();
  }

  /** Draws a message that is being written at the next frame; as often as it is called, once per frame. */
  soon(nodeId) {
    this.changed.add(nodeId);
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      for (const id of this.changed) this.drawOne(id);
      this.changed.clear();
      this.settle();
    });
  }

  drawOne(id) {
    const node = this.conversation?.nodes[id];
    if (node) this.views.get(id)?.update(node, this.conversation, this.generations.live(id), this.generations.isConnected);
  }

  draw() {
    if (!MarkdownView) return;
    const nodes = this.conversation ? path(this.conversation) : [];
    const wanted = new Set(nodes.map((node) => node.id));
    for (const [id, view] of this.views) {
      if (wanted.has(id)) continue;
      view.element.remove();
      this.views.delete(id);
    }
    const cut = this.conversation?.trim_before ? nodes.findIndex((node) => node.id === this.conversation.trim_before) : -1;
    let before = null;
    nodes.forEach((node, index) => {
      let view = this.views.get(node.id);
      if (!view) {
        view = node.role === "user" ? new UserView(node) : new AnswerView(node);
        this.views.set(node.id, view);
      }
      view.update(node, this.conversation, this.generations.live(node.id), this.generations.isConnected);
      view.element.classList.toggle("msg-trimmed", index < cut);
      if (view.element.previousElementSibling !== before || view.element.parentNode !== this.root) {
        if (before) before.after(view.element);
        else this.root.prepend(view.element);
      }
      before = view.element;
    });
    this.showCut(cut > 0 ? this.views.get(nodes[cut].id).element : null, cut);
    this.settle();
  }

  showCut(element, numTrimmed) {
    const text = `${numTrimmed} earlier ${numTrimmed === 1 ? "message is" : "messages are"} no longer sent: they don't fit the context`;
    this.cutNote ??= el("div.cut-note", {}, el("span"), el("button.btn.btn-quiet.btn-small", { type: "button", "data-action": "untrim" }, "Send them again"));
    if (!element) {
      this.cutNote.remove();
      return;
    }
    setText(this.cutNote.firstChild, text);
    // Inside the message, so that messages stay direct neighbours of each other.
    if (this.cutNote.parentNode !== element) element.prepend(this.cutNote);
  }

  get distance() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    return scrollHeight - scrollTop - clientHeight;
  }

  onScroll() {
    this.isFollowing = this.distance <= FOLLOW_PX;
    if (this.isFollowing) this.pill.hidden = true;
  }

  /** After a change of height: at the end if that is where the reader was, else tell them that there is more. */
  settle() {
    if (this.isFollowing) {
      this.scroller.scrollTop = this.scroller.scrollHeight;
      this.pill.hidden = true;
    } else {
      const isWriting = this.conversation && this.generations.isRunning(this.conversation.id);
      if (isWriting && this.distance > FOLLOW_PX) this.pill.hidden = false;
    }
  }

  toEnd() {
    this.isFollowing = true;
    this.settle();
  }
}
