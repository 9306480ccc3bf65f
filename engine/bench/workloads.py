"""Workloads: what a bench sends. Read from JSON lines that any engine can read, or made here from a name.

A line holds `prompt_token_ids` (ids), `max_tokens` (exactly so many are produced) and `arrival_s` (seconds after the
start; a bench without a clock ignores it).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

LOWEST_ID, HIGHEST_ID = 100, 48_999  # ordinary tokens of the embedded model's vocabulary


class WorkloadError(ValueError):
    """A workload that cannot be read or made; the message is one line."""


@dataclass(frozen=True, slots=True)
class Item:
    """One request of a workload."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their arrival, and what to call them."""

    name: str
    items: tuple[Item, ...]

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens over all requests."""
        return sum(len(item.prompt_token_ids) for item in self.items)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that a complete run produces."""
        return sum(item.max_tokens for item in self.items)


def load_workload(path: str | None, spec: str | None) -> Workload:
    """The workload of a file, or the one that `spec` ("mixed:32") names.

    Raises:
        WorkloadError: no such file, a line that is not a request, an unknown name.
    """
    return read_workload(Path(path)) if path is not None else make_workload(spec or "")


def read_workload(path: Path) -> Workload:
    """Read JSON lines.

    Raises:
        WorkloadError: names the file and the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"the workload file {path} cannot be read: {error}") from None
    items = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                items.append(_item(json.loads(line)))
            except (ValueError, TypeError, KeyError) as error:
                why = f"{error.args[0]} is missing" if isinstance(error, KeyError) else error
                raise WorkloadError(f"{path}, line {number}: not a request: {why}") from None
    if not items:
        raise WorkloadError(f"the workload file {path} holds no request")
    return Workload(path.stem, tuple(sorted(items, key=lambda item: item.arrival_s)))


def _item(row: dict[str, object]) -> Item:
    ids, max_tokens, arrival = row["prompt_token_ids"], row["max_tokens"], row.get("arrival_s", 0.0)
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise ValueError("prompt_token_ids must be a list of token ids that is not empty")
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise ValueError(f"max_tokens must be an integer >= 1, got {max_tokens!r}")
    if not isinstance(arrival, int | float) or not arrival >= 0:
        raise ValueError(f"arrival_s must be seconds >= 0, got {arrival!r}")
    return Item(tuple(ids), max_tokens, float(arrival))


def make_workload(spec: str, seed: int = 0) -> Workload:
    """Make "KIND" or "KIND:N"; the same spec and seed give the same requests everywhere.

    Raises:
        WorkloadError: an unknown kind, or a count that is not one.
    """
    kind, _, count = spec.partition(":")
    if kind not in KINDS:
        raise WorkloadError(f"--workload must be one of {', '.join(KINDS)} (or KIND:N), got {spec!r}")
    maker, default = KINDS[kind]
    if count and (not count.isdecimal() or int(count) < 1):
        raise WorkloadError(f"--workload {kind}:N needs a number of requests >= 1, got {count!r}")
    num = int(count) if count else default
    return Workload(f"{kind}-{num}", tuple(maker(random.Random(seed), num)))


def _mixed(rng: random.Random, num: int) -> Iterator[Item]:
    """All at once; prompt and output lengths uniform in 32..256."""
    for _ in range(num):
        prompt = _ids(rng, rng.randint(32, 256))
        yield Item(prompt, rng.randint(32, 256))


def _shared_prefix(rng: random.Random, num: int) -> Iterator[Item]:
    """All at once; one head of 512 tokens, then 32 of its own and 32 to produce."""
    head = _ids(rng, 512)
    for _ in range(num):
        yield Item(head + _ids(rng, 32), 32)


def _interference(rng: random.Random, num: int) -> Iterator[Item]:
    """`num` short requests decode when, after a second, two prompts of 4,000 tokens arrive among them."""
    for _ in range(num):
        yield Item(_ids(rng, 64), 200)
    for _ in range(2):
        yield Item(_ids(rng, 4000), 16, arrival_s=1.0)


def _nano_vllm(rng: random.Random, num: int) -> Iterator[Item]:
    """The lengths of nano-vllm's bench.py: all at once, both uniform in 100..1024."""
    prompts = [tuple(rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))) for _ in range(num)]
    for prompt in prompts:
        yield Item(prompt, rng.randint(100, 1024))


def _ids(rng: random.Random, num: int) -> tuple[int, ...]:
    return tuple(rng.randint(LOWEST_ID, HIGHEST_ID) for _ in range(num))


Maker = Callable[[random.Random, int], Iterator[Item]]
KINDS: dict[str, tuple[Maker, int]] = {  # kind: how it is made, and how many requests if none are named
    "mixed": (_mixed, 32),
    "shared-prefix": (_shared_prefix, 64),
    "interference": (_interference, 16),
    "nano-vllm": (_nano_vllm, 256),
}
