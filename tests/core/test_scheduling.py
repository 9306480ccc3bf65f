"""Who runs in a step, with how many tokens, and what is said of those who wait."""

from __future__ import annotations

import pytest

from engine.core.budget import StepBudget
from engine.core.events import StepRecord
from engine.core.limits import Limits
from engine.core.stats import fold
from engine.engine import Engine
from engine.errors import InvalidValueError, LimitsError, QueueFullError, RequestTooLongError, StaleLimitsError
from tests.helpers.engines import FakeClock, Recorder, make_engine, make_request


def step(recorder: Recorder) -> StepRecord:
    result = recorder.take(recorder.engine.step())
    assert result is not None
    assert isinstance(result.record, StepRecord)
    return result.record


def computed(record: StepRecord) -> dict[str, int]:
    return {c.seq_id: c.num_tokens for c in record.changes.computed}


def test_running_decodes_get_a_token_in_every_step_and_prefills_share_the_rest() -> None:
    engine = make_engine(max_num_batched_tokens=20)
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("a", 8)))
    assert computed(step(recorder)) == {"a": 8}
    recorder.take(engine.add(make_request("long", 50)))
    assert [computed(step(recorder)) for _ in range(3)] == [
        {"a": 1, "long": 19}, {"a": 1, "long": 19}, {"a": 1, "long": 12},
    ]  # fmt: skip
    assert computed(step(recorder)) == {"a": 1, "long": 1}


def test_an_earlier_long_prefill_does_not_starve_a_later_decode() -> None:
    engine = make_engine(max_num_batched_tokens=20, long_prefill_token_threshold=10)
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("long", 100)))
    recorder.take(engine.add(make_request("short", 5)))
    assert computed(step(recorder)) == {"long": 10, "short": 5}
    for _ in range(5):
        assert computed(step(recorder)) == {"short": 1, "long": 10}


def test_prompts_get_their_share_of_a_step_in_which_others_decode_and_all_of_it_where_nothing_does() -> None:
    engine = make_engine(max_num_batched_tokens=100, max_prefill_tokens_while_decoding=10)
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("first", 60, max_tokens=4)))
    assert computed(step(recorder)) == {"first": 60}
    recorder.take(engine.add(make_request("long", 80)))
    assert [computed(step(recorder)) for _ in range(3)] == [
        {"first": 1, "long": 10}, {"first": 1, "long": 9}, {"first": 1, "long": 9},
    ]  # fmt: skip
    assert computed(step(recorder)) == {"long": 52}


def test_what_is_admitted_counts_against_the_prompts_share_and_says_so_when_it_waits() -> None:
    engine = make_engine(max_prefill_tokens_while_decoding=10)
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("first", 20)))
    step(recorder)
    for name, num_tokens in (("a", 6), ("b", 6), ("c", 6)):
        recorder.take(engine.add(make_request(name, num_tokens)))
    record = step(recorder)
    assert computed(record) == {"first": 1, "a": 6, "b": 4}
    assert record.blocked == ("c", "prefill_budget", 1, 0, 0)
    record = step(recorder)
    assert computed(record) == {"first": 1, "a": 1, "b": 2, "c": 6}
    assert record.blocked is None


def test_a_prompt_gets_fewer_tokens_beside_decodes_the_further_it_is_computed_but_always_one() -> None:
    engine = make_engine(max_prefill_tokens_while_decoding=0, num_blocks=256)
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("first", 20, max_tokens=50)))
    step(recorder)
    recorder.take(engine.set_limits({"max_prefill_tokens_while_decoding": 256}))
    recorder.take(engine.add(make_request("long", 2000)))
    assert [computed(step(recorder))["long"] for _ in range(4)] == [256, 170, 139, 121]
    recorder.take(engine.set_limits({"max_prefill_tokens_while_decoding": 1}))
    assert [computed(step(recorder)) for _ in range(2)] == [{"first": 1, "long": 1}] * 2


def test_a_prompt_whose_prefix_is_cached_but_for_one_token_needs_no_share() -> None:
    engine = make_engine(max_prefill_tokens_while_decoding=17)
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("first", list(range(17)))))
    step(recorder)
    recorder.take(engine.add(make_request("other", list(range(100, 117)))))
    recorder.take(engine.add(make_request("again", list(range(17)))))
    assert computed(step(recorder)) == {"first": 1, "other": 17, "again": 1}


def test_what_is_given_back_of_a_steps_budget_can_be_taken_again() -> None:
    limits = Limits(max_num_batched_tokens=100, max_prefill_tokens_while_decoding=20)
    budget = StepBudget.of(limits, num_decodes=1)
    num_tokens = budget.grant(50, position=512)
    assert num_tokens == 10
    budget.take(num_tokens, position=512)
    assert budget == StepBudget(remaining=90, per_sequence=100, prefill_share=0)
    assert budget.grant(50, position=0) == 0
    assert budget.grant(1, position=0) == 1
    budget.give_back(num_tokens, position=512)
    assert budget == StepBudget.of(limits, num_decodes=1)


def test_with_fewer_tokens_than_decodes_everyone_gets_a_turn() -> None:
    engine = make_engine()
    recorder = Recorder(engine)
    for name in "abc":
        recorder.take(engine.add(make_request(name, 4, max_tokens=50)))
    step(recorder)
    recorder.take(engine.set_limits({"max_num_batched_tokens": 1}))
    turns = [next(iter(computed(step(recorder)))) for _ in range(6)]
    assert sorted(turns[:3]) == sorted(turns[3:]) == ["a", "b", "c"]


def test_the_blocks_of_the_whole_prompt_are_taken_at_admission() -> None:
    engine = make_engine(num_blocks=16, max_num_batched_tokens=8)
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("a", 100)))
    record = step(recorder)
    assert computed(record) == {"a": 8}
    assert engine.scheduler.running[0].block_table == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("limits", "second", "expected"),
    [
        ({"max_num_seqs": 1}, 5, ("slots", 1, 0, 0)),
        ({"max_num_batched_tokens": 20}, 5, ("token_budget", 1, 0, 0)),
        ({"num_usable_blocks": 4}, 40, ("blocks", 3, 2, 0)),
        ({"watermark": 0.5, "num_usable_blocks": 4}, 20, ("blocks", 2, 2, 2)),
    ],
)
def test_the_first_waiting_sequence_says_which_test_it_failed(
    limits: dict[str, object], second: int, expected: tuple[str, int, int, int]
) -> None:
    engine = make_engine(**limits)  # type: ignore[arg-type]
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("first", 20)))
    recorder.take(engine.add(make_request("second", second)))
    recorder.take(engine.add(make_request("third", 5)))
    record = step(recorder)
    assert record.blocked is not None
    assert record.blocked == ("second", *expected)


def test_a_paused_engine_says_so_of_what_waits() -> None:
    engine = make_engine()
    recorder = Recorder(engine)
    recorder.take(engine.pause("look"))
    result = recorder.take(engine.add(make_request("a")))
    assert result is not None
    assert result.record.blocked == ("a", "paused", 0, 0, 0)
    resumed = recorder.take(engine.resume())
    assert resumed is not None
    assert resumed.record.blocked is None


def test_the_watermark_is_kept_only_while_something_runs() -> None:
    engine = make_engine(num_blocks=8, watermark=0.5)
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("big", 8 * 16 - 4, max_tokens=2)))
    assert computed(step(recorder)) == {"big": 124}


# ---- preemption ------------------------------------------------------------------------------------------------


def fill(policy: str = "fcfs", priorities: tuple[int, ...] = (0, 0, 0)) -> tuple[Engine, Recorder]:
    """Three sequences of one full block each in a pool of four: the next step needs three more blocks."""
    engine = make_engine(num_blocks=4, scheduling_policy=policy, watermark=0.0)
    recorder = Recorder(engine)
    for name, priority in zip("abc", priorities, strict=True):
        recorder.take(engine.add(make_request(name, 16, max_tokens=40, priority=priority)))
    assert computed(step(recorder)) == {"a": 16, "b": 16, "c": 16}
    return engine, recorder


def test_fcfs_preempts_the_latest_admitted_first() -> None:
    engine, recorder = fill()
    record = step(recorder)
    # a takes the last block; b needs one, so c loses its own; nothing is admitted in a step that preempted.
    assert [(p.seq_id, p.by_seq_id, p.num_blocks, p.num_tokens) for p in record.changes.preempted] == [
        ("c", "b", 1, 16)
    ]
    assert computed(record) == {"a": 1, "b": 1}
    assert record.blocked is not None
    assert record.blocked.constraint == "preemption"
    assert [s.seq_id for s in engine.scheduler.waiting] == ["c"]


def test_priority_preempts_the_least_urgent_and_rolls_back_what_it_was_given_in_the_step() -> None:
    _, recorder = fill("priority", (5, 0, 1))  # b runs first (most urgent), then c, then a
    record = step(recorder)
    assert [(p.seq_id, p.by_seq_id) for p in record.changes.preempted] == [("a", "c")]
    assert computed(record) == {"b": 1, "c": 1}


def test_a_victim_that_was_scheduled_already_is_rolled_back_whole() -> None:
    engine = make_engine(num_blocks=3, scheduling_policy="priority", watermark=0.0)
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("lax", 16, max_tokens=40, priority=9)))
    step(recorder)
    recorder.take(engine.add(make_request("urgent", 16, max_tokens=40, priority=0)))
    record = step(recorder)  # lax takes its second block, urgent is admitted with the third
    assert computed(record) == {"lax": 1, "urgent": 16}
    record = step(recorder)
    # lax is first in the order of admission and was given its token before urgent needed a block.
    assert [p.seq_id for p in record.changes.preempted] == ["lax"]
    assert computed(record) == {"urgent": 1}
    assert engine.scheduler.step == 3


def test_a_preempted_sequence_keeps_its_place_before_later_arrivals_of_equal_priority() -> None:
    engine, recorder = fill()
    step(recorder)
    recorder.take(engine.add(make_request("late", 4)))
    assert [s.seq_id for s in engine.scheduler.waiting] == ["c", "late"]
    recorder.take(engine.set_limits({"scheduling_policy": "priority"}))
    assert [s.seq_id for s in engine.scheduler.waiting] == ["c", "late"]


def test_a_sequence_that_is_alone_and_has_filled_the_pool_ends_with_length() -> None:
    engine = make_engine(num_blocks=2)
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("a", 20, max_tokens=500)))
    recorder.run()
    assert recorder.ends("a") == ["length"]
    assert len(recorder.tokens("a")) == 2 * 16 - 20 + 1
    recorder.take(engine.add(make_request("next", 5)))
    recorder.run()
    assert recorder.ends("next") == ["length"]


# ---- what is refused, and what a limit does -------------------------------------------------------------------


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    engine = make_engine(num_blocks=4, max_model_len=1000)
    with pytest.raises(RequestTooLongError, match=r"64 tokens.* 5 KV blocks of 16 tokens, and 4 are usable"):
        engine.add(make_request("a", 64))
    with pytest.raises(RequestTooLongError, match=r"1000 tokens.*max_model_len = 1000"):
        engine.add(make_request("a", 1000))
    with pytest.raises(InvalidValueError, match=r"n must be at most max_num_seqs \(2\), got 3"):
        make_engine(max_num_seqs=2).add(make_request("a", n=3))


def test_the_waiting_queue_is_bounded() -> None:
    engine = make_engine(max_num_queued_reqs=2)
    engine.add(make_request("a"))
    engine.add(make_request("b"))
    with pytest.raises(QueueFullError, match="2 requests wait, max_num_queued_reqs is 2"):
        engine.add(make_request("c"))
    engine.step()
    engine.add(make_request("c"))


def test_siblings_that_were_preempted_wait_as_one_request() -> None:
    engine = make_engine(num_blocks=12, watermark=0.0, max_num_queued_reqs=2)
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("a", 40, n=4, max_tokens=60)))
    while len(engine.scheduler.waiting) < 2:
        recorder.take(engine.step())
    recorder.take(engine.add(make_request("b", max_tokens=1)))
    with pytest.raises(QueueFullError, match="2 requests wait"):
        engine.add(make_request("c", max_tokens=1))


def test_nothing_is_kept_of_the_deadlines_of_what_has_ended() -> None:
    engine = make_engine()
    for i in range(500):
        engine.add(make_request(f"r{i}", max_tokens=1, request_timeout_s=1e6, queue_timeout_s=1e6))
        engine.abort(f"r{i}")
    assert len(engine.scheduler._deadlines) < 100


def test_what_was_computed_twice_is_counted_and_no_more() -> None:
    """48 of 100 tokens are computed, then lost; with their blocks still cached nothing is computed again."""
    for caching, num_again in ((True, 0), (False, 48)):
        engine = make_engine(max_num_batched_tokens=48, enable_prefix_caching=caching)
        recorder = Recorder(engine)
        recorder.take(engine.add(make_request("a", 100, max_tokens=2)))
        recorder.take(engine.step())
        engine.scheduler._preempt(engine.scheduler.running[0], by=None)
        recorder.run()
        counters = fold(engine.info.num_blocks, engine.start_limits, recorder.records).counters
        assert counters.prompt_tokens_recomputed == num_again


def test_lowering_max_num_seqs_stops_admissions_and_kills_nobody() -> None:
    engine = make_engine()
    recorder = Recorder(engine)
    for name in "abcd":
        recorder.take(engine.add(make_request(name, max_tokens=4)))
    step(recorder)
    recorder.take(engine.set_limits({"max_num_seqs": 2}))
    recorder.take(engine.add(make_request("e", max_tokens=4)))
    record = step(recorder)
    assert set(computed(record)) == set("abcd")
    assert record.blocked == ("e", "slots", 1, 0, 0)
    recorder.run()
    assert [recorder.ends(name) for name in "abcde"] == [["length"]] * 5


def test_lowering_the_usable_blocks_preempts_down_to_them_and_fails_what_can_never_fit() -> None:
    engine = make_engine(num_blocks=16)
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("small", 20, max_tokens=4)))
    recorder.take(engine.add(make_request("big", 100, max_tokens=4)))
    step(recorder)
    result = recorder.take(engine.set_limits({"num_usable_blocks": 3}))
    assert result is not None
    assert [p.seq_id for p in result.record.changes.preempted] == ["big"]
    assert result.record.changes.finished == (("big", "error", 0, "its 101 tokens need 7 KV blocks and 3 are usable"),)
    engine.scheduler.check_invariants()
    recorder.run()
    assert recorder.ends("small") == ["length"]
    assert recorder.ends("big") == ["error"]


def test_a_request_with_more_siblings_than_slots_fails_when_the_limit_is_lowered_under_it() -> None:
    engine = make_engine()
    recorder = Recorder(engine)
    recorder.take(engine.pause("hold"))
    recorder.take(engine.add(make_request("a", n=3)))
    recorder.take(engine.set_limits({"max_num_seqs": 2}))
    assert recorder.ends("a") == ["error"] * 3


def test_limits_are_changed_all_or_nothing() -> None:
    engine = make_engine()
    before = engine.scheduler.limits
    with pytest.raises(LimitsError, match=r"watermark must be a number >= 0 and <= 0.5, got 2"):
        engine.set_limits({"max_num_seqs": 3, "watermark": 2})
    assert engine.scheduler.limits == before
    engine.set_limits({"max_num_seqs": 3}, expected_version=1)
    with pytest.raises(StaleLimitsError, match="version 2, not 1"):
        engine.set_limits({"max_num_seqs": 4}, expected_version=1)
    assert engine.scheduler.limits.max_num_seqs == 3


@pytest.mark.parametrize("value", [True, "8", 1.5, None, float("nan"), [], 0, -1])
def test_a_limit_of_a_wrong_kind_is_refused(value: object) -> None:
    with pytest.raises(LimitsError):
        make_engine().set_limits({"max_num_seqs": value})


# ---- timeouts --------------------------------------------------------------------------------------------------


def test_a_request_that_waits_too_long_ends_with_timeout_and_never_runs() -> None:
    clock = FakeClock()
    engine = make_engine(clock=clock, max_num_seqs=1, queue_timeout_s=5.0)
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("a", max_tokens=100)))
    step(recorder)
    recorder.take(engine.add(make_request("b")))
    clock.now += 10
    recorder.take(engine.expire())
    assert recorder.ends("b") == ["timeout"]
    assert recorder.ends("a") == []  # it has run: only the queue's deadline is past
    assert engine.expire() is None


def test_the_total_deadline_ends_a_running_request_and_frees_its_blocks_at_once() -> None:
    clock = FakeClock()
    engine = make_engine(clock=clock)
    recorder = Recorder(engine)
    recorder.take(engine.add(make_request("a", 40, max_tokens=100, request_timeout_s=3.0)))
    step(recorder)
    clock.now += 3
    result = recorder.take(engine.expire())
    assert result is not None
    assert result.record.changes.finished == (("a", "timeout", 3, "request_timeout_s"),)
    assert engine.scheduler.pool.num_in_use == 0
    assert len(recorder.tokens("a")) == 1
