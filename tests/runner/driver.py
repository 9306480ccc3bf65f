"""A scheduler of a few lines: makes the batches that a test describes, so that the runner is tested alone."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.batch import Batch, BlockCopy, Fork, NewSequence, SampledToken, ScheduledSequence, StepOutput
from engine.runner.model_runner import ModelRunner
from engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


class Driver:
    """Hands out blocks in a scattered order and keeps each sequence's tokens and block table."""

    def __init__(self, runner: ModelRunner, *, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.runner = runner
        self.block_size = runner.info.block_size
        count = runner.info.num_blocks
        self.free = [*range(count - 1, -1, -3), *range(count - 2, -1, -3), *range(count - 3, -1, -3)]
        self.tokens: dict[str, list[int]] = {}
        self.prompt_lens: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.num_computed: dict[str, int] = {}
        self.last: StepOutput = StepOutput(())
        self._eos = eos_token_ids
        self._new: list[NewSequence] = []
        self._removed: list[str] = []
        self._copies: list[BlockCopy] = []
        self._step = 0

    def add(
        self,
        seq_id: str,
        token_ids: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        num_prompt_tokens: int | None = None,
        shared_blocks: Sequence[int] = (),
    ) -> None:
        """A new sequence; `shared_blocks` hold the KV of its first tokens already."""
        table = list(shared_blocks)
        while len(table) * self.block_size < len(token_ids):
            table.append(self.free.pop(0))
        self.tokens[seq_id], self.tables[seq_id] = list(token_ids), table
        self.prompt_lens[seq_id] = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
        self.num_computed[seq_id] = len(shared_blocks) * self.block_size
        self._new.append(
            NewSequence(seq_id, tuple(token_ids), self.prompt_lens[seq_id], tuple(table), params, self._eos)
        )

    def remove(self, seq_id: str, *, keep: Sequence[int] = ()) -> None:
        """Forget a sequence; its blocks become free but those in `keep`."""
        self._removed.append(seq_id)
        self.free += [block for block in self.tables.pop(seq_id) if block not in keep]

    def copy_on_write(self, seq_id: str, index: int) -> None:
        """Give a sequence its own copy of block `index` of its table."""
        source, own = self.tables[seq_id][index], self.free.pop(0)
        self.tables[seq_id][index] = own
        self._copies.append(BlockCopy(seq_id, index, source, own))

    def step(
        self,
        seq_ids: Sequence[str],
        *,
        chunk: int = 10**9,
        forks: Sequence[Fork] = (),
    ) -> dict[str, SampledToken]:
        """Compute up to `chunk` tokens of each of `seq_ids`; returns what was sampled."""
        scheduled = []
        announced = {new.seq_id for new in self._new}
        for seq_id in seq_ids:
            start, known = self.num_computed[seq_id], len(self.tokens[seq_id])
            num = min(chunk, known - start)
            added = []
            while len(self.tables[seq_id]) * self.block_size < start + num:
                added.append(self.free.pop(0))
                self.tables[seq_id].append(added[-1])
            assert not (added and seq_id in announced)
            scheduled.append(ScheduledSequence(seq_id, start, num, tuple(added), start + num == known))
            self.num_computed[seq_id] = start + num
        self._step += 1
        batch = Batch(
            self._step, tuple(self._removed), tuple(self._new), tuple(self._copies), tuple(scheduled), tuple(forks)
        )
        self._removed, self._new, self._copies = [], [], []
        self.last = self.runner.execute(batch)
        for fork in forks:
            known = len(self.tokens[fork.parent_id])
            self.tokens[fork.child_id] = list(self.tokens[fork.parent_id])
            self.prompt_lens[fork.child_id] = self.prompt_lens[fork.parent_id]
            self.tables[fork.child_id] = self.tables[fork.parent_id][: -(-known // self.block_size)]
            self.num_computed[fork.child_id] = known
        for token in self.last.sampled:
            self.tokens[token.seq_id].append(token.token_id)
        return {token.seq_id: token for token in self.last.sampled}

    def output(self, seq_id: str) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[seq_id][self.prompt_lens[seq_id] :]

    def run(self, seq_ids: Sequence[str], num_tokens: int, *, chunk: int = 10**9) -> None:
        """Step all of `seq_ids` together until each has `num_tokens` of output."""
        while unfinished := [seq_id for seq_id in seq_ids if len(self.output(seq_id)) < num_tokens]:
            self.step(unfinished, chunk=chunk)
