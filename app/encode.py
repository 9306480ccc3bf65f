"""The engine's state and records as JSON values: one spelling for the admin API, the event stream and the pages.

Pure functions of `Fold` and of records. Nothing here carries prompt or answer text: a stop string that matched is
text of the answer, so it is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import NamedTuple

from engine.core.events import Blocked, BlockEvent, Changes, CommandRecord, Finished, Record, StepRecord
from engine.core.stats import BLOCK_STATES, Counters, Fold, FoldedSequence, block_state

Json = dict[str, object]
STATE_CODES: dict[str, int] = {state: code for code, state in enumerate(BLOCK_STATES)}


@dataclass(frozen=True, slots=True)
class WallClock:
    """Turns seconds of the engine's monotonic clock into seconds since 1970."""

    offset_s: float

    def unix(self, engine_time: float) -> float:
        """Unix time of `engine_time`, to the millisecond."""
        return round(engine_time + self.offset_s, 3)


def kv(fold: Fold, block_size: int) -> Json:
    """Block counts by state; free + cached + used + shared = num_blocks."""
    return {
        "block_size": block_size,
        "num_blocks": fold.num_blocks,
        "num_usable_blocks": fold.limits.num_usable_blocks,
        **{state: fold.block_counts[state] for state in BLOCK_STATES},
    }


def counters(totals: Counters) -> Json:
    """The counters flat, with `finished` and `rejected` by reason."""
    flat: Json = {f.name: getattr(totals, f.name) for f in fields(totals)}
    return {**flat, "finished": dict(totals.finished), "rejected": dict(totals.rejected)}


def row(sequence: FoldedSequence, fold: Fold, clock: WallClock, why: Json | None, *, blocks: bool = True) -> Json:
    """One sequence; `block_table` only with `blocks`."""
    shared = sum(1 for block_id in sequence.block_table if fold.ref_counts[block_id] > 1)
    data: Json = {
        "id": sequence.seq_id,
        "request_id": sequence.request_id,
        "index": sequence.index,
        "source": sequence.source,
        "status": sequence.status,
        "priority": sequence.priority,
        "num_prompt_tokens": sequence.num_prompt_tokens,
        "num_output_tokens": sequence.num_output_tokens,
        "num_computed_tokens": sequence.num_computed_tokens,
        "num_cached_tokens": sequence.num_cached_tokens,
        "max_tokens": sequence.max_tokens,
        "num_blocks": len(sequence.block_table),
        "num_shared_blocks": shared,
        "num_preemptions": sequence.num_preemptions,
        "arrival_unix": clock.unix(sequence.arrival_time),
        "deadline_unix": None if sequence.deadline is None else clock.unix(sequence.deadline),
        "why": why,
    }
    if blocks:
        data["block_table"] = list(sequence.block_table)
    return data


def whys(fold: Fold, order: Sequence[FoldedSequence]) -> Iterator[Json | None]:
    """Why each of `order`, the first waiting sequences in the queue's order, waits; None where nothing is known yet.

    Only one sequence per step is tested and refused; each of the others is behind the one in front of it.
    """
    blocked = fold.blocked
    for position, sequence in enumerate(order):
        if blocked is not None and blocked.seq_id == sequence.seq_id:
            yield why(blocked)  # of a paused engine too: what the last single step found
        elif fold.is_paused and position == 0:
            yield why(Blocked(sequence.seq_id, "paused", 0, 0, 0))
        elif position > 0:
            front = order[position - 1].seq_id
            yield {"constraint": "behind", "needed": None, "available": None, "watermark": None, "behind": front}
        else:
            yield None


def why(blocked: Blocked) -> Json:
    """The test that failed, with its numbers; of blocks, `available` are those above the watermark."""
    return {
        "constraint": blocked.constraint,
        "needed": blocked.needed,
        "available": max(blocked.available - blocked.watermark, 0),
        "watermark": blocked.watermark,
        "behind": None,
    }


def block_owner(fold: Fold, block_id: int) -> str | None:
    """The first of the sequences that refer to a block."""
    owners = fold.owners.get(block_id)
    return owners[0] if owners else None


def block_code(fold: Fold, block_id: int) -> int:
    """0 free, 1 cached, 2 used, 3 shared."""
    return STATE_CODES[block_state(fold.ref_counts[block_id], fold.block_hashes[block_id])]


class BlockColumns(NamedTuple):
    """A copy of what is known of the blocks, to be spelled out elsewhere than on the event loop."""

    ref_counts: list[int]
    hashes: list[str | None]
    owners: dict[int, tuple[str, ...]]

    @classmethod
    def of(cls, fold: Fold) -> BlockColumns:
        """As it is now."""
        owners = {block_id: tuple(seq_ids) for block_id, seq_ids in fold.owners.items()}
        return cls(list(fold.ref_counts), list(fold.block_hashes), owners)

    def details(self) -> list[Json]:
        """Each block with its state, references, owners and hash, in the order of their ids."""
        return [self._detail(block_id) for block_id in range(len(self.ref_counts))]

    def _detail(self, block_id: int) -> Json:
        ref_count, block_hash = self.ref_counts[block_id], self.hashes[block_id]
        owners = self.owners.get(block_id, ())
        return {
            "id": block_id,
            "state": block_state(ref_count, block_hash),
            "ref_count": ref_count,
            "owner": owners[0] if owners else None,
            "owners": owners,
            "hash": block_hash,
        }


def block_map(fold: Fold) -> Json:
    """Every block as columns; `owner` counts into `owners`, -1 where nobody refers to the block."""
    owners: dict[str, int] = {}
    states, owner = [], []
    for block_id in range(fold.num_blocks):
        states.append(block_code(fold, block_id))
        seq_id = block_owner(fold, block_id)
        owner.append(-1 if seq_id is None else owners.setdefault(seq_id, len(owners)))
    return {"state": states, "ref": list(fold.ref_counts), "owner": owner, "owners": list(owners)}


def engine_state(fold: Fold, clock: WallClock, block_size: int, model: str, now_unix: float) -> Json:
    """What GET /admin/api/state answers: all there is at one point between two records."""
    waiting = fold.waiting()
    rows = [row(s, fold, clock, None) for s in fold.running.values()]
    queue = [row(s, fold, clock, reason) for s, reason in zip(waiting, whys(fold, waiting), strict=True)]
    for entry in (*rows, *queue):
        arrival = entry["arrival_unix"]
        assert isinstance(arrival, float)
        entry["age_s"] = round(max(0.0, now_unix - arrival), 3)
    return {
        "seq": fold.seq,
        "step": fold.step,
        "server_time": round(now_unix, 3),
        "paused": fold.is_paused,
        "pause_reason": fold.pause_reason,
        "draining": fold.is_draining,
        "dead": fold.dead_reason,
        "model": model,
        "limits": fold.limits.as_dict(),
        "limits_version": fold.limits_version,
        "kv": kv(fold, block_size),
        "running": rows,
        "waiting": queue,
        "counters": counters(fold.counters),
    }


def record_json(record: Record) -> Json:
    """A record with names instead of positions, for scripts and for the page of one step."""
    data: Json = {"seq": record.seq, "step": record.step}
    if isinstance(record, StepRecord):
        data |= {
            "kind": "step",
            "started_at": record.started_at,
            "ended_at": record.ended_at,
            "duration_ms": round((record.ended_at - record.started_at) * 1000, 3),
            "num_prefill_tokens": record.num_prefill_tokens,
            "num_decode_tokens": record.num_decode_tokens,
            "phases": dict(record.phases),
        }
    else:
        data |= _command_json(record)
    data["blocked"] = None if record.blocked is None else record.blocked._asdict()
    data["changes"] = _changes_json(record.changes)
    return data


def _command_json(record: CommandRecord) -> Json:
    return {
        "kind": record.kind,
        "at": record.at,
        "request_id": record.request_id,
        "detail": record.detail,
        "limits": None if record.limits is None else record.limits.as_dict(),
        "limits_version": record.limits_version,
    }


def _changes_json(changes: Changes) -> Json:
    return {
        "added": [item._asdict() for item in changes.added],
        "blocks": [item._asdict() for item in changes.blocks],
        "preempted": [item._asdict() for item in changes.preempted],
        "admitted": [item._asdict() for item in changes.admitted],
        "computed": [item._asdict() for item in changes.computed],
        "forked": [item._asdict() for item in changes.forked],
        "finished": [{**item._asdict(), "detail": public_detail(item)} for item in changes.finished],
    }


def public_detail(finished: Finished) -> str | None:
    """Why it ended, without the stop string, which is text of the answer."""
    return None if finished.reason == "stop" else finished.detail


def evicted(blocks: Iterable[BlockEvent]) -> int:
    """Cached blocks that lost their content."""
    return sum(1 for event in blocks if event.kind == "evict")


def first_waiting(fold: Fold, limit: int) -> list[FoldedSequence]:
    """The first `limit` waiting sequences in the order of the queue."""
    return list(islice(fold.waiting(), limit))
