// The chip in the bar that says in words, icon and colour how current this page is.

import { setText } from "./page.js";

const LOOK = {
  CONNECTING: ["stale", ""],
  LIVE: ["live", "chip-ok"],
  "VIEW PAUSED": ["eye-off", ""],
  "ENGINE PAUSED": ["hold", "chip-warn"],
  "ENGINE STUCK": ["alert", "chip-danger"],
  "ENGINE DEAD": ["alert", "chip-danger"],
  STALE: ["stale", "chip-warn"],
  DISCONNECTED: ["off", "chip-danger"],
};

/** Shows a connection {status, age_ms}; the age only while nothing comes. */
export function showState({ status, age_ms: ageMs }) {
  const chip = document.getElementById("bar-state");
  if (!chip) return;
  const [glyph, look] = LOOK[status];
  const isLate = status === "STALE" || status === "DISCONNECTED";
  if (chip.dataset.state !== status) {
    chip.dataset.state = status;
    chip.className = `chip ${look}`.trim();
    chip.querySelector("use").setAttribute("href", `#i-${glyph}`);
    // What was measured last stays to be read, but not as if it were now.
    chip.closest(".topbar-status")?.classList.toggle("is-late", isLate);
    chip.title = isLate ? "Time since the last frame from the engine" : "";
  }
  setText(chip.querySelector("span"), isLate && ageMs !== null ? `${status} ${Math.round(ageMs / 1000)} s` : status);
}
