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
    if (version > this.version && changes.length && this.staged.length && !this.isApplying) this.#tellConflict(changes, limits, version);
    for (const row of this.rows) if (row.name in limits) row.take(limits[row.name]);
    this.version = version;
    setText(byId("limits-version"), String(version));
    if (this.undoable && version > this.undoable.version) this.undoable = null;
    this.changed();
  }

  #tellConflict(changes, limits, version) {
    const parts = changes.map((row) => `${row.name} ${valueText(row.current, row.kind)} → ${valueText(limits[row.name], row.kind)}`);
    const note = byId("conflict");
    note.replaceChildren(
      icon("alert"),
      el("span", {}, el("strong", {}, "Someone else changed the limits while you were editing: "), `${parts.join(", ")} (version ${version}). Your edits are kept; review them again.`),
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
    this.reviewed = { version: this.version, changes: Object.fromEntries(staged.map((row) => [row.name, row.parsed.value])) };
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
    const { version, changes } = this.reviewed;
    const before = Object.fromEntries(this.rows.filter((row) => row.name in changes).map((row) => [row.name, row.current]));
    byId("apply").disabled = true;
    try {
      const applied = await this.#patch(changes, version);
      this.dialog.close();
      if (applied) {
        this.undoable = { changes: before, version: applied.version };
        this.#settle(applied, changes, "Applied");
      }
    } finally {
      byId("apply").disabled = false;
    }
  }

  async undo() {
    if (!this.undoable) return;
    const { changes, version } = this.undoable;
    const applied = await this.#patch(changes, version);
    this.undoable = null;
    if (applied) this.#settle(applied, changes, "Undone");
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

  /** @returns {Promise<{limits: object, version: number}|null>}  null: it was refused and the page says why */
  async #patch(changes, version) {
    let response;
    let body;
    try {
      response = await fetch(url("/admin/api/limits"), {
        method: "PATCH",
        headers: { "Content-Type": "application/json", "If-Match": `"${version}"` },
        body: JSON.stringify(changes),
      });
      body = await response.json();
    } catch (error) {
      this.#tellFailure(`The server could not be reached: ${error.message}. Nothing was applied; your edits are kept.`);
      return null;
    }
    if (response.ok) {
      const tag = /"(\d+)"/.exec(response.headers.get("ETag") ?? "");
      byId("conflict").hidden = true;
      return { limits: body, version: tag ? Number(tag[1]) : version + 1 };
    }
    this.#refused(response.status, body.error ?? { message: response.statusText });
    return null;
  }

  #refused(status, error) {
    if (status === 412) {
      const limits = error.current ?? error.limits;
      const changes = limits ? this.rows.filter((row) => row.name in limits && limits[row.name] !== row.current) : [];
      if (changes.length) {
        this.#tellConflict(changes, limits, error.version);
        this.isApplying = true;
        this.take(limits, error.version);
        this.isApplying = false;
      } else this.#tellFailure(`${error.message}. Your edits are kept; review them again.`);
      return;
    }
    const row = this.rows.find((each) => each.name === error.param);
    if (row) {
      row.showProblem(error.message);
      row.field.focus();
    } else this.#tellFailure(`${error.message}. Nothing was applied; your edits are kept.`);
  }

  #tellFailure(text) {
    const note = byId("conflict");
    note.replaceChildren(icon("alert"), el("span", {}, text));
    note.hidden = false;
  }
}
