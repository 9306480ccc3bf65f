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
 * @property {string} accent
 * @property {string} preempted
 * @property {string} onUsed
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

/** A stable colour for an owner: same lightness for all, the hue from its id. Colour by owner only tells neighbours apart. */
export class OwnerColours {
  constructor() {
    this.css = new Map();
    this.words = new Map();
    this.isDark = false;
  }

  reset(isDark) {
    this.isDark = isDark;
    this.css.clear();
    this.words.clear();
  }

  of(id) {
    let color = this.css.get(id);
    if (color === undefined) {
      let hash = 2166136261;
      for (let i = 0; i < id.length; i += 1) hash = Math.imul(hash ^ id.charCodeAt(i), 16777619);
      const hue = ((hash >>> 0) % 24) * 15;
      const light = this.isDark ? 0.66 + ((hash >>> 8) % 3) * 0.06 : 0.5 + ((hash >>> 8) % 3) * 0.07;
      color = `oklch(${light} 0.14 ${hue})`;
      if (this.css.size > 4096) this.reset(this.isDark);
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
