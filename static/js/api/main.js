// /api: each example is written from what its fields hold, and run with what this browser may do.

import { copyText, page, setText, storage, url } from "../page.js";
import { LANGUAGES } from "./code.js";
import { Run } from "./run.js";

const root = document.querySelector(".api");
const needsKey = root.dataset.needsKey === "true";
const base = new URL(url(""), location.origin).href.replace(/\/$/, "");
const KEY = "pagedeck.api.language";

let highlighter;
/** Colours code whose text is ours; without the library it stays plain. */
async function colour(element, code, grammar) {
  element.textContent = code;
  try {
    highlighter ??= import("../../vendor/highlight.mjs");
    const { default: hljs } = await highlighter;
    if (element.textContent === code) element.innerHTML = hljs.highlight(code, { language: grammar }).value;
  } catch {
    // Plain text.
  }
}

class Example {
  constructor(article) {
    this.article = article;
    const find = (name) => article.querySelector(`[data-${name}]`);
    this.body = find("body");
    this.problem = find("problem");
    this.code = find("code");
    this.params = [...article.querySelectorAll("[data-param]")];
    this.tabs = [...article.querySelectorAll('[role="tab"]')];
    this.runButton = find("run");
    this.stopButton = find("stop");
    this.run = new Run({ status: find("status"), answer: find("answer"), text: find("text"), raw: find("raw") });
    for (const field of [...this.params, ...(this.body ? [this.body] : [])]) field.addEventListener("input", () => this.write());
    for (const tab of this.tabs) {
      tab.addEventListener("click", () => chooseLanguage(tab.dataset.lang));
      tab.addEventListener("keydown", (event) => this.#walk(event, tab));
    }
    const copy = find("copy");
    copy.addEventListener("click", async () => {
      const label = copy.querySelector("span");
      setText(label, (await copyText(this.code.textContent)) ? "Copied" : "Not copied");
      setTimeout(() => setText(label, "Copy"), 1500);
    });
    this.runButton?.addEventListener("click", () => this.start());
    this.stopButton?.addEventListener("click", () => this.run.stop());
    this.body?.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !event.isComposing) this.start();
    });
  }

  #walk(event, tab) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = this.tabs[(this.tabs.indexOf(tab) + step + this.tabs.length) % this.tabs.length];
    chooseLanguage(next.dataset.lang);
    next.focus();
  }

  /** The address with what the fields of path and query hold. */
  get path() {
    const { path } = this.article.dataset;
    const query = new URLSearchParams();
    let filled = path;
    for (const field of this.params) {
      const value = field.value.trim();
      if (field.dataset.where === "path") filled = filled.replace(`{${field.dataset.param}}`, encodeURIComponent(value).replaceAll("%2F", "/"));
      else if (field.dataset.where === "query" && value) query.set(field.dataset.param, value);
    }
    return query.size ? `${filled}?${query}` : filled;
  }

  get headers() {
    return this.params.filter((field) => field.dataset.where === "header" && field.value.trim()).map((field) => [field.dataset.param, field.value.trim()]);
  }

  get rawBody() {
    return this.body && this.body.value.trim() ? this.body.value : null;
  }

  /** Writes the code anew; keeps the last one while the body is no JSON. */
  write(language = chosen) {
    const rawBody = this.rawBody;
    let body = null;
    if (rawBody !== null) {
      try {
        body = JSON.parse(rawBody);
        this.#tell("");
      } catch (error) {
        this.#tell(`No JSON yet: ${error.message}`);
        return;
      }
    } else if (this.problem) this.#tell("");
    const { op, method, open } = this.article.dataset;
    const call = {
      op, method, body, rawBody, base, address: base + this.path, headers: this.headers, model: page.model,
      needsKey: needsKey && open !== "true", isEndless: "endless" in this.article.dataset,
    };
    const { write, grammar } = LANGUAGES[language];
    colour(this.code, write(call), grammar);
  }

  #tell(text) {
    setText(this.problem, text);
    this.problem.hidden = !text;
    if (text) this.body.setAttribute("aria-invalid", "true");
    else this.body.removeAttribute("aria-invalid");
  }

  show(language) {
    for (const tab of this.tabs) {
      const isChosen = tab.dataset.lang === language;
      tab.setAttribute("aria-selected", String(isChosen));
      tab.tabIndex = isChosen ? 0 : -1;
      if (isChosen) this.code.parentElement.setAttribute("aria-labelledby", tab.id);
    }
    this.write(language);
  }

  async start() {
    if (!this.runButton || this.runButton.getAttribute("aria-disabled") === "true" || this.run.isRunning) return;
    if (this.article.dataset.effect && !(await confirmed(this.article))) return;
    const headers = Object.fromEntries(this.headers);
    const body = this.rawBody;
    if (body !== null) headers["Content-Type"] = "application/json";
    this.runButton.disabled = true;
    this.stopButton.hidden = false;
    await this.run.start({ method: this.article.dataset.method, url: base + this.path, headers, body: body ?? undefined });
    this.runButton.disabled = false;
    this.stopButton.hidden = true;
  }
}

const dialog = document.getElementById("run-dialog");
for (const button of dialog.querySelectorAll("[data-close]")) button.addEventListener("click", () => dialog.close(""));

function confirmed(article) {
  setText(document.getElementById("run-title"), `${article.querySelector("h3").textContent}?`);
  setText(document.getElementById("run-text"), `${article.dataset.method} ${article.dataset.path} changes this server for everyone who uses it.`);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

const examples = [...document.querySelectorAll(".op")].map((article) => new Example(article));
let chosen = storage.get(KEY) in LANGUAGES ? storage.get(KEY) : "curl";

function chooseLanguage(language) {
  chosen = language;
  storage.set(KEY, language);
  for (const example of examples) example.show(language);
}
chooseLanguage(chosen);
setText(document.getElementById("base-url"), `${base}/v1`);

// The index: which operation is read now, and folded away on a phone until it is asked for.
const links = new Map([...document.querySelectorAll(".api-index a")].map((link) => [link.hash.slice(1), link]));
const narrow = matchMedia("(max-width: 820px)");
const drawer = document.getElementById("index-drawer");
const fold = () => {
  drawer.open = !narrow.matches;
};
narrow.addEventListener("change", fold);
fold();
for (const link of links.values()) link.addEventListener("click", () => narrow.matches && fold());
const main = document.getElementById("main");
let spying;
function spy() {
  spying = undefined;
  const top = main.getBoundingClientRect().top + 80;
  let current = examples[0].article;
  for (const { article } of examples) if (article.getBoundingClientRect().top <= top) current = article;
  if (main.scrollHeight - main.scrollTop - main.clientHeight < 2) current = examples[examples.length - 1].article;
  for (const [name, link] of links) {
    const isCurrent = name === current.id;
    if (isCurrent === (link.getAttribute("aria-current") === "true")) continue;
    if (isCurrent) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
    if (isCurrent && !narrow.matches) link.scrollIntoView({ block: "nearest" });
  }
}
main.addEventListener("scroll", () => {
  spying ??= requestAnimationFrame(spy);
}, { passive: true });
spy();
