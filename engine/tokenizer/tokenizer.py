"""Text to token ids and back, for one model.

`Tokenizer` wraps the `tokenizers` library with what a model adds to it: which ids end an answer, which are special,
and the chat template. Nothing in it changes after construction, so any thread may use it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

import tokenizers

from engine.errors import RequestError
from engine.tokenizer.chat_template import ChatTemplate, ChatTemplateError
from engine.tokenizer.source import find_tokenizer
from engine.tokenizer.token_table import TokenTable, build_token_table


class TextError(RequestError):
    """A text that has no encoding; `param` is for the caller to set to its own field's name."""

    param = "prompt"


class Tokenizer:
    """One model's vocabulary. `vocab_size` counts ids from 0 to the largest token's (a model may have more rows).

    `chat_template` is None where the model has none. `name` is for messages.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Iterable[int],
        bos_token_id: int | None = None,
        chat_template: ChatTemplate | None = None,
        name: str = "",
    ) -> None:
        backend.no_truncation()  # some tokenizer.json files carry a training set-up
        backend.no_padding()
        self._backend = backend
        self.name = name
        self.chat_template = chat_template
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        table = build_token_table(backend)
        self.table = table  # None: decoding needs context
        self.table_skipping_special = None if table is None else table.without(self.special_token_ids)
        size = backend.get_vocab_size(with_added_tokens=True) if table is None else len(table.pieces)
        self.vocab_size: int = max(size, *(token_id + 1 for token_id in added)) if added else size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written out in the text are parsed as such; `add_special_tokens` adds
        what the model's prompts start or end with (a rendered chat has that already).

        Raises:
            TextError: the text holds half of a surrogate pair, which no encoding can express.
        """
        position = _first_surrogate(text)
        if position is not None:
            raise TextError(f"the text holds half of a surrogate pair at character {position}")
        # As a batch of one: that lets other threads run meanwhile (`encode` holds the interpreter's lock, seconds for
        # a long text), and leaves out the offsets that nobody reads.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of these tokens; bytes that are no UTF-8 become U+FFFD, ids that are no token become nothing."""
        table = self.table_for(skip_special_tokens)
        if table is None:
            known = [token_id for token_id in token_ids if 0 <= token_id < self.vocab_size]
            return self._backend.decode(known, skip_special_tokens=skip_special_tokens)
        text = table.join(tuple(token_ids)).decode("utf-8", "replace")
        return text[1:] if table.strip_first_space and text.startswith(" ") else text

    def table_for(self, skip_special_tokens: bool) -> TokenTable | None:
        """The table to decode with, or None where this tokenizer's decoding needs context."""
        return self.table_skipping_special if skip_special_tokens else self.table

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; a special token's name; empty for an id that is no token."""
        if self.table is not None:
            return self.table.join((token_id,))
        return self.decode((token_id,), skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """A token for display. Bytes that are not whole characters are shown as the OpenAI API does, so that two
        different tokens never look the same: `bytes:\\xe2\\x80`."""
        piece = self.token_bytes(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary, None if there is no such token."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def render_chat(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True, **kwargs: object
    ) -> str:
        """The prompt's text for a conversation; encode it with `add_special_tokens=False`.

        Raises:
            ChatTemplateError: no template, messages of the wrong form, or the template's own refusal.
        """
        if self.chat_template is None:
            raise ChatTemplateError("this model has no chat template; use the completions API")
        return self.chat_template.render(messages, add_generation_prompt=add_generation_prompt, **kwargs)


def _first_surrogate(text: str) -> int | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def load_tokenizer(model: str, tokenizer: str | None = None) -> Tokenizer:
    """The tokenizer of `model`, or the one named by `tokenizer`: "smollm2", a .gguf file, a directory or a hub id.

    Raises:
        StartupError: it cannot be found, or is of a kind that cannot be built correctly; the message names it.
    """
    # Texts come one at a time; a thread pool of the library's own would only fight with the engine's threads.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    source = find_tokenizer(tokenizer or model)
    if source.is_file():
        from engine.tokenizer.gguf_tokenizer import load_gguf_tokenizer

        return load_gguf_tokenizer(source)
    from engine.tokenizer.hf_tokenizer import load_hf_tokenizer

    return load_hf_tokenizer(source)
