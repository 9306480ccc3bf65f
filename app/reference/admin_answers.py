"""The answers of the admin API and of the health checks as schemas; tests hold the real answers against them.

Where a class of the engine is what is sent, its schema is made of it.
"""

from __future__ import annotations

from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, create_model

from app.audit import AuditEntry
from app.reference.operation import Answer
from app.settings import SettingInfo
from engine.config import ModelInfo
from engine.core import events
from engine.core.limits import Limits


def _with_names(*tuples: type) -> tuple[type[BaseModel], ...]:
    """Models of NamedTuples as objects: they are sent with names instead of positions."""
    return tuple(
        create_model(
            kind.__name__,
            __base__=Answer,
            __doc__=kind.__doc__,
            **{name: (hint, ...) for name, hint in get_type_hints(kind).items()},  # type: ignore[call-overload]
        )
        for kind in tuples
    )


_Added, _BlockEvent, _Preempted, _Admitted, _Computed, _Forked, _Finished, _Blocked = _with_names(
    events.Added, events.BlockEvent, events.Preempted, events.Admitted, events.Computed, events.Forked,
    events.Finished, events.Blocked,
)  # fmt: skip


class Health(Answer):
    """Whether the process, or the engine, lives."""

    status: Literal["ok", "dead"]


class Readiness(Answer):
    """Whether new work should come here, and why not."""

    status: Literal["ready", "not ready"]
    reasons: list[Literal["loading", "dead", "draining", "stuck", "paused"]]


class Kv(Answer):
    """Blocks by state; free + cached + used + shared = num_blocks."""

    block_size: int
    num_blocks: int
    num_usable_blocks: int
    free: int
    cached: int
    used: int
    shared: int


class Counters(Answer):
    """Totals since the start."""

    num_requests: int
    num_preemptions: int
    prompt_tokens: int
    prompt_tokens_cached: int
    prompt_tokens_recomputed: int
    generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    finished: dict[str, int]
    rejected: dict[str, int]


class Why(Answer):
    """The first test that kept a sequence from being admitted, with its numbers."""

    constraint: Literal["slots", "token_budget", "prefill_budget", "blocks", "preemption", "paused", "behind"]
    needed: int | None
    available: int | None
    watermark: int | None
    behind: str | None


class Row(Answer):
    """One sequence."""

    id: str
    request_id: str
    index: int
    source: str
    status: str
    priority: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    max_tokens: int
    num_blocks: int
    num_shared_blocks: int
    num_preemptions: int
    arrival_unix: float
    deadline_unix: float | None
    why: Why | None
    block_table: list[int]
    age_s: float


class Stuck(Answer):
    """The step that takes longer than it may."""

    step: int
    running_s: float
    limit_s: float


class State(Answer):
    """Everything at one point between two records. `stuck` is there only while a step takes too long."""

    seq: int
    step: int
    server_time: float
    paused: bool
    pause_reason: str | None
    draining: bool
    dead: str | None
    model: str
    limits: Limits
    limits_version: int
    kv: Kv
    running: list[Row]
    waiting: list[Row]
    counters: Counters
    stuck: Stuck | None = None


class Block(Answer):
    """One block of the pool."""

    id: int
    state: Literal["free", "cached", "used", "shared"]
    ref_count: int
    owner: str | None
    owners: list[str]
    hash: str | None


class Blocks(Kv):
    """Each block."""

    step: int
    blocks: list[Block]


class Changes(Answer):
    """What a step did, in order."""

    added: list[_Added]  # type: ignore[valid-type]
    blocks: list[_BlockEvent]  # type: ignore[valid-type]
    preempted: list[_Preempted]  # type: ignore[valid-type]
    admitted: list[_Admitted]  # type: ignore[valid-type]
    computed: list[_Computed]  # type: ignore[valid-type]
    forked: list[_Forked]  # type: ignore[valid-type]
    finished: list[_Finished]  # type: ignore[valid-type]


class Step(Answer):
    """The record of one step."""

    seq: int
    step: int
    kind: Literal["step"]
    started_at: float
    ended_at: float
    duration_ms: float
    num_prefill_tokens: int
    num_decode_tokens: int
    phases: dict[str, float]
    blocked: _Blocked | None  # type: ignore[valid-type]
    changes: Changes


class Steps(Answer):
    """Records of steps, oldest first."""

    steps: list[Step]
    first_step: int | None
    last_step: int


class Phase(Answer):
    """One part of a step."""

    name: str
    ms: float
    is_bookkeeping: bool  # Python's part; the rest is the model's


class Span(Answer):
    """A stretch of a sequence's life."""

    kind: Literal["waiting", "reading", "writing", "preempted"]
    from_unix: float
    to_unix: float | None
    from_step: int


class HistoryRow(Row):
    """A live sequence, without its age."""

    age_s: float = 0


class SequenceHistory(Answer):
    """One sequence of a request: of what the trace has lost source, prompt and limit are null."""

    id: str
    source: str | None
    num_prompt_tokens: int | None
    max_tokens: int | None
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    finish_reason: str | None
    spans: list[Span]
    steps: list[tuple[int, int, int]]
    row: HistoryRow | None


class HistoryEvent(Answer):
    """What happened to it, or to everyone while it lived."""

    step: int
    at_unix: float
    kind: str
    id: str | None
    text: str


class RequestHistory(Answer):
    """The life of one request as the trace tells it."""

    request_id: str
    is_live: bool
    is_whole: bool
    server_time: float
    step: int
    first_step: int | None
    limits: Limits
    sequences: list[SequenceHistory]
    events: list[HistoryEvent]


class Phases(Answer):
    """Where the time of the latest steps went: medians."""

    num_steps: int
    last_step: int
    step_ms: float
    phases: list[Phase]


class LimitInfo(Answer):
    """One limit and what a person wants to know of it."""

    name: str
    value: float | str | None
    default: float | str | None
    start_value: float | str | None
    source: Literal["default", "flag", "env", "runtime"]
    help: str
    kind: Literal["int", "float", "seconds", "choice"]
    low: float
    high: float | None
    choices: list[str]
    range: str
    takes_effect: str


class LimitsTable(Answer):
    """All limits."""

    version: int
    limits: list[LimitInfo]


class Info(Answer):
    """The model, this process and how it was started."""

    model: ModelInfo
    version: str
    epoch: str
    role: Literal["read-only", "admin"]
    flags: list[SettingInfo]


class Done(Answer):
    """The engine has applied it."""

    ok: Literal[True]
    step: int
    paused: bool
    draining: bool


class Stepped(Done):
    """How many steps it did: fewer than asked for if it ran out of work."""

    steps: int


class CacheReset(Done):
    """How many blocks lost their content."""

    blocks_dropped: int


class Receipt(Answer):
    """What an abort did; asked for again, how the request had ended."""

    ok: Literal[True]
    request_id: str
    state: str
    step: int
    blocks_freed: int
    output_tokens: int


class KeyInfo(Answer):
    """A key, never its text."""

    id: str
    label: str
    role: Literal["inference", "read-only", "admin"]
    source: Literal["flag", "created"]
    created_at: float | None
    last_used_at: float | None


class ListedKey(KeyInfo):
    """A key in the list."""

    is_yours: bool


class KeyList(Answer):
    """All keys."""

    is_authentication_on: bool
    is_kept: bool
    keys: list[ListedKey]


class CreatedKey(KeyInfo):
    """A new key with its text, which is shown this once."""

    key: str


class RevokedKey(KeyInfo):
    """A key that holds no more."""

    ok: Literal[True]
    is_authentication_on: bool


class Audit(Answer):
    """Actions, newest first."""

    entries: list[AuditEntry]


class EngineEvent(Answer):
    """An event of the stream: its name and its data; app/README.md says what each holds."""

    event: Literal["hello", "key", "delta", "tick", "bye"]
    data: dict[str, Any]
