// What is under the pointer or the keyboard cursor: one small panel that never takes the pointer itself.

import { el, setText } from "../page.js";
import { count, integer, shortId } from "./format.js";
import { describeBlock } from "./map.js";

const MAX_OWNERS = 5;

export class Tooltip {
  constructor(element, view) {
    this.element = element;
    this.view = view;
    this.block = -1;
    this.point = null;
  }

  show(block, point) {
    this.block = block;
    this.point = point;
    this.refresh();
  }

  /** Follows the state while it is open. */
  refresh() {
    const { element, view, block, point } = this;
    const isShown = block >= 0 && block < view.numBlocks && point !== null;
    element.hidden = !isShown;
    if (!isShown) return;
    const { state, refs, owners } = describeBlock(view, block);
    const key = JSON.stringify([block, state, refs, owners]);
    if (key !== this.key) {
      this.key = key;
      element.replaceChildren(...this.#lines(block, state, refs, owners));
    }
    this.#place(point);
  }

  #lines(block, state, refs, owners) {
    const head = el(
      "div.tip-head",
      {},
      el("span.glyph", { "data-state": state }),
      el("strong", {}, `Block ${integer(block)}`),
      el("span", {}, state),
      el("span.tip-refs", {}, count(refs, "reference")),
    );
    const lines = owners.slice(0, MAX_OWNERS).map((owner) => el(
      "div.tip-owner",
      {},
      el("span", {}, shortId(owner.id)),
      el("span.tip-tokens", {}, `tokens ${integer(owner.first)}–${integer(owner.last)}`),
      owner.computed < this.view.blockSize ? el("span.faint", {}, `${integer(owner.computed)} computed`) : null,
    ));
    if (owners.length > MAX_OWNERS) lines.push(el("div.faint", {}, `and ${integer(owners.length - MAX_OWNERS)} more`));
    if (state === "cached") lines.push(el("div.faint", {}, "kept for reuse; the next prompt with this prefix takes it"));
    if (state === "free") lines.push(el("div.faint", {}, "no content"));
    return [head, ...lines];
  }

  #place({ x, y }) {
    const box = this.element.getBoundingClientRect();
    const left = x + 14 + box.width > innerWidth - 8 ? x - 14 - box.width : x + 14;
    const top = y + 16 + box.height > innerHeight - 8 ? y - 12 - box.height : y + 16;
    this.element.style.transform = `translate(${Math.round(Math.max(8, left))}px, ${Math.round(Math.max(8, top))}px)`;
  }
}

/** A text for those who don't see the map, at most every five seconds. */
export class Summary {
  constructor(element) {
    this.element = element;
    this.at = -Infinity;
  }

  refresh(state, now = performance.now()) {
    if (!state.kv || now - this.at < 5000) return;
    this.at = now;
    const { kv } = state;
    setText(
      this.element,
      `Step ${integer(state.step)}: ${count(kv.used, "block")} used, ${integer(kv.shared)} shared, ${integer(kv.cached)} cached, ` +
        `${integer(kv.free)} free, ${integer(kv.num_blocks)} in all. ${count(state.running.length, "sequence")} running, ` +
        `${integer(state.waiting_total)} waiting, ${count(state.counters?.num_preemptions ?? 0, "preemption")} so far.`,
    );
  }
}
