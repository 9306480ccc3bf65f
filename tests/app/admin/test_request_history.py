"""The life of one request as the trace tells it, against what a synchronous engine did."""

from __future__ import annotations

from typing import Any

import pytest

from app.admin.request_history import request_history
from app.admin.timeline import timeline
from tests.app.stream.stage import WALL, Stage


def history(stage: Stage, request_id: str, first: int = 0) -> dict[str, Any] | None:
    """Of the records from the `first` on, as a ring that has lost those before."""
    stage.apply()
    return request_history(request_id, stage.recorder.records[first:], stage.fold, WALL, WALL.unix(stage.clock.now))


def kinds(sequence: dict[str, Any]) -> list[str]:
    return [span["kind"] for span in sequence["spans"]]


def test_a_request_waits_reads_writes_and_is_preempted_in_spans_without_gaps() -> None:
    stage = Stage(num_blocks=18, watermark=0.0, max_num_batched_tokens=64)
    for name in ("r-1", "r-2"):
        stage.submit(name, 100, max_tokens=60)
    while stage.engine.has_work:
        stage.step()
        stage.clock.now += 1.0
    found = history(stage, "r-2")
    assert found is not None
    (sequence,) = found["sequences"]
    assert kinds(sequence) == ["waiting", "reading", "writing", "preempted", "reading", "writing"]
    assert (sequence["num_preemptions"], sequence["num_output_tokens"], sequence["finish_reason"]) == (1, 60, "length")
    assert sum(sampled for _, _, sampled in sequence["steps"]) == 60
    spans = sequence["spans"]
    assert [span["to_unix"] for span in spans[:-1]] == [span["from_unix"] for span in spans[1:]]
    assert spans[-1]["to_unix"] is not None
    assert (found["is_live"], found["is_whole"]) == (False, True)
    told = [event["kind"] for event in found["events"] if event["kind"] != "blocked"]
    assert told == ["added", "admitted", "preempted", "admitted", "finished"]
    assert all("r-2" in event["text"] for event in found["events"])
    drawn = timeline(sequence, found["server_time"])
    assert [bar.kind for bar in drawn.bars] == kinds(sequence)
    assert sum(drawn.seconds.values()) == pytest.approx(drawn.total_s, abs=0.01)
    assert all(bar.x >= 0 and bar.x + bar.width <= 1002 for bar in drawn.bars)


def test_each_of_n_sequences_has_its_own_line_and_begins_at_the_fork() -> None:
    stage = Stage(num_blocks=64)
    stage.submit("r-1", 20, max_tokens=5, n=3)
    stage.recorder.run()
    found = history(stage, "r-1")
    assert found is not None
    assert [s["id"] for s in found["sequences"]] == ["r-1", "r-1.1", "r-1.2"]
    assert [kinds(s) for s in found["sequences"]] == [["waiting", "reading", "writing"], ["writing"], ["writing"]]
    assert [s["num_output_tokens"] for s in found["sequences"]] == [5, 5, 5]


def test_of_a_live_request_the_fold_knows_what_the_trace_has_lost() -> None:
    stage = Stage(num_blocks=64)
    stage.submit("r-1", 20, max_tokens=50)
    stage.step(10)
    found = history(stage, "r-1", first=6)
    assert found is not None
    (sequence,) = found["sequences"]
    assert (found["is_live"], found["is_whole"]) == (True, False)
    assert kinds(sequence)[0] == "waiting"
    assert kinds(sequence)[-1] == "writing"
    assert (sequence["num_prompt_tokens"], sequence["num_output_tokens"], sequence["max_tokens"]) == (20, 10, 50)
    assert sequence["row"]["block_table"]


def test_what_everyone_was_told_while_it_lived_is_told_too() -> None:
    stage = Stage(num_blocks=64)
    take = stage.recorder.take
    take(stage.engine.pause("before"))
    take(stage.engine.resume())
    stage.submit("r-1", 20, max_tokens=3)
    take(stage.engine.set_limits({"max_num_seqs": 2}))
    stage.recorder.run()
    take(stage.engine.pause("after"))
    found = history(stage, "r-1")
    assert found is not None
    assert [event["kind"] for event in found["events"]] == ["added", "limits", "admitted", "finished"]


def test_a_forgotten_request_is_unknown() -> None:
    stage = Stage(num_blocks=64)
    stage.submit("r-1", 20, max_tokens=3)
    stage.recorder.run()
    assert history(stage, "r-2") is None
    assert history(stage, "r-1", first=len(stage.recorder.records)) is None
