"""Executes batches: the model's forward pass over a paged KV pool, then sampling.

It knows tensors, rows and blocks. Which sequence runs, which block is whose and when something ends is the scheduler's
business; the runner does what a batch says and remembers each sequence's tokens and block table between steps.
"""

from __future__ import annotations

from collections import defaultdict
from time import perf_counter

import numpy as np
import torch

from engine.config import ModelInfo
from engine.core.batch import Batch, Fork, SampledToken, StepOutput
from engine.runner.forward import Forward
from engine.runner.inputs import RowTable, StepInputs, build_inputs
from engine.runner.prompt_logprobs import PromptScorer
from engine.runner.sampler import Sampler, SampleResult
from engine.runner.transfer import DeviceLink, HostLink
from engine.sampling_params import SamplingParams
from engine.structured.grammars import Grammars, Matcher

_NOT_FINITE = "the model's logits are not finite (NaN or infinity)"


class ModelRunner:
    """One model with its KV pool."""

    def __init__(
        self,
        info: ModelInfo,
        forward: Forward,
        kv_pool: torch.Tensor,
        sampler: Sampler,
        *,
        num_rows: int,
        link: DeviceLink | None = None,
    ) -> None:
        """Args: what `executor.load_runner` puts together; num_rows, sequences to make room for at first; link, to the
        device that forward, pool and sampler are on, None = the host."""
        self.info = info
        self._forward = forward
        self._kv_pool = kv_pool  # [num_layers, *cache shape], see kernels.layout
        self._sampler = sampler
        self._table = RowTable(num_rows, info.max_model_len, info.block_size)
        self._eos_token_ids: dict[str, tuple[int, ...]] = {}
        self._link = link
        self._prompts = PromptScorer(forward, link or HostLink())
        self._grammars: Grammars | None = None

    def use_grammars(self, grammars: Grammars) -> None:
        """Take matchers for structured output from there."""
        self._grammars = grammars

    def execute(self, batch: Batch) -> StepOutput:
        """Do what `batch` says, in the order its docstring gives.

        Returns:
            A token of each sampling sequence and of each fork of it, in the batch's order; sequences whose logits are
            not finite are in `failed`, without forks.
        """
        begin = perf_counter()
        if self._link is not None:
            self._link.begin_step()
        self._apply(batch)
        if not batch.scheduled:
            return StepOutput(())
        with torch.inference_mode():
            inputs = build_inputs(self._table, batch.scheduled)
            ready = perf_counter()
            hidden, layers = self._forward.hidden(inputs)
            walked = perf_counter()
            logits, seq_ids = self._logits(batch, inputs, hidden)
            computed = perf_counter()
            pending = self._prompts.score(batch.scheduled, inputs.last_tokens, hidden, self._table)
            sampled, failed = self._sample(batch, logits, seq_ids)
            scores = tuple(result() for result in pending)
        ended = perf_counter()
        if self._link is None:
            phases = (("inputs", ready - begin), *layers, ("head", computed - walked), ("sample", ended - computed))
        else:  # the host only launches until it waits for the tokens, and with them for all that came before
            phases = (("inputs", ready - begin), ("launch", computed - ready), ("device", ended - computed))
        return StepOutput(sampled, failed, phases, scores)

    def reset(self) -> None:
        """Forget all sequences. The pool's content stays until it is overwritten."""
        self._table.clear()
        self._eos_token_ids.clear()
        self._prompts.clear()

    def _apply(self, batch: Batch) -> None:
        table = self._table
        for seq_id in batch.removed:
            table.remove(seq_id)
            del self._eos_token_ids[seq_id]
            self._prompts.remove(seq_id)
        for new in batch.new:
            matcher = self._matcher(new.sampling_params, new.token_ids[new.num_prompt_tokens :])
            self._sampler.set_row(table.add(new), new.sampling_params, new.eos_token_ids, matcher)
            self._eos_token_ids[new.seq_id] = new.eos_token_ids
            self._prompts.add(new.seq_id, new.sampling_params)
        for copy in batch.copies:
            self._kv_pool[:, copy.block_id].copy_(self._kv_pool[:, copy.source_id])
            row = table.row_of[copy.seq_id]
            assert table.block_tables[row, copy.block_index] == copy.source_id
            table.block_tables[row, copy.block_index] = copy.block_id
        for scheduled in batch.scheduled:
            if scheduled.new_block_ids:
                table.append_blocks(table.row_of[scheduled.seq_id], scheduled.new_block_ids)

    def _matcher(self, params: SamplingParams, output_token_ids: tuple[int, ...]) -> Matcher | None:
        """The state of a sequence's structured output after its output so far."""
        if params.structured is None:
            return None
        assert self._grammars is not None, "structured output without use_grammars"
        return self._grammars.matcher(params.structured, output_token_ids)

    def _logits(self, batch: Batch, inputs: StepInputs, hidden: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
        """Logits `[n, vocab_size]` at the last token of each sampling sequence, and those sequences."""
        sampling = [index for index, scheduled in enumerate(batch.scheduled) if scheduled.is_sampling]
        if not sampling:
            return hidden.new_empty((0, self.info.vocab_size), dtype=torch.float32), []
        last = inputs.last_tokens[sampling]
        logits = self._forward.logits(self._forward.rows(hidden, last))
        return logits, [batch.scheduled[index].seq_id for index in sampling]

    def _sample(
        self, batch: Batch, logits: torch.Tensor, seq_ids: list[str]
    ) -> tuple[tuple[SampledToken, ...], tuple[tuple[str, str], ...]]:
        if not seq_ids:
            return (), ()
        if batch.forks:
            logits, seq_ids = self._fork(batch.forks, logits, seq_ids)
        rows = np.array([self._table.row_of[seq_id] for seq_id in seq_ids], dtype=np.int64)
        result = self._sampler.sample(logits, rows, self._table)
        if result.is_failed.any():
            return self._without_failed(batch.forks, seq_ids, rows, result)
        self._table.append_tokens(rows, result.token_ids)
        tokens = result.token_ids.tolist()
        return tuple(map(SampledToken, seq_ids, tokens, result.logprobs)), ()

    def _fork(
        self, forks: tuple[Fork, ...], logits: torch.Tensor, seq_ids: list[str]
    ) -> tuple[torch.Tensor, list[str]]:
        """Rows for the children, before their parents get a token: each has its parent's tokens, blocks and logits."""
        children: defaultdict[str, list[str]] = defaultdict(list)
        for fork in forks:
            children[fork.parent_id].append(fork.child_id)
            row = self._table.fork(fork.parent_id, fork.child_id)
            self._eos_token_ids[fork.child_id] = self._eos_token_ids[fork.parent_id]
            matcher = self._matcher(fork.sampling_params, ())
            self._sampler.set_row(row, fork.sampling_params, self._eos_token_ids[fork.parent_id], matcher)
        index = [i for i, seq_id in enumerate(seq_ids) for _ in range(1 + len(children[seq_id]))]
        return logits[index], [name for seq_id in seq_ids for name in (seq_id, *children[seq_id])]

    def _without_failed(
        self, forks: tuple[Fork, ...], seq_ids: list[str], rows: np.ndarray[tuple[int], np.dtype[np.int64]],
        result: SampleResult,
    ) -> tuple[tuple[SampledToken, ...], tuple[tuple[str, str], ...]]:  # fmt: skip
        good = ~result.is_failed
        self._table.append_tokens(rows[good], result.token_ids[good])
        children = {fork.child_id for fork in forks}
        sampled, failed = [], []
        for index, seq_id in enumerate(seq_ids):
            if good[index]:
                sampled.append(SampledToken(seq_id, int(result.token_ids[index]), result.logprobs[index]))
            elif seq_id in children:  # never came to be
                self._table.remove(seq_id)
                del self._eos_token_ids[seq_id]
            else:
                failed.append((seq_id, result.problems.get(index, _NOT_FINITE)))
        return tuple(sampled), tuple(failed)
