"""What happened, in words: each record as complete sentences with its numbers, for the event feed and the audit.

Sentences are made from records alone, so that the feed of a keyframe, read back from the trace, is the feed that was
streamed. Ids and counts only: no prompt, no answer, no stop string.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from app.encode import Json, evicted, public_detail
from engine.core.events import Added, Admitted, Blocked, CommandRecord, Finished, Preempted, Record
from engine.core.limits import Limits


class Event(NamedTuple):
    """One line of the feed."""

    seq: int  # of the record
    step: int
    kind: str  # preempted admitted finished added rejected aborted timeout error blocked evicted paused resumed ...
    id: str | None  # the sequence, or the request of a refusal
    text: str
    by: str | None = None  # who took the blocks, or the first of the blocked one's obstacles

    def as_json(self) -> Json:
        """With names."""
        return self._asdict()


def count(number: int, noun: str) -> str:
    """`1 block`, `1,024 blocks`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


class Narrator:
    """Tells records one after the other; remembers what it needs to tell only news.

    Args:
        limits: those before the first record, if known: a change is then told as old -> new.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits
        self._blocked: tuple[str, str] | None = None

    def tell(self, record: Record) -> list[Event]:
        """The events of the next record."""
        return [Event(record.seq, record.step, *line) for line in self._lines(record)]

    def _lines(self, record: Record) -> Iterable[tuple[str, str | None, str, str | None]]:
        changes = record.changes
        prefix = f"step {record.step:,}: "
        if isinstance(record, CommandRecord):
            yield from self._command(record)
        dropped = evicted(changes.blocks)
        if dropped and not (isinstance(record, CommandRecord) and record.kind == "reset"):
            yield "evicted", None, f"{prefix}{count(dropped, 'cached block')} evicted for reuse", None
        for preempted in changes.preempted:
            yield "preempted", preempted.seq_id, prefix + preempted_text(preempted), preempted.by_seq_id
        for admitted in changes.admitted:
            yield "admitted", admitted.seq_id, prefix + admitted_text(admitted), None
        for finished in changes.finished:
            kind = _FINISHED_KINDS.get(finished.reason, "finished")
            yield kind, finished.seq_id, prefix + finished_text(finished), None
        news = None if record.blocked is None else (record.blocked.seq_id, record.blocked.constraint)
        if record.blocked is not None and news != self._blocked:
            yield "blocked", record.blocked.seq_id, prefix + blocked_text(record.blocked), None
        self._blocked = news

    def _command(self, record: CommandRecord) -> Iterable[tuple[str, str | None, str, str | None]]:
        after = f"after step {record.step:,}"
        match record.kind:
            case "add":
                for added in record.changes.added:
                    yield "added", added.seq_id, added_text(added), None
            case "reject":
                why = "" if record.detail is None else f": {record.detail.replace('_', ' ')}"
                yield "rejected", record.request_id, f"{record.request_id or 'a request'} was refused{why}", None
            case "pause":
                reason = f": {record.detail}" if record.detail else ""
                yield "paused", None, f"engine paused {after}{reason}", None
            case "resume":
                yield "resumed", None, f"engine resumed {after}", None
            case "limits":
                yield "limits", None, self._limits_text(record), None
            case "reset":
                dropped = evicted(record.changes.blocks)
                yield "reset", None, f"prefix cache reset {after}: content of {count(dropped, 'block')} dropped", None
            case "drain":
                yield "drain", None, f"engine drains {after}: no new requests are taken", None
            case "dead":
                yield "dead", None, f"engine died {after}: {record.detail or 'no reason given'}", None

    def _limits_text(self, record: CommandRecord) -> str:
        before, self.limits = self.limits, record.limits
        version = f"limits changed to version {record.limits_version}"
        if before is None or record.limits is None:
            return version
        old, new = before.as_dict(), record.limits.as_dict()
        changed = [f"{name} {_value(old[name])} → {_value(new[name])}" for name in new if old[name] != new[name]]
        return f"{version}: {', '.join(changed) or 'no value differs'}"


_FINISHED_KINDS = {"abort": "aborted", "timeout": "timeout", "error": "error"}


def _value(value: object) -> str:
    if value is None:
        return "off"
    return f"{value:,}" if isinstance(value, int) else str(value)


def added_text(added: Added) -> str:
    """Who came, from where and with how much."""
    times = "" if added.n == 1 else f" for each of {added.n} sequences"
    prompt = count(added.num_prompt_tokens, "prompt token")
    most = count(added.max_tokens, "token")
    return f"{added.seq_id} arrived from {added.source}: {prompt}, at most {most} to generate{times}"


def preempted_text(preempted: Preempted) -> str:
    """Who lost how much to whom."""
    by = preempted.by_seq_id
    if by is None:
        for_whom = "because the pool was made smaller"
    elif by == preempted.seq_id:
        for_whom = "because nobody else could give it a block"
    else:
        for_whom = f"for {by}"
    return (
        f"preempted {preempted.seq_id} {for_whom}: {count(preempted.num_blocks, 'block')} freed, "
        f"{count(preempted.num_tokens, 'token')} to compute again"
    )


def admitted_text(admitted: Admitted) -> str:
    """What starts to run, and what of it the prefix cache had."""
    verb = "resumed" if admitted.is_resumed else "admitted"
    missing = admitted.num_known_tokens - admitted.num_cached_tokens
    return (
        f"{verb} {admitted.seq_id}: {count(missing, 'token')} to compute, "
        f"{count(admitted.num_cached_tokens, 'token')} from the prefix cache"
    )


def finished_text(finished: Finished) -> str:
    """How it ended and what that freed."""
    freed = f"{count(finished.num_blocks, 'block')} freed"
    detail = public_detail(finished)
    match finished.reason:
        case "abort":
            return f"aborted {finished.seq_id}: {freed}"
        case "timeout":
            return f"{finished.seq_id} timed out ({detail or 'deadline'}): {freed}"
        case "error":
            return f"{finished.seq_id} failed ({detail or 'no reason given'}): {freed}"
        case _:
            return f"finished {finished.seq_id} ({finished.reason}): {freed}"


def blocked_text(blocked: Blocked) -> str:
    """The first waiting sequence, the test it failed, and the numbers of that test."""
    who, needed, available = blocked.seq_id, blocked.needed, blocked.available
    match blocked.constraint:
        case "blocks":
            if not blocked.watermark:
                return f"{who} waits: needs {count(needed, 'block')}, {available:,} available"
            above = max(available - blocked.watermark, 0)
            where = f"above the watermark of {blocked.watermark:,}"
            return f"{who} waits: needs {count(needed, 'block')}, {above:,} available {where}"
        case "slots":
            return f"{who} waits: needs {count(needed, 'sequence slot')}, {available:,} free of max_num_seqs"
        case "token_budget":
            return f"{who} waits: needs {count(needed, 'token')} of the step's budget, {available:,} left"
        case "prefill_budget":
            share = "of the prompts' share of a step in which others decode"
            return f"{who} waits: needs {count(needed, 'token')} {share}, {available:,} left"
        case "preemption":
            return f"{who} waits: nothing is admitted in a step that preempted"
        case "paused":
            return f"{who} waits: the engine is paused"
