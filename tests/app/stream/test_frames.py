"""The content of the engine's stream: whatever happens and however records are merged, a client's copy is the state."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from app.admin.frames import MAX_WAITING_ROWS
from app.sse import frame
from engine.core.stats import fold
from engine.errors import RequestError
from tests.app.stream.mirror import Mirror
from tests.app.stream.stage import Stage, expected
from tests.helpers.engines import make_request


def act_at_random(stage: Stage, rng: random.Random, number: int) -> None:
    engine, take = stage.engine, stage.recorder.take
    live = [s.request_id for s in (*engine.scheduler.running, *engine.scheduler.waiting)]
    match rng.choices(["add", "step", "abort", "limits", "pause", "reset"], [4, 12, 1, 1, 1, 0.5])[0]:
        case "add":
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 90))]  # few values: prefixes are shared
            options = {"max_tokens": rng.randint(1, 40), "n": rng.choice([1, 1, 1, 3]), "priority": rng.randrange(3)}
            request = make_request(f"r-{number}", prompt, **options)
            try:
                take(engine.add(request))
            except RequestError as error:
                take(engine.reject(request.request_id, error))
        case "step":
            if engine.has_work:
                take(engine.step())
        case "abort" if live:
            take(engine.abort(rng.choice(live))[1])
        case "limits":
            changes = {
                "max_num_seqs": rng.randint(3, 6), "num_usable_blocks": rng.randint(12, 24),
                "scheduling_policy": rng.choice(["fcfs", "priority"]),
            }  # fmt: skip
            take(engine.set_limits(changes))
        case "pause":
            take(engine.resume() if engine.is_paused else engine.pause("a look"))
        case "reset":
            take(engine.reset_prefix_cache()[1])


@pytest.mark.parametrize("seed", range(12))
def test_a_copy_kept_up_by_deltas_is_the_fold(seed: int) -> None:
    rng = random.Random(seed)
    stage = Stage(num_blocks=24, max_num_seqs=5, max_num_batched_tokens=64, max_num_queued_reqs=12)
    stage.begin()
    for number in range(300):
        act_at_random(stage, rng, number)
        if rng.random() < 0.4:  # several records share a frame
            stage.publish()
            assert stage.mirror.state() == expected(stage.fold)
    assert stage.fold.counters.num_preemptions > 0
    assert stage.fold.counters.finished.total() > 10


@pytest.mark.parametrize("seed", range(4))
def test_a_keyframe_of_a_running_engine_equals_one_kept_up_from_the_start(seed: int) -> None:
    rng = random.Random(100 + seed)
    stage = Stage(num_blocks=24, max_num_seqs=5, max_num_batched_tokens=64, max_num_queued_reqs=12)
    stage.begin()
    for number in range(150):
        act_at_random(stage, rng, number)
    stage.publish()
    stage.late_frames.begin()
    mirror = Mirror()
    mirror.feed("key", stage.late_frames.key(1), None)
    assert mirror.state() == stage.mirror.state()
    assert mirror.steps == stage.mirror.steps
    assert mirror.events == stage.mirror.events[-len(mirror.events) :]


def test_the_steps_of_a_frame_say_what_ran_waited_and_was_held_after_each() -> None:
    rng = random.Random(7)
    stage = Stage(num_blocks=24, max_num_seqs=5, max_num_batched_tokens=64, max_num_queued_reqs=12)
    stage.begin()
    seen = []
    for number in range(200):
        before = stage.fold.step
        act_at_random(stage, rng, number)
        done = len(stage.recorder.records)
        if done and stage.recorder.records[-1].step > before and done > stage.fold.seq:
            scheduler = stage.engine.scheduler
            # What was held, by a fold of its own from the beginning.
            past = fold(24, stage.engine.start_limits, stage.recorder.records).block_counts
            held = (past["used"], past["shared"], past["cached"])
            seen.append((scheduler.step, len(scheduler.running), len(scheduler.waiting), *held))
    stage.publish()
    by_step = {step: tuple(after) for step, _, _, _, _, *after in stage.mirror.steps}
    first_seen = {step: tuple(after) for step, *after in reversed(seen)}
    assert by_step == first_seen
    assert len({held for *_, held in seen}) > 3, "blocks were cached and lost"


REQUEST_ID = "chatcmpl-0f1e2d3c4b5a69788796a5b4c3d2{:04x}"  # as long as those of /v1
MAX_BYTES_PER_S = 40 * 1024
FRAMES_PER_S = 20


def test_a_decode_step_costs_one_number_per_sequence() -> None:
    stage = Stage(num_blocks=256)
    for number in range(8):
        stage.submit(f"r-{number}", 100, max_tokens=100)
    stage.step(3)
    stage.apply()
    stage.begin()
    stage.step()
    delta = stage.publish()
    assert delta["outputs"] == [4] * 8
    assert set(delta["counters"]) == {"generation_tokens"}
    always = {"seq", "step", "server_time", "rates", "num_viewers"}
    assert set(delta) == {*always, "outputs", "counters", "steps"}


def bytes_per_s(stage: Stage, num_frames: int, *, arrivals: int = 0) -> float:
    """Of frames at the highest rate, 20 per second, at 30 steps per second; every other brings so many new requests."""
    rng = random.Random(0)
    total, number = 0, 10_000
    for index in range(num_frames):
        for _ in range(arrivals if index % 2 else 0):
            number += 1
            stage.submit(REQUEST_ID.format(number), rng.randint(32, 256), max_tokens=rng.randint(32, 256))
        stage.step(1 + index % 2)
        total += len(frame("delta", stage.publish(), "0badc0de-123456"))
    assert stage.mirror.state() == expected(stage.fold)
    return total / num_frames * FRAMES_PER_S


@pytest.mark.parametrize("num_blocks", [1024, 50_000])
def test_64_sequences_that_decode_cost_less_than_the_stream_may(num_blocks: int) -> None:
    stage = Stage(num_blocks=num_blocks, max_num_seqs=64)
    for number in range(64):
        stage.submit(REQUEST_ID.format(number), 64 + number, max_tokens=200)
    stage.step(8)
    stage.apply()
    stage.begin()
    assert bytes_per_s(stage, 100) < MAX_BYTES_PER_S / 2


def test_64_sequences_of_a_long_queue_that_come_and_go_cost_less_than_the_stream_may() -> None:
    stage = Stage(num_blocks=50_000, max_num_seqs=64, max_num_queued_reqs=2000)
    for number in range(300):
        stage.submit(REQUEST_ID.format(number), 32 + number % 200, max_tokens=32 + (7 * number) % 224)
    stage.step(8)
    stage.apply()
    stage.begin()
    assert bytes_per_s(stage, 100, arrivals=1) < MAX_BYTES_PER_S
    assert stage.fold.num_waiting > MAX_WAITING_ROWS


def test_a_row_is_whole_when_it_comes_into_the_window_of_rows_that_are_shown() -> None:
    stage = Stage(num_blocks=512, max_num_seqs=1)
    for number in range(MAX_WAITING_ROWS + 2):
        stage.submit(f"r-{number}", 4, max_tokens=2)
    stage.apply()
    stage.begin()
    assert f"r-{MAX_WAITING_ROWS}" not in stage.mirror.rows
    stage.step()
    stage.publish()
    assert stage.mirror.rows[f"r-{MAX_WAITING_ROWS}"]["num_prompt_tokens"] == 4
    assert stage.mirror.waiting_total == MAX_WAITING_ROWS + 1


def test_why_names_the_first_one_s_numbers_and_for_the_others_who_is_in_front() -> None:
    stage = Stage(num_blocks=20, watermark=0.1)
    stage.submit("r-1", 200, max_tokens=50)
    stage.step()
    stage.submit("r-2", 100)
    stage.submit("r-3", 10)
    stage.step()
    stage.apply()
    stage.begin()
    available = stage.engine.scheduler.pool.num_available
    assert stage.mirror.rows["r-2"]["why"] == {
        "constraint": "blocks", "needed": 7, "available": available - 2, "watermark": 2, "behind": None,
    }  # fmt: skip
    assert stage.mirror.rows["r-3"]["why"]["behind"] == "r-2"
    assert stage.mirror.rows["r-1"]["why"] is None
    event = next(e for e in stage.mirror.events if e["kind"] == "blocked")
    assert event["text"] == f"step 2: r-2 waits: needs 7 blocks, {available - 2} available above the watermark of 2"


def test_a_paused_engine_is_the_reason_of_the_first_waiting_sequence() -> None:
    stage = Stage()
    stage.recorder.take(stage.engine.pause("a look"))
    stage.submit("r-1")
    stage.submit("r-2")
    stage.apply()
    stage.begin()
    assert stage.mirror.rows["r-1"]["why"]["constraint"] == "paused"
    assert stage.mirror.rows["r-2"]["why"]["behind"] == "r-1"
    assert stage.mirror.scalars["pause_reason"] == "a look"


def test_rates_count_the_last_seconds_and_fall_to_zero_when_idle() -> None:
    stage = Stage()
    stage.submit("r-1", 4, max_tokens=6)
    stage.recorder.run()
    stage.apply()
    stage.begin()
    assert stage.frames.rates() == {"steps_per_s": 2.0, "tokens_per_s": 2.0}
    stage.clock.now += 10
    assert stage.frames.rates() == {"steps_per_s": 0.0, "tokens_per_s": 0.0}


def test_limits_changes_are_told_as_old_and_new() -> None:
    stage = Stage(max_num_seqs=8)
    stage.begin()
    stage.recorder.take(stage.engine.set_limits({"max_num_seqs": 2, "queue_timeout_s": 1.5}))
    delta = stage.publish()
    assert delta["events"][0]["text"] == "limits changed to version 2: max_num_seqs 8 → 2, queue_timeout_s off → 1.5"
    assert delta["limits"]["max_num_seqs"] == 2
    assert delta["limits_version"] == 2
    assert stage.fold.limits == replace(stage.engine.start_limits, max_num_seqs=2, queue_timeout_s=1.5)
