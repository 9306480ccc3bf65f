// The bar of every page, and when its banner is shown: how the engine is, ten times a second at most, in fixed widths.

import { showBanner } from "./banner.js";
import { brief, count, page, setText } from "./page.js";
import { showState } from "./state-chip.js";
import { engineStream } from "./stream.js";

const REFRESH_MS = 100;
const byId = (id) => document.getElementById(id);

function showConnection(connection) {
  showState(connection);
  showBanner(connection);
}

function showNumbers(state) {
  setText(byId("bar-step"), count(state.step));
  setText(byId("bar-steps-rate"), brief(state.rates?.steps_per_s));
  setText(byId("bar-tokens-rate"), brief(state.rates?.tokens_per_s));
  setText(byId("bar-running"), `${state.running.length}/${state.limits?.max_num_seqs ?? "–"}`);
  setText(byId("bar-waiting"), count(state.waiting_total));
  showKv(state.kv);
}

function showKv(kv) {
  const bar = byId("bar-kv");
  if (!bar || !kv) return;
  const total = kv.num_blocks || 1;
  for (const name of ["used", "shared", "cached"]) bar.querySelector(`.${name}`).style.width = `${(100 * kv[name]) / total}%`;
  const percent = (100 * (kv.used + kv.shared)) / total;
  setText(byId("bar-kv-value"), `${percent > 0 && percent < 10 ? percent.toFixed(1) : Math.round(percent)} %`);
  const text = `KV cache: ${kv.used} blocks used, ${kv.shared} shared, ${kv.cached} cached, ${kv.free} free, ${kv.num_blocks} in all`;
  if (bar.getAttribute("aria-label") !== text) {
    bar.setAttribute("aria-label", text);
    bar.title = text;
  }
}

const THEMES = { system: ["system", "Theme: follows the system"], light: ["sun", "Theme: light"], dark: ["moon", "Theme: dark"] };

function wireTheme() {
  const button = byId("theme-toggle");
  if (!button) return;
  const root = document.documentElement;
  const show = () => {
    const [glyph, text] = THEMES[root.dataset.theme ?? "system"];
    button.querySelector("use").setAttribute("href", `#i-${glyph}`);
    setText(button.querySelector(".sr-only"), text);
    button.title = text;
  };
  button.addEventListener("click", () => {
    const order = ["system", "light", "dark"];
    const next = order[(order.indexOf(root.dataset.theme ?? "system") + 1) % order.length];
    if (next === "system") delete root.dataset.theme;
    else root.dataset.theme = next;
    try {
      localStorage.setItem("pagedeck.theme", next);
    } catch {
      // It holds for this page only.
    }
    dispatchEvent(new CustomEvent("pagedeck:theme", { detail: next }));
    show();
  });
  show();
}

wireTheme();
if ((page.role === "admin" || page.role === "read-only") && byId("bar-state")) {
  let timer = null;
  let shownAt = 0;
  const refresh = () => {
    timer = null;
    shownAt = performance.now();
    showNumbers(engineStream.state);
  };
  const soon = () => {
    timer ??= setTimeout(refresh, Math.max(0, REFRESH_MS - (performance.now() - shownAt)));
  };
  engineStream.subscribe({ onKey: soon, onDelta: soon, onState: showConnection });
}
