"""The log-probabilities of a prompt come once, whole and in order, however the prompt was computed."""

from __future__ import annotations

import pytest

from engine.core.batch import TokenLogprobs
from tests.helpers.engines import Recorder, make_engine, make_request
from tests.helpers.fake_runner import prompt_score


def told(recorder: Recorder, request_id: str) -> list[tuple[int, tuple[TokenLogprobs, ...]]]:
    return [(d.index, d.prompt_logprobs) for d in recorder.deltas if d.request_id == request_id and d.prompt_logprobs]


@pytest.mark.parametrize("budget", [3, 16, 2048])
def test_they_come_with_the_first_token(budget: int) -> None:
    engine = make_engine(max_num_batched_tokens=budget)
    recorder = Recorder(engine)
    request = make_request("r", 40, prompt_logprobs=2)
    recorder.take(engine.add(request))
    recorder.run()
    assert told(recorder, "r") == [(0, tuple(prompt_score(t, 2) for t in request.prompt_token_ids[1:]))]
    first = next(delta for delta in recorder.deltas if delta.token_ids)
    assert first.prompt_logprobs


def test_a_prompt_that_is_cached_is_computed_again_for_them() -> None:
    engine = make_engine()
    recorder = Recorder(engine)
    for name in "abc":
        recorder.take(engine.add(make_request(name, range(40), prompt_logprobs=0 if name == "b" else None)))
        recorder.run()
    stats = {d.request_id: d for d in recorder.deltas if d.finish_reason}
    assert set(stats) == {"a", "b", "c"}
    assert len(told(recorder, "b")[0][1]) == 39
    admitted = {a.seq_id: a.num_cached_tokens for r in recorder.records for a in r.changes.admitted}
    assert admitted == {"a": 0, "b": 0, "c": 32}


def test_a_prompt_that_is_preempted_half_way_tells_each_token_once() -> None:
    engine = make_engine(num_blocks=8, max_num_batched_tokens=4, watermark=0.0)
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("a", 16, max_tokens=100)))
    while engine.scheduler.step < 15:
        recorder.take(engine.step())
    long = make_request("b", 90, prompt_logprobs=1)
    recorder.take(engine.add(long))
    recorder.run()
    preempted = [p.seq_id for r in recorder.records for p in r.changes.preempted]
    assert "b" in preempted
    assert told(recorder, "b") == [(0, tuple(prompt_score(t, 1) for t in long.prompt_token_ids[1:]))]


def test_siblings_hear_it_from_the_first_of_them() -> None:
    engine = make_engine()
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("r", 10, prompt_logprobs=0, n=3)))
    recorder.run()
    assert [index for index, _ in told(recorder, "r")] == [0]


def test_a_prompt_of_one_token_has_none() -> None:
    engine = make_engine()
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("r", [5], prompt_logprobs=3)))
    recorder.run()
    assert told(recorder, "r") == []
    assert recorder.ends("r") == ["length"]
