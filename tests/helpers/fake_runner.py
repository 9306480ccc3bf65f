"""A runner without a model that checks everything it is told.

Its "KV" holds the token id of each slot. It reads a sequence's tokens back through its block table before it samples,
so a wrong block table, a missed copy-on-write or a prefix hit on the wrong content fails at once. The next token is a
hash of all tokens before it (and of the seed, where sampling isn't greedy): any engine that keeps its promises gives
the same tokens whatever was batched, chunked, cached or preempted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from engine.config import ModelInfo
from engine.core.batch import Batch, PromptLogprobs, SampledToken, ScheduledSequence, StepOutput, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.structured.grammars import Grammars, Matcher

FIRST_TOKEN, LAST_TOKEN = 33, 126  # printable ASCII of the byte tokenizer


def next_token(token_ids: list[int], params: SamplingParams) -> int:
    """What a model would say after `token_ids`."""
    seed = "" if params.is_greedy else f"{params.seed}"
    digest = blake2b(repr(token_ids).encode() + seed.encode(), digest_size=8).digest()
    return FIRST_TOKEN + int.from_bytes(digest, "little") % (LAST_TOKEN - FIRST_TOKEN + 1)


def expected_tokens(prompt: list[int], params: SamplingParams, num_tokens: int) -> list[int]:
    """The output of a sequence that nothing disturbs and nothing stops."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, params))
    return tokens[len(prompt) :]


def prompt_score(token_id: int, top: int) -> TokenLogprobs:
    """The made-up log-probability of a prompt's token: each token has its own."""
    ids = tuple((token_id + i) % 250 for i in range(top))
    return TokenLogprobs(-token_id / 8, 1, ids, tuple(-token_id / 8 - i for i in range(top)))


def allowed_tokens(matcher: Matcher, vocab_size: int) -> list[int]:
    """What may come next."""
    mask = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    assert matcher.fill(mask) is None
    return [int(i) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


@dataclass
class _Row:
    token_ids: list[int]
    block_table: list[int]
    params: SamplingParams
    num_prompt_tokens: int
    matcher: Matcher | None


class FakeRunner:
    """Executes batches on integers.

    Args:
        choose: replaces `next_token`, to say what a test needs said.
        before_step: called with each batch, e.g. to wait or to fail.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        max_model_len: int = 8192,
        vocab_size: int = 300,
        choose: Callable[[list[int], SamplingParams], int] = next_token,
        before_step: Callable[[Batch], None] | None = None,
        generation_defaults: tuple[tuple[str, float], ...] = (),
    ) -> None:
        self.info = ModelInfo(
            name="fake", architecture="FakeForCausalLM", dtype="int", kv_cache_dtype="int", device="cpu",
            attention_backend="fake", quantization="none", num_parameters=0, num_layers=1, num_heads=1, num_kv_heads=1,
            head_dim=1, hidden_size=1, vocab_size=vocab_size, max_model_len=max_model_len, block_size=block_size,
            num_blocks=num_blocks, kv_bytes_per_block=block_size * 8, weights_bytes=0, threads=1,
            generation_defaults=generation_defaults,
        )  # fmt: skip
        self.batches: list[Batch] = []
        self.rows: dict[str, _Row] = {}
        self.fail_next: dict[str, str] = {}  # sequence -> message: reported as failed when it would sample
        self._choose = choose
        self._before_step = before_step
        self._kv: dict[tuple[int, int], int] = {}
        self._grammars: Grammars | None = None

    def use_grammars(self, grammars: Grammars) -> None:
        """See `engine.runner.model_runner`."""
        self._grammars = grammars

    def _matcher(self, params: SamplingParams, output: tuple[int, ...] = ()) -> Matcher | None:
        if params.structured is None:
            return None
        assert self._grammars is not None
        return self._grammars.matcher(params.structured, output)

    def execute(self, batch: Batch) -> StepOutput:
        """See `engine.runner.model_runner`."""
        self.batches.append(batch)
        if self._before_step is not None:
            self._before_step(batch)
        for seq_id in batch.removed:
            del self.rows[seq_id]
        for new in batch.new:
            assert new.seq_id not in self.rows, f"{new.seq_id} is announced twice"
            params, num_prompt_tokens = new.sampling_params, new.num_prompt_tokens
            matcher = self._matcher(params, new.token_ids[num_prompt_tokens:])
            self.rows[new.seq_id] = _Row(
                list(new.token_ids), list(new.block_table), params, num_prompt_tokens, matcher
            )  # fmt: skip
        for copy in batch.copies:
            self._copy_block(copy.source_id, copy.block_id)
            table = self.rows[copy.seq_id].block_table
            assert table[copy.block_index] == copy.source_id
            table[copy.block_index] = copy.block_id
        assert len({s.seq_id for s in batch.scheduled}) == len(batch.scheduled), "a sequence is scheduled twice"
        for scheduled in batch.scheduled:
            self._compute(scheduled)
        scores = tuple(score for scheduled in batch.scheduled if (score := self._score_prompt(scheduled)))
        sampled: list[SampledToken] = []
        failed: list[tuple[str, str]] = []
        for scheduled in batch.scheduled:
            if not scheduled.is_sampling:
                continue
            seq_id = scheduled.seq_id
            if seq_id in self.fail_next:
                failed.append((seq_id, self.fail_next.pop(seq_id)))
                continue
            prompt = list(self.rows[seq_id].token_ids)
            sampled.append(self._sample(seq_id))
            for fork in (f for f in batch.forks if f.parent_id == seq_id):
                table = self.rows[seq_id].block_table[: -(-len(prompt) // self.info.block_size)]
                params = fork.sampling_params
                self.rows[fork.child_id] = _Row(list(prompt), table, params, len(prompt), self._matcher(params))
                sampled.append(self._sample(fork.child_id))
        return StepOutput(tuple(sampled), tuple(failed), (("forward", 0.0),), scores)

    def _score_prompt(self, scheduled: ScheduledSequence) -> PromptLogprobs | None:
        row, begin = self.rows[scheduled.seq_id], scheduled.num_computed_tokens
        end = min(begin + scheduled.num_tokens, row.num_prompt_tokens - 1)
        if row.params.prompt_logprobs is None or begin >= end:
            return None
        top = row.params.prompt_logprobs
        return PromptLogprobs(
            scheduled.seq_id, begin + 1, tuple(prompt_score(token, top) for token in row.token_ids[begin + 1 : end + 1])
        )

    def _copy_block(self, source_id: int, block_id: int) -> None:
        for offset in range(self.info.block_size):
            if (source_id, offset) in self._kv:
                self._kv[block_id, offset] = self._kv[source_id, offset]

    def _slot(self, row: _Row, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.info.block_size)
        return row.block_table[index], offset

    def _compute(self, scheduled: ScheduledSequence) -> None:
        row = self.rows[scheduled.seq_id]
        row.block_table.extend(scheduled.new_block_ids)
        end = scheduled.num_computed_tokens + scheduled.num_tokens
        assert scheduled.num_tokens >= 1
        assert end <= len(row.token_ids)
        assert scheduled.is_sampling == (end == len(row.token_ids))
        for position in range(scheduled.num_computed_tokens, end):
            self._kv[self._slot(row, position)] = row.token_ids[position]

    def _sample(self, seq_id: str) -> SampledToken:
        row = self.rows[seq_id]
        read = [self._kv[self._slot(row, position)] for position in range(len(row.token_ids))]
        assert read == row.token_ids, f"the KV of {seq_id} holds other tokens than the sequence"
        token_id = self._choose(read, row.params)
        if row.matcher is not None:
            allowed = allowed_tokens(row.matcher, self.info.vocab_size)
            token_id = allowed[token_id % len(allowed)]
            row.matcher.accept((token_id,))
        row.token_ids.append(token_id)
        logprobs = None
        if row.params.logprobs is not None:
            top = tuple(range(token_id, token_id + max(1, row.params.logprobs)))
            logprobs = TokenLogprobs(-0.5, 1, top, tuple(-0.5 - i for i in range(len(top))))
        return SampledToken(seq_id, token_id, logprobs)
