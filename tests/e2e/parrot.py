"""A model that says what it is told to, one byte per token, as fast as a test lets it.

The answer is the last user message without its first word, which is for people ("say", "repeat"). Everything else is
the real thing: scheduler, blocks, detokenizer, streams, pages.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from engine.core.batch import Batch
from engine.sampling_params import SamplingParams
from tests.helpers.live_app import LiveApp
from tests.helpers.tokenizers import IM_END, IM_START, byte_tokenizer

_USER = b"user\n"
_ASSISTANT = b"assistant\n"


class Parrot:
    """`hold()` stops it between two tokens, `say(n)` lets it do n steps, `go_on()` lets it run."""

    def __init__(self) -> None:
        self._tokenizer = byte_tokenizer()
        self._changed = threading.Condition()
        self._allowed: int | None = None  # steps it may still do; None: any number
        self._failure: str | None = None

    def hold(self) -> None:
        """No step from now on."""
        self._allow(0)

    def say(self, num_steps: int) -> None:
        """So many steps more."""
        self._allow((self._allowed or 0) + num_steps)

    def go_on(self) -> None:
        """As many as it likes."""
        self._allow(None)

    def fail(self, message: str) -> None:
        """The next step breaks the engine."""
        self._failure = message
        self.go_on()

    def _allow(self, allowed: int | None) -> None:
        with self._changed:
            self._allowed = allowed
            self._changed.notify_all()

    def before_step(self, batch: Batch) -> None:
        """For the fake runner: waits until a step is allowed."""
        with self._changed:
            self._changed.wait_for(lambda: self._allowed is None or self._allowed > 0)
            if self._allowed is not None:
                self._allowed -= 1
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def choose(self, token_ids: list[int], params: SamplingParams) -> int:
        """For the fake runner: the next byte of what is to be said, or the end."""
        turns = self._turns(token_ids)
        assert turns[-1].startswith(_ASSISTANT)
        question = next(turn for turn in reversed(turns) if turn.startswith(_USER))
        _, _, answer = question.removeprefix(_USER).partition(b" ")
        num_said = len(turns[-1]) - len(_ASSISTANT)
        return answer[num_said] if num_said < len(answer) else IM_END

    def _turns(self, token_ids: list[int]) -> list[bytes]:
        """What stands between `<|im_start|>` and `<|im_end|>`, or the end."""
        turns: list[bytearray] = []
        is_inside = False
        for token_id in token_ids:
            if token_id == IM_START:
                turns.append(bytearray())
                is_inside = True
            elif token_id == IM_END:
                is_inside = False
            elif is_inside:
                turns[-1] += self._tokenizer.token_bytes(token_id)
        return [bytes(turn) for turn in turns]


@dataclass
class ParrotServer:
    """Where the server answers, and what its model is told by the test."""

    base_url: str
    parrot: Parrot
    app: LiveApp
