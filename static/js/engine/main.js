// /engine: puts the parts together and decides how often each of them is drawn.

import { setText, toast, url } from "../page.js";
import { engineStream } from "../stream.js";
import { BlockTable } from "./block-table.js";
import { Charts } from "./charts.js";
import { EngineControls, ViewPause } from "./controls.js";
import { CounterStrip } from "./counters.js";
import { Feed } from "./feed.js";
import { parseFilter } from "./filter.js";
import { count, integer, shortId } from "./format.js";
import { BlockMap, blockSentence } from "./map.js";
import { Phases } from "./phases.js";
import { RunningTable, WaitingTable } from "./rows.js";
import { Summary, Tooltip } from "./tooltip.js";
import { LossWatcher, View } from "./view.js";

const TABLES_MS = 100;
const CHARTS_MS = 250;
const byId = (id) => document.getElementById(id);

class EnginePage {
  constructor() {
    this.view = new View();
    this.losses = new LossWatcher(this.view);
    this.map = new BlockMap(byId("map"), this.view);
    this.tooltip = new Tooltip(byId("map-tip"), this.view);
    this.summary = new Summary(byId("map-summary"));
    this.blockTable = new BlockTable(byId("block-table"), this.view, (id) => this.select(id));
    const hooks = {
      onSelect: (id) => this.select(id === this.selected ? null : id),
      onScroll: () => this.refreshSoon("tables"),
      onReceipt: (text, isError) => this.receipt(text, isError),
      rowsOf: (requestId) => [...this.view.raw.rows.values()].filter((row) => row.request_id === requestId),
    };
    this.running = new RunningTable(byId("running"), hooks);
    this.waiting = new WaitingTable(byId("waiting"), hooks);
    this.feed = new Feed(byId("feed"), (id) => this.select(id));
    this.charts = new Charts(byId("strip"), this.view);
    this.phases = new Phases(byId("phases"), () => engineStream.isViewPaused);
    this.counters = new CounterStrip(byId("counters"));
    this.controls = new EngineControls(byId("engine-controls"));
    this.viewPause = new ViewPause(byId("view-pause"), byId("frozen-note"), () => {
      this.refresh();
      this.charts.refresh();
    });
    this.legend = Object.fromEntries([...document.querySelectorAll("[data-legend]")].map((e) => [e.dataset.legend, e]));
    this.selected = null;
    this.filter = parseFilter("");
    this.clockOffset = 0;
    this.timers = {};
    this.shownAt = {};
    for (const element of document.querySelectorAll("[data-origin]")) setText(element, location.origin);
    this.readAddress();
    this.wire();
    engineStream.subscribe({
      onKey: () => this.onKey(),
      onDelta: (delta) => this.onDelta(delta),
      onState: () => this.refreshSoon("tables"),
    });
    setInterval(() => this.refreshSoon("tables"), 500); // ages grow while the engine is silent
  }

  // Stream ------------------------------------------------------------------------------------------------------------

  onKey() {
    const { raw } = this.view;
    this.takeClock();
    if (this.epoch !== raw.epoch || this.numBlocks !== this.view.numBlocks) {
      this.map.reset();
      this.epoch = raw.epoch;
      this.numBlocks = this.view.numBlocks;
      byId("map-stage").dataset.ready = "true";
    }
    this.losses.reset();
    this.feed.reset(raw.recent_events);
    this.map.stateChanged();
    this.refreshSoon("tables");
    this.refreshSoon("charts");
  }

  onDelta(delta) {
    this.takeClock();
    this.map.flash(this.losses.losses(delta));
    this.feed.add(delta.events);
    this.map.stateChanged();
    this.refreshSoon("tables");
    if (delta.steps?.length) this.refreshSoon("charts");
  }

  takeClock() {
    const serverTime = this.view.raw.server_time;
    if (serverTime) this.clockOffset = serverTime - Date.now() / 1000;
  }

  /** The server's time now; stands still while the view is paused. */
  now() {
    return engineStream.isViewPaused ? this.view.raw.server_time : Date.now() / 1000 + this.clockOffset;
  }

  // Drawing -----------------------------------------------------------------------------------------------------------

  refreshSoon(part) {
    const gap = part === "charts" ? CHARTS_MS : TABLES_MS;
    this.timers[part] ??= setTimeout(() => {
      this.timers[part] = undefined;
      this.shownAt[part] = performance.now();
      if (part === "charts") this.charts.refresh();
      else this.refresh();
    }, Math.max(0, gap - (performance.now() - (this.shownAt[part] ?? 0))));
  }

  refresh() {
    const { raw } = this.view;
    this.viewPause.refresh();
    if (!raw.ready) return;
    const now = this.now();
    const context = { now, limits: raw.limits, numRunning: raw.running.length, paused: raw.paused };
    const passes = (row) => this.filter.matches(row, now);
    const isFiltered = !this.filter.isEmpty && !this.filter.error;
    const running = this.view.running();
    const waiting = this.view.waiting();
    this.running.show(isFiltered ? running.filter(passes) : running, running.length, isFiltered, context);
    this.waiting.show(isFiltered ? waiting.filter(passes) : waiting, raw.waiting_total, isFiltered, context);
    this.controls.refresh(raw);
    this.counters.refresh(raw.counters);
    this.refreshLegend(raw.kv);
    this.refreshSelection();
    this.tooltip.refresh();
    this.summary.refresh(raw);
    const seconds = Math.floor(now);
    if (seconds !== this.tableSecond) this.blockTable.refresh();
    this.tableSecond = seconds;
  }

  refreshLegend(kv) {
    if (!kv) return;
    for (const name of ["free", "cached", "used", "shared"]) setText(this.legend[name], integer(kv[name]));
    setText(this.legend.total, integer(kv.num_blocks));
    const isLess = kv.num_usable_blocks < kv.num_blocks;
    byId("usable-note").hidden = !isLess;
    if (isLess) setText(this.legend.usable, `${integer(kv.num_usable_blocks)} of ${integer(kv.num_blocks)}`);
  }

  refreshSelection() {
    const line = byId("selection");
    const row = this.selected === null ? undefined : this.view.row(this.selected);
    if (this.selected !== null && !row) this.select(null);
    byId("selection-clear").hidden = !row;
    const open = byId("selection-open");
    open.hidden = !row;
    if (row) open.href = url(`/engine/requests/${encodeURIComponent(row.request_id)}`);
    if (!row) {
      setText(line, "Point at a block for its owner and tokens; click one to select its request.");
      return;
    }
    const held = row.num_blocks
      ? `${count(row.num_blocks, "block")}, ${integer(row.num_shared_blocks)} shared`
      : "holds no blocks";
    const cached = row.num_cached_tokens ? ` · ${count(row.num_cached_tokens, "token")} from the prefix cache` : "";
    setText(
      line,
      `${shortId(row.id)} · ${row.status.toLowerCase()} · ${held} · ${integer(row.num_computed_tokens)} of ` +
        `${count(row.num_prompt_tokens + row.num_output_tokens, "token")} computed${cached}`,
    );
  }

  // What a person does ------------------------------------------------------------------------------------------------

  select(id) {
    this.selected = id !== null && this.view.row(id) ? id : null;
    this.map.select(this.selected);
    this.running.select(this.selected);
    this.waiting.select(this.selected);
    if (this.selected !== null) {
      this.running.reveal(this.selected);
      this.waiting.reveal(this.selected);
    }
    this.refreshSelection();
  }

  receipt(text, isError) {
    setText(byId("receipt-text"), text);
    const receipt = byId("receipt");
    receipt.classList.toggle("is-error", isError);
    receipt.hidden = false;
    if (isError) toast(text, { error: true });
  }

  setFilter(text) {
    this.filter = parseFilter(text);
    const box = byId("filter");
    const problem = byId("filter-error");
    box.setAttribute("aria-invalid", String(this.filter.error !== null));
    problem.hidden = this.filter.error === null;
    setText(problem, this.filter.error ?? "");
    const isOn = !this.filter.isEmpty && !this.filter.error;
    this.map.setFilter(isOn ? (row) => this.filter.matches(row, this.now()) : null);
    for (const note of document.querySelectorAll(".filter-clear")) note.hidden = !isOn;
    this.refreshSoon("tables");
  }

  /** Filter, layout and colour are in the address, so that a link shows the same. */
  readAddress() {
    const query = new URLSearchParams(location.search);
    const text = query.get("filter") ?? "";
    byId("filter").value = text;
    this.setFilter(text);
    this.arrange(query.get("layout") === "request" ? "request" : "physical");
    this.colour(query.get("colour") === "owner" ? "owner" : "state");
    this.showTable(query.get("blocks") === "table");
  }

  writeAddress(name, value, standard) {
    const query = new URLSearchParams(location.search);
    if (value === standard) query.delete(name);
    else query.set(name, value);
    const text = query.toString().replaceAll("%3A", ":").replaceAll("%3E", ">");
    history.replaceState(history.state, "", text ? `?${text}` : location.pathname);
  }

  arrange(arrangement) {
    this.map.setArrangement(arrangement);
    this.press("layout", arrangement);
  }

  colour(colour) {
    this.map.setColour(colour);
    this.press("colour", colour);
  }

  press(name, value) {
    for (const button of document.querySelectorAll(`[data-${name}]`)) {
      button.setAttribute("aria-pressed", String(button.dataset[name] === value));
    }
  }

  showTable(isShown) {
    byId("block-table").hidden = !isShown;
    byId("map").hidden = isShown;
    byId("table-toggle").setAttribute("aria-pressed", String(isShown));
    if (isShown) this.blockTable.refresh();
  }

  wire() {
    const filter = byId("filter");
    filter.addEventListener("input", () => {
      this.setFilter(filter.value);
      this.writeAddress("filter", filter.value.trim(), "");
    });
    for (const button of document.querySelectorAll(".filter-clear")) {
      button.addEventListener("click", () => {
        filter.value = "";
        filter.dispatchEvent(new Event("input"));
        filter.focus();
      });
    }
    for (const button of document.querySelectorAll("[data-layout]")) {
      button.addEventListener("click", () => {
        this.arrange(button.dataset.layout);
        this.writeAddress("layout", button.dataset.layout, "physical");
      });
    }
    for (const button of document.querySelectorAll("[data-colour]")) {
      button.addEventListener("click", () => {
        this.colour(button.dataset.colour);
        this.writeAddress("colour", button.dataset.colour, "state");
      });
    }
    byId("table-toggle").addEventListener("click", () => {
      const isShown = byId("block-table").hidden;
      this.showTable(isShown);
      this.writeAddress("blocks", isShown ? "table" : "map", "map");
    });
    byId("selection-clear").addEventListener("click", () => this.select(null));
    byId("receipt-close").addEventListener("click", () => {
      byId("receipt").hidden = true;
    });
    for (const button of document.querySelectorAll("[data-copy]")) {
      button.addEventListener("click", () => this.copy(button));
    }
    this.wireMap();
  }

  async copy(button) {
    try {
      await navigator.clipboard.writeText(byId(button.dataset.copy).textContent.trim());
      toast("Copied.");
    } catch {
      toast("The browser does not let this page copy.", { error: true });
    }
  }

  wireMap() {
    const map = byId("map");
    const selectBlock = (block) => {
      const owner = block >= 0 ? this.view.ownerOf(block) : null;
      this.select(owner === this.selected ? null : owner);
    };
    map.addEventListener("block-hover", ({ detail }) => {
      this.tooltip.show(detail.block, detail.block >= 0 ? { x: detail.x, y: detail.y } : null);
    });
    map.addEventListener("block-cursor", ({ detail }) => {
      if (map.matches(":focus-visible")) this.tooltip.show(detail.block, this.map.pointOf(detail.block));
      if (detail.block >= 0) setText(byId("map-cursor"), blockSentence(this.view, detail.block));
    });
    map.addEventListener("block-select", ({ detail }) => selectBlock(detail.block));
    map.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        this.select(null);
        this.tooltip.show(-1, null);
      }
    });
  }
}

new EnginePage();
