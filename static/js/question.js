// The dialog of what cannot simply be taken back; its form is templates/macros/_question.html.

import { plural, setText } from "./page.js";

const byId = (id) => document.getElementById(id);

/** One dialog for all questions; resolves with the reason (or true) when it is answered with yes, else null. */
export class Question {
  constructor() {
    this.dialog = byId("ask-dialog");
    this.field = byId("ask-reason");
    this.problem = this.dialog.querySelector(".field-error");
    this.answer = null;
    this.dialog.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      const reason = this.field.value.trim();
      if (this.wantsReason && !reason) {
        setText(this.problem, "Say why: everyone sees it in the banner.");
        this.field.setAttribute("aria-invalid", "true");
        this.field.focus();
        return;
      }
      this.answer = this.wantsReason ? reason : true;
      this.dialog.close();
    });
    this.dialog.addEventListener("close", () => this.resolve?.(this.answer));
    for (const button of this.dialog.querySelectorAll("[data-close]")) button.addEventListener("click", () => this.dialog.close());
  }

  ask({ title, text, yes, wantsReason = false }) {
    this.wantsReason = wantsReason;
    this.answer = null;
    setText(byId("ask-title"), title);
    setText(byId("ask-text"), text);
    setText(byId("ask-yes"), yes);
    setText(this.problem, "");
    this.field.removeAttribute("aria-invalid");
    this.field.value = "";
    byId("ask-field").hidden = !wantsReason;
    this.dialog.showModal();
    (wantsReason ? this.field : byId("ask-yes")).focus();
    return new Promise((resolve) => {
      this.resolve = resolve;
    });
  }
}

/** What a pause for everyone means, in numbers; it asks for a reason. */
export const pauseQuestion = (state) => ({
  title: "Pause the engine for everyone?",
  text:
    `${plural(state.running.length, "running sequence")} and ${plural(state.waiting_total, "waiting one")} stand still until someone resumes it. ` +
    "Requests keep their blocks; their timeouts go on.",
  yes: "Pause engine",
  wantsReason: true,
});
