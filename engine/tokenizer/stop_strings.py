"""Stop strings, matched in the text: across tokens, and never shown by halves.

The result does not depend on how the text is cut into pieces. The match that starts first wins, and of those that
start together the one complete first, which is the shortest. So a complete match may still have to wait: with the
stops "bc" and "abcd", after "abc" only the next character tells which of them it is.

Text goes out as soon as it cannot belong to a match; fewer characters are held than the longest stop string has. Each
character costs one step per stop string (Knuth, Morris and Pratt, 1977), however long the stop strings are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


@lru_cache(maxsize=1024)
def _fallbacks(stop: str) -> tuple[int, ...]:
    """[i]: how much of the stop string's beginning is also the end of its first i + 1 characters."""
    fallbacks = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = fallbacks[length - 1]
        length += stop[i] == stop[length]
        fallbacks[i] = length
    return tuple(fallbacks)


class _Matcher:
    """Progress through one stop string: `length` of its characters are the end of the text so far."""

    __slots__ = ("fallback", "length", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self.fallback = _fallbacks(stop)

    def advance(self, character: str) -> bool:
        """Take one more character; True where it completes the stop string."""
        stop, length = self.stop, self.length
        while length and stop[length] != character:
            length = self.fallback[length - 1]
        length += stop[length] == character
        complete = length == len(stop)
        self.length = self.fallback[length - 1] if complete else length
        return complete


class StopStrings:
    """Cuts one sequence's text at its first stop string.

    `matched` is the stop string that ended the text, None so far. With `include_in_output` the text ends after it,
    else before it. Without stop strings text passes through.
    """

    __slots__ = ("_candidate", "_first", "_held", "_include", "_matchers", "matched")

    def __init__(self, stop: Sequence[str], *, include_in_output: bool = False) -> None:
        if not all(stop):
            raise ValueError("a stop string must not be empty")
        self._matchers = [_Matcher(text) for text in dict.fromkeys(stop)]
        self._first = frozenset(text[0] for text in stop)
        self._include = include_in_output
        self._held = ""  # what may be the beginning of a stop string, or is one that waits
        self._candidate: tuple[int, str] | None = None  # a complete match: where it starts in `_held`, and which
        self.matched: str | None = None

    @property
    def waiting(self) -> str | None:
        """The stop string that counts unless the text goes on: one that began earlier may still match."""
        return None if self._candidate is None else self._candidate[1]

    def feed(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """The text that may go out now, and the stop string if one matched. After a match nothing goes out.

        Without `may_stop` what is complete within `text` doesn't count, but what begins there may count later.
        """
        if self.matched is not None:
            return "", self.matched
        if not self._held and self._first.isdisjoint(text):
            return text, None
        data, candidate, longest = self._held + text, self._candidate, len(self._held)
        for end in range(len(self._held) + 1, len(data) + 1):
            character, longest = data[end - 1], 0
            for matcher in self._matchers:
                if matcher.advance(character) and may_stop:
                    start = end - len(matcher.stop)
                    if candidate is None or start < candidate[0]:
                        candidate = (start, matcher.stop)
                longest = max(longest, matcher.length)
            if candidate is not None and candidate[0] <= end - longest:  # nothing that began earlier is open
                return self._cut(data, candidate), self.matched
        safe = len(data) - longest
        self._held = data[safe:]
        self._candidate = None if candidate is None else (candidate[0] - safe, candidate[1])
        return data[:safe], None

    def _cut(self, data: str, match: tuple[int, str]) -> str:
        start, self.matched = match
        self._held, self._candidate = "", None
        return data[: start + len(self.matched)] if self._include else data[:start]

    def flush(self, *, may_stop: bool = True) -> str:
        """At the end of the sequence: what was held. A match that still waited counts now and sets `matched`."""
        if self._candidate is not None and may_stop:
            return self._cut(self._held, self._candidate)
        held, self._held = self._held, ""
        return held
