// The two tables of sequences. A row is made once per sequence and only its texts change: nothing under the pointer or
// the focus is ever replaced.

import { el, icon, setText } from "../page.js";
import { AbortCell } from "./abort.js";
import { age, count, integer, shortId } from "./format.js";
import { whyText } from "./why.js";

const MAX_ROWS = 100;
const LEAST_ROW_PX = 24;
const TALLEST_ROW_PX = 64;

/** Behaviour that both tables share: keyed rows, order, selection, the line below for what is not shown. */
class RowTable {
  /**
   * @param {HTMLElement} section  holds table, .more and .empty
   * @param {object} hooks  {onSelect(id), onReceipt(text, isError), rowsOf(requestId), onScroll()}
   */
  constructor(section, hooks) {
    this.section = section;
    this.hooks = hooks;
    this.body = section.querySelector("tbody");
    this.table = section.querySelector("table");
    this.more = section.querySelector(".more");
    this.empty = section.querySelector(".empty-note");
    this.number = section.querySelector(".panel-count");
    this.lines = new Map();
    this.selected = null;
    // Rows out of sight keep their old texts until they are scrolled to: a queue of hundreds costs what is seen of it.
    this.seen = { top: 0, height: 400 };
    const scroller = this.table.parentElement;
    scroller.addEventListener("scroll", () => {
      this.seen.top = scroller.scrollTop;
      hooks.onScroll();
    }, { passive: true });
    new ResizeObserver(([entry]) => {
      this.seen.height = entry.contentRect.height;
    }).observe(scroller);
  }

  #isSeen(position) {
    const { top, height } = this.seen;
    return position >= Math.floor(top / TALLEST_ROW_PX) - 2 && position <= Math.ceil((top + height) / LEAST_ROW_PX) + 2;
  }

  /** @param {object[]} rows  those that pass the filter  @param {number} total  before the filter  */
  show(rows, total, isFiltered, context) {
    const shown = rows.slice(0, MAX_ROWS);
    const wanted = new Set(shown.map((row) => row.id));
    for (const [id, line] of this.lines) {
      if (wanted.has(id)) continue;
      line.abort.gone(this.hooks.rowsOf(line.abort.requestId).length === 0);
      line.element.remove();
      this.lines.delete(id);
    }
    let next = this.body.firstElementChild;
    shown.forEach((row, position) => {
      let line = this.lines.get(row.id);
      const isNew = !line;
      if (isNew) {
        line = this.create(row);
        line.element.dataset.id = row.id;
        line.element.addEventListener("click", (event) => {
          if (!event.target.closest("button:not(.row-id)")) this.hooks.onSelect(row.id);
        });
        line.element.classList.toggle("is-selected", row.id === this.selected);
        this.lines.set(row.id, line);
      }
      if (line.element !== next) this.body.insertBefore(line.element, next);
      else next = next.nextElementSibling;
      if (isNew || this.#isSeen(position)) this.update(line, row, position, context);
      line.element.classList.toggle("is-first", position === 0);
      line.abort.refresh();
    });
    this.#notes(rows.length, total, isFiltered);
  }

  #notes(passing, total, isFiltered) {
    setText(this.number, isFiltered ? `${integer(passing)} of ${integer(total)}` : integer(total));
    const hidden = (isFiltered ? passing : total) - Math.min(passing, MAX_ROWS);
    this.more.hidden = hidden <= 0;
    if (hidden > 0) setText(this.more, `and ${integer(hidden)} more`);
    this.table.hidden = passing === 0;
    this.empty.hidden = passing > 0;
    this.empty.dataset.filtered = isFiltered && total > 0 ? "true" : "false";
  }

  select(id) {
    this.selected = id;
    for (const [key, line] of this.lines) {
      line.element.classList.toggle("is-selected", key === id);
      line.id.setAttribute("aria-pressed", key === id ? "true" : "false");
    }
  }

  /** Brings the row of a sequence into its panel's view, without moving the page. */
  reveal(id) {
    const line = this.lines.get(id);
    if (!line) return;
    const box = this.table.parentElement;
    const top = line.element.offsetTop;
    const head = this.table.tHead.offsetHeight;
    if (top - head < box.scrollTop) box.scrollTop = top - head;
    else if (top + line.element.offsetHeight > box.scrollTop + box.clientHeight) {
      box.scrollTop = top + line.element.offsetHeight - box.clientHeight;
    }
  }

  idCell(row) {
    const button = el(
      "button.row-id",
      { type: "button", title: `${row.id}\nSelect: highlights its blocks on the map`, "aria-pressed": "false" },
      shortId(row.id),
    );
    return { button, cell: el("td.col-id", {}, button) };
  }

  abortCell(row) {
    return new AbortCell(row.request_id, () => this.hooks.rowsOf(row.request_id), this.hooks.onReceipt);
  }
}

function deadlineTitle(row) {
  const at = (unix) => new Date(unix * 1000).toLocaleTimeString();
  return `arrived at ${at(row.arrival_unix)}, ${row.deadline_unix ? `ended by its deadline at ${at(row.deadline_unix)}` : "no deadline"}`;
}

export class RunningTable extends RowTable {
  create(row) {
    const id = this.idCell(row);
    const cells = {};
    for (const name of ["prompt", "output", "computed", "blocks", "age", "preempted"]) cells[name] = el("span", {}, "");
    cells.blocks.title = "of its own + shared with others";
    cells.age.title = deadlineTitle(row);
    cells.bar = el("span.prefill", { role: "img" }, el("span"));
    const abort = this.abortCell(row);
    const element = el(
      "tr",
      {},
      id.cell,
      el("td.col-source", {}, row.source),
      el("td.num.col-prompt", {}, cells.prompt),
      el("td.num.col-output", {}, cells.output),
      el("td.num.col-computed", {}, cells.bar, cells.computed),
      el("td.num.col-blocks", {}, cells.blocks),
      el("td.num.col-age", {}, cells.age),
      el("td.num.col-preempted", {}, cells.preempted),
      abort.cell,
    );
    return { element, id: id.button, cells, abort };
  }

  update(line, row, _position, { now }) {
    const { cells } = line;
    const known = row.num_prompt_tokens + row.num_output_tokens;
    setText(cells.prompt, integer(row.num_prompt_tokens));
    setText(cells.output, `${integer(row.num_output_tokens)} / ${integer(row.max_tokens)}`);
    setText(cells.computed, integer(row.num_computed_tokens));
    const own = row.num_blocks - row.num_shared_blocks;
    setText(cells.blocks, `${integer(own)} + ${integer(row.num_shared_blocks)}`);
    setText(cells.age, age(now - row.arrival_unix));
    setText(cells.preempted, integer(row.num_preemptions));
    cells.preempted.classList.toggle("is-zero", row.num_preemptions === 0);
    this.#prefill(cells.bar, row, known);
  }

  #prefill(bar, row, known) {
    // While decoding exactly one known token is not computed yet.
    const isReading = row.num_computed_tokens < known - 1;
    bar.classList.toggle("is-done", !isReading);
    if (!isReading) return;
    const part = Math.round((100 * row.num_computed_tokens) / known);
    if (bar.dataset.part === String(part)) return;
    bar.dataset.part = String(part);
    bar.firstChild.style.width = `${part}%`;
    bar.setAttribute("aria-label", `prefill ${part} % done`);
    bar.title = `prefill: ${integer(row.num_computed_tokens)} of ${count(known, "token")}`;
  }
}

export class WaitingTable extends RowTable {
  create(row) {
    const id = this.idCell(row);
    const cells = {};
    for (const name of ["place", "state", "prompt", "age", "why"]) cells[name] = el("span", {}, "");
    cells.age.title = deadlineTitle(row);
    const abort = this.abortCell(row);
    const mark = el("span.preempted-mark", { title: "" }, icon("retry", "icon-small"), el("span", {}, "preempted"));
    const element = el(
      "tr",
      {},
      el("td.num.col-place", {}, cells.place),
      id.cell,
      el("td.col-source", {}, row.source),
      el("td.num.col-prompt", {}, cells.prompt),
      el("td.num.col-age", {}, cells.age),
      el("td.col-why", {}, mark, cells.why),
      abort.cell,
    );
    return { element, id: id.button, cells, abort, mark };
  }

  update(line, row, position, { now, limits, numRunning, paused }) {
    const { cells, mark } = line;
    setText(cells.place, integer(position + 1));
    const known = row.num_prompt_tokens + row.num_output_tokens;
    setText(cells.prompt, integer(known));
    const title = row.num_output_tokens
      ? `${integer(row.num_prompt_tokens)} prompt and ${count(row.num_output_tokens, "output token")} to compute again`
      : count(row.num_prompt_tokens, "prompt token");
    if (cells.prompt.title !== title) cells.prompt.title = title;
    setText(cells.age, age(now - row.arrival_unix));
    const isPreempted = row.status === "PREEMPTED";
    mark.hidden = !isPreempted;
    if (isPreempted) mark.title = `It ran, and lost its blocks ${count(row.num_preemptions, "time")}; it goes on where it was`;
    const why = whyText(row.why, { limits, numRunning, paused: paused && position === 0 });
    setText(cells.why, why.text);
    cells.why.dataset.constraint = why.constraint;
    if (cells.why.title !== why.text) cells.why.title = why.text;
  }
}
