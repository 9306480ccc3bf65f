"""Whatever is batched, chunked, cached or preempted, the tokens are the same: on integers, where it is exact."""

from __future__ import annotations

import pytest

from engine.sampling_params import SamplingParams
from tests.helpers.engines import Recorder, make_engine, make_request
from tests.helpers.fake_runner import expected_tokens

PROMPTS = {f"r{i}": [(i * 37 + j * (i + 3)) % 250 for j in range(5 + 13 * i)] for i in range(8)}


@pytest.mark.parametrize("budget", [1, 7, 16, 2048])
@pytest.mark.parametrize("num_blocks", [12, 64])
@pytest.mark.parametrize("caching", [False, True])
def test_tokens_do_not_depend_on_the_schedule(budget: int, num_blocks: int, caching: bool) -> None:
    engine = make_engine(
        num_blocks=num_blocks, max_num_batched_tokens=budget, enable_prefix_caching=caching, watermark=0.0
    )
    recorder = Recorder(engine)
    for request_id, prompt in PROMPTS.items():
        recorder.take(engine.add(make_request(request_id, prompt, max_tokens=60)))
    recorder.run()
    num_preemptions = sum(len(r.changes.preempted) for r in recorder.records)
    # With a budget of one token nothing runs beside the first, so nobody can be preempted.
    assert (num_preemptions > 0) == (num_blocks == 12 and budget > 1)
    for request_id, prompt in PROMPTS.items():
        assert recorder.tokens(request_id) == expected_tokens(prompt, SamplingParams(temperature=0), 60)
        assert recorder.ends(request_id) == ["length"]
        text = recorder.text(request_id)
        assert text == engine.tokenizer.decode(recorder.tokens(request_id))


def test_nothing_is_sent_twice_after_a_preemption() -> None:
    engine = make_engine(num_blocks=4, watermark=0.0)
    recorder = Recorder(engine)
    for name in "ab":
        recorder.take(engine.add(make_request(name, 16, max_tokens=40)))
    recorder.run()
    assert sum(len(r.changes.preempted) for r in recorder.records) > 0
    assert all(len(d.token_ids) <= 1 for d in recorder.deltas)
    assert [len(recorder.tokens(name)) for name in "ab"] == [40, 40]
