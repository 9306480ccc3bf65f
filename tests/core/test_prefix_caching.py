"""Sharing blocks between requests and between the siblings of one, down to the block ids."""

from __future__ import annotations

from dataclasses import replace

from engine.core.events import StepRecord
from engine.engine import Engine, Request
from engine.sampling_params import SamplingParams
from tests.helpers.engines import Recorder, make_engine, make_request
from tests.helpers.fake_runner import expected_tokens

PROMPT = list(range(40, 80))  # 40 tokens: two full blocks of 16 and half a block


def run(engine: Engine, *requests: Request) -> Recorder:
    recorder = Recorder(engine)
    for request in requests:
        recorder.take(engine.add(request))
    recorder.run()
    return recorder


def cached_tokens(recorder: Recorder) -> list[int]:
    return [a.num_cached_tokens for r in recorder.records for a in r.changes.admitted]


def test_a_second_request_with_the_same_head_takes_its_full_blocks_and_computes_the_rest() -> None:
    engine = make_engine(num_blocks=8)
    run(engine, make_request("a", PROMPT, max_tokens=2))
    # Released tail first: 2 held no full block, so it is free again; 1 and 0 are cached.
    recorder = run(engine, make_request("b", [*PROMPT[:36], 1, 2, 3], max_tokens=2))
    assert cached_tokens(recorder) == [32]
    first = recorder.records[1]
    assert isinstance(first, StepRecord)
    assert [(e.kind, e.block_id) for e in first.changes.blocks] == [("hit", 0), ("hit", 1), ("allocate", 3)]
    assert first.changes.computed[0].num_tokens == 7
    assert recorder.tokens("b") == expected_tokens([*PROMPT[:36], 1, 2, 3], SamplingParams(temperature=0), 2)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    engine = make_engine()
    run(engine, make_request("a", PROMPT[:32], max_tokens=2))
    assert cached_tokens(run(engine, make_request("b", PROMPT[:32], max_tokens=2))) == [16]
    assert cached_tokens(run(engine, make_request("c", PROMPT[:33], max_tokens=2))) == [32]


def test_running_requests_share_a_head_and_it_stays_until_the_last_of_them_ends() -> None:
    engine = make_engine()
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("a", PROMPT, max_tokens=3)))
    recorder.take(engine.step())
    recorder.take(engine.add(make_request("b", PROMPT, max_tokens=9)))
    recorder.take(engine.step())
    pool = engine.scheduler.pool
    assert [s.block_table for s in engine.scheduler.running] == [[0, 1, 2], [0, 1, 3]]
    assert pool.ref_counts[:4] == [2, 2, 1, 1]
    recorder.take(engine.step())
    assert recorder.ends("a") == ["length"]
    assert pool.ref_counts[:4] == [1, 1, 0, 1]


def test_requests_of_one_step_share_the_head_that_the_first_of_them_computes() -> None:
    engine = make_engine()
    recorder = Recorder(engine)
    for name in "abc":
        recorder.take(engine.add(make_request(name, PROMPT, max_tokens=9)))
    result = recorder.take(engine.step())
    assert result is not None
    assert isinstance(result.record, StepRecord)
    assert [c.num_tokens for c in result.record.changes.computed] == [40, 8, 8]
    assert [s.block_table for s in engine.scheduler.running] == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    assert engine.scheduler.pool.ref_counts[:5] == [3, 3, 1, 1, 1]
    recorder.run()
    for name in "abc":
        assert recorder.tokens(name) == expected_tokens(PROMPT, SamplingParams(temperature=0), 9)


def test_a_head_is_shared_as_far_as_the_step_computes_it() -> None:
    engine = make_engine(long_prefill_token_threshold=20)
    recorder = Recorder(engine)
    for name in "ab":
        recorder.take(engine.add(make_request(name, PROMPT)))
    recorder.take(engine.step())
    assert cached_tokens(recorder) == [0, 16]  # one block of the first 20 tokens is full
    # The second computes tokens 16 to 36 itself, and both have a block with tokens 16 to 32.
    assert [s.num_computed_tokens for s in engine.scheduler.running] == [20, 36]
    recorder.take(engine.add(make_request("c", PROMPT)))
    recorder.take(engine.step())
    assert cached_tokens(recorder) == [0, 16, 32]
    recorder.run()
    assert [recorder.tokens(name) for name in "abc"] == [recorder.tokens("a")] * 3


def test_a_block_that_a_single_token_fills_is_shared_from_the_next_step_on() -> None:
    """In a step of single tokens a sequence may read before another has written."""
    engine = make_engine()
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("a", PROMPT[:14], max_tokens=9)))
    recorder.take(engine.step())
    recorder.take(engine.step())
    known = PROMPT[:14] + recorder.tokens("a")  # 16, of which the last one is computed by the next step
    recorder.take(engine.add(make_request("b", [*known, 1])))
    recorder.take(engine.step())
    assert cached_tokens(recorder) == [0, 0]
    recorder.take(engine.add(make_request("c", [*known, 1])))
    recorder.take(engine.step())
    assert cached_tokens(recorder) == [0, 0, 16]


def test_nothing_is_shared_with_a_request_of_another_salt_in_the_same_step() -> None:
    engine = make_engine()
    assert cached_tokens(run(engine, *(make_request(salt, PROMPT, cache_salt=salt) for salt in "xy"))) == [0, 0]


def test_a_hit_is_touched_before_anything_is_allocated() -> None:
    engine = make_engine(num_blocks=4)
    run(engine, make_request("a", PROMPT, max_tokens=2))
    recorder = run(engine, make_request("b", [*PROMPT[:32], *range(100, 120)], max_tokens=2))
    assert cached_tokens(recorder) == [32]
    assert not [e for r in recorder.records for e in r.changes.blocks if e.kind == "evict"]


def test_salts_keep_requests_apart() -> None:
    engine = make_engine()
    run(engine, make_request("a", PROMPT, cache_salt="x"))
    assert cached_tokens(run(engine, make_request("b", PROMPT, cache_salt="y"))) == [0]
    assert cached_tokens(run(engine, make_request("c", PROMPT))) == [0]
    assert cached_tokens(run(engine, make_request("d", PROMPT, cache_salt="x"))) == [32]


def test_without_prefix_caching_nothing_is_kept() -> None:
    engine = make_engine(enable_prefix_caching=False)
    run(engine, make_request("a", PROMPT))
    assert cached_tokens(run(engine, make_request("b", PROMPT))) == [0]
    assert all(h is None for h in engine.scheduler.pool.block_hashes)


def test_output_is_reused_by_the_next_turn_of_a_conversation() -> None:
    engine = make_engine()
    recorder = run(engine, make_request("a", PROMPT, max_tokens=30))
    conversation = PROMPT + recorder.tokens("a") + [1, 2, 3]
    # 70 tokens are known, 69 of them were computed: four full blocks.
    assert cached_tokens(run(engine, make_request("b", conversation))) == [64]


def test_a_reset_drops_every_identity_and_hurts_nobody() -> None:
    engine = make_engine()
    recorder = Recorder(engine)
    run(engine, make_request("old", [5] * 40))
    recorder.take(engine.add(make_request("a", PROMPT, max_tokens=30)))
    recorder.take(engine.step())
    num_blocks, result = engine.reset_prefix_cache()
    recorder.take(result)
    assert num_blocks == 4  # two of `old`, two of the running `a`
    recorder.run()
    assert recorder.tokens("a") == expected_tokens(PROMPT, SamplingParams(temperature=0), 30)
    assert cached_tokens(run(engine, make_request("b", PROMPT))) == [0]


# ---- n > 1 -----------------------------------------------------------------------------------------------------


def test_siblings_share_the_prompt_and_copy_its_last_block_on_the_first_write() -> None:
    engine = make_engine(num_blocks=16)
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("r", PROMPT, n=3, seed=7, temperature=1.0, max_tokens=5)))
    recorder.take(engine.step())
    assert [(s.seq_id, s.block_table) for s in engine.scheduler.running] == [
        ("r", [0, 1, 2]), ("r.1", [0, 1, 2]), ("r.2", [0, 1, 2]),
    ]  # fmt: skip
    assert engine.scheduler.pool.ref_counts[:3] == [3, 3, 3]
    recorder.take(engine.step())
    # The first two to write copy block 2; the last finds it its own.
    assert [s.block_table for s in engine.scheduler.running] == [[0, 1, 3], [0, 1, 4], [0, 1, 2]]
    recorder.run()
    params = SamplingParams(temperature=1.0, seed=7)
    for index in range(3):
        want = expected_tokens(PROMPT, replace(params, seed=7 + index), 5)
        assert recorder.tokens("r", index) == want
    assert len({tuple(recorder.tokens("r", i)) for i in range(3)}) == 3


def test_a_prompt_of_whole_blocks_needs_no_copy() -> None:
    engine = make_engine()
    recorder = run(engine, make_request("r", PROMPT[:32], n=2, seed=1, temperature=1.0))
    assert not [e for r in recorder.records for e in r.changes.blocks if e.kind == "copy"]


def test_siblings_take_their_slots_from_the_admission_on() -> None:
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=16)
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("r", PROMPT, n=3)))
    recorder.take(engine.add(make_request("s", 4, n=2)))
    record = recorder.take(engine.step())
    assert record is not None
    assert record.record.blocked is not None
    assert record.record.blocked[:4] == ("s", "slots", 2, 1)


def test_siblings_end_each_at_its_own_time_and_one_abort_ends_all() -> None:
    engine = make_engine(num_blocks=8)
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("r", PROMPT, n=3, temperature=1.0, seed=3, max_tokens=50)))
    for _ in range(4):
        recorder.take(engine.step())
    receipt, result = engine.abort("r")
    recorder.take(result)
    assert receipt.state == "aborted"
    assert receipt.blocks_freed == 5  # two shared by three, one partial block each
    assert receipt.output_tokens == 12
    assert recorder.ends("r") == ["abort"] * 3
    assert engine.scheduler.pool.num_in_use == 0


def test_a_request_aborted_before_its_fork_ends_for_every_sibling() -> None:
    engine = make_engine()
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("r", n=3)))
    recorder.take(engine.abort("r")[1])
    assert recorder.ends("r") == ["abort"] * 3


def test_preempted_siblings_go_on_alone_and_say_the_same() -> None:
    engine = make_engine(num_blocks=6, watermark=0.0)
    recorder = run(engine, make_request("r", PROMPT, n=3, temperature=1.0, seed=3, max_tokens=30))
    assert sum(len(r.changes.preempted) for r in recorder.records) > 0
    params = SamplingParams(temperature=1.0)
    for index in range(3):
        assert recorder.tokens("r", index) == expected_tokens(PROMPT, replace(params, seed=3 + index), 30)
