"""The limits an admin may change while the engine runs, and their ranges: one table, read by flags, API and page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

from engine.errors import LimitsError

# Of max_prefill_tokens_while_decoding; measured, see engine/README.md. A GPU computes whole prompts in a decode's time.
CPU_PREFILL_SHARE = 160
MAX_TIMEOUT_S = 1e9  # thirty years; clocks of operating systems end before ten times as much


@dataclass(frozen=True, slots=True)
class Limits:
    """One consistent set of limits; replaced as a whole, between two steps."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0  # 0 = off
    max_prefill_tokens_while_decoding: int | None = None  # 0 = off; None = off, replaced at start
    watermark: float = 0.01  # fraction of the usable pool an admission leaves free while something runs
    num_usable_blocks: int = 0  # 0 = all of them, replaced at start
    max_num_queued_reqs: int = 1024
    queue_timeout_s: float | None = None
    request_timeout_s: float | None = None
    scheduling_policy: str = "fcfs"

    def as_dict(self) -> dict[str, object]:
        """Flat {name: value} in the order of the fields."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class LimitRow:
    """What a person needs to know about one limit."""

    name: str
    kind: str  # "int", "float", "seconds" or "choice"
    low: float
    high: float | None  # None = no bound but the pool's size for num_usable_blocks
    choices: tuple[str, ...]
    help: str

    def range_text(self, num_blocks: int) -> str:
        """The allowed values in words."""
        if self.kind == "choice":
            return " or ".join(self.choices)
        high = num_blocks if self.name == "num_usable_blocks" else self.high
        noun = {"int": "an integer", "float": "a number", "seconds": "null (off) or seconds"}[self.kind]
        low = f"> {self.low:g}" if self.kind == "seconds" else f">= {self.low:g}"
        return f"{noun} {low}" + (f" and <= {high:g}" if high is not None else "")


LIMIT_TABLE: tuple[LimitRow, ...] = (
    LimitRow("max_num_seqs", "int", 1, 4096, (), "Sequences that may run at once. Lowering it ends nothing that runs."),
    LimitRow("max_num_batched_tokens", "int", 1, 1_000_000, (), "Tokens one step may compute, over all sequences."),
    LimitRow(
        "long_prefill_token_threshold", "int", 0, 1_000_000, (),
        "Tokens of one prompt that one step may compute; 0 = no cap but the step's budget.",
    ),
    LimitRow(
        "max_prefill_tokens_while_decoding", "int", 0, 1_000_000, (),
        "Tokens of prompts that one step may compute while others decode, fewer far into a long prompt; 0 = no cap.",
    ),
    LimitRow(
        "watermark", "float", 0.0, 0.5, (),
        "Fraction of the usable blocks an admission must leave available while something runs.",
    ),
    LimitRow(
        "num_usable_blocks", "int", 1, None, (),
        "Blocks that sequences may hold. Lowering it preempts down to it; what can't fit any more fails.",
    ),
    LimitRow("max_num_queued_reqs", "int", 1, 1_000_000, (), "Requests that may wait; one more is refused with 503."),
    LimitRow("queue_timeout_s", "seconds", 0.0, MAX_TIMEOUT_S, (),
        "Longest wait for a first step; then it ends with timeout. Holds for requests added from then on.",
    ),
    LimitRow("request_timeout_s", "seconds", 0.0, MAX_TIMEOUT_S, (),
        "Longest life of a request; then it ends with timeout. Holds for requests added from then on.",
    ),
    LimitRow(
        "scheduling_policy", "choice", 0, None, ("fcfs", "priority"),
        "Who is next, and who is preempted: by arrival, or by (priority, arrival).",
    ),
)  # fmt: skip

LIMIT_ROWS: dict[str, LimitRow] = {row.name: row for row in LIMIT_TABLE}
assert list(LIMIT_ROWS) == [f.name for f in fields(Limits)], "the table and the dataclass name the same limits"


def start_limits(limits: Limits, num_blocks: int, device: str) -> Limits:
    """`limits` with what only the start can tell: the pool's size, and what suits the device ("cpu", ...)."""
    usable = min(limits.num_usable_blocks or num_blocks, num_blocks)
    share = limits.max_prefill_tokens_while_decoding
    if share is None:
        share = CPU_PREFILL_SHARE if device == "cpu" else 0
    return replace(limits, num_usable_blocks=usable, max_prefill_tokens_while_decoding=share)


def changed_limits(current: Limits, changes: Mapping[str, object], num_blocks: int) -> Limits:
    """`current` with `changes` applied, all or nothing.

    Raises:
        LimitsError: an unknown name, a wrong type or a value outside its range; names field, value and range.
    """
    checked: dict[str, object] = {}
    for name, value in changes.items():
        row = LIMIT_ROWS.get(name)
        if row is None:
            raise LimitsError(name, value, f"one of {', '.join(LIMIT_ROWS)}")
        checked[name] = _checked(row, value, num_blocks)
    return replace(current, **checked)  # type: ignore[arg-type]


def _checked(row: LimitRow, value: object, num_blocks: int) -> object:
    allowed = row.range_text(num_blocks)
    if row.kind == "choice":
        if value not in row.choices:
            raise LimitsError(row.name, value, allowed)
        return value
    if row.kind == "seconds" and value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise LimitsError(row.name, value, allowed)
    if row.kind == "int" and not isinstance(value, int):
        raise LimitsError(row.name, value, allowed)
    high = num_blocks if row.name == "num_usable_blocks" else row.high
    too_low = value <= row.low if row.kind == "seconds" else value < row.low
    if too_low or (high is not None and value > high):
        raise LimitsError(row.name, value, allowed)
    return value
