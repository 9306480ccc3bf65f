// Markdown of an answer, which is hostile text. Raw HTML is off, so tags are shown as text; what the renderer made is then
// held against a short list of tags and attributes; images become a chip and are never fetched.

import MarkdownIt from "../../vendor/markdown-it.mjs";
import "../../vendor/purify.js";
import { el, icon } from "../page.js";

const MAX_HIGHLIGHT = 50_000; // characters: longer code stays plain
const LINK = /^(?:https?:\/\/|mailto:)/i;

const md = new MarkdownIt({ html: false, linkify: true, breaks: true, typographer: false });
md.linkify.set({ fuzzyLink: false, fuzzyEmail: false });

// <mark> cannot come from the text (html is off, and there is no syntax for it): it carries an image's address and its
// alternative text from here to `decorate`.
md.renderer.rules.image = (tokens, index, options, env, self) => {
  const token = tokens[index];
  const alt = self.renderInlineAsText(token.children ?? [], options, env);
  return `<mark>${md.utils.escapeHtml(`${token.attrGet("src") ?? ""}\n${alt}`)}</mark>`;
};

// The alignment of a column as an attribute: style attributes are not allowed, neither by the list nor by the CSP.
md.renderer.rules.th_open = (tokens, index, options, _env, self) => {
  const token = tokens[index];
  const align = /text-align:\s*(left|center|right)/.exec(token.attrGet("style") ?? "")?.[1];
  token.attrs = align ? [["align", align]] : null;
  return self.renderToken(tokens, index, options);
};
md.renderer.rules.td_open = md.renderer.rules.th_open;

const RULES = {
  ALLOWED_TAGS: [
    "p", "br", "strong", "em", "s", "del", "code", "pre", "blockquote", "ul", "ol", "li", "h1", "h2", "h3", "h4", "h5", "h6",
    "table", "thead", "tbody", "tr", "th", "td", "hr", "a", "mark",
  ],
  ALLOWED_ATTR: ["href", "class", "align", "start"],
  ADD_URI_SAFE_ATTR: ["align", "start"],
  ALLOWED_URI_REGEXP: LINK,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const purifier = globalThis.DOMPurify(window);
purifier.addHook("uponSanitizeAttribute", (node, attribute) => {
  if (attribute.attrName === "class") attribute.keepAttr = node.nodeName === "CODE" && /^language-[\w+#.-]{1,32}$/.test(attribute.attrValue);
});

const codePurifier = globalThis.DOMPurify(window);
codePurifier.addHook("uponSanitizeAttribute", (_node, attribute) => {
  attribute.keepAttr = attribute.attrName === "class" && /^hljs[\w -]*$/.test(attribute.attrValue);
});
const CODE_RULES = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false, RETURN_DOM_FRAGMENT: true };

function hostOf(address) {
  try {
    const parsed = new URL(address);
    return parsed.host || parsed.protocol.replace(":", "");
  } catch {
    return "no host";
  }
}

function imageChip(mark) {
  const text = mark.textContent;
  const cut = text.indexOf("\n");
  const alt = text.slice(cut + 1).trim() || "image";
  return el("span.chip.image-chip", { title: "An image in the answer. It isn't fetched." }, icon("image"), `${alt} · ${hostOf(text.slice(0, cut))}`);
}

function codeBlock(pre, language) {
  const copy = el("button.btn.btn-quiet.btn-small", { type: "button", "data-action": "copy-code" }, icon("copy", "icon-small"), "Copy");
  pre.tabIndex = 0; // a wide block scrolls by keyboard too
  return el("div.codeblock", {}, el("div.codeblock-head", {}, el("span.codeblock-language", {}, language || "text"), copy), pre);
}

/** Links, image chips and code blocks of a clean fragment (in place). */
function decorate(fragment) {
  for (const link of fragment.querySelectorAll("a")) {
    if (!LINK.test(link.getAttribute("href") ?? "")) {
      link.replaceWith(...link.childNodes);
      continue;
    }
    link.rel = "noopener noreferrer nofollow";
    link.target = "_blank";
    link.title = link.href;
  }
  for (const mark of fragment.querySelectorAll("mark")) mark.replaceWith(imageChip(mark));
  for (const table of fragment.querySelectorAll("table")) {
    const frame = el("div.table-frame", { tabindex: "0" });
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const pre of fragment.querySelectorAll("pre")) {
    const code = pre.querySelector("code");
    const language = /language-(\S+)/.exec(code?.className ?? "")?.[1] ?? "";
    const place = document.createComment("");
    pre.replaceWith(place);
    place.replaceWith(codeBlock(pre, language));
  }
}

function render(tokens, env) {
  const fragment = purifier.sanitize(md.renderer.render(tokens, md.options, env), RULES);
  decorate(fragment);
  return fragment;
}

let highlighter = null;

/** Colours finished code. The highlighter is fetched with the first block that needs it. */
async function highlight(root) {
  for (const code of root.querySelectorAll("pre > code[class^='language-']")) {
    const language = code.className.slice("language-".length);
    const text = code.textContent;
    if (text.length > MAX_HIGHLIGHT) continue;
    try {
      highlighter ??= import("../../vendor/highlight.mjs");
      const { default: hljs } = await highlighter;
      if (!hljs.getLanguage(language) || code.textContent !== text) continue;
      code.replaceChildren(codePurifier.sanitize(hljs.highlight(text, { language, ignoreIllegals: true }).value, CODE_RULES));
    } catch {
      highlighter = null; // Not there: the code stays plain.
      return;
    }
  }
}

/** Offsets of the beginnings of lines, and the length at the end. */
function lineStarts(text) {
  const starts = [0];
  for (let at = text.indexOf("\n"); at !== -1; at = text.indexOf("\n", at + 1)) starts.push(at + 1);
  return starts;
}

/** The top-level blocks of a token list: [{start, end, tokens}], lines from `start` up to and not with `end`. */
function topBlocks(tokens) {
  const blocks = [];
  for (const token of tokens) {
    if (token.level === 0 && token.nesting >= 0 && token.map) blocks.push({ start: token.map[0], end: token.map[1], tokens: [] });
    blocks.at(-1)?.tokens.push(token);
  }
  return blocks;
}

function isClosedFence(block, lines) {
  const [token] = block.tokens;
  if (token.type !== "fence" || block.end - block.start < 2) return false;
  const last = lines[block.end - 1].trim();
  return last.startsWith(token.markup) && last.replaceAll(token.markup[0], "") === "";
}

/** Whether nothing that comes can change `block`; the line numbered `unfinished` may still grow into something else. */
function isFinal(block, next, lines, unfinished) {
  if (next && next.start < unfinished) return true;
  if (block.end > unfinished) return false;
  const { type } = block.tokens[0];
  const isBlankBelow = block.end < unfinished && lines[block.end].trim() === "";
  return isClosedFence(block, lines) || ((type === "paragraph_open" || type === "heading_open" || type === "table_open") && isBlankBelow);
}

/**
 * An answer that grows, in `root`. Finished blocks are rendered once and never touched again, so that selections and
 * buttons in them stay; only the last block is rendered anew. The code of an open fence grows as one text node.
 */
export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.reset();
  }

  reset() {
    this.source = "";
    this.frozen = 0; // characters of the source that are in finished blocks
    this.references = {}; // link targets defined in finished blocks
    this.tail = []; // nodes of the last block
    this.openCode = null; // the text node of an open fence
    this.root.replaceChildren();
  }

  /** Shows `source`; `isDone` when nothing will be added. */
  update(source, isDone) {
    source = source.replace(/\r\n?/g, "\n");
    if (!source.startsWith(this.source)) this.reset();
    // A link whose target is defined further down can only be resolved with the whole text.
    if (isDone && this.frozen > 0 && /^ {0,3}\[[^\]]+\]:/m.test(source)) this.reset();
    this.source = source;

    const text = source.slice(this.frozen);
    const starts = lineStarts(text);
    const unfinished = starts.length - 1; // the last line may still grow and change what it is
    const lines = text.split("\n");
    // Definitions in the last lines may be half there: they hold for this drawing only.
    const env = { references: { ...this.references } };
    const blocks = topBlocks(md.parse(text, env));
    let numFrozen = 0;
    if (isDone) numFrozen = blocks.length;
    else while (numFrozen < blocks.length && isFinal(blocks[numFrozen], blocks[numFrozen + 1], lines, unfinished)) numFrozen += 1;

    const rest = blocks.slice(numFrozen);
    const isOpenFence = rest.length === 1 && rest[0].tokens[0].type === "fence" && rest[0].start < unfinished;
    if (isOpenFence && numFrozen === 0 && this.openCode) {
      this.growCode(rest[0].tokens[0].content);
      return;
    }

    this.dropTail();
    for (const block of blocks.slice(0, numFrozen)) this.freeze(block, env);
    if (numFrozen > 0) {
      const length = rest.length ? starts[rest[0].start] : (starts[blocks.at(-1).end] ?? text.length);
      const finished = { references: this.references };
      md.parse(text.slice(0, length), finished);
      this.references = finished.references;
      this.frozen += length;
    }
    if (isOpenFence) this.openFence(rest[0].tokens[0]);
    else if (rest.length) {
      const fragment = render(rest.flatMap((block) => block.tokens), env);
      this.tail = [...fragment.childNodes];
      this.root.append(fragment);
    }
  }

  dropTail() {
    for (const node of this.tail) node.remove();
    this.tail = [];
    this.openCode = null;
  }

  freeze(block, env) {
    const fragment = render(block.tokens, env);
    const nodes = [...fragment.children];
    this.root.append(fragment);
    for (const node of nodes) highlight(node);
  }

  openFence(token) {
    const language = token.info.trim().split(/\s+/)[0];
    this.openCode = document.createTextNode(token.content);
    const block = codeBlock(el("pre", {}, el("code", {}, this.openCode)), language);
    this.tail = [block];
    this.root.append(block);
  }

  growCode(content) {
    const before = this.openCode.data;
    if (content.startsWith(before)) this.openCode.appendData(content.slice(before.length));
    else this.openCode.data = content;
  }
}
