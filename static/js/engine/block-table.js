// The blocks as a table, for those who cannot use the map and those who want the exact numbers. A page at a time.

import { el, setText } from "../page.js";
import { integer, shortId } from "./format.js";
import { describeBlock } from "./map.js";

const PAGE_SIZE = 128;

export class BlockTable {
  /** @param {HTMLElement} section  @param {import("./view.js").View} view */
  constructor(section, view, onSelect) {
    this.section = section;
    this.view = view;
    this.onSelect = onSelect;
    this.body = section.querySelector("tbody");
    this.state = section.querySelector("select");
    this.range = section.querySelector(".table-range");
    this.previous = section.querySelector("[data-page=previous]");
    this.next = section.querySelector("[data-page=next]");
    this.start = 0;
    this.lines = [];
    this.state.addEventListener("change", () => this.#turn(-Infinity));
    this.previous.addEventListener("click", () => this.#turn(-PAGE_SIZE));
    this.next.addEventListener("click", () => this.#turn(PAGE_SIZE));
  }

  #turn(by) {
    this.start = Math.max(0, this.start + by);
    this.section.querySelector(".table-scroll").scrollTop = 0;
    this.refresh();
  }

  #blocks() {
    const { view } = this;
    const wanted = this.state.value;
    const blocks = [];
    for (let block = 0; block < view.numBlocks; block += 1) {
      if (wanted === "" || view.state[block] === Number(wanted)) blocks.push(block);
    }
    return blocks;
  }

  refresh() {
    if (this.section.hidden) return;
    const blocks = this.#blocks();
    if (this.start >= blocks.length) this.start = Math.max(0, Math.floor((blocks.length - 1) / PAGE_SIZE) * PAGE_SIZE);
    const shown = blocks.slice(this.start, this.start + PAGE_SIZE);
    const holders = this.#holders(new Set(shown));
    while (this.lines.length < shown.length) this.lines.push(this.#line());
    this.lines.forEach((line, i) => {
      line.row.hidden = i >= shown.length;
      if (i < shown.length) this.#fill(line, shown[i], holders.get(shown[i]) ?? []);
    });
    const last = Math.min(blocks.length, this.start + PAGE_SIZE);
    setText(this.range, blocks.length ? `${integer(this.start + 1)}–${integer(last)} of ${integer(blocks.length)} blocks` : "no such blocks");
    this.previous.disabled = this.start === 0;
    this.next.disabled = last >= blocks.length;
  }

  /** Owners of the blocks on this page in one pass over the block tables. */
  #holders(wanted) {
    const holders = new Map();
    for (const row of this.view.running()) {
      (row.block_table ?? []).forEach((block, index) => {
        if (!wanted.has(block)) return;
        if (!holders.has(block)) holders.set(block, []);
        holders.get(block).push({ id: row.id, index });
      });
    }
    return holders;
  }

  #line() {
    const cells = { block: el("td.num"), state: el("td"), refs: el("td.num"), owner: el("td"), tokens: el("td.num") };
    const owner = el("button.row-id", { type: "button", title: "Select" });
    owner.addEventListener("click", () => owner.dataset.id && this.onSelect(owner.dataset.id));
    const others = el("span.faint");
    cells.owner.append(owner, others);
    const swatch = el("span.glyph");
    const word = el("span");
    cells.state.append(swatch, word);
    const row = el("tr", {}, ...Object.values(cells));
    this.body.append(row);
    return { row, cells, owner, others, swatch, word };
  }

  #fill(line, block, holders) {
    const { view } = this;
    const { state, refs } = describeBlock(view, block, []);
    setText(line.cells.block, integer(block));
    if (line.swatch.dataset.state !== state) {
      line.swatch.dataset.state = state;
      setText(line.word, state);
    }
    setText(line.cells.refs, integer(refs));
    const first = holders[0];
    line.owner.hidden = !first;
    if (first && line.owner.dataset.id !== first.id) {
      line.owner.dataset.id = first.id;
      setText(line.owner, shortId(first.id));
      line.owner.title = `${first.id}\nSelect: highlights its blocks on the map`;
    }
    setText(line.others, holders.length > 1 ? ` and ${integer(holders.length - 1)} more` : first ? "" : "–");
    const size = view.blockSize;
    setText(line.cells.tokens, first ? `${integer(first.index * size)}–${integer(first.index * size + size - 1)}` : "–");
  }
}
