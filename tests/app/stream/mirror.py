"""What a page does with the frames of the engine's stream (the same as static/js/stream-fold.js), in Python."""

from __future__ import annotations

import json
from typing import Any

SCALARS = (
    "seq", "step", "paused", "pause_reason", "draining", "dead", "limits", "limits_version", "kv", "counters",
    "waiting_total",
)  # fmt: skip
FIELDWISE = ("kv", "counters")


class Mirror:
    """A client's copy of the state."""

    def __init__(self) -> None:
        self.scalars: dict[str, Any] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.running: list[str] = []
        self.waiting: list[str] = []
        self.stuck: dict[str, Any] | None = None
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
        self.stuck = data.get("stuck")
        if event == "key":
            self._key(data)
        elif event == "delta":
            self._delta(data)

    def _key(self, data: dict[str, Any]) -> None:
        self.scalars = {name: data[name] for name in SCALARS}
        self.rows = {row["id"]: row for row in (*data["running"], *data["waiting"])}
        self.running = [row["id"] for row in data["running"]]
        self.waiting = [row["id"] for row in data["waiting"]]
        blocks = data["blocks"]
        owners = [*blocks["owners"], None]
        self.blocks = [
            (state, ref, owners[owner])
            for state, ref, owner in zip(blocks["state"], blocks["ref"], blocks["owner"], strict=True)
        ]
        self.steps, self.events = list(data["recent_steps"]), list(data["recent_events"])

    @property
    def waiting_total(self) -> int:
        """How many wait, those included that are not shown."""
        return int(self.scalars["waiting_total"])

    def _delta(self, data: dict[str, Any]) -> None:
        for name in SCALARS:
            if name in data:
                self.scalars[name] = {**self.scalars[name], **data[name]} if name in FIELDWISE else data[name]
        for seq_id in data.get("removed", ()):
            del self.rows[seq_id]
        for change in data.get("rows", ()):
            self.rows[change["id"]] = {**self.rows.get(change["id"], {}), **change}
        self.running = self._order("running", self.running, data, is_running=True)
        self.waiting = self._order("waiting", self.waiting, data, is_running=False)
        for seq_id, output in zip(self.running, data.get("outputs", ()), strict=False):
            if output:
                row = self.rows[seq_id]
                computed = row["num_prompt_tokens"] + output - 1
                self.rows[seq_id] = {**row, "num_output_tokens": output, "num_computed_tokens": computed}
        for index, start, *tail in data.get("tails", ()):
            row = self.rows[self.running[index]]
            table = row["block_table"][:start] + tail
            self.rows[row["id"]] = {**row, "block_table": table, "num_blocks": len(table)}
        for first, count, state, ref, owner in data.get("blocks", ()):
            seq_id = None if owner < 0 else self.running[owner]
            self.blocks[first : first + count] = [(state, ref, seq_id)] * count
        self.steps += data.get("steps", ())
        self.events += data.get("events", ())

    def _order(self, name: str, before: list[str], data: dict[str, Any], *, is_running: bool) -> list[str]:
        if f"{name}_order" in data:
            return list(data[f"{name}_order"])
        order = [i for i in before if i in self.rows and (self.rows[i]["status"] == "RUNNING") is is_running]
        for after, *moved in data.get(f"{name}_moves", ()):
            order = [i for i in order if i not in moved]
            place = 0 if after is None else order.index(after) + 1
            order[place:place] = moved
        return order

    def state(self) -> dict[str, Any]:
        """All of it but the history, comparable."""
        return {
            **self.scalars, "rows": self.rows, "running": self.running, "waiting": self.waiting,
            "blocks": self.blocks,
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
