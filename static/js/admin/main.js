// /admin: live pressure beside the limits, the switches, and an audit log that is fetched again when something happened.

import { setText } from "../page.js";
import { engineStream } from "../stream.js";
import { Actions } from "./actions.js";
import { Keys } from "./keys.js";
import { LimitsForm } from "./limits.js";

const REFRESH_MS = 250;
const AUDIT_MS = 400;

class AdminPage {
  constructor(root) {
    this.clockOffset = 0;
    this.timer = undefined;
    this.shownAt = 0;
    const state = () => engineStream.state;
    const onDone = () => this.refetchAudit();
    this.form = new LimitsForm(root, { state, now: () => this.now(), onApplied: onDone });
    this.actions = new Actions(root, { state, onDone });
    const keys = root.querySelector("[data-keys]");
    if (keys && document.getElementById("key-rows")) this.keys = new Keys(keys, { question: this.actions.question, onDone });
    this.localiseTimes();
    document.body.addEventListener("htmx:afterSwap", () => this.localiseTimes());
    document.body.addEventListener("htmx:after:swap", () => this.localiseTimes());
    engineStream.subscribe({
      onKey: () => this.onFrame(null),
      onDelta: (delta) => this.onFrame(delta),
      onState: () => this.refreshSoon(),
    });
    setInterval(() => this.refreshSoon(), 1000);
    this.form.changed();
    this.actions.refresh(engineStream.state);
  }

  onFrame(delta) {
    const { state } = engineStream;
    if (state.server_time) this.clockOffset = state.server_time - Date.now() / 1000;
    this.form.take(state.limits, state.limits_version);
    const acts = ["limits", "paused", "resumed", "reset", "drain", "aborted"];
    if (delta?.events?.some((event) => acts.includes(event.kind))) this.refetchAudit();
    this.refreshSoon();
  }

  now() {
    return Date.now() / 1000 + this.clockOffset;
  }

  refreshSoon() {
    this.timer ??= setTimeout(() => {
      this.timer = undefined;
      this.shownAt = performance.now();
      this.form.refresh();
      this.actions.refresh(engineStream.state);
    }, Math.max(0, REFRESH_MS - (performance.now() - this.shownAt)));
  }

  /** The rows are a fragment that htmx fetches on this event; several acts in a row are one fetch. */
  refetchAudit() {
    this.auditTimer ??= setTimeout(() => {
      this.auditTimer = undefined;
      document.body.dispatchEvent(new CustomEvent("auditchanged", { bubbles: true }));
    }, AUDIT_MS);
  }

  /** The server writes UTC; people read their own time, with UTC in the title. */
  localiseTimes() {
    for (const time of document.querySelectorAll("time[data-unix]")) {
      const at = new Date(Number(time.dataset.unix) * 1000);
      time.title = time.textContent.trim();
      time.dateTime = at.toISOString();
      const day = at.toDateString() === new Date().toDateString() ? "" : `${at.toLocaleDateString()} `;
      setText(time, day + at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" }));
      delete time.dataset.unix;
    }
  }
}

new AdminPage(document.querySelector(".admin"));
