"""The two byte-pair encodings written out: slow, readable, and sharing nothing with the library that is tested."""

from __future__ import annotations

import re
from itertools import pairwise

import regex

from engine.tokenizer.token_table import byte_level_alphabet

GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


class ReferenceBpe:
    """`special` tokens are cut out first; then digits one by one; then GPT-2's pieces; then merges by rank. A byte
    that is no token (the embedded vocabulary lacks some control characters) is dropped."""

    def __init__(self, tokens: list[str], merges: list[str], special: list[str]) -> None:
        self.ids = {token: token_id for token_id, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.special = re.compile("(" + "|".join(re.escape(token) for token in sorted(special, key=len)[::-1]) + ")")
        self.letters = {byte: letter for letter, byte in byte_level_alphabet().items()}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for number, part in enumerate(self.special.split(text)):
            if number % 2:
                ids.append(self.ids[part])
                continue
            for run in regex.findall(r"\p{N}|[^\p{N}]+", part):
                for piece in GPT2.findall(run):
                    ids += [self.ids[token] for token in self.merge(piece) if token in self.ids]
        return ids

    def has_all_bytes_of(self, text: str) -> bool:
        return all(self.letters[byte] in self.ids for byte in text.encode())

    def merge(self, piece: str) -> list[str]:
        parts = [self.letters[byte] for byte in piece.encode()]
        while len(parts) > 1:
            ranked = [(self.ranks[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in self.ranks]
            if not ranked:
                break
            _, i = min(ranked)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return parts


class ReferenceSentencepiece:
    """Join the neighbours whose joined piece scores best, the leftmost of equals; unknown characters are bytes."""

    def __init__(self, tokens: list[str], scores: list[float], *, add_space_prefix: bool) -> None:
        self.ids = {token: token_id for token_id, token in enumerate(tokens)}
        self.scores = scores
        self.prefix = "▁" if add_space_prefix else ""

    def encode(self, text: str) -> list[int]:
        if not text:
            return []
        parts = list(self.prefix + text.replace(" ", "▁"))
        while True:
            joined = [(left + right, i) for i, (left, right) in enumerate(pairwise(parts))]
            scored = [(-self.scores[self.ids[piece]], i) for piece, i in joined if piece in self.ids]
            if not scored:
                break
            _, i = min(scored)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids: list[int] = []
        for part in parts:
            ids += [self.ids[part]] if part in self.ids else [self.ids[f"<0x{byte:02X}>"] for byte in part.encode()]
        return ids
