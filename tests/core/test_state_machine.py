"""Any order of adds, steps, aborts, timeouts and limit changes keeps every invariant, and loses no request.

The run goes on until the engine has made NUM_STEPS steps, each followed by all checks. A long one:
`STATE_MACHINE_STEPS=1000000 pytest --log-cli-level=info tests/core/test_state_machine.py`.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import ClassVar

import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.core.stats import Fold
from engine.engine import Request, StepResult
from engine.errors import LimitsError, RequestError
from engine.sampling_params import SamplingParams
from tests.helpers.engines import FakeClock, make_engine
from tests.helpers.fake_runner import next_token

NUM_STEPS = int(os.environ.get("STATE_MACHINE_STEPS", "10000"))
NUM_BLOCKS = 24
BLOCK_SIZE = 4
MAX_MODEL_LEN = 80
HEADS = ([7] * 9, [7] * 8 + [8] * 5, [9] * 30)  # prompts share heads, so that blocks are hit and shared


class EngineMachine(RuleBasedStateMachine):
    """The engine on the fake runner, which checks every batch and reads all KV back before it samples."""

    seen: ClassVar[Counter[str]] = Counter()  # of all examples: steps, and what happened in them

    @initialize(caching=st.booleans(), policy=st.sampled_from(["fcfs", "priority"]), budget=st.integers(1, 40))
    def start(self, caching: bool, policy: str, budget: int) -> None:
        self.clock = FakeClock()
        self.engine = make_engine(
            num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN, clock=self.clock,
            enable_prefix_caching=caching, scheduling_policy=policy, max_num_batched_tokens=budget,
            max_num_seqs=4, max_num_queued_reqs=6, watermark=0.05,
        )  # fmt: skip
        self.fold = Fold(NUM_BLOCKS, self.engine.start_limits)
        self.requests: dict[str, Request] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}  # of each sequence: prompt and output
        self.ends: dict[tuple[str, int], str] = {}

    def take(self, result: StepResult | None) -> None:
        if result is None:
            return
        self.fold.apply(result.record)
        changes = result.record.changes
        self.seen.update(event.kind for event in changes.blocks)
        self.seen.update(finished.reason for finished in changes.finished)
        self.seen.update(preempted=len(changes.preempted), forked=len(changes.forked))
        for delta in result.deltas:
            key = (delta.request_id, delta.index)
            assert key not in self.ends, f"{key} got news after its end"
            request = self.requests[delta.request_id]
            params = replace(request.sampling_params, seed=request.sampling_params.seed + delta.index)
            known = self.tokens.setdefault(key, list(request.prompt_token_ids))
            for token_id in delta.token_ids:
                assert token_id == next_token(known, params), f"{key}: another token than alone"
                known.append(token_id)
            if delta.finish_reason is not None:
                self.ends[key] = delta.finish_reason

    @rule(
        head=st.sampled_from(HEADS), tail=st.lists(st.integers(0, 255), max_size=60), max_tokens=st.integers(1, 40),
        n=st.sampled_from([1, 1, 1, 2, 3, 5]), priority=st.integers(-1, 1), temperature=st.sampled_from([0.0, 1.0]),
        timeouts=st.tuples(*[st.sampled_from([None] * 6 + [0.02, 0.1])] * 2), salt=st.sampled_from([None, None, "s"]),
    )  # fmt: skip
    def add(
        self, head: list[int], tail: list[int], max_tokens: int, n: int, priority: int, temperature: float,
        timeouts: tuple[float | None, float | None], salt: str | None,
    ) -> None:  # fmt: skip
        request_id = f"r{len(self.requests)}"
        params = SamplingParams(n=n, max_tokens=max_tokens, temperature=temperature, seed=len(self.requests))
        request = Request(request_id, tuple(head + tail), params, priority, *timeouts, cache_salt=salt)
        try:
            result = self.engine.add(request)
        except RequestError as error:
            self.take(self.engine.reject(request_id, error))
        else:
            self.requests[request_id] = request
            self.take(result)

    @rule(steps=st.integers(1, 25))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.take(self.engine.expire())
            if self.engine.has_work:
                before = len(self.ends), self.computed(), self.fold.counters.num_preemptions
                self.take(self.engine.step())
                after = len(self.ends), self.computed(), self.fold.counters.num_preemptions
                self.seen["steps"] += 1
                assert after != before, "a step with work made no progress"
                self.check()

    def computed(self) -> list[tuple[str, int, int]]:
        return [(s.seq_id, s.num_computed_tokens, s.num_output_tokens) for s in self.fold.running.values()]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        was_live = bool(self.engine.scheduler.live_sequences(request_id))
        receipt, result = self.engine.abort(request_id)
        self.take(result)
        assert (receipt.state == "aborted") == was_live or receipt.state == "aborted"
        again, nothing = self.engine.abort(request_id)
        assert nothing is None
        assert again.state == receipt.state
        assert not self.engine.scheduler.live_sequences(request_id)

    @rule(seconds=st.floats(0, 0.2))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.take(self.engine.expire())

    @rule(
        name=st.sampled_from(["max_num_seqs", "max_num_batched_tokens", "num_usable_blocks", "watermark",
                              "long_prefill_token_threshold", "max_prefill_tokens_while_decoding",
                              "scheduling_policy"]),
        number=st.integers(0, 30), policy=st.sampled_from(["fcfs", "priority"]),
    )  # fmt: skip
    def change_limit(self, name: str, number: int, policy: str) -> None:
        value = {"watermark": number / 60, "scheduling_policy": policy}.get(name, number)
        before = self.engine.scheduler.limits
        try:
            self.take(self.engine.set_limits({name: value}))
        except LimitsError:
            assert self.engine.scheduler.limits == before

    @rule()
    def reset_prefix_cache(self) -> None:
        self.take(self.engine.reset_prefix_cache()[1])

    @rule()
    def pause_and_resume(self) -> None:
        self.take(self.engine.pause("test"))
        self.check()
        self.take(self.engine.resume())

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "engine"):
            return
        scheduler = self.engine.scheduler
        scheduler.check_invariants()
        assert self.fold.snapshot() == scheduler.snapshot()
        assert sum(self.fold.block_counts.values()) == NUM_BLOCKS
        states = self.fold.block_counts
        assert states["used"] + states["shared"] <= scheduler.limits.num_usable_blocks
        assert sum(self.fold.ref_counts) == sum(len(s.block_table) for s in self.fold.running.values())
        assert self.fold.num_waiting == len(scheduler.waiting)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for request_id in self.requests:
            self.take(self.engine.abort(request_id)[1])
            self.check()
        assert not self.engine.has_work
        assert self.fold.block_counts["used"] == self.fold.block_counts["shared"] == 0
        counted = {reason: count for reason, count in self.fold.counters.finished.items() if count}
        assert counted == Counter(self.ends.values()), "the counters say what the clients saw"
        for request_id, request in self.requests.items():
            ends = [key for key in self.ends if key[0] == request_id]
            assert len(ends) == request.sampling_params.n, f"{request_id}: every sequence ends exactly once"


@pytest.fixture
def seen() -> Iterator[Counter[str]]:
    """What the machines of this test have seen so far."""
    EngineMachine.seen.clear()
    yield EngineMachine.seen
    EngineMachine.seen.clear()


@pytest.mark.timeout(0 if NUM_STEPS > 10_000 else 300)
def test_no_order_of_events_breaks_an_invariant(seen: Counter[str]) -> None:
    for number in count():
        if seen["steps"] >= NUM_STEPS:
            break
        run_state_machine_as_test(
            seed(number)(EngineMachine), settings=settings(max_examples=50, stateful_step_count=40)
        )
    logging.getLogger(__name__).info("seen: %s", dict(seen))
    # What the checks are about did happen.
    for kind in ("preempted", "forked", "hit", "share", "copy", "evict", "timeout", "abort", "length", "error"):
        assert seen[kind], f"no {kind} in {seen['steps']} steps"
