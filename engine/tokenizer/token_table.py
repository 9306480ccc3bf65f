"""What each token id stands for, as bytes: the table behind decoding, detokenising and logprobs.

The decoders of today's models only concatenate: every token is some bytes, and the text is the UTF-8 decoding of them
all. Where that is so a table of bytes says everything the decoder does, at the price of one list access a token. Two
families are recognised by their `decoder`:

* byte-level (GPT-2, Llama 3, Qwen, SmolLM): each character of a token stands for one byte;
* sentencepiece written as a sequence (Llama 1/2, Mistral, Gemma): "▁" is a space, "<0xE2>" a byte, and some drop one
  space at the start of the text. Bytes that are no UTF-8 are replaced one maximal part at a time here; the library
  replaces each byte of the run they are in, valid neighbours too, which no stream could do.

Any other decoder gives no table, see `detokenizer.WindowDecoder`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import tokenizers


@dataclass(frozen=True, slots=True)
class TokenTable:
    """`pieces[id]` is the token's bytes (empty for ids that are no token); `texts[id]` their text, or None where the
    bytes are not whole characters. With `strip_first_space` one space at the very start of a text is dropped."""

    pieces: list[bytes]
    texts: list[str | None]
    strip_first_space: bool

    def without(self, token_ids: frozenset[int]) -> TokenTable:
        """The same table with those tokens made empty."""
        pieces, texts = list(self.pieces), list(self.texts)
        for token_id in token_ids:
            pieces[token_id], texts[token_id] = b"", ""
        return TokenTable(pieces, texts, self.strip_first_space)

    def join(self, token_ids: list[int] | tuple[int, ...]) -> bytes:
        """The bytes of these tokens; ids outside the table are nothing."""
        pieces, size = self.pieces, len(self.pieces)
        return b"".join([pieces[token_id] for token_id in token_ids if 0 <= token_id < size])


def build_token_table(backend: tokenizers.Tokenizer) -> TokenTable | None:
    """The table of this tokenizer, or None where its decoder does more than concatenate bytes."""
    decoder = _decoder_steps(backend)
    vocabulary = backend.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    if decoder == [{"type": "ByteLevel"}]:
        byte_of = byte_level_alphabet()
        for token, token_id in vocabulary.items():
            try:
                pieces[token_id] = bytes([byte_of[character] for character in token])
            except KeyError:  # an added token with a character outside the alphabet stands for itself
                pieces[token_id] = token.encode()
        strip = False
    elif (strip_ := _sentencepiece(decoder)) is not None:
        strip = strip_
        for token, token_id in vocabulary.items():
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                pieces[token_id] = bytes([int(token[3:5], 16)])
            else:
                pieces[token_id] = token.replace("▁", " ").encode()
    else:
        return None
    return TokenTable(pieces, [_whole_text(piece) for piece in pieces], strip)


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each of the 256 bytes: printable Latin-1 characters are themselves, the other
    bytes, in order, are the characters from U+0100."""
    alphabet: dict[str, int] = {}
    stand_in = 0x100
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF:
            alphabet[chr(byte)] = byte
        else:
            alphabet[chr(stand_in)] = byte
            stand_in += 1
    return alphabet


def _whole_text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The decoder as a flat list of steps, without the options that concern encoding only."""
    if backend.decoder is None:
        return []
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    return [{"type": "ByteLevel"} if step["type"] == "ByteLevel" else step for step in steps]


def _sentencepiece(steps: list[dict[str, Any]]) -> bool | None:
    """Whether a first space is dropped, if the steps are those of sentencepiece; else None."""
    space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    start = [space, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if steps == start:
        return False
    if steps == [*start, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]:
        return True
    return None
