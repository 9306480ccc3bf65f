"""Which tokens may come next: structured output, allowed_token_ids and bad_words of the rows that have them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from engine.runner.inputs import IntArray, RowTable
from engine.sampling_params import SamplingParams
from engine.structured.grammars import Matcher

Bits = npt.NDArray[np.int32]

NOTHING_LEFT = "no token may come next: allowed_token_ids, bad_words and structured output exclude each other"


class TokenMasks:
    """Matchers and lists of each row. A mask has one bit per token, the lowest first, in words of 32 bits."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._matchers: dict[int, Matcher] = {}
        self._allowed: dict[int, Bits] = {}
        self._bad_words: dict[int, tuple[tuple[int, ...], ...]] = {}

    def set_row(self, row: int, params: SamplingParams, matcher: Matcher | None) -> bool:
        """Take what `row` may say; returns whether there is any such rule."""
        self._matchers.pop(row, None)
        self._allowed.pop(row, None)
        self._bad_words.pop(row, None)
        if matcher is not None:
            self._matchers[row] = matcher
        if params.allowed_token_ids is not None:
            bits = np.zeros(-(-self._vocab_size // 32) * 32, dtype=np.bool_)
            bits[list(params.allowed_token_ids)] = True
            self._allowed[row] = np.packbits(bits, bitorder="little").view(np.int32)
        if params.bad_words:
            self._bad_words[row] = params.bad_words
        return matcher is not None or params.allowed_token_ids is not None or bool(params.bad_words)

    def apply(self, logits: torch.Tensor, rows: IntArray, places: IntArray, table: RowTable) -> dict[int, str]:
        """Set the logits of tokens that may not come to -inf.

        Args:
            logits: `[n, vocab_size]`.
            rows: `[n]`.
            places: indices into `rows` of those with a rule.

        Returns:
            The places that no token is left for, and why.
        """
        masked, banned, problems = self.masks(rows, places)
        if masked:
            is_banned = torch.from_numpy(banned)
            for index, place in enumerate(masked):
                logits[place].masked_fill_(is_banned[index], -torch.inf)  # a view: in place
        for place in places.tolist():
            words = self.banned_words(int(rows[place]), table)
            if words:
                logits[place, words] = -torch.inf
                if logits[place].max() == -torch.inf:
                    problems.setdefault(place, NOTHING_LEFT)
        return problems

    def masks(self, rows: IntArray, places: IntArray) -> tuple[list[int], npt.NDArray[np.bool_], dict[int, str]]:
        """Those of `places` that have a mask, the tokens that theirs exclude `[n, vocab_size]`, and the places that no
        token is left for, with the reason."""
        problems: dict[int, str] = {}
        masked = [place for place in places.tolist() if rows[place] in self._matchers or rows[place] in self._allowed]
        bits = np.full((len(masked), -(-self._vocab_size // 32)), -1, dtype=np.int32)
        for mask, place in zip(bits, masked, strict=True):
            problem = self._fill(mask, int(rows[place]))
            if problem is not None or not mask.any():
                problems[place] = problem or NOTHING_LEFT
        banned = np.unpackbits((~bits).view(np.uint8), axis=1, bitorder="little", count=self._vocab_size)
        return masked, banned.view(np.bool_), problems

    def has_matcher(self, row: int) -> bool:
        """Whether `row` has structured output."""
        return row in self._matchers

    def _fill(self, mask: Bits, row: int) -> str | None:
        matcher = self._matchers.get(row)
        problem = None if matcher is None else matcher.fill(mask)
        if row in self._allowed:
            mask &= self._allowed[row]
        return None if problem is None else f"structured output: {problem}"

    def banned_words(self, row: int, table: RowTable) -> list[int]:
        """Tokens that would complete a bad word."""
        words = self._bad_words.get(row)
        if words is None:
            return []
        longest = max(map(len, words))
        first = max(int(table.num_prompt_tokens[row]), int(table.num_tokens[row]) - longest + 1)
        said = tuple(table.token_ids[row, first : table.num_tokens[row]].tolist())
        return [word[-1] for word in words if len(word) == 1 or said[-len(word) + 1 :] == word[:-1]]

    def without_finished(
        self, logits: torch.Tensor, rows: IntArray, places: IntArray, end_tokens: Mapping[int, IntArray]
    ) -> IntArray:
        """Those of `places` where min_tokens can keep the end from coming: something else may come, too."""

        def has_more(place: int) -> bool:
            if int(rows[place]) not in self._matchers:
                return True
            others = logits[place].clone()
            others[torch.from_numpy(end_tokens[int(rows[place])])] = -torch.inf
            return bool(others.max() > -torch.inf)

        return np.array([place for place in places.tolist() if has_more(place)], dtype=np.int64)

    def accept(self, rows: IntArray, places: IntArray, token_ids: IntArray) -> None:
        """The matchers of `places` take the token that was chosen there."""
        for place in places.tolist():
            matcher = self._matchers.get(int(rows[place]))
            if matcher is not None:
                matcher.accept((int(token_ids[place]),))
