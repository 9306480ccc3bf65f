"""Where the time of a step goes: medians by phase over some steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from engine.core.events import StepRecord

# What a record times, and the phase that a person is told of. In the order in which a step does them.
PHASE_OF: dict[str, str] = {
    "drain": "schedule", "schedule": "schedule", "inputs": "inputs", "forward": "forward", "attention": "attention",
    "linear": "linear", "head": "linear", "elementwise": "elementwise", "sample": "sample", "detokenize": "update",
    "update": "update", "publish": "publish",
}  # fmt: skip
BOOKKEEPING = ("schedule", "inputs", "update", "publish")  # Python's part of a step; all else is the model's


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Medians over `num_steps` steps, in seconds."""

    num_steps: int
    step_s: float  # all phases of a step together
    phases: tuple[tuple[str, float], ...]  # (phase, seconds), only those that there are

    @property
    def bookkeeping(self) -> float:
        """The share of `BOOKKEEPING` in a step, 0 to 1; 0 without steps."""
        seconds = sum(seconds for phase, seconds in self.phases if phase in BOOKKEEPING)
        return seconds / self.step_s if self.step_s else 0.0


def step_profile(records: Iterable[StepRecord]) -> StepProfile:
    """The profile of steps that computed something."""
    steps = []
    for record in records:
        if record.changes.computed:
            seconds: dict[str, float] = {}
            for name, duration in record.phases:
                phase = PHASE_OF.get(name, name)
                seconds[phase] = seconds.get(phase, 0.0) + duration
            steps.append(seconds)
    if not steps:
        return StepProfile(0, 0.0, ())
    names = dict.fromkeys(PHASE_OF.values()) | dict.fromkeys(name for step in steps for name in step)
    phases = [(name, median(step.get(name, 0.0) for step in steps)) for name in names if any(name in s for s in steps)]
    return StepProfile(len(steps), median(sum(step.values()) for step in steps), tuple(phases))
