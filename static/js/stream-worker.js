// The shared worker: one hub for all tabs of this browser.

import { Hub } from "./stream-hub.js";

const root = new URL("../..", import.meta.url).href.replace(/\/$/, "");
const hub = new Hub(root);

self.onconnect = (event) => {
  const port = event.ports[0];
  hub.attach(port);
  port.onmessage = ({ data }) => {
    hub.receive(port, data);
    // A tab holds a lock for as long as it lives: when the lock can be had, the tab is gone, even if it crashed.
    if (data.type === "alive" && navigator.locks) navigator.locks.request(data.lock, () => hub.detach(port));
  };
  port.start();
};
