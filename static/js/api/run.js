// Runs a request of the page and shows its answer while it comes.

import { brief, count, el, seconds, setText } from "../page.js";

const MAX_SHOWN = 200_000; // characters of a stream that are kept on the page
const FRAME_MS = 100;

/** What a stream's events say as text: of a chat, of a completion, of responses and messages. */
function textOf(data) {
  if (Array.isArray(data.choices)) return data.choices.filter((choice) => choice.index === 0).map((choice) => choice.delta?.content ?? choice.text ?? "").join("");
  if (data.type === "response.output_text.delta") return data.delta ?? "";
  if (data.type === "content_block_delta") return data.delta?.text ?? "";
  return "";
}

const isPlain = (value) => value === null || typeof value !== "object";

/** Indented JSON, with lists of plain values on one line: token ids and block tables are long. */
export function pretty(value, indent = "") {
  if (isPlain(value)) return JSON.stringify(value);
  const inner = `${indent}  `;
  if (Array.isArray(value)) {
    if (value.every(isPlain)) return `[${value.map((item) => JSON.stringify(item)).join(", ")}]`;
    return `[\n${value.map((item) => inner + pretty(item, inner)).join(",\n")}\n${indent}]`;
  }
  const items = Object.entries(value).map(([name, item]) => `${inner}${JSON.stringify(name)}: ${pretty(item, inner)}`);
  return items.length ? `{\n${items.join(",\n")}\n${indent}}` : "{}";
}

export class Run {
  /** @param parts {status, answer, text, raw}: elements of the example */
  constructor(parts) {
    this.parts = parts;
    this.control = null;
  }

  get isRunning() {
    return this.control !== null;
  }

  stop() {
    this.control?.abort();
  }

  /** @param {{method: string, url: string, headers: object, body: string|undefined}} request */
  async start(request) {
    const { answer, text, raw } = this.parts;
    this.control = new AbortController();
    this.begin = performance.now();
    this.numBytes = 0;
    this.numEvents = 0;
    this.shown = "";
    this.said = "";
    this.word = "";
    this.look = "";
    raw.textContent = "";
    text.textContent = "";
    text.hidden = true;
    answer.hidden = true;
    this.#status("waiting", "");
    setText(document.getElementById("run-said"), "Running");
    try {
      const response = await fetch(request.url, { method: request.method, headers: request.headers, body: request.body, signal: this.control.signal });
      answer.hidden = false;
      this.word = `${response.status} ${response.statusText}`.trim();
      this.look = response.ok ? "is-ok" : "is-error";
      this.firstMs = performance.now() - this.begin;
      const kind = response.headers.get("Content-Type") ?? "";
      if (kind.startsWith("text/event-stream")) await this.#stream(response);
      else await this.#whole(response, kind);
    } catch (error) {
      const isStopped = error.name === "AbortError";
      this.word = isStopped ? (this.word ? `${this.word}, stopped` : "stopped") : `not reached: ${error.message}`;
      this.look = isStopped ? "" : "is-error";
    }
    this.control = null;
    this.#paint();
    this.#status(this.word, this.look);
    setText(document.getElementById("run-said"), `Answer: ${this.word}`);
  }

  async #whole(response, kind) {
    const bytes = await response.text();
    this.numBytes = new Blob([bytes]).size;
    this.shown = bytes;
    if (kind.startsWith("application/json")) {
      try {
        this.shown = pretty(JSON.parse(bytes));
      } catch {
        // Shown as it came.
      }
    }
    if (this.shown.length > MAX_SHOWN) this.shown = `${this.shown.slice(0, MAX_SHOWN)}\n… ${count(this.shown.length - MAX_SHOWN)} characters more`;
  }

  async #stream(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      this.numBytes += value.length;
      this.shown = (this.shown + value).slice(-MAX_SHOWN);
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) this.#event(event);
      this.painting ??= setTimeout(() => this.#paint(), FRAME_MS);
    }
  }

  #event(event) {
    const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
    if (!data) return;
    this.numEvents += 1;
    if (data === "[DONE]") return;
    try {
      this.said += textOf(JSON.parse(data));
    } catch {
      // Counted, and shown as it came.
    }
  }

  #paint() {
    clearTimeout(this.painting);
    this.painting = undefined;
    const { text, raw } = this.parts;
    const scroller = raw.parentElement;
    const isAtEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 24;
    setText(raw, this.shown);
    if (this.numEvents && isAtEnd) scroller.scrollTop = scroller.scrollHeight;
    if (this.said) {
      text.hidden = false;
      setText(text, this.said);
      text.scrollTop = text.scrollHeight;
    }
    if (this.control && this.numEvents) this.#status(this.word, this.look, "live");
  }

  #status(word, look, more = "") {
    const parts = [el(look ? `span.${look}` : "span", {}, word)];
    if (this.numEvents) parts.push(el("span", {}, `first after ${seconds(this.firstMs / 1000)}`), el("span", {}, `${count(this.numEvents)} events`));
    if (this.numBytes) parts.push(el("span", {}, size(this.numBytes)));
    if (word !== "waiting") parts.push(el("span", {}, seconds((performance.now() - this.begin) / 1000)));
    if (more) parts.push(el("span", {}, more));
    this.parts.status.replaceChildren(...parts);
  }
}

const size = (bytes) => (bytes < 1024 ? `${bytes} B` : `${brief(bytes / 1024)} KiB`);
