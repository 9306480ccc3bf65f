"""Where the time of a step goes."""

from __future__ import annotations

import pytest

from engine.core.events import Changes, Computed, StepRecord
from engine.core.profile import StepProfile, step_profile


def record(step: int, phases: dict[str, float], *, is_empty: bool = False) -> StepRecord:
    changes = Changes() if is_empty else Changes(computed=(Computed("a", 1, step, 1),))
    return StepRecord(step, step, 0.0, 1.0, changes, None, tuple(phases.items()))


def test_phases_are_medians_of_what_belongs_together_in_the_order_of_a_step() -> None:
    profile = step_profile([
        record(1, {"update": 1.0, "detokenize": 0.5, "drain": 1.0, "schedule": 2.0, "head": 3.0, "linear": 4.0}),
        record(2, {"update": 2.0, "detokenize": 0.5, "drain": 0.0, "schedule": 9.0, "head": 3.0, "linear": 5.0}),
        record(3, {"update": 3.0, "detokenize": 0.5, "drain": 0.0, "schedule": 1.0, "head": 3.0, "linear": 6.0}),
        record(4, {"update": 99.0}, is_empty=True),
    ])  # fmt: skip
    assert profile == StepProfile(3, 13.5, (("schedule", 3.0), ("linear", 8.0), ("update", 2.5)))
    assert profile.bookkeeping == pytest.approx(5.5 / 13.5)


def test_a_phase_without_a_name_of_its_own_is_told_as_it_is_and_no_steps_have_no_profile() -> None:
    assert step_profile([record(1, {"new": 1.0})]).phases == (("new", 1.0),)
    empty = step_profile([])
    assert (empty, empty.bookkeeping) == (StepProfile(0, 0.0, ()), 0.0)
