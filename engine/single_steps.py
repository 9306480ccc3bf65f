"""Single steps of a paused engine, and who waits for how many of them. The engine thread's alone."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _Wanted:
    num_left: int
    future: asyncio.Future[Any]  # of the caller, who may have left
    num_run: int = 0

    @property
    def is_open(self) -> bool:
        return self.num_left > 0 and not self.future.cancelled()


class SingleSteps:
    """The steps of several callers are run one after the other, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._wanted: list[_Wanted] = []

    def __bool__(self) -> bool:
        return bool(self._wanted)

    def want(self, n: int, future: asyncio.Future[Any]) -> None:
        """`n` steps, for whoever waits for `future`."""
        self._wanted.append(_Wanted(n, future))

    def take(self) -> bool:
        """Whether to run one more, which is then somebody's."""
        wanted = next((wanted for wanted in self._wanted if wanted.is_open), None)
        if wanted is None:
            return False
        wanted.num_left -= 1
        wanted.num_run += 1
        return True

    def stop(self) -> None:
        """No further one: whoever waits is answered with what was run."""
        for wanted in self._wanted:
            wanted.num_left = 0

    def take_answers(self, *, may_go_on: bool) -> list[tuple[asyncio.Future[Any], int]]:
        """(future, steps run) of those whose steps are all run, or of everyone where the engine can't go on."""
        ended = [wanted for wanted in self._wanted if not (may_go_on and wanted.is_open)]
        self._wanted = [wanted for wanted in self._wanted if may_go_on and wanted.is_open]
        return [(wanted.future, wanted.num_run) for wanted in ended]
