// The limits form: edits are staged in the page, reviewed as a diff, and applied as one atomic PATCH. Live updates set
// texts beside a field, never a field that is being edited.

import { el, icon, setText, url } from "../page.js";
import { integer } from "../engine/format.js";
import { consequence, pressure } from "./pressure.js";

const byId = (id) => document.getElementById(id);

/** A value as the table shows it. */
export function valueText(value, kind) {
  if (value === null || value === undefined) return "off";
  if (kind === "seconds") return `${value} s`;
  return kind === "int" ? integer(value) : String(value);
}

/** A value as a field holds it: no separators, nothing where it is off. */
const fieldText = (value) => (value === null || value === undefined ? "" : String(value));

/** What a field's text means. @returns {{value: unknown}|{problem: string}} */
export function parseField(text, kind) {
  const trimmed = text.trim();
  if (kind === "choice") return { value: trimmed };
  if (kind === "seconds" && (trimmed === "" || trimmed.toLowerCase() === "off")) return { value: null };
  const value = Number(trimmed.replaceAll(/[,_ ](?=\d)/g, ""));
  return trimmed === "" || Number.isNaN(value) ? { problem: "This is not a number." } : { value };
}

class LimitRow {
  constructor(element, form) {
    this.element = element;
    this.name = element.dataset.limit;
    this.kind = element.dataset.kind;
    this.field = element.querySelector("input, select");
    this.currentCell = element.querySelector("[data-current]");
    this.pressureCell = element.querySelector("[data-pressure]");
    this.sourceCell = element.querySelector("[data-source]");
    this.problem = element.querySelector(".field-error");
    this.unstage = element.querySelector(".unstage");
    this.range = element.querySelector(".limit-range").textContent;
    this.current = parseField(this.field.value, this.kind).value;
    this.isEdited = false;
    this.field.addEventListener("input", () => {
      this.isEdited = true;
      this.showProblem("");
      form.changed();
    });
    this.field.addEventListener("blur", () => {
      if (!this.isStaged) this.follow();
      form.changed();
    });
    this.field.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.isEdited) {
        event.stopPropagation();
        this.discard();
        form.changed();
      }
    });
    this.unstage.addEventListener("click", () => {
      this.discard();
      this.field.focus();
      form.changed();
    });
  }

  get parsed() {
    return parseField(this.field.value, this.kind);
  }

  get isStaged() {
    return this.isEdited && (this.parsed.problem !== undefined || this.parsed.value !== this.current);
  }

  /** Takes the value in force; the field follows only if nobody is editing it. */
  take(value) {
    if (value === this.current) return;
    this.current = value;
    setText(this.currentCell, valueText(value, this.kind));
    setText(this.sourceCell, "runtime");
    if (!this.isEdited && document.activeElement !== this.field) this.follow();
  }

  follow() {
    this.isEdited = false;
    const text = fieldText(this.current);
    if (this.field.value !== text) this.field.value = text;
    this.showProblem("");
  }

  discard() {
    this.follow();
  }

  showProblem(text) {
    setText(this.problem, text);
    this.problem.hidden = text === "";
    if (text) this.field.setAttribute("aria-invalid", "true");
    else this.field.removeAttribute("aria-invalid");
  }

  refresh(state, now) {
    this.element.classList.toggle("is-staged", this.isStaged);
    this.unstage.hidden = !this.isStaged;
    const { text, part } = pressure(this.name, state, now);
    setText(this.pressureCell, text);
    if (part === null) {
      this.meter?.remove();
      this.meter = undefined;
    } else {
      if (!this.meter) {
        this.meter = el("span.meter", { "aria-hidden": "true" }, el("span"));
        this.pressureCell.after(this.meter);
      }
      this.meter.firstChild.style.width = `${Math.min(100, Math.round(100 * part))}%`;
      this.meter.classList.toggle("is-full", part >= 1);
    }
  }
}

export class LimitsForm {
  /** @param {object} hooks  {state(), now(), onApplied()} */
  constructor(root, hooks) {
    this.hooks = hooks;
    this.mayAct = root.dataset.mayAct === "true";
    this.version = Number(root.dataset.version);
    this.rows = [...root.querySelectorAll("[data-limit]")].map((element) => new LimitRow(element, this));
    this.undoable = null;
    this.dialog = byId("review-dialog");
    if (this.mayAct) this.#wire();
  }

  #wire() {
    byId("limits-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.review();
    });
    // A form without a submit button is submitted by Enter only when it has one field: ask for it.
    byId("limits-form").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && event.target.matches("input")) {
        event.preventDefault();
        this.review();
      }
    });
    byId("review").addEventListener("click", () => this.review());
    byId("discard").addEventListener("click", () => {
      for (const row of this.rows) row.discard();
      byId("conflict").hidden = true;
      this.changed();
    });
    byId("apply").addEventListener("click", () => this.apply());
    byId("undo").addEventListener("click", () => this.undo());
    for (const button of this.dialog.querySelectorAll("[data-close]")) button.addEventListener("click", () => this.dialog.close());
  }

  get staged() {
    return this.rows.filter((row) => row.isStaged);
  }

  /** The limits in force, from the stream. */
  take(limits, version) {
    if (!limits || version === null || version < this.version) return;
    const changes = this.rows.filter((row) => row.name in limits && limits[row.name] !== row.current);
    if (version > this.version && changes.length && this.staged.length && !this.isApplying) {
      this.#tellConflict(changes.map((row) => ({ row, from: row.current, to: limits[row.name] })), version);
    }
    for (const row of this.rows) if (row.name in limits) row.take(limits[row.name]);
    this.version = version;
    setText(byId("limits-version"), String(version));
    if (this.undoable && version > this.undoable.version) this.undoable = null;
    this.changed();
  }

  #tellConflict(changes, version) {
    const parts = changes.map(({ row, from, to }) => `${row.name} ${valueText(from, row.kind)} → ${valueText(to, row.kind)}`);
    const note = byId("conflict");
    note.replaceChildren(
      icon("alert"),
      el(
        "span",
        {},
        el("strong", {}, "Someone else changed the limits while you were editing: "),
        `${parts.join(", ") || "and changed them back"} (version ${version}). Your edits are kept; review them again.`,
      ),
    );
    note.hidden = false;
  }

  changed() {
    const staged = this.staged;
    const n = staged.length;
    setText(byId("stage-note"), n ? `${integer(n)} ${n === 1 ? "change" : "changes"} staged, nothing applied yet` : (this.receipt ?? ""));
    if (!this.mayAct) return;
    byId("review").disabled = n === 0;
    byId("discard").hidden = n === 0;
    byId("undo").hidden = this.undoable === null || n > 0;
    this.refresh();
  }

  refresh() {
    const state = this.hooks.state();
    const now = this.hooks.now();
    for (const row of this.rows) row.refresh(state, now);
  }

  review() {
    const staged = this.staged;
    if (!staged.length) return;
    let first = null;
    for (const row of staged) {
      const { problem } = row.parsed;
      if (problem) {
        row.showProblem(`${problem} Allowed: ${row.range}.`);
        first ??= row;
      }
    }
    if (first) {
      first.field.focus();
      return;
    }
    this.reviewed = {
      version: this.version,
      limits: Object.fromEntries(this.rows.map((row) => [row.name, row.current])),
      changes: Object.fromEntries(staged.map((row) => [row.name, row.parsed.value])),
    };
    setText(byId("review-version"), String(this.version));
    const state = this.hooks.state();
    this.dialog.querySelector("tbody").replaceChildren(...staged.map((row) => el(
      "tr",
      {},
      el("th", { scope: "row" }, row.name),
      el("td.num.diff-old", {}, valueText(row.current, row.kind)),
      el("td.diff-arrow", {}, "→"),
      el("td.num.diff-new", {}, valueText(row.parsed.value, row.kind)),
      el("td.diff-effect", {}, consequence(row.name, row.parsed.value, state)),
    )));
    byId("conflict").hidden = true;
    this.dialog.showModal();
    byId("apply").focus();
  }

  async apply() {
    const { version, changes, limits } = this.reviewed;
    const before = Object.fromEntries(Object.keys(changes).map((name) => [name, limits[name]]));
    byId("apply").disabled = true;
    const answer = await this.#patch(changes, version);
    byId("apply").disabled = false;
    this.dialog.close(); // before what comes: closing gives the focus back to where it was
    if (!this.#isApplied(answer)) return;
    this.undoable = { changes: before, version: answer.version };
    this.#settle(answer, changes, "Applied");
  }

  async undo() {
    if (!this.undoable) return;
    const { changes, version } = this.undoable;
    this.undoable = null;
    const answer = await this.#patch(changes, version);
    if (this.#isApplied(answer)) this.#settle(answer, changes, "Undone");
    this.changed();
  }

  #settle({ limits, version }, changes, verb) {
    for (const row of this.rows) if (row.name in changes) row.isEdited = false;
    this.receipt = `${verb} as version ${version}: ${Object.entries(changes).map(([name, value]) => `${name} ${value ?? "off"}`).join(", ")}`;
    this.isApplying = true;
    this.take(limits, version);
    this.isApplying = false;
    for (const row of this.rows) if (row.name in changes) row.follow();
    this.changed();
    this.hooks.onApplied();
  }

  /** @returns {Promise<{limits: object, version: number}|{status: number, error: object}>} */
  async #patch(changes, version) {
    try {
      const response = await fetch(url("/admin/api/limits"), {
        method: "PATCH",
        headers: { "Content-Type": "application/json", "If-Match": `"${version}"` },
        body: JSON.stringify(changes),
      });
      const body = await response.json();
      if (!response.ok) return { status: response.status, error: body.error ?? { message: response.statusText } };
      const tag = /"(\d+)"/.exec(response.headers.get("ETag") ?? "");
      return { limits: body, version: tag ? Number(tag[1]) : version + 1 };
    } catch (error) {
      return { status: 0, error: { message: `The server could not be reached: ${error.message}` } };
    }
  }

  /** Whether a PATCH was applied; if it was not, the page says why. */
  #isApplied({ status, error }) {
    if (!error) {
      byId("conflict").hidden = true;
      return true;
    }
    const row = this.rows.find((each) => each.name === error.param);
    if (status === 412 && error.current) this.#tellStale(error);
    else if (row) {
      row.showProblem(error.message);
      row.field.focus();
    } else this.#tellFailure(`${error.message}. Nothing was applied; your edits are kept.`);
    return false;
  }

  #tellStale({ current, version }) {
    const seen = this.reviewed?.limits ?? {};
    const changes = this.rows.filter((row) => row.name in current && current[row.name] !== seen[row.name]);
    this.#tellConflict(changes.map((row) => ({ row, from: seen[row.name], to: current[row.name] })), version);
    this.isApplying = true;
    this.take(current, version);
    this.isApplying = false;
  }

  #tellFailure(text) {
    const note = byId("conflict");
    note.replaceChildren(icon("alert"), el("span", {}, text));
    note.hidden = false;
  }
}
