"""What a page does with the frames of the engine's stream (the same as static/js/stream-fold.js), in Python."""

from __future__ import annotations

import json
from typing import Any

SCALARS = (
    "seq", "step", "paused", "pause_reason", "draining", "dead", "limits", "limits_version", "kv", "counters",
)  # fmt: skip


class Mirror:
    """A client's copy of the state."""

    def __init__(self) -> None:
        self.scalars: dict[str, Any] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.running: list[str] = []
        self.waiting: list[str] = []
        self.waiting_total = 0
        self.blocks: list[tuple[int, int, str | None]] = []
        self.steps: list[list[float]] = []
        self.events: list[dict[str, Any]] = []
        self.last_id: str | None = None
        self.kinds: list[str] = []
        self.rates: dict[str, float] = {}

    def feed(self, event: str, data: dict[str, Any], event_id: str | None) -> None:
        """Take one event."""
        self.kinds.append(event)
        self.last_id = event_id or self.last_id
        self.rates = data.get("rates", self.rates)
        if event == "key":
            self._key(data)
        elif event == "delta":
            self._delta(data)

    def _key(self, data: dict[str, Any]) -> None:
        self.scalars = {name: data[name] for name in SCALARS}
        self.rows = {row["id"]: row for row in (*data["running"], *data["waiting"])}
        self.running = [row["id"] for row in data["running"]]
        self.waiting = [row["id"] for row in data["waiting"]]
        self.waiting_total = data["waiting_total"]
        blocks = data["blocks"]
        owners = [*blocks["owners"], None]
        self.blocks = [
            (state, ref, owners[owner])
            for state, ref, owner in zip(blocks["state"], blocks["ref"], blocks["owner"], strict=True)
        ]
        self.steps, self.events = list(data["recent_steps"]), list(data["recent_events"])

    def _delta(self, data: dict[str, Any]) -> None:
        self.scalars.update({name: data[name] for name in SCALARS if name in data})
        for seq_id in data.get("removed", ()):
            del self.rows[seq_id]
        for row in data.get("rows", ()):
            self.rows[row["id"]] = {**self.rows.get(row["id"], {}), **row}
        self.running = data.get("running_order", self.running)
        self.waiting = data.get("waiting_order", self.waiting)
        self.waiting_total = data["waiting_total"]
        for block_id, state, ref, owner in data.get("blocks", ()):
            self.blocks[block_id] = (state, ref, owner)
        self.steps += data.get("steps", ())
        self.events += data.get("events", ())

    def state(self) -> dict[str, Any]:
        """All of it but the history, comparable."""
        return {
            **self.scalars, "rows": self.rows, "running": self.running, "waiting": self.waiting,
            "waiting_total": self.waiting_total, "blocks": self.blocks,
        }  # fmt: skip


def events_of(data: bytes) -> list[tuple[str, dict[str, Any], str | None]]:
    """(event, data, id) of each frame in `data`, which must be whole frames."""
    assert b"\r" not in data
    assert data.endswith(b"\n\n") or not data
    found = []
    for block in data.decode().split("\n\n"):
        if block:
            fields = dict(line.split(": ", 1) for line in block.split("\n"))
            found.append((fields["event"], json.loads(fields["data"]), fields.get("id")))
    return found
