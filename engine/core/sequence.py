"""One token stream and how far it has come. Mutable, owned by the scheduler alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from engine.core.policy import QueueKey, queue_key
from engine.core.stats import SequenceRow
from engine.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class Sequence:
    """`num_computed_tokens` (KV exists) catches up with `len(token_ids)` (known), step by step."""

    seq_id: str
    request_id: str
    index: int  # which of the request's n
    source: str
    priority: int
    queue_index: int  # number of the request's arrival
    arrival_time: float
    num_prompt_tokens: int
    token_ids: list[int]  # prompt + output
    sampling_params: SamplingParams  # with a seed
    max_tokens: int  # output tokens at most, after clipping to max_model_len
    eos_token_ids: tuple[int, ...]
    root_hash: str
    num_pending_forks: int  # siblings to be forked when the prompt is computed
    queue_deadline: float | None
    deadline: float | None
    status: str = "WAITING"
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[str] = field(default_factory=list)  # of the full blocks of token_ids, as far as needed yet
    was_scheduled: bool = False
    end_token_ids: frozenset[int] = field(init=False)  # any of these may end it
    max_num_tokens: int = field(init=False)  # known tokens at which it ends

    def __post_init__(self) -> None:
        params = self.sampling_params
        eos = () if params.ignore_eos else self.eos_token_ids
        self.end_token_ids = frozenset(eos).union(params.stop_token_ids)
        self.max_num_tokens = self.num_prompt_tokens + self.max_tokens

    @property
    def num_tokens(self) -> int:
        """Known tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_slots(self) -> int:
        """Places under max_num_seqs that it takes: its own and those of the siblings to come."""
        return 1 + self.num_pending_forks

    def queue_key(self, policy: str) -> QueueKey:
        """Its place in the waiting queue."""
        return queue_key(policy, self.priority, self.queue_index, self.index)

    def row(self) -> SequenceRow:
        """What a snapshot says of it."""
        return SequenceRow(
            self.seq_id, self.status, self.priority, self.num_prompt_tokens, self.num_output_tokens,
            self.num_computed_tokens, self.num_cached_tokens, tuple(self.block_table), self.num_preemptions,
        )  # fmt: skip

    def finish_reason(self, token_id: int) -> tuple[str, str | None] | None:
        """(reason, detail) if `token_id`, the token just appended, ends it."""
        params = self.sampling_params
        if token_id in self.end_token_ids and self.num_output_tokens >= params.min_tokens:
            is_eos = not params.ignore_eos and token_id in self.eos_token_ids
            return "stop", None if is_eos else str(token_id)
        if self.num_tokens >= self.max_num_tokens:
            return "length", None
        return None

    def fork(self, index: int) -> Sequence:
        """The sibling `index`, at the point where the prompt is computed and nothing is sampled."""
        return Sequence(
            seq_id=child_seq_id(self.request_id, index), request_id=self.request_id, index=index, source=self.source,
            priority=self.priority, queue_index=self.queue_index, arrival_time=self.arrival_time,
            num_prompt_tokens=self.num_prompt_tokens, token_ids=self.token_ids[: self.num_prompt_tokens],
            sampling_params=child_params(self.sampling_params, index), max_tokens=self.max_tokens,
            eos_token_ids=self.eos_token_ids, root_hash=self.root_hash, num_pending_forks=0, queue_deadline=None,
            deadline=self.deadline, status="RUNNING", num_computed_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens, block_hashes=list(self.block_hashes), was_scheduled=True,
        )  # fmt: skip


def child_seq_id(request_id: str, index: int) -> str:
    """Sequence id of the request's sequence `index`; the first, from which the others fork, has the request's own."""
    return f"{request_id}.{index}" if index else request_id


def child_params(params: SamplingParams, index: int) -> SamplingParams:
    """`params` of sibling `index`: seed + index, so that siblings differ and each can be had again alone."""
    if index == 0:
        return params
    assert params.seed is not None
    return replace(params, seed=params.seed + index)
