// Colours for canvases, read from the CSS custom properties, so that one file holds them for everything.

const STATES = ["free", "cached", "used", "shared"];

/**
 * @typedef {object} Palette
 * @property {string[]} state       CSS colour of the states 0 free, 1 cached, 2 used, 3 shared
 * @property {Uint32Array} pixels   the same as ImageData words
 * @property {string} background
 * @property {string} ink
 * @property {string} muted
 * @property {string} line
 * @property {string} strong
 * @property {string} accent
 * @property {string} preempted
 * @property {string} onUsed
 * @property {string} onShared
 * @property {boolean} isDark
 */

const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });

/** Any CSS colour as [r, g, b]. */
export function rgbOf(color) {
  probe.fillStyle = "#000";
  probe.fillStyle = color;
  probe.fillRect(0, 0, 1, 1);
  return probe.getImageData(0, 0, 1, 1).data;
}

/** A CSS colour as the word that an ImageData's Uint32 view holds. */
export function pixelOf(color) {
  const [r, g, b] = rgbOf(color);
  const word = new Uint32Array(1);
  new Uint8Array(word.buffer).set([r, g, b, 255]);
  return word[0];
}

/** @param {Element} element  @returns {Palette} */
export function readPalette(element) {
  const style = getComputedStyle(element);
  const read = (name) => style.getPropertyValue(name).trim();
  const state = STATES.map((name) => read(`--state-${name}`));
  const background = read("--bg");
  const [r, g, b] = rgbOf(background);
  return {
    state,
    pixels: Uint32Array.from(state, pixelOf),
    background,
    ink: read("--ink"),
    muted: read("--ink-3"),
    line: read("--line"),
    strong: read("--line-strong"),
    accent: read("--accent"),
    preempted: read("--state-preempted"),
    onUsed: read("--on-used"),
    onShared: r + g + b < 384 ? "#14171a" : "#ffffff",
    isDark: r + g + b < 384,
  };
}

/** Calls back when the theme, the contrast or the forced colours change. */
export function onThemeChange(callback) {
  const observer = new MutationObserver(callback);
  observer.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  for (const query of ["(prefers-color-scheme: dark)", "(forced-colors: active)", "(prefers-contrast: more)"]) {
    matchMedia(query).addEventListener("change", callback);
  }
}

const GOLDEN_ANGLE = 137.508;

/** A colour per owner, all of one lightness, each hue far from those before it. It tells neighbours apart, no more. */
export class OwnerColours {
  constructor() {
    this.css = new Map();
    this.words = new Map();
    this.numSeen = 0;
    this.isDark = false;
  }

  reset(isDark) {
    this.isDark = isDark;
    this.css.clear();
    this.words.clear();
    this.numSeen = 0;
  }

  of(id) {
    let color = this.css.get(id);
    if (color === undefined) {
      if (this.css.size > 4096) this.reset(this.isDark);
      const hue = (250 + this.numSeen * GOLDEN_ANGLE) % 360;
      color = `oklch(${this.isDark ? 0.68 : 0.56} 0.13 ${hue.toFixed(1)})`;
      this.numSeen += 1;
      this.css.set(id, color);
    }
    return color;
  }

  word(id) {
    let word = this.words.get(id);
    if (word === undefined) {
      word = pixelOf(this.of(id));
      this.words.set(id, word);
    }
    return word;
  }
}
