// Keys on /admin: a new one is shown once, revoking one says first whom it hits.

import { api, copyText, setText } from "../page.js";

const byId = (id) => document.getElementById(id);
const REFRESH_MS = 30_000;

const ROLES = {
  inference: "/v1 and the chat; no pages, no state, no metrics.",
  "read-only": "Pages, state and metrics; generates nothing and changes nothing.",
  admin: "Everything: also limits, pauses, aborts, keys and the audit log.",
};

export class Keys {
  /** @param hooks {question, onDone}: the dialog for questions, and what to do after an action */
  constructor(section, hooks) {
    this.hooks = hooks;
    this.isOn = section.dataset.on === "true";
    this.rows = byId("key-rows");
    this.dialog = byId("key-dialog");
    this.label = byId("key-label");
    this.role = byId("key-role");
    this.text = byId("key-text");
    byId("new-key").addEventListener("click", () => this.open());
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.create();
    });
    this.role.addEventListener("change", () => this.#explain());
    this.rows.addEventListener("click", (event) => {
      const button = event.target.closest("[data-revoke]");
      if (button) this.revoke(button.closest("tr"));
    });
    for (const button of this.dialog.querySelectorAll("[data-close]")) button.addEventListener("click", () => this.dialog.close());
    // The key is there this once: Escape does not lose it.
    this.dialog.addEventListener("cancel", (event) => {
      if (!byId("key-shown").hidden) event.preventDefault();
    });
    this.dialog.addEventListener("close", () => {
      this.text.value = "";
    });
    byId("key-done").addEventListener("click", () => this.dialog.close());
    byId("key-copy").addEventListener("click", async () => {
      const label = byId("key-copy").querySelector("span");
      this.text.select();
      setText(label, (await copyText(this.text.value)) ? "Copied" : "Press Ctrl+C");
    });
    setInterval(() => {
      if (!this.rows.contains(document.activeElement) && document.visibilityState === "visible") this.refetch();
    }, REFRESH_MS);
  }

  open() {
    byId("key-form").hidden = false;
    byId("key-shown").hidden = true;
    byId("key-first").hidden = this.isOn;
    this.dialog.setAttribute("aria-labelledby", "key-dialog-title");
    this.label.value = "";
    this.role.value = this.isOn ? "inference" : "admin";
    this.role.disabled = !this.isOn;
    this.#problem("");
    this.#explain();
    this.dialog.showModal();
    this.label.focus();
  }

  #explain() {
    const first = this.isOn ? "" : " The first key must be an admin's.";
    setText(byId("key-role-hint"), ROLES[this.role.value] + first);
  }

  #problem(text, atLabel = false) {
    const [mine, other] = atLabel ? [byId("key-label-error"), byId("key-error")] : [byId("key-error"), byId("key-label-error")];
    setText(mine, text);
    mine.hidden = !text;
    other.hidden = true;
    this.label.toggleAttribute("aria-invalid", false);
    if (atLabel && text) this.label.setAttribute("aria-invalid", "true");
  }

  async create() {
    const label = this.label.value.trim();
    if (!label) {
      this.#problem("Say what it is for: the list and the audit log show it.", true);
      this.label.focus();
      return;
    }
    this.#problem("");
    const submit = byId("key-create");
    submit.disabled = true;
    try {
      const made = await api("POST", "/admin/api/keys", { label, role: this.role.value });
      this.#show(made);
    } catch (error) {
      this.#problem(`Not created: ${error.message}`, error.param === "label");
    } finally {
      submit.disabled = false;
    }
    this.refetch();
    this.hooks.onDone();
  }

  #show(made) {
    const wasOn = this.isOn;
    this.#setOn(true);
    byId("key-form").hidden = true;
    byId("key-shown").hidden = false;
    this.dialog.setAttribute("aria-labelledby", "key-shown-title");
    this.text.value = made.key;
    setText(byId("key-copy").querySelector("span"), "Copy");
    this.text.focus();
    this.text.select();
    this.#receipt(`“${made.label}” (${made.role}) was created.${wasOn ? "" : " Authentication is on; this browser is logged in with that key."}`);
  }

  async revoke(row) {
    const { key, label, role } = row.dataset;
    const isYours = "yours" in row.dataset;
    const isLast = this.rows.querySelectorAll("tr[data-key]").length === 1;
    const used = row.querySelector("td[data-label='last used']").textContent.trim();
    const parts = [used === "never" ? "It was never used." : `Last used ${used}. Programs that send it get 401 at once, and what is being answered to them ends.`];
    if (isLast) parts.push("It is the only key: without it no key is asked for, and everyone on this machine is admin.");
    else if (isYours) parts.push("This browser is logged in with it and will be logged out.");
    const yes = await this.hooks.question.ask({ title: `Revoke “${label}” (${role})?`, text: parts.join(" "), yes: "Revoke" });
    if (!yes) return;
    try {
      const answer = await api("DELETE", `/admin/api/keys/${encodeURIComponent(key)}`);
      this.#setOn(answer.is_authentication_on);
      this.#receipt(`“${label}” (${role}) was revoked.${answer.is_authentication_on ? "" : " No key is asked for any more."}`);
      if (isYours && answer.is_authentication_on) location.reload(); // to the login form
    } catch (error) {
      this.#receipt(`Not revoked: ${error.message}`, true);
    }
    this.refetch();
    this.hooks.onDone();
  }

  #setOn(isOn) {
    this.isOn = isOn;
    const chip = byId("keys-state");
    setText(chip, isOn ? "A KEY IS ASKED FOR" : "NO KEY IS ASKED FOR");
    chip.className = `chip ${isOn ? "chip-ok" : "chip-warn"}`;
  }

  #receipt(text, isError = false) {
    const line = byId("keys-receipt");
    setText(line, text);
    line.classList.toggle("is-error", isError);
  }

  /** The rows are a fragment that htmx fetches on this event. */
  refetch() {
    document.body.dispatchEvent(new CustomEvent("keyschanged", { bubbles: true }));
  }
}
