"""A tokenizer out of the metadata of a GGUF file.

Reads `tokenizer.ggml.*` and `tokenizer.chat_template` and builds the Rust tokenizer in memory. Byte-level BPE ("gpt2")
is built; other kinds are refused by name, because a tokenizer that is nearly right makes a model quietly worse.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from gguf import TokenType
from tokenizers import AddedToken, decoders, models, processors

from engine.errors import StartupError
from engine.tokenizer.chat_template import ChatTemplate
from engine.tokenizer.pre_tokenizers import pre_tokenization
from engine.tokenizer.tokenizer import Tokenizer
from engine.weights.gguf_file import GgufFile


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in the file.

    Raises:
        StartupError: no tokenizer in it, or of a kind that is not built here.
    """
    return tokenizer_from_metadata(GgufFile(path).metadata, name=str(path))


def tokenizer_from_metadata(metadata: Mapping[str, Any], name: str) -> Tokenizer:
    """The tokenizer in a file that is open already; `name` is for messages.

    Raises:
        StartupError: as `load_gguf_tokenizer`.
    """
    fields = _Fields(metadata, name)
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        found = f"is of type {kind!r} (tokenizer.ggml.model)" if kind else "is not in the file (tokenizer.ggml.model)"
        raise StartupError(
            f"{name}: the tokenizer {found}; only 'gpt2' (byte-level BPE) can be built from a GGUF file. "
            "A directory with the model's tokenizer.json can be given with --tokenizer"
        )
    tokens: list[str] = fields.need("tokenizer.ggml.tokens")
    rule = pre_tokenization(fields.need("tokenizer.ggml.pre"))
    backend = _byte_level_bpe(tokens, fields.need("tokenizer.ggml.merges"), rule.ignore_merges)
    backend.pre_tokenizer = rule.build()
    if rule.normalizer is not None:
        backend.normalizer = rule.normalizer()
    backend.decoder = decoders.ByteLevel()
    _add_special_tokens(backend, tokens, fields.get("tokenizer.ggml.token_type") or [])

    bos = fields.token_id("bos", len(tokens))
    eos = fields.token_id("eos", len(tokens))
    add_bos = fields.get("tokenizer.ggml.add_bos_token")
    _add_ends(
        backend,
        bos if (rule.add_bos if add_bos is None else add_bos) else None,
        eos if fields.get("tokenizer.ggml.add_eos_token") else None,
    )
    ends = [eos, fields.token_id("eot", len(tokens)), fields.token_id("eom", len(tokens))]
    source = fields.get("tokenizer.chat_template")
    named = {"bos_token": bos, "eos_token": eos}
    for key in ("unknown", "padding"):
        named[f"{key[:3]}_token"] = fields.token_id(key, len(tokens))
    return Tokenizer(
        backend,
        eos_token_ids=[token_id for token_id in ends if token_id is not None],
        bos_token_id=bos,
        chat_template=ChatTemplate(source, {key: tokens[i] for key, i in named.items() if i is not None})
        if source
        else None,
        name=name,
    )


class _Fields:
    """Typed access to the file's metadata, with the file's name in every complaint."""

    def __init__(self, metadata: Mapping[str, Any], name: str) -> None:
        self._metadata = metadata
        self._name = name

    def get(self, key: str) -> Any:
        return self._metadata.get(key)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise StartupError(f"{self._name}: the file has no {key}, which its tokenizer needs")
        return value

    def token_id(self, role: str, num_tokens: int) -> int | None:
        """`tokenizer.ggml.<role>_token_id`, inside the vocabulary."""
        key = f"tokenizer.ggml.{role}_token_id"
        value: int | None = self.get(key)
        if value is not None and not 0 <= value < num_tokens:
            raise StartupError(f"{self._name}: {key} is {value}, the vocabulary has {num_tokens} tokens")
        return value


def _byte_level_bpe(tokens: list[str], merges: list[str], ignore_merges: bool) -> tokenizers.Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")  # byte-level tokens contain no space
        pairs.append((left, right))
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=ignore_merges))
    except Exception as error:  # the library raises plain Exception, for a merge of tokens that do not exist
        if type(error) is not Exception:
            raise
        raise StartupError(f"the merges (tokenizer.ggml.merges) do not fit the vocabulary: {error}") from error


def _add_special_tokens(backend: tokenizers.Tokenizer, tokens: list[str], token_types: list[int]) -> None:
    """Make control and user-defined tokens known as such; their ids are those of the vocabulary."""
    control = (TokenType.CONTROL, TokenType.UNKNOWN)
    added = [
        AddedToken(token, special=kind in control, normalized=False)
        for token, kind in zip(tokens, token_types, strict=False)
        if kind in control or kind == TokenType.USER_DEFINED
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])


def _add_ends(backend: tokenizers.Tokenizer, bos: int | None, eos: int | None) -> None:
    """What `add_special_tokens` adds around a prompt."""
    ends = {f"{role}": token_id for role, token_id in (("bos", bos), ("eos", eos)) if token_id is not None}
    if not ends:
        return
    first, last = (["bos"] if bos is not None else []), (["eos"] if eos is not None else [])
    names = {role: backend.id_to_token(token_id) for role, token_id in ends.items()}
    backend.post_processor = processors.TemplateProcessing(
        single=[*(names[role] for role in first), "$A", *(names[role] for role in last)],
        pair=None,
        special_tokens=[(names[role], token_id) for role, token_id in ends.items()],
    )
