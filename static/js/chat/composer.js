// The composer: Enter sends (unless an input method is composing), the draft's tokens are counted by the server.

import { api, count, setText } from "../page.js";

const COUNT_MS = 300;
const MAX_HEIGHT = 220;

export class Composer {
  /**
   * `onSend(text)`, `onStop()`, `messages(draft)` gives what would be sent with that draft,
   * `onCount({numTokens, maxContext, isTooLong})` after each count.
   */
  constructor({ form, input, button, counter, onSend, onStop, messages, onCount }) {
    Object.assign(this, { form, input, button, counter, onSend, onStop, messages, onCount });
    this.isWriting = false;
    this.maxContext = null;
    this.numTokens = null;
    this.timer = null;
    this.counting = null;
    this.isComposing = false;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    input.addEventListener("keydown", (event) => this.onKey(event));
    // Some browsers end a composition before the keydown of the Enter that confirmed it.
    input.addEventListener("compositionstart", () => (this.isComposing = true));
    input.addEventListener("compositionend", () => (this.isComposing = false));
    input.addEventListener("input", () => {
      this.fit();
      this.show();
      this.countSoon();
    });
    this.fit();
    this.show();
  }

  get text() {
    return this.input.value;
  }

  set text(value) {
    this.input.value = value;
    this.fit();
    this.show();
    this.countSoon();
  }

  onKey(event) {
    if (event.key !== "Enter" || event.shiftKey || event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.isComposing || this.isComposing || event.keyCode === 229) return;
    event.preventDefault();
    if (!this.isWriting) this.submit();
  }

  submit() {
    if (this.isWriting) {
      this.onStop();
      return;
    }
    const text = this.text.trim();
    if (!text) return;
    this.onSend(text);
  }

  /** While an answer is written the button stops it; the draft can be typed on. */
  setWriting(isWriting, isStopping) {
    this.isWriting = isWriting;
    this.isStopping = isStopping;
    this.show();
  }

  show() {
    const { button } = this;
    button.classList.toggle("btn-primary", !this.isWriting);
    button.disabled = this.isWriting ? this.isStopping : this.text.trim() === "";
    setText(button.querySelector("span"), this.isWriting ? (this.isStopping ? "Stopping" : "Stop") : "Send");
    button.querySelector("use").setAttribute("href", this.isWriting ? "#i-stop" : "#i-send");
    setText(document.getElementById("composer-keys"), this.isWriting ? "Esc stops · Shift+Enter new line" : "Enter sends · Shift+Enter new line");
    button.title = this.isWriting ? "Stop the answer (Esc)" : "Send (Enter)";
  }

  /** As high as its text, up to a limit. */
  fit() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight + 2, MAX_HEIGHT)}px`;
    this.input.style.overflowY = this.input.scrollHeight > MAX_HEIGHT ? "auto" : "hidden";
  }

  countSoon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.count(), COUNT_MS);
  }

  async count() {
    this.counting?.abort();
    const messages = this.messages(this.text.trim());
    if (!messages.length) {
      this.showCount(0);
      return;
    }
    this.counting = new AbortController();
    const { signal } = this.counting;
    try {
      const answer = await api("POST", "/chat/api/tokenize", { messages });
      if (signal.aborted) return;
      this.maxContext = answer.max_context;
      this.showCount(answer.num_prompt_tokens);
    } catch {
      if (!signal.aborted) this.showCount(null);
    }
  }

  showCount(numTokens) {
    this.numTokens = numTokens;
    const isTooLong = numTokens !== null && this.maxContext !== null && numTokens >= this.maxContext;
    const [text, bar] = [this.counter.querySelector(".counter-text"), this.counter.querySelector(".counter-bar > span")];
    if (numTokens === null) setText(text, "– tokens");
    else if (this.maxContext === null) setText(text, numTokens ? `${count(numTokens)} tokens` : "");
    else setText(text, `${count(numTokens)} of ${count(this.maxContext)} tokens`);
    bar.style.width = this.maxContext && numTokens ? `${Math.min(100, (100 * numTokens) / this.maxContext)}%` : "0";
    this.counter.classList.toggle("counter-over", isTooLong);
    this.onCount({ numTokens, maxContext: this.maxContext, isTooLong });
  }
}
