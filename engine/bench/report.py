"""What a bench prints: a table for people on stderr, one JSON line per repetition on stdout."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence

Cell = str | int | float | None


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value that `percent` % of `values` don't exceed, interpolated between neighbours; None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def format_table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Right-aligned columns; a number that was not measured is a dash."""
    texts = [list(header), *([_cell(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in texts) for i in range(len(header))]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in texts)


def _cell(cell: Cell) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:,.1f}" if abs(cell) >= 100 else f"{cell:.3g}"
    return f"{cell:,}" if isinstance(cell, int) else cell


def say(text: str) -> None:
    """A line for people."""
    print(text, file=sys.stderr, flush=True)


def emit(values: Mapping[str, object]) -> None:
    """A line for programs."""
    print(json.dumps(values), flush=True)
