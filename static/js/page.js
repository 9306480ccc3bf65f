// What the server said about this page, and the few helpers every page needs.

const meta = document.querySelector('meta[name="pagedeck"]')?.dataset ?? {};

/** Path prefix behind a proxy ("" at the root), role of this browser, name of the model, version and process epoch. */
export const page = {
  root: meta.root ?? "",
  role: meta.role ?? "",
  model: meta.model ?? "",
  version: meta.version ?? "",
  epoch: meta.epoch ?? "",
};

/** URL of a path of this server. */
export const url = (path) => page.root + path;

/** A random id that needs no secure context. */
export function randomId(numBytes = 16) {
  const bytes = crypto.getRandomValues(new Uint8Array(numBytes));
  return Array.from(bytes, (b) => b.toString(16).padStart(2, "0")).join("");
}

/** localStorage that may be missing or full: reads give null, writes give false. */
export const storage = {
  get(key) {
    try {
      return localStorage.getItem(key);
    } catch {
      return null;
    }
  },
  set(key, value) {
    try {
      localStorage.setItem(key, value);
      return true;
    } catch {
      return false;
    }
  },
};

/** Who this browser is for the chat stream; kept for ever, shared by all tabs. */
export function clientId() {
  let id = storage.get("pagedeck.client_id");
  if (!id) {
    id = randomId();
    storage.set("pagedeck.client_id", id);
  }
  return id;
}

/** An error that the server answered with, in the one JSON shape. */
export class ApiError extends Error {
  constructor(status, error) {
    super(error.message || `the server answered ${status}`);
    this.status = status;
    this.code = error.code ?? null;
    this.param = error.param ?? null;
    this.detail = error;
  }
}

/** fetch of JSON. Rejects with ApiError (the server said no) or TypeError (it could not be reached). */
export async function api(method, path, body, headers = {}) {
  const response = await fetch(url(path), {
    method,
    headers: body === undefined ? headers : { "Content-Type": "application/json", ...headers },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  const text = await response.text();
  let value = null;
  try {
    value = text ? JSON.parse(text) : null;
  } catch {
    value = null;
  }
  if (!response.ok) throw new ApiError(response.status, value?.error ?? { message: `${response.status} ${response.statusText}` });
  return value;
}

const numbers = new Intl.NumberFormat("en-US");

/** 18204 -> "18,204"; null or undefined -> an en dash: not measured is not zero. */
export const count = (n) => (n === null || n === undefined ? "–" : numbers.format(n));

/** A rate or other number with few digits: 812, 31.2, 4.56. */
export function brief(n) {
  if (n === null || n === undefined || !Number.isFinite(n)) return "–";
  if (n >= 100) return numbers.format(Math.round(n));
  return n >= 10 ? n.toFixed(1) : n.toFixed(2);
}

/** Seconds as a person reads them: 830 ms, 4.2 s, 3 min 20 s. */
export function seconds(s) {
  if (s === null || s === undefined || !Number.isFinite(s)) return "–";
  if (s < 0.0095) return `${(s * 1000).toFixed(1)} ms`;
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 10) return `${s.toFixed(2)} s`;
  if (s < 60) return `${s.toFixed(1)} s`;
  const whole = Math.round(s);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/** "1 block", "6 blocks". */
export const plural = (n, word, many = `${word}s`) => `${count(n)} ${n === 1 ? word : many}`;

const SVG = "http://www.w3.org/2000/svg";

/** An icon of the sprite in base.html. */
export function icon(name, className = "") {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", `icon ${className}`.trim());
  svg.setAttribute("aria-hidden", "true");
  svg.setAttribute("focusable", "false");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

/** An element: el("p.hint", {id: "x"}, "text", child). Strings become text nodes, never HTML. */
export function el(spec, attributes = {}, ...children) {
  const [tag, ...classes] = spec.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Sets text only when it changed, so that an idle page does no layout. */
export function setText(element, text) {
  if (element && element.textContent !== text) element.textContent = text;
}

/** A short notice at the lower left; errors stay until dismissed. */
export function toast(text, { error = false, ms = 4000 } = {}) {
  const host = document.getElementById("toasts");
  if (!host) return;
  const close = el("button.btn.btn-quiet.btn-small.btn-icon", { type: "button", "aria-label": "Dismiss" }, icon("close", "icon-small"));
  const note = el(error ? "div.toast.toast-error" : "div.toast", error ? { role: "alert" } : {}, icon(error ? "alert" : "check"), el("span.grow", {}, text), close);
  close.addEventListener("click", () => note.remove());
  host.append(note);
  if (!error) setTimeout(() => note.remove(), ms);
}

/** Copies text; false where the browser refuses (then the caller says so). */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Not a secure context, or no permission: the old way.
    const area = el("textarea.sr-only", { "aria-hidden": "true", tabindex: "-1" });
    area.value = text;
    document.body.append(area);
    const focused = document.activeElement;
    area.select();
    let done = false;
    try {
      done = document.execCommand("copy");
    } catch {
      done = false;
    }
    area.remove();
    focused?.focus?.();
    return done;
  }
}
