"""Sentencepiece's byte-pair tokenizer (Llama 1 and 2, Gemma) from what a GGUF file has of it: pieces and scores.

Sentencepiece joins, again and again, the two neighbours whose joined piece has the best score, the leftmost of equals.
The Rust library does the same with a list of merges in order of rank, so the list is: every way to cut a piece into
two pieces, best score first. Characters that are no piece become their UTF-8 bytes, "<0xE2>" and so on.

No normalisation but the space's: it is written "▁", and with `add_space_prefix` one is put before the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from gguf import TokenType
from tokenizers import decoders, models, normalizers

SPACE = "▁"


def sentencepiece_bpe(
    tokens: Sequence[str],
    scores: Sequence[float],
    token_types: Sequence[int],
    *,
    unknown: str | None,
    add_space_prefix: bool,
) -> tokenizers.Tokenizer:
    """The tokenizer without its special tokens. `scores` and `token_types` are by token id."""
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    model = models.BPE(
        vocab=vocab,
        merges=merges_by_score(vocab, scores, token_types),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    space = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), space]) if add_space_prefix else space
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if add_space_prefix else steps)
    return backend


def merges_by_score(
    vocab: dict[str, int], scores: Sequence[float], token_types: Sequence[int]
) -> list[tuple[str, str]]:
    """Every cut of a normal piece into two pieces, in the order in which they are to be joined."""
    pieces = [
        (-scores[token_id], token_id, token)
        for token, token_id in vocab.items()
        if len(token) > 1 and token_types[token_id] == TokenType.NORMAL
    ]
    merges: list[tuple[str, str]] = []
    for _, _, piece in sorted(pieces):
        for cut in range(1, len(piece)):
            left = piece[:cut]
            if left in vocab and (right := piece[cut:]) in vocab:
                merges.append((left, right))
    return merges
