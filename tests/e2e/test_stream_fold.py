"""static/js/stream-fold.js in a real browser: whatever the frames of a random run say, its state is the engine's."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from playwright.sync_api import Page

from tests.app.stream.mirror import Mirror
from tests.app.stream.stage import Stage, expected
from tests.app.stream.test_frames import act_at_random

pytestmark = [pytest.mark.browser, pytest.mark.slow]

FOLD = """async ([address, frames]) => {
  const { applyDelta, applyKey, emptyState } = await import(address);
  const state = emptyState();
  const seen = [];
  for (const [event, data, isCompared] of frames) {
    (event === "key" ? applyKey : applyDelta)(state, data);
    if (!isCompared) continue;
    const { state: states, ref, owner, owners } = state.blocks;
    const rows = Object.fromEntries(state.rows);
    const blocks = [...states].map((s, i) => [s, ref[i], owner[i] < 0 ? null : owners[owner[i]]]);
    seen.push(structuredClone({ ...state, rows, blocks }));
  }
  return JSON.stringify(seen);
}"""


@pytest.mark.parametrize("seed", range(3))
def test_the_page_s_state_is_the_engine_s_after_each_frame(seed: int, clean_page: Page, address: str) -> None:
    rng = random.Random(seed)
    stage = Stage(num_blocks=24, max_num_seqs=5, max_num_batched_tokens=64, max_num_queued_reqs=12)
    stage.apply()
    stage.frames.begin()
    frames: list[tuple[str, Any, bool]] = [("key", stage.frames.key(1), True)]
    states = [expected(stage.fold)]
    stage.mirror = Mirror()
    stage.mirror.feed("key", frames[0][1], None)
    for number in range(300):
        act_at_random(stage, rng, number)
        if rng.random() < 0.4:
            is_compared = rng.random() < 0.3
            frames.append(("delta", stage.publish(), is_compared))
            if is_compared:
                states.append(expected(stage.fold))
    assert stage.fold.counters.num_preemptions > 0
    clean_page.goto(address)
    seen = json.loads(clean_page.evaluate(FOLD, [f"{address}/static/js/stream-fold.js", frames]))
    assert len(seen) == len(states) > 20
    for shown, state in zip(seen, json.loads(json.dumps(states)), strict=True):
        assert {name: shown[name] for name in state} == state
