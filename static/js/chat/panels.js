// The side panels: beside the conversation where there is room, drawers over it where there is not.

import { storage } from "../page.js";

const byId = (id) => document.getElementById(id);
const LIST = "pagedeck.chat.sidebar";

export class Panels {
  constructor() {
    this.sidebar = byId("sidebar");
    this.settings = byId("settings");
    this.scrim = byId("scrim");
    this.toggles = new Map([[this.sidebar, byId("toggle-sidebar")], [this.settings, byId("toggle-settings")]]);
    this.narrow = matchMedia("(max-width: 900px)");
    this.medium = matchMedia("(max-width: 1180px)");
    this.drawer = null; // the panel that lies over the conversation
    for (const [panel, toggle] of this.toggles) toggle.addEventListener("click", () => this.toggle(panel));
    this.scrim.addEventListener("click", () => this.closeDrawer());
    document.querySelector("[data-action=close-drawer]").addEventListener("click", () => this.closeDrawer());
    document.querySelector("[data-action=close-settings]").addEventListener("click", () => {
      if (!this.closeDrawer()) this.set(this.settings, false);
      byId("toggle-settings").focus();
    });
    this.narrow.addEventListener("change", () => this.arrange());
    this.medium.addEventListener("change", () => this.arrange());
    this.arrange();
    this.watchKeyboard();
  }

  isDrawer(panel) {
    return panel === this.settings ? this.medium.matches : this.narrow.matches;
  }

  /** After a change of width: drawers are closed, the list is as it was left. */
  arrange() {
    this.closeDrawer();
    this.set(this.sidebar, !this.narrow.matches && storage.get(LIST) !== "closed");
    if (this.isDrawer(this.settings)) this.set(this.settings, false);
  }

  set(panel, isOpen) {
    panel.hidden = !isOpen;
    this.toggles.get(panel).setAttribute("aria-expanded", String(isOpen));
    byId("new-chat").hidden = !this.sidebar.hidden;
  }

  toggle(panel) {
    const isOpen = panel.hidden;
    if (this.isDrawer(panel)) {
      if (isOpen) this.openDrawer(panel);
      else this.closeDrawer();
      return;
    }
    this.set(panel, isOpen);
    if (panel === this.sidebar) storage.set(LIST, isOpen ? "open" : "closed");
  }

  openDrawer(panel) {
    this.closeDrawer();
    this.drawer = panel;
    panel.classList.add("drawer");
    this.set(panel, true);
    this.scrim.hidden = false;
    // What lies below can be neither clicked nor reached by Tab.
    document.querySelector(".conversation").inert = true;
    document.querySelector(".topbar").inert = true;
    panel.querySelector("button:not([disabled]), textarea, input")?.focus();
  }

  /** True if there was one. */
  closeDrawer() {
    const panel = this.drawer;
    if (!panel) return false;
    this.drawer = null;
    panel.classList.remove("drawer");
    this.set(panel, false);
    this.scrim.hidden = true;
    document.querySelector(".conversation").inert = false;
    document.querySelector(".topbar").inert = false;
    this.toggles.get(panel).focus();
    return true;
  }

  /** A phone's keyboard shrinks what is seen, not the page: the composer follows what is seen. */
  watchKeyboard() {
    const view = globalThis.visualViewport;
    if (!view) return;
    const fit = () => {
      const hidden = innerHeight - view.height * view.scale;
      document.body.style.height = view.scale === 1 && hidden > 80 ? `${view.height}px` : "";
      if (hidden > 80) scrollTo(0, 0);
    };
    view.addEventListener("resize", fit);
    view.addEventListener("scroll", fit);
  }
}
