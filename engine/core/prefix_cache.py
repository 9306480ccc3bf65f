"""Identity of a block's content: a hash chained over everything before it.

Two blocks hold the same keys and values only if their tokens, and all tokens before them, are the same. So the hash of
a block covers its parent's hash, its token ids, and, through the first parent, the extra key (cache salt). Only full
blocks have one. BLAKE2b with 128 bits is collision-resistant (RFC 7693): equal hashes are taken as equal content.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from hashlib import blake2b

DIGEST_BYTES = 16


def root_hash(cache_salt: str | None) -> str:
    """Parent of the first block; requests with different salts share nothing."""
    return "" if cache_salt is None else _digest("salt:", cache_salt.encode())


def block_hash(parent: str, token_ids: SequenceOf[int]) -> str:
    """Hash (hex) of a full block with `token_ids` behind the block with hash `parent`."""
    return _digest(parent, array("i", token_ids).tobytes())


def _digest(head: str, data: bytes) -> str:
    return blake2b(head.encode() + data, digest_size=DIGEST_BYTES).hexdigest()
