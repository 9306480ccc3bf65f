// Where the time of a step goes: one bar of medians over the latest steps, asked for while somebody looks.

import { api, setText } from "../page.js";
import { DASH, count, integer } from "./format.js";

const POLL_MS = 2000;
const NUM_STEPS = 100;

/** What each phase does, for whoever points at it. */
const WORDS = {
  schedule: "commands, and who computes how many tokens with which blocks",
  inputs: "the tensors of the step",
  forward: "the model's layers",
  attention: "the model's attention over keys and values",
  linear: "the model's matrix products, the head included",
  elementwise: "the model's norms, rotations and gates",
  sample: "choosing the next tokens",
  launch: "telling the device what to compute",
  device: "waiting for the device and its tokens",
  update: "taking the tokens, and making text of them",
  publish: "handing the news to the event loop",
};

const ms = (value) => (value >= 10 ? value.toFixed(0) : value >= 1 ? value.toFixed(1) : value.toFixed(2));

export class Phases {
  /** @param {HTMLElement} figure  @param {() => boolean} isPaused  whether the person's view stands still */
  constructor(figure, isPaused) {
    this.now = figure.querySelector(".phases-now");
    this.share = figure.querySelector(".phases-share");
    this.bar = figure.querySelector(".phases-bar");
    this.list = figure.querySelector(".phases-list");
    this.isPaused = isPaused;
    this.lastStep = null;
    this.names = "";
    setInterval(() => this.refresh(), POLL_MS);
    this.refresh();
  }

  async refresh() {
    if (document.hidden || this.isPaused()) return;
    try {
      const profile = await api("GET", `/admin/api/phases?limit=${NUM_STEPS}`);
      if (profile.last_step !== this.lastStep) this.show(profile);
    } catch {
      // The state of the connection is told in the bar at the top; the last profile stays.
    }
  }

  show({ num_steps, last_step, step_ms, phases }) {
    this.lastStep = last_step;
    if (!num_steps) {
      setText(this.now, DASH);
      return;
    }
    const names = phases.map((phase) => phase.name).join();
    if (names !== this.names) this.#build(phases);
    this.names = names;
    const total = phases.reduce((sum, phase) => sum + phase.ms, 0) || 1;
    let bookkeeping = 0;
    for (const [i, phase] of phases.entries()) {
      if (phase.is_bookkeeping) bookkeeping += phase.ms;
      this.bar.children[i].style.flexGrow = String(phase.ms / total);
      setText(this.list.children[i].querySelector(".phases-ms"), ms(phase.ms));
    }
    setText(this.now, `${ms(step_ms)} ms · median of ${num_steps === 1 ? "1 step" : `the last ${count(num_steps, "step")}`}`);
    const percent = (100 * bookkeeping) / total;
    setText(this.share, `bookkeeping ${percent < 10 ? percent.toFixed(1) : integer(Math.round(percent))} %`);
  }

  #build(phases) {
    this.bar.replaceChildren();
    this.list.replaceChildren();
    for (const { name, is_bookkeeping } of phases) {
      const part = document.createElement("span");
      part.dataset.phase = name;
      const item = document.createElement("li");
      item.title = WORDS[name] ?? name;
      const key = document.createElement("i");
      key.dataset.phase = name;
      const value = document.createElement("span");
      value.className = "phases-ms";
      for (const element of [part, key]) if (is_bookkeeping) element.dataset.bookkeeping = "";
      item.append(key, ` ${name} `, value);
      this.bar.append(part);
      this.list.append(item);
    }
  }
}
