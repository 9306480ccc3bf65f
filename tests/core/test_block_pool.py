"""Which block is handed out next, and what becomes of its content."""

from __future__ import annotations

import pytest

from engine.core.block_pool import BlockPool
from engine.core.prefix_cache import block_hash, root_hash


def test_free_blocks_are_handed_out_in_order_before_cached_ones() -> None:
    pool = BlockPool(4)
    assert pool.allocate("a", 2) == (0, 1)
    pool.seal([0], ["x"])
    pool.release([1, 0], "a")
    # 2 and 3 never held anything, 1 holds nothing any more, 0 is cached.
    assert pool.allocate("b", 4) == (2, 3, 1, 0)
    with pytest.raises(AssertionError, match="1 blocks asked for, 0 available"):
        pool.allocate("b", 1)


def test_cached_blocks_are_evicted_in_the_order_of_their_release() -> None:
    pool = BlockPool(3)
    for name in "abc":
        pool.seal(pool.allocate(name, 1), [name])
    pool.release([1], "b")
    pool.release([0], "a")
    pool.release([2], "c")
    pool.take(0, "hit")  # a hit in the middle of the queue
    assert pool.allocate("d", 2) == (1, 2)


def test_a_block_loses_its_hash_before_it_is_reused() -> None:
    pool = BlockPool(1)
    pool.seal(pool.allocate("a", 1), ["x"])
    pool.release([0], "a")
    assert pool.find("x") == 0
    assert pool.allocate("b", 1) == (0,)
    assert pool.find("x") is None
    assert [e.kind for e in pool.events] == ["allocate", "seal", "free", "evict", "allocate"]


def test_a_second_block_with_the_same_content_keeps_no_identity() -> None:
    pool = BlockPool(2)
    pool.seal(pool.allocate("a", 1), ["x"])
    pool.seal(pool.allocate("b", 1), ["x"])
    assert pool.find("x") == 0
    pool.release([1], "b")
    assert not pool.is_cached(1)
    pool.check_invariants([[0]])


def test_usable_blocks_bound_what_is_held_not_what_is_cached() -> None:
    pool = BlockPool(4, num_usable=2)
    assert pool.num_available == 2
    pool.allocate("a", 2)
    with pytest.raises(AssertionError, match="1 blocks asked for, 0 available"):
        pool.allocate("a", 1)
    pool.num_usable = 1
    assert pool.num_available == -1


def test_a_hash_covers_everything_before_the_block() -> None:
    first, other = block_hash(root_hash(None), [1, 2]), block_hash(root_hash(None), [2, 1])
    assert block_hash(first, [3, 4]) != block_hash(other, [3, 4])
    assert block_hash(first, [3, 4]) == block_hash(first, [3, 4])


def test_salted_and_unsalted_prompts_share_nothing() -> None:
    hashes = {block_hash(root_hash(salt), [1, 2]) for salt in (None, "", "a", "b")}
    assert len(hashes) == 4
