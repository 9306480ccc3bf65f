// The live streams as a page sees them.
//
//   engineStream.subscribe({onHello, onKey, onDelta, onTick, onBye, onState}) -> unsubscribe
//     onKey(state)            the whole state is new: draw everything
//     onDelta(delta, state)   `delta` as the server sent it, already folded into `state`
//     onState(connection)     {status, age_ms, ...}, when it changes, and each second while it is not LIVE
//   engineStream.state        the folded state; see stream-fold.js for its fields
//   engineStream.pauseView(), resumeView(), isViewPaused     this page only: the state stays as it is until resumed
//   chatStream.subscribe(fn)  fn(event, data, generation): snapshot | delta | status | done, folded text in `generation`;
//                             tick {dead, stuck} and connection {open} without one
//
// status: LIVE | VIEW PAUSED | ENGINE PAUSED | ENGINE STUCK | ENGINE DEAD | STALE (nothing heard for 6 s) | DISCONNECTED | CONNECTING

import { api, clientId, page, randomId } from "./page.js";
import { applyChat, applyDelta, applyTick, emptyState } from "./stream-fold.js";
import { Hub } from "./stream-hub.js";

const STALE_MS = 6000;

let port = null;
const handlers = { engine: () => {}, chat: () => {} };

function dispatch(message) {
  if (message.type === "chat" || message.stream === "chat") handlers.chat(message);
  else handlers.engine(message);
}

/** A hub in this page, for browsers without SharedWorker (or when its script could not be loaded). */
function localPort() {
  const hub = new Hub(new URL(page.root || "/", location.href).href.replace(/\/$/, ""));
  const end = {
    // The hub keeps its own state: what it hands out must be a copy, as it would be from a worker.
    postMessage: (message) => dispatch(message.type === "key" ? { ...message, state: structuredClone(message.state) } : message),
  };
  hub.attach(end);
  return { postMessage: (message) => hub.receive(end, message) };
}

function workerPort() {
  const worker = new SharedWorker(new URL("stream-worker.js", import.meta.url), { type: "module", name: `pagedeck-${page.version}` });
  worker.onerror = () => {
    port = localPort();
    for (const type of started) start(type);
  };
  worker.port.onmessage = ({ data }) => dispatch(data);
  worker.port.start();
  if (navigator.locks) {
    const lock = `pagedeck-tab-${randomId(8)}`;
    navigator.locks.request(lock, () => {
      worker.port.postMessage({ type: "alive", lock });
      return new Promise(() => {}); // held until the page is gone
    });
  }
  return worker.port;
}

const started = new Set();

function start(type) {
  started.add(type);
  port ??= "SharedWorker" in self ? workerPort() : localPort();
  port.postMessage({ type, clientId: type === "chat" ? clientId() : undefined });
  port.postMessage({ type: "visible", value: document.visibilityState === "visible" });
}

document.addEventListener("visibilitychange", () => port?.postMessage({ type: "visible", value: document.visibilityState === "visible" }));
addEventListener("online", () => port?.postMessage({ type: "poke" }));
addEventListener("pagehide", (event) => {
  if (!event.persisted) port?.postMessage({ type: "bye" });
});

class EngineStream {
  constructor() {
    this.state = emptyState();
    this.isViewPaused = false;
    this.connection = { status: "CONNECTING", age_ms: null, engine_paused: false, pause_reason: null, draining: false, dead: null, stuck: null };
    this.subscribers = new Set();
    this.isOpen = false;
    this.everOpen = false;
    this.frameAt = 0;
    this.startedAt = Date.now();
    this.engine = { paused: false, pause_reason: null, draining: false, dead: null, stuck: null };
    this.liveStep = null; // the engine's own step, also while the view is paused
  }

  subscribe(subscriber) {
    this.subscribers.add(subscriber);
    if (!started.has("engine")) {
      handlers.engine = (message) => this.receive(message);
      start("engine");
      setInterval(() => this.check(true), 1000);
    }
    if (this.state.ready) subscriber.onKey?.(this.state);
    subscriber.onState?.(this.connection);
    return () => this.subscribers.delete(subscriber);
  }

  emit(name, ...values) {
    for (const subscriber of this.subscribers) subscriber[name]?.(...values);
  }

  receive(message) {
    if (message.at) this.frameAt = Math.max(this.frameAt, message.at);
    switch (message.type) {
      case "conn":
        this.isOpen = message.open;
        this.everOpen ||= message.open;
        break;
      case "key":
        port.postMessage({ type: "ack" });
        if (this.isViewPaused) return;
        Object.assign(this.state, message.state);
        this.takeEngine(this.state);
        this.emit("onKey", this.state);
        break;
      case "delta":
        port.postMessage({ type: "ack" });
        if (this.isViewPaused || !this.state.ready) return;
        applyDelta(this.state, message.data);
        this.takeEngine(this.state);
        this.emit("onDelta", message.data, this.state);
        break;
      case "tick":
        if (!this.isViewPaused) applyTick(this.state, message.data);
        this.engine.stuck = message.data.stuck ?? null;
        this.emit("onTick", message.data, this.state);
        break;
      case "beat":
        this.takeEngine(message.data);
        break;
      case "hello":
        this.emit("onHello", message.data);
        break;
      case "bye":
        this.emit("onBye", message.data);
        break;
    }
    this.check();
  }

  takeEngine({ step, paused, pause_reason, draining, dead, stuck }) {
    this.liveStep = step ?? this.liveStep;
    this.engine = {
      paused: Boolean(paused),
      pause_reason: pause_reason ?? null,
      draining: Boolean(draining),
      dead: dead || null,
      stuck: stuck ?? null,
    };
  }

  /** Milliseconds since anything was heard, or null before the first time. */
  get ageMs() {
    return this.frameAt ? Math.max(0, Date.now() - this.frameAt) : null;
  }

  status() {
    const age = this.ageMs;
    if (!this.isOpen) return this.everOpen || Date.now() - this.startedAt > 2000 ? "DISCONNECTED" : "CONNECTING";
    if (age === null) return "CONNECTING";
    if (age > STALE_MS) return "STALE";
    if (this.engine.dead) return "ENGINE DEAD";
    if (this.engine.stuck) return "ENGINE STUCK";
    if (this.isViewPaused) return "VIEW PAUSED";
    return this.engine.paused ? "ENGINE PAUSED" : "LIVE";
  }

  check(isTimer = false) {
    const { paused, pause_reason, draining, dead } = this.engine;
    const stuck = this.engine.stuck && { ...this.engine.stuck, running_s: this.engine.stuck.running_s + this.ageMs / 1000 };
    const status = this.status();
    const before = this.connection;
    const isChanged =
      status !== before.status || paused !== before.engine_paused || pause_reason !== before.pause_reason || draining !== before.draining || dead !== before.dead ||
      stuck?.step !== before.stuck?.step;
    this.connection = { status, age_ms: this.ageMs, step: this.liveStep, engine_paused: paused, pause_reason, draining, dead, stuck };
    if (isChanged || (isTimer && status !== "LIVE")) this.emit("onState", this.connection);
  }

  pauseView() {
    if (this.isViewPaused) return;
    this.isViewPaused = true;
    port?.postMessage({ type: "view", paused: true });
    this.check();
  }

  resumeView() {
    if (!this.isViewPaused) return;
    this.isViewPaused = false;
    port?.postMessage({ type: "view", paused: false });
    this.check();
  }
}

class ChatStream {
  constructor() {
    this.generations = new Map();
    this.subscribers = new Set();
    this.isOpen = false;
    this.fetching = new Set();
  }

  subscribe(subscriber) {
    this.subscribers.add(subscriber);
    if (!started.has("chat")) {
      handlers.chat = (message) => this.receive(message);
      start("chat");
    }
    return () => this.subscribers.delete(subscriber);
  }

  receive(message) {
    if (message.type === "conn") {
      this.isOpen = message.open;
      this.emit("connection", { open: message.open }, null);
      return;
    }
    const { event, data } = message;
    if (event === "tick") this.emit("tick", data, null);
    if (data?.generation_id === undefined) return;
    const generation = applyChat(this.generations, event, data);
    if (generation === null) this.refetch(data.generation_id);
    else this.emit(event, data, generation);
  }

  emit(event, data, generation) {
    for (const subscriber of this.subscribers) subscriber(event, data, generation);
  }

  /** Text is missing before what came: fetch the whole once, and go on from there. */
  async refetch(id) {
    if (this.fetching.has(id)) return;
    this.fetching.add(id);
    try {
      const data = await api("GET", `/chat/api/generations/${encodeURIComponent(id)}`);
      port?.postMessage({ type: "chat-snapshot", data });
    } catch {
      // The next snapshot, at the latest after a reconnect, closes the gap.
    } finally {
      this.fetching.delete(id);
    }
  }
}

export const engineStream = new EngineStream();
export const chatStream = new ChatStream();
