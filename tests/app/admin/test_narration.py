"""The feed's sentences: complete, with their numbers, told once, and without anybody's text."""

from __future__ import annotations

from typing import Any

import pytest

from app.narration import Narrator
from engine.core.events import (
    Added,
    Admitted,
    Blocked,
    BlockEvent,
    Changes,
    CommandRecord,
    Finished,
    Preempted,
    StepRecord,
)
from engine.core.limits import Limits


def step(seq: int = 1, blocked: Blocked | None = None, **changes: Any) -> StepRecord:
    return StepRecord(seq, 18203, 1.0, 1.5, Changes(**changes), blocked, ())


def command(kind: str, **fields: Any) -> CommandRecord:
    fields.setdefault("changes", Changes())
    return CommandRecord(1, 18203, 1.0, kind, **fields)


def texts(*records: StepRecord | CommandRecord, limits: Limits | None = None) -> list[tuple[str, str]]:
    narrator = Narrator(limits)
    return [(event.kind, event.text) for record in records for event in narrator.tell(record)]


@pytest.mark.parametrize(
    ("preempted", "text"),
    [
        (Preempted("r-88", "r-71", 6, 96), "preempted r-88 for r-71: 6 blocks freed, 96 tokens to compute again"),
        (Preempted("r-88", "r-88", 1, 1), "preempted r-88 because nobody else could give it a block: 1 block freed, "
                                          "1 token to compute again"),
        (Preempted("r-88", None, 2, 1500), "preempted r-88 because the pool was made smaller: 2 blocks freed, "
                                           "1,500 tokens to compute again"),
    ],
)  # fmt: skip
def test_a_preemption_says_who_for_whom_and_what_it_costs(preempted: Preempted, text: str) -> None:
    assert texts(step(preempted=(preempted,))) == [("preempted", f"step 18,203: {text}")]


@pytest.mark.parametrize(
    ("finished", "kind", "text"),
    [
        (Finished("r-1", "length", 3, None), "finished", "finished r-1 (length): 3 blocks freed"),
        (Finished("r-1", "stop", 3, "their stop string"), "finished", "finished r-1 (stop): 3 blocks freed"),
        (Finished("r-1", "abort", 0, None), "aborted", "aborted r-1: 0 blocks freed"),
        (Finished("r-1", "timeout", 1, "queue_timeout_s"), "timeout", "r-1 timed out (queue_timeout_s): 1 block freed"),
        (Finished("r-1", "error", 1, "not finite"), "error", "r-1 failed (not finite): 1 block freed"),
    ],
)
def test_an_end_says_how_and_what_it_freed(finished: Finished, kind: str, text: str) -> None:
    assert texts(step(finished=(finished,))) == [(kind, f"step 18,203: {text}")]


@pytest.mark.parametrize(
    ("blocked", "text"),
    [
        (Blocked("r-71", "blocks", 9, 5, 1), "r-71 waits: needs 9 blocks, 4 available above the watermark of 1"),
        (Blocked("r-71", "blocks", 9, 5, 0), "r-71 waits: needs 9 blocks, 5 available"),
        (Blocked("r-71", "blocks", 9, 0, 3), "r-71 waits: needs 9 blocks, 0 available above the watermark of 3"),
        (Blocked("r-71", "slots", 1, 0, 0), "r-71 waits: needs 1 sequence slot, 0 free of max_num_seqs"),
        (Blocked("r-71", "token_budget", 1, 0, 0), "r-71 waits: needs 1 token of the step's budget, 0 left"),
        (
            Blocked("r-71", "prefill_budget", 1, 0, 0),
            "r-71 waits: needs 1 token of the prompts' share of a step in which others decode, 0 left",
        ),
        (Blocked("r-71", "preemption", 3, 8, 0), "r-71 waits: nothing is admitted in a step that preempted"),
        (Blocked("r-71", "paused", 0, 0, 0), "r-71 waits: the engine is paused"),
    ],
)
def test_waiting_says_the_test_that_failed_with_its_numbers(blocked: Blocked, text: str) -> None:
    assert texts(step(blocked=blocked)) == [("blocked", f"step 18,203: {text}")]


def test_waiting_is_told_when_it_begins_and_when_its_reason_changes() -> None:
    first, fewer = Blocked("r-71", "blocks", 9, 5, 1), Blocked("r-71", "blocks", 9, 4, 1)
    other = Blocked("r-71", "slots", 1, 0, 0)
    told = texts(step(1, first), step(2, fewer), step(3, other), step(4, None), step(5, first))
    assert [text.split(": ")[2][:13] for _, text in told] == ["needs 9 block", "needs 1 seque", "needs 9 block"]


def test_commands_are_told_with_their_reasons() -> None:
    added = Added("r-1", "r-1", 0, "chat", 0, 1, 1200, 64, 3, 0.0, None)
    limits = Limits(max_num_seqs=2)
    evictions = tuple(BlockEvent("evict", i, None) for i in range(3))
    assert texts(
        command("add", changes=Changes(added=(added,))),
        command("reject", request_id="r-2", detail="queue_full"),
        command("pause", detail="a look"),
        command("resume"),
        command("limits", limits=limits, limits_version=2),
        command("reset", changes=Changes(blocks=evictions)),
        command("drain"),
        command("dead", detail="RuntimeError: out of memory"),
        limits=Limits(max_num_seqs=8),
    ) == [
        ("added", "r-1 arrived from chat: 1,200 prompt tokens, at most 64 tokens to generate for each of 3 sequences"),
        ("rejected", "r-2 was refused: queue full"),
        ("paused", "engine paused after step 18,203: a look"),
        ("resumed", "engine resumed after step 18,203"),
        ("limits", "limits changed to version 2: max_num_seqs 8 → 2"),
        ("reset", "prefix cache reset after step 18,203: content of 3 blocks dropped"),
        ("drain", "engine drains after step 18,203: no new requests are taken"),
        ("dead", "engine died after step 18,203: RuntimeError: out of memory"),
    ]


def test_one_step_tells_evictions_preemptions_admissions_and_ends_in_that_order() -> None:
    record = step(
        blocks=(BlockEvent("evict", 3, None), BlockEvent("evict", 4, None), BlockEvent("allocate", 3, "r-2")),
        preempted=(Preempted("r-9", "r-1", 2, 20),),
        admitted=(Admitted("r-2", 32, 40, False), Admitted("r-3", 0, 7, True)),
        finished=(Finished("r-1", "length", 3, None),),
    )
    assert [kind for kind, _ in texts(record)] == ["evicted", "preempted", "admitted", "admitted", "finished"]
    assert texts(record)[0][1] == "step 18,203: 2 cached blocks evicted for reuse"
    assert texts(record)[2][1] == "step 18,203: admitted r-2: 8 tokens to compute, 32 tokens from the prefix cache"
    assert texts(record)[3][1] == "step 18,203: resumed r-3: 7 tokens to compute, 0 tokens from the prefix cache"
