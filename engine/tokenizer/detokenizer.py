"""Token ids to text while they arrive: one `Detokenizer` per sequence, one call per token.

What leaves is certain: bytes of an unfinished character are held until the character is whole, or until it is clear
that it never will be. All deltas and the flush together are the decode of all output tokens.

With a token table (see `token_table`) that is one list access for most tokens, and otherwise an incremental UTF-8
decoding of at most three held bytes. Tokenizers without a table go through `WindowDecoder`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from engine.tokenizer.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Text of one sequence. `prompt_token_ids` matter where a token's text depends on what is before it: a leading
    space, dropped at the start of a text, is kept after a prompt."""

    __slots__ = ("_at_start", "_held", "_pieces", "_plain", "_texts", "_window")

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        table = tokenizer.table_for(skip_special_tokens)
        self._held = b""  # the start of a character, at most 3 bytes
        self._window: WindowDecoder | None = None
        self._at_start = False  # nothing but empty tokens so far, and a first space is to be dropped
        self._pieces: list[bytes] = []
        self._texts: list[str | None] = []
        if table is None:
            self._window = WindowDecoder(tokenizer, prompt_token_ids, skip_special_tokens)
        else:
            self._pieces, self._texts = table.pieces, table.texts
            size = len(table.pieces)
            self._at_start = table.strip_first_space and not any(
                0 <= token_id < size and table.pieces[token_id] for token_id in prompt_token_ids
            )
        self._plain = self._window is None and not self._at_start  # the next whole text can go out as it is

    def feed(self, token_id: int) -> str:
        """Text that became certain with this token; an id that is no token adds nothing."""
        if self._plain:
            try:
                text = self._texts[token_id]
            except IndexError:
                return ""
            if text is not None:
                return text
        return self._feed_slowly(token_id)

    def _feed_slowly(self, token_id: int) -> str:
        if self._window is not None:
            return self._window.feed(token_id)
        if token_id >= len(self._pieces):
            return ""
        return self._take(self._held + self._pieces[token_id], final=False)

    def _take(self, data: bytes, final: bool) -> str:
        text, consumed = codecs.utf_8_decode(data, "replace", final)
        self._held = data[consumed:]
        if self._at_start and text:
            self._at_start = False
            text = text.removeprefix(" ")
        self._plain = not self._held and not self._at_start
        return text

    def flush(self) -> str:
        """At the end: what was held, with bytes that never became a character replaced."""
        if self._window is not None:
            return self._window.flush()
        return self._take(self._held, final=True)


class WindowDecoder:
    """Incremental text of a tokenizer whose tokens depend on their neighbours.

    Decodes a window of recent tokens twice, without and with the new ones; the difference is the new text. It waits
    while the window ends in U+FFFD (perhaps half a character) or does not begin with what was said before.
    """

    # A character is at most 4 bytes, hence at most 4 tokens: what is still broken after more never heals.
    MAX_HELD_TOKENS = 8
    # Tokens of context before the new ones: enough for "am I the first" and for spaces around a word.
    CONTEXT_TOKENS = 8

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_token_ids[-self.CONTEXT_TOKENS :])
        self._num_said = len(self._ids)  # tokens of the window whose text is out
        self._said = self._decode(self._ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)

    def feed(self, token_id: int) -> str:
        """Text that became certain with this token."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.startswith(self._said) and not text.endswith(REPLACEMENT):
            return self._say(text[len(self._said) :])
        if len(self._ids) - self._num_said > self.MAX_HELD_TOKENS:
            return self._say(self._rest(text))
        return ""

    def _rest(self, text: str) -> str:
        """What `text` has beyond what was said, where they need not agree."""
        common = 0
        for said, now in zip(self._said, text, strict=False):
            if said != now:
                break
            common += 1
        return text[common:] if common == len(self._said) else text[len(self._said) :]

    def _say(self, delta: str) -> str:
        del self._ids[: max(0, self._num_said - self.CONTEXT_TOKENS)]
        self._num_said = len(self._ids)
        self._said = self._decode(self._ids)
        return delta

    def flush(self) -> str:
        """At the end: what was held."""
        return self._say(self._rest(self._decode(self._ids)))
