// The two kinds of pause, kept apart: this view (my screen), and the engine (everyone).

import { api, page, setText, toast } from "../page.js";
import { Question, pauseQuestion } from "../question.js";
import { engineStream } from "../stream.js";
import { READ_ONLY } from "./abort.js";
import { count, integer } from "./format.js";

/** Buttons that act on the engine, for everyone. */
export class EngineControls {
  constructor(root) {
    this.root = root;
    this.pause = root.querySelector("[data-engine=pause]");
    this.resume = root.querySelector("[data-engine=resume]");
    this.steps = [...root.querySelectorAll("[data-engine=step]")];
    this.question = new Question();
    this.isBusy = false;
    this.isAdmin = page.role === "admin";
    this.pause.addEventListener("click", () => this.#isEnabled(this.pause) && this.#ask());
    this.resume.addEventListener("click", () => this.#isEnabled(this.resume) && this.#post("resume"));
    for (const button of this.steps) {
      button.addEventListener("click", () => this.#isEnabled(button) && this.#post("step", { n: Number(button.dataset.n) }));
    }
  }

  #isEnabled(button) {
    return button.getAttribute("aria-disabled") !== "true";
  }

  async #ask() {
    const reason = await this.question.ask(pauseQuestion(engineStream.state));
    if (reason) await this.#post("pause", { reason });
  }

  async #post(action, body) {
    this.isBusy = true;
    try {
      await api("POST", `/admin/api/engine/${action}`, body ?? {});
    } catch (error) {
      toast(`The engine did not ${action}: ${error.message}`, { error: true });
    } finally {
      this.isBusy = false;
    }
  }

  refresh(state) {
    const busy = state.dead ? `The engine has stopped: ${state.dead}` : this.isAdmin ? null : READ_ONLY;
    this.#set(this.pause, busy, "Pause the engine for everyone: asks for a reason");
    this.#set(this.resume, busy, "Let the engine run again");
    const isIdle = state.running.length === 0 && state.waiting_total === 0;
    const noStep = busy ?? (!state.paused ? "Pause the engine first: it steps by itself" : isIdle ? "Nothing to step: no requests" : null);
    for (const button of this.steps) this.#set(button, noStep, `Run ${count(Number(button.dataset.n), "step")}, then pause again`);
    this.pause.hidden = state.paused;
    this.resume.hidden = !state.paused;
  }

  /** Disabled but still in reach of focus, so that the reason can be read. */
  #set(button, reason, title) {
    const isDisabled = reason !== null;
    if ((button.getAttribute("aria-disabled") === "true") !== isDisabled) button.setAttribute("aria-disabled", String(isDisabled));
    const text = reason ?? title;
    if (button.title !== text) button.title = text;
  }
}

/** The button that freezes only this page, with the steps it has missed. */
export class ViewPause {
  /** `onToggle` draws once more: everything on the page must be of the same step when it freezes. */
  constructor(button, note, onToggle) {
    this.button = button;
    this.onToggle = onToggle;
    this.label = button.querySelector("span");
    this.note = note;
    button.addEventListener("click", () => this.toggle());
  }

  toggle() {
    if (engineStream.isViewPaused) engineStream.resumeView();
    else engineStream.pauseView();
    this.refresh();
    this.onToggle();
  }

  refresh() {
    const isPaused = engineStream.isViewPaused;
    this.button.setAttribute("aria-pressed", String(isPaused));
    setText(this.label, isPaused ? "Resume view" : "Pause view");
    this.note.hidden = !isPaused;
    if (!isPaused) return;
    const shown = engineStream.state.step ?? 0;
    const missed = Math.max(0, (engineStream.liveStep ?? shown) - shown);
    setText(this.note.querySelector(".frozen-at"), `at step ${integer(shown)}`);
    setText(this.note.querySelector(".frozen-missed"), `${count(missed, "step")} missed`);
  }
}
