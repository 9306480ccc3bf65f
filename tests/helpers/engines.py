"""Engines on the fake runner, for tests that need no model."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.async_engine import AsyncEngine
from engine.core.batch import Batch
from engine.core.events import Record
from engine.core.limits import Limits
from engine.engine import Engine, Request, StepResult
from engine.outputs import SequenceDelta
from engine.sampling_params import SamplingParams
from tests.helpers.fake_runner import FakeRunner, next_token
from tests.helpers.tokenizers import byte_tokenizer


class FakeClock:
    """A clock that a test moves; each reading advances it by `tick` seconds."""

    def __init__(self, tick: float = 0.001) -> None:
        self.now = 0.0
        self.tick = tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 16,
    max_model_len: int = 8192,
    enable_prefix_caching: bool = True,
    choose: Callable[[list[int], SamplingParams], int] = next_token,
    before_step: Callable[[Batch], None] | None = None,
    clock: Callable[[], float] | None = None,
    generation_defaults: tuple[tuple[str, float], ...] = (),
    **limits: object,
) -> Engine:
    """An engine of bytes; `limits` are fields of `Limits`."""
    runner = FakeRunner(
        num_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len, choose=choose,
        before_step=before_step, generation_defaults=generation_defaults,
    )  # fmt: skip
    return Engine(
        runner, byte_tokenizer(), Limits(**limits),  # type: ignore[arg-type]
        enable_prefix_caching=enable_prefix_caching, clock=clock or FakeClock(),
    )  # fmt: skip


def make_async_engine(**options: object) -> AsyncEngine:
    """The same with a thread of its own, on the real clock; start it on the running loop."""
    import time

    options.setdefault("clock", time.monotonic)
    return AsyncEngine(make_engine(**options))  # type: ignore[arg-type]


def make_request(
    request_id: str, prompt: Iterable[int] | int = 10, *, max_tokens: int | None = 8, **options: object
) -> Request:
    """A greedy request; `prompt` is its ids, or how many; `options` are fields of Request or SamplingParams."""
    if isinstance(prompt, int):
        start = sum(request_id.encode())
        prompt = [(start + 7 * i) % 250 for i in range(prompt)]
    request_fields = {k: options.pop(k) for k in list(options) if k in Request.__dataclass_fields__}
    options.setdefault("temperature", 0.0)
    params = SamplingParams(max_tokens=max_tokens, **options)  # type: ignore[arg-type]
    return Request(request_id, tuple(prompt), params, **request_fields)  # type: ignore[arg-type]


class Recorder:
    """Keeps all records and deltas of a synchronous engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.records: list[Record] = []
        self.deltas: list[SequenceDelta] = []

    def take(self, result: StepResult | None) -> StepResult | None:
        """Note a result; returns it."""
        if result is not None:
            self.records.append(result.record)
            self.deltas.extend(result.deltas)
        return result

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.take(self.engine.step())
        raise AssertionError(f"not idle after {max_steps} steps")

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        """All output tokens of one sequence."""
        return [t for d in self.deltas if (d.request_id, d.index) == (request_id, index) for t in d.token_ids]

    def text(self, request_id: str, index: int = 0) -> str:
        """All text of one sequence."""
        return "".join(d.text for d in self.deltas if (d.request_id, d.index) == (request_id, index))

    def ends(self, request_id: str) -> list[str]:
        """Finish reasons of the request's sequences, in the order in which they ended."""
        return [d.finish_reason for d in self.deltas if d.request_id == request_id and d.finish_reason]
