"""The spans of a sequence's life as a picture of fixed width, and the figures in words beside it."""

from __future__ import annotations

from typing import Any, NamedTuple

WIDTH = 1000  # of the picture, in its own units
LEAST_WIDTH = 2  # so that a short span can be seen


class Bar(NamedTuple):
    """One span in the picture."""

    kind: str
    x: float
    width: float
    title: str


class Timeline(NamedTuple):
    """One sequence."""

    sequence: dict[str, Any]
    bars: list[Bar]
    seconds: dict[str, float]  # kind -> how long in all
    total_s: float


def timeline(sequence: dict[str, Any], now_unix: float) -> Timeline:
    """Of a sequence in the form of `request_history`."""
    spans = sequence["spans"]
    ends = [now_unix if span["to_unix"] is None else span["to_unix"] for span in spans]
    begin, end = (spans[0]["from_unix"], max(ends)) if spans else (now_unix, now_unix)
    total_s = max(end - begin, 1e-6)
    bars: list[Bar] = []
    seconds: dict[str, float] = {}
    for span, until in zip(spans, ends, strict=True):
        lasted = max(0.0, until - span["from_unix"])
        seconds[span["kind"]] = seconds.get(span["kind"], 0.0) + lasted
        x = min(WIDTH * (span["from_unix"] - begin) / total_s, WIDTH - LEAST_WIDTH)
        width = max(LEAST_WIDTH, WIDTH * lasted / total_s)
        where = f" from step {span['from_step']:,}" if span["from_step"] else ""
        bars.append(Bar(span["kind"], round(x, 1), round(width, 1), f"{span['kind']} {in_words(lasted)}{where}"))
    return Timeline(sequence, bars, seconds, total_s if spans else 0.0)


def in_words(seconds: float) -> str:
    """`830 ms`, `4.2 s`."""
    return f"{seconds * 1000:,.0f} ms" if seconds < 1 else f"{seconds:,.1f} s"
