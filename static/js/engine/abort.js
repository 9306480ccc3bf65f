// Abort, in three moments: what it would do (in numbers), are you sure, what it did.

import { api, el, icon, page, setText } from "../page.js";
import { count, integer, shortId } from "./format.js";

export const READ_ONLY = "This role may look, not act. An admin key may.";

/** What ending a request would do, from the rows of all its sequences. */
export function abortEffect(rows) {
  let own = 0;
  let shared = 0;
  let computed = 0;
  let output = 0;
  for (const row of rows) {
    own += row.num_blocks - row.num_shared_blocks;
    shared += row.num_shared_blocks;
    computed += row.num_computed_tokens;
    output += row.num_output_tokens;
  }
  if (computed === 0 && own + shared === 0) {
    return output > 0 ? `holds no blocks, loses ${count(output, "output token")}` : "leaves the queue, frees no blocks";
  }
  const others = shared > 0 ? ` (${integer(shared)} shared stay with others)` : "";
  return `frees ${count(own, "block")}${others}, loses ${count(computed, "token")}`;
}

/** The server's receipt in words. */
export function receiptText(id, receipt) {
  if (receipt.state === "aborted") {
    const freed = count(receipt.blocks_freed, "block");
    return `Aborted ${shortId(id)} at step ${integer(receipt.step)}: ${freed} freed, ${count(receipt.output_tokens, "token")} produced`;
  }
  if (receipt.state?.startsWith("finished")) {
    return `${shortId(id)} had already ended (${receipt.state.split(":")[1] ?? "finished"}) by step ${integer(receipt.step)}`;
  }
  return `${shortId(id)} is not known here any more`;
}

/**
 * The last cell of a row: a button that asks in place. `getRows` gives the rows of the request; `onReceipt(text)` gets
 * the sentence when it is done.
 */
export class AbortCell {
  constructor(requestId, getRows, onReceipt) {
    this.requestId = requestId;
    this.getRows = getRows;
    this.onReceipt = onReceipt;
    const isReadOnly = page.role !== "admin";
    this.button = el(
      "button.btn.btn-quiet.btn-small.btn-icon.abort",
      {
        type: "button",
        "aria-label": `Abort ${shortId(requestId)}`,
        "aria-expanded": "false",
        title: isReadOnly ? READ_ONLY : "Abort: asks first",
        "aria-disabled": isReadOnly ? "true" : null,
        onclick: () => !isReadOnly && this.ask(),
      },
      icon("stop", "icon-small"),
    );
    this.cell = el("td.col-act", {}, this.button);
    this.panel = null;
  }

  ask() {
    if (this.panel) return;
    this.effect = el("span.confirm-effect", {}, "");
    this.yes = el("button.btn.btn-small.btn-danger", { type: "button", onclick: () => this.run() }, "Abort");
    const no = el("button.btn.btn-small", { type: "button", onclick: () => this.close(true) }, "Keep");
    this.panel = el(
      "div.confirm",
      {
        role: "group",
        "aria-label": `Abort ${shortId(this.requestId)}?`,
        onclick: (event) => event.stopPropagation(),
        onkeydown: (event) => {
          if (event.key !== "Escape") return;
          event.stopPropagation();
          this.close(true);
        },
      },
      this.effect,
      this.yes,
      no,
    );
    this.cell.append(this.panel);
    this.button.setAttribute("aria-expanded", "true");
    this.refresh();
    this.yes.focus();
  }

  /** Keeps the numbers of an open question current. */
  refresh() {
    if (this.panel && !this.yes.disabled) setText(this.effect, abortEffect(this.getRows()));
  }

  close(refocus) {
    this.panel?.remove();
    this.panel = null;
    this.button.setAttribute("aria-expanded", "false");
    if (refocus) this.button.focus();
  }

  /** The row leaves its table while the question is open: it ended, or only went to the other table. */
  gone(isEnded) {
    if (!this.panel || this.yes.disabled) return;
    this.onReceipt(isEnded ? `${shortId(this.requestId)} ended by itself; nothing was aborted` : `${shortId(this.requestId)} moved to the other table; ask again there`, false);
    this.panel = null;
  }

  async run() {
    this.yes.disabled = true;
    try {
      const receipt = await api("POST", `/admin/api/requests/${encodeURIComponent(this.requestId)}/abort`);
      this.onReceipt(receiptText(this.requestId, receipt), false);
      this.close(false);
    } catch (error) {
      this.onReceipt(`Abort failed: ${error.message}`, true);
      this.close(true);
    }
  }
}
