// The strip of the last 600 steps: four small charts that share their cursor. Made once; only their data changes.

import { setText, url } from "../page.js";
import { DASH, integer, milliseconds, percent } from "./format.js";
import { onThemeChange, readPalette } from "./palette.js";

const NUM_STEPS = 600;
const NO_STROKE = "transparent";

/** Columns of a step; the last five are of after it, three of these in blocks. */
const STEP = 0;
const PREFILL = 1;
const DECODE = 2;
const PREEMPTED = 3;
const MS = 4;
const RUNNING = 5;
const WAITING = 6;
const USED = 7;
const SHARED = 8;
const CACHED = 9;

const compact = (value) =>
  value >= 1000 ? `${Number((value / 1000).toFixed(1))}k` : String(Number(value.toFixed(value < 10 ? 1 : 0)));

/**
 * What each chart shows. `values(step, numBlocks)` gives the series, areas stacked and the topmost first; `words` is the
 * line above the chart for one step.
 */
const CHARTS = {
  tokens: {
    unit: "tokens",
    series: [
      { label: "prefill", kind: "area", colour: (p) => p.muted, alpha: 0.45 },
      { label: "decode", kind: "area", colour: (p) => p.accent, alpha: 0.9 },
    ],
    values: (s) => [s[PREFILL] + s[DECODE], s[DECODE]],
    words: (s) => `prefill ${integer(s[PREFILL])} · decode ${integer(s[DECODE])} tokens` +
      (s[PREEMPTED] ? ` · ${integer(s[PREEMPTED])} preempted` : ""),
    ticks: true,
  },
  duration: {
    unit: "ms",
    series: [{ label: "duration", kind: "line", colour: (p) => p.ink }],
    values: (s) => [s[MS]],
    words: (s) => milliseconds(s[MS]),
  },
  kv: {
    unit: "% of blocks",
    max: 100,
    series: [
      { label: "cached", kind: "area", colour: (p) => p.state[1], alpha: 0.55 },
      { label: "shared", kind: "area", colour: (p) => p.state[3], alpha: 0.9 },
      { label: "used", kind: "area", colour: (p) => p.state[2], alpha: 0.9 },
    ],
    values: (s, numBlocks) => {
      const part = (n) => (100 * n) / numBlocks;
      return [part(s[USED] + s[SHARED] + s[CACHED]), part(s[USED] + s[SHARED]), part(s[USED])];
    },
    words: (s, numBlocks) => `${percent(s[USED] + s[SHARED], numBlocks)} in use`,
  },
  queue: {
    unit: "sequences",
    series: [
      { label: "waiting", kind: "line", colour: (p) => p.muted, dash: [4, 3] },
      { label: "running", kind: "line", colour: (p) => p.ink },
    ],
    values: (s) => [s[WAITING], s[RUNNING]],
    words: (s) => `running ${integer(s[RUNNING])} · waiting ${integer(s[WAITING])}`,
  },
};

/** Loads the chart library; null when it was not installed. */
async function loadLibrary() {
  try {
    return (await import(url("/static/vendor/uplot.mjs"))).default;
  } catch {
    return null;
  }
}

export class Charts {
  /** @param {HTMLElement} section  holds a figure[data-chart] per chart  @param {import("./view.js").View} view */
  constructor(section, view) {
    this.section = section;
    this.view = view;
    this.steps = [];
    this.charts = [];
    this.hovered = null;
    this.ready = this.#build();
  }

  async #build() {
    const Plot = await loadLibrary();
    if (Plot === null) {
      this.section.querySelector(".charts-missing").hidden = false;
      return;
    }
    this.Plot = Plot;
    this.#create();
    onThemeChange(() => this.#create());
  }

  #create() {
    for (const { plot } of this.charts) plot.destroy();
    this.charts = [];
    const palette = readPalette(this.section);
    for (const figure of this.section.querySelectorAll("[data-chart]")) {
      const spec = CHARTS[figure.dataset.chart];
      const box = figure.querySelector(".chart-box");
      const plot = new this.Plot(this.#options(spec, palette, box), this.#data(spec), box);
      this.charts.push({ spec, figure, box, plot, words: figure.querySelector(".chart-now") });
      this.observer ??= new ResizeObserver(() => this.#resize());
      this.observer.observe(box);
    }
    this.#showWords();
  }

  #resize() {
    for (const { plot, box } of this.charts) {
      if (box.clientWidth > 20 && (plot.width !== box.clientWidth || plot.height !== box.clientHeight)) {
        plot.setSize({ width: box.clientWidth, height: box.clientHeight });
      }
    }
  }

  #options(spec, palette, box) {
    const font = `10px ${getComputedStyle(document.body).fontFamily}`;
    const series = spec.series.map((s) => ({
      label: s.label,
      stroke: s.kind === "line" ? s.colour(palette) : NO_STROKE,
      width: s.kind === "line" ? 1.25 : 0,
      dash: s.dash,
      fill: s.kind === "area" ? this.#translucent(s.colour(palette), s.alpha) : undefined,
      points: { show: false },
      spanGaps: false,
    }));
    return {
      width: Math.max(40, box.clientWidth),
      height: Math.max(30, box.clientHeight),
      legend: { show: false },
      cursor: { sync: { key: "steps" }, y: false, points: { show: false }, drag: { setScale: false, x: false } },
      padding: [6, 14, 0, 0],
      scales: {
        x: { time: false, range: () => this.#window() },
        y: { range: (_, _min, max) => [0, spec.max ?? Math.max(4, (max ?? 0) * 1.1)] },
      },
      axes: [
        {
          stroke: palette.muted, font, size: 18, gap: 3, grid: { show: false }, ticks: { show: false },
          values: (_, at) => at.map((v) => (Number.isInteger(v) && v >= 0 ? integer(v) : "")), space: 90,
        },
        {
          stroke: palette.muted, font, size: 34, gap: 3, ticks: { show: false }, space: 16,
          grid: { stroke: palette.line, width: 1 }, values: (_, at) => at.map(compact),
        },
      ],
      series: [{}, ...series],
      hooks: {
        draw: spec.ticks ? [(plot) => this.#drawTicks(plot, palette)] : [],
        setCursor: [(plot) => this.#hover(plot)],
      },
    };
  }

  #translucent(colour, alpha) {
    return `color-mix(in srgb, ${colour} ${Math.round(alpha * 100)}%, transparent)`;
  }

  #window() {
    const last = this.steps.length ? this.steps[this.steps.length - 1][STEP] : (this.view.raw.step ?? 0);
    return [Math.max(0, last - NUM_STEPS + 1), Math.max(NUM_STEPS - 1, last)];
  }

  /** A tick at the top for each step that preempted. */
  #drawTicks(plot, palette) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.fillStyle = palette.preempted;
    const width = Math.max(2, Math.round(1.5 * devicePixelRatio));
    for (const step of this.steps) {
      if (!step[PREEMPTED]) continue;
      const x = plot.valToPos(step[STEP], "x", true);
      if (x >= bbox.left) ctx.fillRect(Math.round(x - width / 2), 0, width, bbox.top + Math.round(bbox.height * 0.12));
    }
    ctx.restore();
  }

  #data(spec) {
    const columns = [[], ...spec.series.map(() => [])];
    for (const step of this.steps) {
      columns[0].push(step[STEP]);
      spec.values(step, this.view.numBlocks).forEach((value, i) => columns[i + 1].push(value));
    }
    return columns;
  }

  #hover(plot) {
    const index = plot.cursor.idx;
    const step = index === null || index === undefined || plot.cursor.left < 0 ? null : (this.steps[index]?.[STEP] ?? null);
    if (step === this.hovered) return;
    this.hovered = step;
    this.#showWords();
  }

  #showWords() {
    let step = this.steps[this.steps.length - 1];
    if (this.hovered !== null) step = this.steps.find((s) => s[STEP] === this.hovered) ?? step;
    const label = this.hovered === null || !step ? "" : `step ${integer(step[STEP])}: `;
    for (const { spec, words } of this.charts) {
      setText(words, step ? label + spec.words(step, this.view.numBlocks) : DASH);
    }
  }

  refresh() {
    this.steps = this.view.raw.recent_steps;
    for (const { plot, spec } of this.charts) plot.setData(this.#data(spec), true);
    this.#showWords();
  }
}
