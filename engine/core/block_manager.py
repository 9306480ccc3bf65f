"""Block tables: which physical blocks hold the keys and values of each sequence.

Logical block i of a sequence covers its tokens [i * block_size, (i + 1) * block_size).
"""

from __future__ import annotations

from engine.core.batch import BlockCopy
from engine.core.block_pool import BlockPool
from engine.core.prefix_cache import block_hash
from engine.core.sequence import Sequence


class BlockManager:
    """Gives sequences blocks of the pool and takes them back; knows nothing of queues and budgets."""

    def __init__(self, pool: BlockPool, block_size: int, *, enable_prefix_caching: bool) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._expected: dict[str, int] = {}  # content -> the block that will hold it after the step being planned

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def find_cached_prefix(self, sequence: Sequence) -> list[int]:
        """The longest chain of blocks with the sequence's head in them, at most `num_tokens - 1` tokens of it.

        The last token is always computed: its logits are needed. So are those of the whole prompt where the client
        wants the log-probabilities of its tokens: then nothing is read from the cache.
        """
        if not self.enable_prefix_caching or sequence.sampling_params.prompt_logprobs is not None:
            return []
        found: list[int] = []
        for i in range((sequence.num_tokens - 1) // self.block_size):
            content = self._hash(sequence, i)
            block_id = self.pool.find(content)
            if block_id is None:
                block_id = self._expected.get(content)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def expect(self, sequence: Sequence, num_tokens: int) -> None:
        """The step will compute the sequence's next `num_tokens`: who is admitted after it may share what they fill.

        A step writes all its keys and values of a layer before it attends, unless every sequence has a single token:
        those may read before others write, so a block that a single token fills isn't shared before it is sealed.
        """
        if not self.enable_prefix_caching or num_tokens == 1:
            return
        first = sequence.num_computed_tokens // self.block_size
        for i in range(first, (sequence.num_computed_tokens + num_tokens) // self.block_size):
            self._expected.setdefault(self._hash(sequence, i), sequence.block_table[i])

    def expect_nothing(self) -> None:
        """Before a step is planned."""
        self._expected.clear()

    def num_blocks_to_take(self, sequence: Sequence, prefix: list[int]) -> int:
        """How many available blocks an admission uses up: new ones, and cached ones that it takes back."""
        new = self.num_blocks_for(sequence.num_tokens) - len(prefix)
        return new + sum(self.pool.is_cached(block_id) for block_id in prefix)

    def admit(self, sequence: Sequence, prefix: list[int]) -> None:
        """Take the blocks of the whole known sequence; the caller has checked that they are available.

        The prefix is taken out of the cached queue before anything is allocated, else it could be evicted for it.
        """
        assert not sequence.block_table
        for block_id in prefix:
            self.pool.take(block_id, sequence.seq_id)
            sequence.block_table.append(block_id)
        num_new = self.num_blocks_for(sequence.num_tokens) - len(prefix)
        sequence.block_table.extend(self.pool.allocate(sequence.seq_id, num_new))

    def can_decode_in_place(self, sequence: Sequence) -> bool:
        """Whether it computes exactly its last known token, into a part-filled block of its own."""
        position = sequence.num_computed_tokens
        index, offset = divmod(position, self.block_size)
        return (
            offset > 0
            and len(sequence.token_ids) - position == 1
            and self.pool.ref_counts[sequence.block_table[index]] == 1
            and not sequence.num_pending_forks
        )

    def num_blocks_to_append(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks missing before the sequence can write its next `num_tokens` tokens, a copy-on-write included."""
        missing = self.num_blocks_for(sequence.num_computed_tokens + num_tokens) - len(sequence.block_table)
        return missing + self._writes_to_shared(sequence)

    def append(self, sequence: Sequence, num_tokens: int) -> tuple[tuple[int, ...], BlockCopy | None]:
        """(new blocks of the table, the copy to make first); the caller has checked that they are available."""
        copy = None
        if self._writes_to_shared(sequence):
            index = sequence.num_computed_tokens // self.block_size
            source = sequence.block_table[index]
            block_id = self.pool.allocate_copy(sequence.seq_id, source)
            sequence.block_table[index] = block_id
            self.pool.release([source], sequence.seq_id)
            copy = BlockCopy(sequence.seq_id, index, source, block_id)
        num_new = self.num_blocks_for(sequence.num_computed_tokens + num_tokens) - len(sequence.block_table)
        if num_new <= 0:
            return (), copy
        new = self.pool.allocate(sequence.seq_id, num_new)
        sequence.block_table.extend(new)
        return new, copy

    def _writes_to_shared(self, sequence: Sequence) -> bool:
        """Whether the next token's slot is in a part-filled block that another sequence refers to as well."""
        index, offset = divmod(sequence.num_computed_tokens, self.block_size)
        return (
            offset > 0
            and index < len(sequence.block_table)
            and self.pool.ref_counts[sequence.block_table[index]] > 1
        )  # fmt: skip

    def seal_full_blocks(self, sequence: Sequence, num_computed_before: int) -> None:
        """Give the blocks that the step filled their identity, now that their KV is there."""
        if not self.enable_prefix_caching:
            return
        first, end = num_computed_before // self.block_size, sequence.num_computed_tokens // self.block_size
        self._hash(sequence, end - 1)
        self.pool.seal(sequence.block_table[first:end], sequence.block_hashes[first:end])

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child refers to the blocks of the parent's prompt."""
        for block_id in parent.block_table[: self.num_blocks_for(parent.num_prompt_tokens)]:
            self.pool.take(block_id, child.seq_id)
            child.block_table.append(block_id)

    def free(self, sequence: Sequence) -> int:
        """Release all blocks, the tail first so that heads stay cached longest; returns how many references."""
        num_blocks = len(sequence.block_table)
        self.pool.release(reversed(sequence.block_table), sequence.seq_id)
        sequence.block_table.clear()
        return num_blocks

    def _hash(self, sequence: Sequence, index: int) -> str:
        hashes, size = sequence.block_hashes, self.block_size
        if len(hashes) <= index:
            parent = hashes[-1] if hashes else sequence.root_hash
            for start in range(len(hashes) * size, (index + 1) * size, size):
                parent = block_hash(parent, sequence.token_ids[start : start + size])
                hashes.append(parent)
        return hashes[index]
