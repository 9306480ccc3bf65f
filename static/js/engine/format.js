// Numbers, ages and ids as a person reads them: always a unit, a dash where nothing was measured.

import { count as integer, plural as count } from "../page.js";

export { integer, count };

const TENTHS = new Intl.NumberFormat("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

export const DASH = "–";

/** Integers exactly below a million, then "12.10 M". */
export function short(value) {
  if (value === null || value === undefined || value < 1e6) return integer(value);
  return value < 1e9 ? `${(value / 1e6).toFixed(2)} M` : `${(value / 1e9).toFixed(2)} G`;
}

/** A share in per cent of a known total; a dash when the total is zero: nothing was measured. */
export function percent(part, total) {
  return total > 0 ? `${TENTHS.format((100 * part) / total)} %` : DASH;
}

/** Milliseconds with three digits at most: "0.41 ms", "12.3 ms", "1,204 ms". */
export function milliseconds(value) {
  if (value === null || value === undefined) return DASH;
  if (value < 1) return `${value.toFixed(2)} ms`;
  return `${value < 100 ? TENTHS.format(value) : integer(Math.round(value))} ms`;
}

/** Seconds as an age: "0.4 s", "12 s", "3 m 04 s", "2 h 05 m". */
export function age(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return DASH;
  const s = Math.max(0, seconds);
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 60) return `${Math.floor(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} m ${String(Math.floor(s % 60)).padStart(2, "0")} s`;
  return `${Math.floor(s / 3600)} h ${String(Math.floor((s % 3600) / 60)).padStart(2, "0")} m`;
}

/**
 * A short name for a sequence that stays unique enough to point at: the random part's first eight characters, with the
 * index of a sibling behind a dot. The full id belongs in a title.
 */
export function shortId(id) {
  if (id === null || id === undefined) return DASH;
  const text = String(id);
  if (text.length <= 12) return text;
  const match = /^(?:[a-z]+[-_])?(.{4,}?)((?:[-_.:#/]\d{1,3})?)$/i.exec(text);
  const body = match ? match[1] : text;
  const index = match ? match[2].slice(1) : "";
  return `${body.slice(0, 8)}${body.length > 8 ? "…" : ""}${index && index !== "0" ? `.${index}` : ""}`;
}
