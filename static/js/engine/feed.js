// The event feed: the newest on top, 300 at most, still while the pointer or the focus is in it.

import { el, icon, setText, storage } from "../page.js";
import { count, integer, shortId } from "./format.js";

const MAX_EVENTS = 300;
const STORED = "pagedeck.engine.feed";

/** Groups the reader can switch, the kinds in each, and their icons. */
export const GROUPS = {
  preemptions: { label: "Preemptions", icon: "retry", kinds: ["preempted"] },
  admissions: { label: "Admissions", icon: "play", kinds: ["admitted", "added", "blocked", "evicted"] },
  finishes: { label: "Finishes", icon: "check", kinds: ["finished", "aborted", "timeout", "error", "rejected"] },
  limits: { label: "Limits, engine", icon: "sliders", kinds: ["limits", "paused", "resumed", "reset", "drain", "dead"] },
};
const ICONS = {
  preempted: "retry", evicted: "scissors", admitted: "play", added: "plus", blocked: "stale", finished: "check",
  aborted: "stop", timeout: "stale", error: "alert", rejected: "off", limits: "sliders", paused: "hold", resumed: "play",
  reset: "trash", drain: "down", dead: "alert",
};
const GROUP_OF = Object.fromEntries(Object.entries(GROUPS).flatMap(([name, { kinds }]) => kinds.map((kind) => [kind, name])));

/** Text of an event as nodes: ids shortened, the full one in the title. */
function textNodes(event) {
  let rest = event.text.replace(/^step [\d,]+: /, "").replace(/ after step [\d,]+/, "");
  const nodes = [];
  const ids = [event.id, event.by].filter((id) => id && rest.includes(id));
  while (rest) {
    let first = null;
    for (const id of ids) {
      const at = rest.indexOf(id);
      if (at >= 0 && (first === null || at < first.at || (at === first.at && id.length > first.id.length))) first = { at, id };
    }
    if (first === null) break;
    if (first.at > 0) nodes.push(rest.slice(0, first.at));
    nodes.push(el("span.feed-id", { title: first.id, "data-select": first.id }, shortId(first.id)));
    rest = rest.slice(first.at + first.id.length);
  }
  if (rest) nodes.push(rest);
  return nodes;
}

export class Feed {
  /** @param {HTMLElement} section  holds ol, .feed-filters, .feed-more, .empty-note */
  constructor(section, onSelect) {
    this.section = section;
    this.list = section.querySelector("ol");
    this.filters = section.querySelector(".feed-filters");
    this.pill = section.querySelector(".feed-more");
    this.empty = section.querySelector(".empty-note");
    this.held = [];
    this.isHeld = false;
    this.hidden = new Set((storage.get(STORED) ?? "").split(",").filter((name) => name in GROUPS));
    this.counts = Object.fromEntries(Object.keys(GROUPS).map((name) => [name, 0]));
    this.#buildFilters();
    const scroller = this.list.parentElement;
    for (const [event, value] of [["pointerenter", true], ["focusin", true], ["pointerleave", false], ["focusout", false]]) {
      scroller.addEventListener(event, () => this.#hold(value || scroller.scrollTop > 4));
    }
    scroller.addEventListener("scroll", () => this.#hold(scroller.scrollTop > 4 || scroller.matches(":hover")));
    this.pill.addEventListener("click", () => {
      scroller.scrollTop = 0;
      this.#hold(false);
    });
    this.list.addEventListener("click", (event) => {
      const id = event.target.closest("[data-select]")?.dataset.select;
      if (id) onSelect(id);
    });
  }

  #buildFilters() {
    for (const [name, group] of Object.entries(GROUPS)) {
      const isShown = !this.hidden.has(name);
      const button = el(
        "button.toggle",
        { type: "button", "aria-pressed": String(isShown), "data-group": name, title: `Show or hide: ${group.kinds.join(", ")}` },
        icon(group.icon, "icon-small"),
        group.label,
      );
      button.addEventListener("click", () => {
        if (this.hidden.has(name)) this.hidden.delete(name);
        else this.hidden.add(name);
        button.setAttribute("aria-pressed", String(!this.hidden.has(name)));
        storage.set(STORED, [...this.hidden].join(","));
        this.#applyFilters();
      });
      this.filters.append(button);
    }
    this.#applyFilters();
  }

  #applyFilters() {
    for (const name of Object.keys(GROUPS)) this.list.classList.toggle(`hide-${name}`, this.hidden.has(name));
    this.#showEmpty();
  }

  #showEmpty() {
    const shown = Object.entries(this.counts).reduce((sum, [name, n]) => sum + (this.hidden.has(name) ? 0 : n), 0);
    this.empty.hidden = shown > 0;
    this.empty.dataset.filtered = String(this.list.childElementCount > 0 && shown === 0);
  }

  #hold(value) {
    this.isHeld = value;
    if (!value && this.held.length) this.#insert(this.held.splice(0));
    this.#showPill();
  }

  #showPill() {
    this.pill.hidden = this.held.length === 0;
    if (this.held.length) setText(this.pill, `${integer(this.held.length)} new`);
  }

  /** Replaces all events. */
  reset(events) {
    this.list.replaceChildren();
    this.held = [];
    for (const name of Object.keys(GROUPS)) this.counts[name] = 0;
    this.#insert(events);
    this.#showPill();
  }

  /** Adds events, oldest first. */
  add(events) {
    if (!events?.length) return;
    if (this.isHeld) {
      this.held.push(...events);
      if (this.held.length > MAX_EVENTS) this.held.splice(0, this.held.length - MAX_EVENTS);
      this.#showPill();
    } else this.#insert(events);
  }

  /** Evictions in a row become one line with their sum: a full prefix cache evicts in nearly every step. */
  #merge(event, line) {
    const number = Number(/^(?:step [\d,]+: )?([\d,]+) cached/.exec(event.text)?.[1].replaceAll(",", ""));
    if (event.kind !== "evicted" || line?.dataset.kind !== "evicted" || !number) return false;
    const sum = Number(line.dataset.sum) + number;
    line.dataset.sum = String(sum);
    line.dataset.since ??= line.querySelector(".feed-step").textContent;
    setText(line.querySelector(".feed-step"), integer(event.step));
    setText(line.querySelector(".feed-text"), `${count(sum, "cached block")} evicted for reuse since step ${line.dataset.since}`);
    return true;
  }

  #insert(events) {
    const lines = document.createDocumentFragment();
    for (const event of events.slice(-MAX_EVENTS)) {
      if (this.#merge(event, lines.firstElementChild ?? this.list.firstElementChild)) continue;
      const group = GROUP_OF[event.kind] ?? "limits";
      this.counts[group] += 1;
      const sum = event.kind === "evicted" ? (/([\d,]+) cached/.exec(event.text)?.[1] ?? "0").replaceAll(",", "") : null;
      lines.prepend(el(
        "li",
        { "data-kind": event.kind, "data-group": group, "data-sum": sum },
        el("span.feed-step", { title: `step ${integer(event.step)}` }, integer(event.step)),
        icon(ICONS[event.kind] ?? "stale", "icon-small"),
        el("span.feed-text", {}, ...textNodes(event)),
      ));
    }
    this.list.prepend(lines);
    while (this.list.childElementCount > MAX_EVENTS) {
      this.counts[this.list.lastElementChild.dataset.group] -= 1;
      this.list.lastElementChild.remove();
    }
    this.#showEmpty();
  }
}
