// The banner below the bar of every page: what keeps everyone waiting, said in words and numbers, gone when it is over.

import { count, el, icon, seconds, setText } from "./page.js";

/** [glyph, danger?, lead, detail] of how the engine is, or null when there is nothing to say. */
function words({ dead, step, stuck, engine_paused: isPaused, pause_reason: reason, draining }) {
  if (dead) {
    const where = step ? ` after step ${count(step)}` : "";
    return ["alert", true, `The engine has stopped${where}: `, `${dead}. Nothing is answered any more until the server is started again.`];
  }
  if (stuck) {
    const limit = `; a step should take less than ${seconds(stuck.limit_s)}. Requests, stops and commands wait until it ends.`;
    return ["alert", true, "The engine is stuck: ", `step ${count(stuck.step)} has been running for `, limit];
  }
  if (isPaused) return ["hold", false, "The engine is paused for everyone: ", reason || "no reason given"];
  if (draining) return ["hold", false, "The engine is draining: ", "what runs is finished, new requests are refused"];
  return null;
}

/** Shows how the engine is. The time of a stuck step counts on without being read out each second. */
export function showBanner(engine) {
  const banner = document.getElementById("engine-banner");
  if (!banner) return;
  const told = words(engine);
  const key = told ? told.join("|") : "";
  if (banner.dataset.text !== key) {
    banner.dataset.text = key;
    banner.hidden = !told;
    banner.replaceChildren();
    if (told) draw(banner, told);
  }
  if (engine.stuck) setText(banner.querySelector("[role=timer]"), whole(engine.stuck.running_s));
}

function draw(banner, [glyph, isDanger, lead, detail, end]) {
  banner.className = isDanger ? "banner banner-danger" : "banner";
  const timer = end ? [el("span.banner-timer", { role: "timer", "aria-live": "off" }), end] : [];
  banner.append(icon(glyph), el("span.grow", {}, el("strong", {}, lead), detail, ...timer));
}

/** Whole seconds below a minute: it counts. */
const whole = (s) => (s < 60 ? `${Math.floor(s)} s` : seconds(s));
