// The engine's switches on /admin. What cannot be taken back asks first, with the numbers it concerns.

import { api, page, setText } from "../page.js";
import { Question, pauseQuestion } from "../question.js";
import { READ_ONLY } from "../engine/abort.js";
import { count, integer } from "../engine/format.js";

const byId = (id) => document.getElementById(id);

export class Actions {
  constructor(root, hooks) {
    this.hooks = hooks;
    this.question = new Question();
    this.buttons = [...root.querySelectorAll("[data-action]")];
    this.receiptLine = byId("engine-receipt");
    this.isAdmin = page.role === "admin";
    for (const button of this.buttons) {
      button.addEventListener("click", () => {
        if (button.getAttribute("aria-disabled") !== "true") this.run(button);
      });
    }
  }

  async run(button) {
    const state = this.hooks.state();
    switch (button.dataset.action) {
      case "pause": {
        const reason = await this.question.ask(pauseQuestion(state));
        if (reason) await this.post("/admin/api/engine/pause", { reason }, (r) => `Paused after step ${integer(r.step)}.`);
        break;
      }
      case "resume":
        await this.post("/admin/api/engine/resume", {}, (r) => `Resumed after step ${integer(r.step)}.`);
        break;
      case "step":
        await this.post("/admin/api/engine/step", { n: Number(button.dataset.n) }, (r) =>
          r.steps === undefined ? `At step ${integer(r.step)}.` : `Ran ${count(r.steps, "step")}; at step ${integer(r.step)}.`);
        break;
      case "reset": {
        const cached = state.kv?.cached ?? 0;
        const yes = await this.question.ask({
          title: "Reset the prefix cache?",
          text: cached
            ? `${count(cached, "cached block")} become free: up to ${count(cached * state.kv.block_size, "token")} are computed again when a prompt with such a prefix comes. Running requests keep their blocks.`
            : "Nothing is cached now. Blocks of running requests are forgotten as reusable when they are freed.",
          yes: "Reset the cache",
        });
        if (yes) {
          await this.post("/admin/api/prefix-cache/reset", undefined, (r) =>
            `Prefix cache reset: content of ${count(r.blocks_dropped ?? cached, "block")} dropped.`);
        }
        break;
      }
      case "drain": {
        const yes = await this.question.ask({
          title: "Drain the engine?",
          text: `${count(state.running.length, "running sequence")} and ${count(state.waiting_total, "waiting one")} are finished; every new request is refused with 503. Only a restart of the process takes it back.`,
          yes: "Drain",
        });
        if (yes) await this.post("/admin/api/engine/drain", {}, () => "Draining: new requests are refused.");
        break;
      }
    }
  }

  async post(path, body, words) {
    try {
      this.receipt(words(await api("POST", path, body)), false);
    } catch (error) {
      this.receipt(`Not done: ${error.message}`, true);
    }
    this.hooks.onDone();
  }

  receipt(text, isError) {
    setText(this.receiptLine, text);
    this.receiptLine.classList.toggle("is-error", isError);
  }

  refresh(state) {
    const { paused, draining, dead } = state;
    const chip = byId("engine-state");
    const [word, look] = dead ? ["STOPPED", "chip-danger"] : state.stuck ? ["STUCK", "chip-danger"] : paused ? ["PAUSED", "chip-warn"] : draining ? ["DRAINING", "chip-warn"] : state.ready ? ["RUNNING", "chip-ok"] : ["–", ""];
    setText(chip, word);
    chip.className = `chip ${look}`.trim();
    const isIdle = state.running.length === 0 && state.waiting_total === 0;
    for (const button of this.buttons) {
      const { action } = button.dataset;
      if (action === "pause") button.hidden = paused;
      if (action === "resume") button.hidden = !paused;
      this.#set(button, this.#reason(action, state, isIdle));
    }
    const cached = state.kv?.cached ?? null;
    setText(byId("reset-hint"), cached === null ? "Cached blocks become free." : `${count(cached, "cached block")} become free; what runs keeps its blocks.`);
  }

  #reason(action, { paused, draining, dead }, isIdle) {
    if (!this.isAdmin) return READ_ONLY;
    if (dead) return `The engine has stopped: ${dead}`;
    if (action === "step" && !paused) return "Pause the engine first: it steps by itself";
    if (action === "step" && isIdle) return "Nothing to step: no requests";
    if (action === "drain" && draining) return "It drains already";
    return null;
  }

  #set(button, reason) {
    button.setAttribute("aria-disabled", String(reason !== null));
    if (button.title !== (reason ?? "")) button.title = reason ?? "";
  }
}
