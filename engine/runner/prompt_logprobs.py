"""Log-probabilities of prompt tokens, for the few sequences whose clients want them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from engine.core.batch import PromptLogprobs, ScheduledSequence, TokenLogprobs
from engine.runner.forward import Forward
from engine.runner.inputs import IntArray, RowTable
from engine.runner.sampler import logprob_entries, logprob_tensors
from engine.runner.transfer import Arrays, Link
from engine.sampling_params import SamplingParams

_CHUNK = 64  # positions at a time: all logits of a long prompt would be gigabytes


class PromptScorer:
    """Remembers which sequences want it, and scores what each step has computed of their prompts."""

    def __init__(self, forward: Forward, link: Link) -> None:
        self._forward, self._link = forward, link
        self._wanted: dict[str, int] = {}  # sequence -> how many alternatives of each token

    def add(self, seq_id: str, params: SamplingParams) -> None:
        """Note a sequence that begins, or begins again."""
        if params.prompt_logprobs is not None:
            self._wanted[seq_id] = params.prompt_logprobs

    def remove(self, seq_id: str) -> None:
        """Forget a sequence."""
        self._wanted.pop(seq_id, None)

    def clear(self) -> None:
        """Forget all."""
        self._wanted.clear()

    def score(
        self, scheduled: Sequence[ScheduledSequence], last_tokens: IntArray, hidden: torch.Tensor, table: RowTable
    ) -> tuple[Callable[[], PromptLogprobs], ...]:
        """Log-probabilities of the prompt tokens that follow a position of this step.

        Args:
            last_tokens: `[num scheduled]`, index of each one's last token in `hidden`.
            hidden: `[num_tokens, hidden_size]`.
            table: the sequences' tokens.

        Returns:
            A function for each sequence, which waits for the device.
        """
        if not self._wanted:
            return ()
        scores = []
        for step, last in zip(scheduled, last_tokens.tolist(), strict=True):
            top = self._wanted.get(step.seq_id)
            if top is None:
                continue
            row = table.row_of[step.seq_id]
            begin = step.num_computed_tokens
            end = min(begin + step.num_tokens, int(table.num_prompt_tokens[row]) - 1)  # the last one's is sampled
            if end <= begin:
                continue
            first = last - step.num_tokens + 1
            targets = table.token_ids[row, begin + 1 : end + 1].astype(np.int64)
            found: list[Callable[[], Arrays]] = []
            for i in range(0, end - begin, _CHUNK):
                part = targets[i : i + _CHUNK]
                raw = torch.log_softmax(self._forward.logits(hidden[first + i : first + i + len(part)]), dim=1)
                found.append(self._link.later(*logprob_tensors(raw, self._link.send(part), top)))
            scores.append(partial(_scores, step.seq_id, begin + 1, found, top))
        return tuple(scores)


def _scores(seq_id: str, first: int, found: Sequence[Callable[[], Arrays]], top: int) -> PromptLogprobs:
    entries: list[TokenLogprobs] = []
    for get in found:
        arrays = get()
        entries += logprob_entries(arrays, np.full(len(arrays[0]), top))
    return PromptLogprobs(seq_id, first, tuple(entries))
