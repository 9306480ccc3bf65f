// The settings of a conversation: read from the form, written to it, checked as they are typed.

import { storage } from "../page.js";

const LAST = "pagedeck.chat.settings";

/** Fields of the form: its defaults are in the page (data-default), so they are written once. */
function fieldsOf(form) {
  return [...form.querySelectorAll("[data-param]")];
}

function parseField(field, text) {
  if (field.dataset.param === "stop") {
    const stops = text.split("\n").filter((line) => line !== "");
    return { value: stops.map((line) => line.replaceAll("\\n", "\n")) };
  }
  const trimmed = text.trim();
  if (trimmed === "") return { value: null };
  const value = Number(trimmed);
  const isWhole = field.dataset.kind !== "integer" || Number.isInteger(value);
  const low = field.dataset.min ? Number(field.dataset.min) : -Infinity;
  const high = field.dataset.max ? Number(field.dataset.max) : Infinity;
  const isAbove = field.dataset.open === "low" ? value > low : value >= low;
  if (!Number.isFinite(value) || !isWhole || !isAbove || value > high) {
    return { error: `${isWhole ? "Must be" : "Must be a whole number,"} ${field.dataset.range}` };
  }
  return { value };
}

function formatField(field, value) {
  if (field.dataset.param === "stop") return (value ?? []).map((stop) => stop.replaceAll("\n", "\\n")).join("\n");
  return value === null || value === undefined ? "" : String(value);
}

export class Settings {
  /** `onChange({system, params})` on each valid change. */
  constructor(form, onChange) {
    this.form = form;
    this.onChange = onChange;
    this.system = form.querySelector("[name=system]");
    this.fields = fieldsOf(form);
    form.addEventListener("input", (event) => this.onInput(event.target));
    form.addEventListener("submit", (event) => event.preventDefault());
    form.querySelector("[data-action=reset]").addEventListener("click", () => {
      this.show(this.defaults());
      this.changed();
    });
  }

  defaults() {
    const params = {};
    for (const field of this.fields) params[field.dataset.param] = parseField(field, field.dataset.default ?? "").value;
    return { system: "", params };
  }

  /** What a new conversation starts with: what was used last. */
  last() {
    const defaults = this.defaults();
    try {
      const stored = JSON.parse(storage.get(LAST) ?? "null");
      return stored ? { system: stored.system ?? "", params: { ...defaults.params, ...stored.params } } : defaults;
    } catch {
      return defaults;
    }
  }

  show({ system, params }) {
    this.system.value = system ?? "";
    for (const field of this.fields) {
      field.value = formatField(field, params[field.dataset.param]);
      this.mark(field, null);
    }
    this.showCount();
  }

  /** {system, params} of the form; a field that is wrong keeps its default until it is right. */
  value() {
    const params = this.defaults().params;
    for (const field of this.fields) {
      const { value, error } = parseField(field, field.value);
      if (!error) params[field.dataset.param] = value;
    }
    return { system: this.system.value, params };
  }

  onInput(field) {
    if (field.dataset.param) this.mark(field, parseField(field, field.value).error ?? null);
    this.changed();
  }

  mark(field, error) {
    const note = document.getElementById(`${field.id}-error`);
    if (error) field.setAttribute("aria-invalid", "true");
    else field.removeAttribute("aria-invalid");
    if (note) {
      note.textContent = error ?? "";
      note.hidden = !error;
    }
  }

  changed() {
    const value = this.value();
    storage.set(LAST, JSON.stringify(value));
    this.showCount();
    this.onChange(value);
  }

  /** Whether anything differs from the defaults is said on the button that opens the panel. */
  showCount() {
    const { params, system } = this.value();
    const defaults = this.defaults().params;
    const changed = Object.keys(params).filter((name) => JSON.stringify(params[name]) !== JSON.stringify(defaults[name])).length + (system.trim() ? 1 : 0);
    this.form.querySelector("[data-action=reset]").disabled = changed === 0;
    const badge = document.getElementById("settings-count");
    badge.textContent = changed ? String(changed) : "";
    badge.hidden = changed === 0;
  }
}
