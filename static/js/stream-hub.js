// Two EventSources for a whole browser, fanned out to its tabs. Runs in a SharedWorker; where there is none, each page
// has a hub of its own. A tab that is hidden, has paused its view or does not keep up gets no frames; when it is back
// it gets a keyframe from the hub's own folded state, so it is current at once and nothing piles up for it.

import { applyChat, applyDelta, applyKey, applyTick, emptyState } from "./stream-fold.js";

const MAX_UNACKED = 16;
const SILENT_MS = 15_000; // heartbeats come every 5 s: after this the connection is dead, whatever TCP says
const RETRY_MS = [500, 1000, 2000, 4000];
const MAX_GENERATIONS = 64;
const ENGINE_EVENTS = ["hello", "key", "delta", "tick", "bye"];
const CHAT_EVENTS = ["snapshot", "delta", "status", "done", "hello", "tick", "bye"];

/** One EventSource that is always there: reconnects by itself (with Last-Event-ID), and again when that gave up. */
class Source {
  constructor(address, events, onEvent, onConnection) {
    Object.assign(this, { address, events, onEvent, onConnection });
    this.source = null;
    this.timer = null;
    this.failures = 0;
    this.isOpen = false;
    this.lastAt = 0;
  }

  open() {
    if (this.source) return;
    clearTimeout(this.timer);
    this.timer = null;
    this.lastAt = Date.now();
    const source = new EventSource(this.address);
    this.source = source;
    source.onopen = () => {
      this.failures = 0;
      this.lastAt = Date.now();
      this.setOpen(true);
    };
    source.onerror = () => {
      this.setOpen(false);
      if (source.readyState === EventSource.CLOSED) this.retry();
    };
    for (const name of this.events) {
      source.addEventListener(name, (message) => {
        this.lastAt = Date.now();
        let data = null;
        try {
          data = JSON.parse(message.data || "{}");
        } catch {
          return; // Not a frame of this protocol.
        }
        this.onEvent(name, data);
      });
    }
  }

  setOpen(isOpen) {
    if (this.isOpen === isOpen) return;
    this.isOpen = isOpen;
    this.onConnection(isOpen);
  }

  retry(ms = RETRY_MS[Math.min(this.failures, RETRY_MS.length - 1)]) {
    this.source?.close();
    this.source = null;
    this.setOpen(false);
    this.failures += 1;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.open(), ms);
  }

  /** Reconnects at once if the connection is gone or silent. */
  poke() {
    const isSilent = Date.now() - this.lastAt > SILENT_MS;
    if (this.timer !== null || isSilent) this.retry(0);
  }

  close() {
    clearTimeout(this.timer);
    this.timer = null;
    this.source?.close();
    this.source = null;
    this.isOpen = false;
  }
}

export class Hub {
  /** `root` is the URL of the server's root, without a slash at the end. */
  constructor(root) {
    this.root = root;
    this.ports = new Map(); // port -> {engine, chat, isVisible, isViewPaused, unacked, needsKey}
    this.engine = null;
    this.chat = null;
    this.state = emptyState();
    this.frameAt = 0;
    this.beatAt = 0;
    this.generations = new Map();
    this.watchdog = setInterval(() => this.watch(), 2000);
    self.addEventListener?.("online", () => this.poke());
  }

  attach(port) {
    this.ports.set(port, { engine: false, chat: false, isVisible: true, isViewPaused: false, unacked: 0, needsKey: true });
  }

  detach(port) {
    this.ports.delete(port);
    const tabs = [...this.ports.values()];
    if (this.engine && !tabs.some((tab) => tab.engine)) {
      this.engine.close();
      this.engine = null;
      this.state = emptyState();
    }
    if (this.chat && !tabs.some((tab) => tab.chat)) {
      this.chat.close();
      this.chat = null;
      this.generations.clear();
    }
  }

  receive(port, message) {
    const tab = this.ports.get(port);
    if (!tab) return;
    switch (message.type) {
      case "engine":
        tab.engine = true;
        this.openEngine();
        port.postMessage({ type: "conn", stream: "engine", open: this.engine.isOpen, at: this.engine.lastAt });
        this.sendKey(port, tab);
        break;
      case "chat":
        tab.chat = true;
        this.openChat(message.clientId);
        port.postMessage({ type: "conn", stream: "chat", open: this.chat.isOpen, at: this.chat.lastAt });
        for (const generation of this.generations.values()) port.postMessage({ type: "chat", event: "snapshot", data: { ...generation } });
        break;
      case "visible":
        tab.isVisible = message.value;
        if (message.value) {
          this.poke();
          this.sendKey(port, tab);
        }
        break;
      case "view":
        tab.isViewPaused = message.paused;
        this.sendKey(port, tab);
        break;
      case "ack":
        tab.unacked = Math.max(0, tab.unacked - 1);
        if (tab.unacked < MAX_UNACKED / 2) this.sendKey(port, tab);
        break;
      case "chat-snapshot": // a page fetched the whole text after a gap
        this.onChat("snapshot", message.data);
        break;
      case "poke":
        this.poke();
        break;
      case "bye":
        this.detach(port);
        break;
    }
  }

  openEngine() {
    this.engine ??= new Source(`${this.root}/admin/api/events`, ENGINE_EVENTS, (e, d) => this.onEngine(e, d), (open) => this.onConnection("engine", open));
    this.engine.open();
  }

  openChat(clientId) {
    const address = `${this.root}/chat/api/stream?client_id=${encodeURIComponent(clientId)}`;
    this.chat ??= new Source(address, CHAT_EVENTS, (e, d) => this.onChat(e, d), (open) => this.onConnection("chat", open));
    this.chat.open();
  }

  onConnection(stream, open) {
    for (const [port, tab] of this.ports) if (tab[stream]) port.postMessage({ type: "conn", stream, open, at: this[stream]?.lastAt ?? 0 });
  }

  onEngine(event, data) {
    this.frameAt = Date.now();
    if (event === "hello") {
      if (data.epoch !== this.state.epoch) Object.assign(this.state, emptyState(), { epoch: data.epoch });
    } else if (event === "key") {
      applyKey(this.state, data);
    } else if (event === "delta") {
      if (!this.state.ready) return;
      applyDelta(this.state, data);
    } else if (event === "tick") {
      applyTick(this.state, data);
    }
    for (const [port, tab] of this.ports) {
      if (!tab.engine || !tab.isVisible) {
        tab.needsKey = true;
      } else if (event === "key") {
        tab.needsKey = true;
        this.sendKey(port, tab);
      } else if (event !== "delta") {
        port.postMessage({ type: event, data, at: this.frameAt });
      } else if (tab.isViewPaused || tab.needsKey || tab.unacked >= MAX_UNACKED) {
        tab.needsKey = true;
      } else {
        tab.unacked += 1;
        port.postMessage({ type: "delta", data, at: this.frameAt });
      }
    }
    this.beat();
  }

  /** A paused view still says that the engine is alive, and whether it runs. */
  beat() {
    if (this.frameAt - this.beatAt < 500) return;
    this.beatAt = this.frameAt;
    const { step, paused, pause_reason, draining, dead, stuck } = this.state;
    const data = { step, paused, pause_reason, draining, dead, stuck };
    for (const [port, tab] of this.ports) {
      if (tab.engine && tab.isVisible && tab.isViewPaused) port.postMessage({ type: "beat", data, at: this.frameAt });
    }
  }

  sendKey(port, tab) {
    if (!tab.needsKey || !tab.engine || !tab.isVisible || tab.isViewPaused || !this.state.ready || tab.unacked >= MAX_UNACKED) return;
    tab.needsKey = false;
    tab.unacked += 1;
    port.postMessage({ type: "key", state: this.state, at: this.frameAt });
  }

  onChat(event, data) {
    if (data.generation_id !== undefined) {
      applyChat(this.generations, event, data);
      // The oldest finished ones go first; the pages keep their own copies.
      for (const [id, generation] of this.generations) {
        if (this.generations.size <= MAX_GENERATIONS) break;
        if (generation.status === "done") this.generations.delete(id);
      }
    }
    // Hidden tabs get these too: a few bytes per token, and a conversation is complete when its tab is looked at again.
    for (const [port, tab] of this.ports) if (tab.chat) port.postMessage({ type: "chat", event, data });
  }

  watch() {
    for (const source of [this.engine, this.chat]) {
      if (source && source.timer === null && Date.now() - source.lastAt > SILENT_MS) source.retry(0);
    }
  }

  poke() {
    this.engine?.poke();
    this.chat?.poke();
  }
}
