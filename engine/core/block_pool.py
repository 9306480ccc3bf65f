"""Physical blocks: who may take which next, how many refer to each, and what each one holds.

A block is in exactly one of four states: `free` (no content), `cached` (ref_count 0, content kept under its hash),
`used` (ref_count 1), `shared` (ref_count 2 or more). Free blocks are reused before cached ones, cached ones in the
order in which they were last released. Every change is logged as a `BlockEvent`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from engine.core.events import BlockEvent

_event = tuple.__new__  # a NamedTuple's own constructor takes twice as long, and each block has four events


class BlockPool:
    """`num_blocks` blocks, of which sequences may hold `num_usable` at once.

    `events` collects what happened until its owner takes it.
    """

    def __init__(self, num_blocks: int, num_usable: int | None = None) -> None:
        self.num_blocks = num_blocks
        self.num_usable = num_blocks if num_usable is None else num_usable
        self.ref_counts = [0] * num_blocks
        self.block_hashes: list[str | None] = [None] * num_blocks
        self.events: list[BlockEvent] = []
        self._by_hash: dict[str, int] = {}
        # OrderedDict: removal from the middle (a hit) and popping the oldest are both O(1).
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_in_use(self) -> int:
        """Blocks with a reference: used + shared."""
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now; negative while more are held than are usable."""
        return self.num_usable - self.num_in_use

    def find(self, block_hash: str) -> int | None:
        """The block that holds this content, in use or cached."""
        return self._by_hash.get(block_hash)

    def is_cached(self, block_id: int) -> bool:
        """Whether the block has content and no reference."""
        return block_id in self._cached

    def allocate(self, seq_id: str, num_blocks: int) -> tuple[int, ...]:
        """`num_blocks` blocks without content for `seq_id`; the caller has checked that they are available."""
        taken = self._pop(num_blocks)
        self.events += [_event(BlockEvent, ("allocate", block_id, seq_id, None)) for block_id in taken]
        return taken

    def allocate_copy(self, seq_id: str, source_id: int) -> int:
        """A block for `seq_id` that becomes a copy of `source_id`; the caller has checked that one is available."""
        (block_id,) = self._pop(1)
        self.events.append(BlockEvent("copy", block_id, seq_id, source_id))
        return block_id

    def _pop(self, num_blocks: int) -> tuple[int, ...]:
        """The next blocks to be reused, now with one reference; a cached one loses its hash before it is handed out."""
        assert num_blocks <= self.num_available, f"{num_blocks} blocks asked for, {self.num_available} available"
        num_free = min(num_blocks, len(self._free))
        taken = [self._free.popitem(last=False)[0] for _ in range(num_free)]
        for _ in range(num_blocks - num_free):
            block_id, _ = self._cached.popitem(last=False)
            self._evict(block_id)
            taken.append(block_id)
        for block_id in taken:
            self.ref_counts[block_id] = 1
        return tuple(taken)

    def take(self, block_id: int, seq_id: str) -> None:
        """One more reference to a block with content: a hit if it had none, else a share."""
        if self.ref_counts[block_id] == 0:
            del self._cached[block_id]
            self.events.append(BlockEvent("hit", block_id, seq_id))
        else:
            self.events.append(BlockEvent("share", block_id, seq_id))
        self.ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int], seq_id: str) -> None:
        """Give back one reference to each block, in this order: the first given back is the first reused."""
        for block_id in block_ids:
            self.ref_counts[block_id] -= 1
            self.events.append(_event(BlockEvent, ("free", block_id, seq_id, None)))
            if self.ref_counts[block_id] == 0:
                if self.block_hashes[block_id] is None:
                    self._free[block_id] = None
                else:
                    self._cached[block_id] = None

    def seal(self, block_ids: SequenceOf[int], block_hashes: SequenceOf[str]) -> None:
        """Remember the content of full, computed blocks; the first block with a content keeps the identity."""
        for block_id, block_hash in zip(block_ids, block_hashes, strict=True):
            if block_hash not in self._by_hash and self.block_hashes[block_id] is None:
                self._by_hash[block_hash] = block_id
                self.block_hashes[block_id] = block_hash
                self.events.append(_event(BlockEvent, ("seal", block_id, None, block_hash)))

    def forget_contents(self) -> int:
        """Drop every identity; returns how many. Blocks in use stay with their sequences."""
        hashed = list(self._by_hash.values())
        for block_id in hashed:
            self._evict(block_id)
        self._free.update(self._cached)
        self._cached.clear()
        return len(hashed)

    def _evict(self, block_id: int) -> None:
        block_hash = self.block_hashes[block_id]
        assert block_hash is not None
        del self._by_hash[block_hash]
        self.block_hashes[block_id] = None
        self.events.append(_event(BlockEvent, ("evict", block_id, None, block_hash)))

    def check_invariants(self, block_tables: Iterable[list[int]]) -> None:
        """Prove conservation against the block tables of all sequences.

        Raises:
            AssertionError: says which invariant broke, and for which block.
        """
        refs = [0] * self.num_blocks
        for table in block_tables:
            for block_id in table:
                refs[block_id] += 1
        for block_id, (counted, kept) in enumerate(zip(refs, self.ref_counts, strict=True)):
            assert counted == kept, f"block {block_id}: ref_count {kept}, but {counted} table entries"
            is_free, is_cached = block_id in self._free, block_id in self._cached
            assert is_free + is_cached + (kept > 0) == 1, f"block {block_id} is in no state or in two"
            has_hash = self.block_hashes[block_id] is not None
            assert not (is_free and has_hash), f"free block {block_id} has content"
            assert not is_cached or has_hash, f"cached block {block_id} has no content"
        for block_hash, block_id in self._by_hash.items():
            assert self.block_hashes[block_id] == block_hash, f"block {block_id} is indexed under a hash it lost"
        assert sum(h is not None for h in self.block_hashes) == len(self._by_hash), "a hash is not indexed"
