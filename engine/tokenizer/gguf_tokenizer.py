"""A tokenizer out of the metadata of a GGUF file.

Reads `tokenizer.ggml.*` and `tokenizer.chat_template` and builds the Rust tokenizer in memory. Byte-level BPE ("gpt2")
and sentencepiece's BPE ("llama") are built; other kinds are refused by name, because a tokenizer that is nearly right
makes a model quietly worse.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from gguf import TokenType
from tokenizers import AddedToken, decoders, models, normalizers, processors

from engine.errors import StartupError
from engine.tokenizer.chat_template import ChatTemplate
from engine.tokenizer.pre_tokenizers import pre_tokenization
from engine.tokenizer.sentencepiece_bpe import sentencepiece_bpe
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
    build = _KINDS.get(kind)
    if build is None:
        found = f"is of type {kind!r} (tokenizer.ggml.model)" if kind else "is not in the file (tokenizer.ggml.model)"
        raise StartupError(
            f"{name}: the tokenizer {found}; 'gpt2' (byte-level BPE) and 'llama' (sentencepiece BPE) can be "
            "built from a GGUF file. A directory with the model's tokenizer.json can be given with --tokenizer"
        )
    tokens: list[str] = fields.need("tokenizer.ggml.tokens")
    token_types = fields.per_token("token_type", len(tokens))
    backend, add_bos_by_default = build(fields, tokens, token_types)
    _add_special_tokens(backend, tokens, token_types)

    bos = fields.token_id("bos", len(tokens))
    eos = fields.token_id("eos", len(tokens))
    add_bos = fields.get("tokenizer.ggml.add_bos_token")
    _add_ends(
        backend,
        bos if (add_bos_by_default if add_bos is None else add_bos) else None,
        eos if fields.get("tokenizer.ggml.add_eos_token") else None,
    )
    ends = [eos, fields.token_id("eot", len(tokens)), fields.token_id("eom", len(tokens))]
    return Tokenizer(
        backend,
        eos_token_ids=[token_id for token_id in ends if token_id is not None],
        bos_token_id=bos,
        chat_template=_chat_template(fields, tokens),
        name=name,
    )


def _chat_template(fields: _Fields, tokens: list[str]) -> ChatTemplate | None:
    source = fields.get("tokenizer.chat_template")
    if not source:
        return None
    variables = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {variable: fields.token_id(role, len(tokens)) for variable, role in variables.items()}
    named = {variable: tokens[token_id] for variable, token_id in ids.items() if token_id is not None}
    return ChatTemplate(source, named)


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

    def per_token(self, name: str, num_tokens: int) -> list[Any]:
        """`tokenizer.ggml.<name>`, one value for each token."""
        values: list[Any] = self.need(f"tokenizer.ggml.{name}")
        if len(values) != num_tokens:
            raise StartupError(f"{self._name}: tokenizer.ggml.{name} has {len(values)} values for {num_tokens} tokens")
        return values

    def token_id(self, role: str, num_tokens: int) -> int | None:
        """`tokenizer.ggml.<role>_token_id`, inside the vocabulary."""
        key = f"tokenizer.ggml.{role}_token_id"
        value: int | None = self.get(key)
        if value is not None and not 0 <= value < num_tokens:
            raise StartupError(f"{self._name}: {key} is {value}, the vocabulary has {num_tokens} tokens")
        return value


def _byte_level(
    fields: _Fields, tokens: list[str], token_types: list[int]
) -> tuple[tokenizers.Tokenizer, bool]:  # fmt: skip
    """GPT-2's kind: merges in the file, and a rule by name for how the text is cut before."""
    rule = pre_tokenization(fields.need("tokenizer.ggml.pre"))
    pairs = []
    for merge in fields.need("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")  # byte-level tokens contain no space
        pairs.append((left, right))
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=rule.ignore_merges)
    except Exception as error:  # the library raises plain Exception, for a merge of tokens that do not exist
        if type(error) is not Exception:
            raise
        raise StartupError(f"the merges (tokenizer.ggml.merges) do not fit the vocabulary: {error}") from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = rule.build()
    if rule.normalizer is not None:
        backend.normalizer = rule.normalizer()
    backend.decoder = decoders.ByteLevel()
    return backend, rule.add_bos


def _sentencepiece(
    fields: _Fields, tokens: list[str], token_types: list[int]
) -> tuple[tokenizers.Tokenizer, bool]:  # fmt: skip
    """Llama's and Gemma's kind; where the file is silent, a space is put in front and a bos token before that."""
    unknown = fields.token_id("unknown", len(tokens))
    add_space_prefix = fields.get("tokenizer.ggml.add_space_prefix")
    backend = sentencepiece_bpe(
        tokens,
        fields.per_token("scores", len(tokens)),
        token_types,
        unknown=None if unknown is None else tokens[unknown],
        add_space_prefix=True if add_space_prefix is None else add_space_prefix,
    )
    return backend, True


_KINDS = {"gpt2": _byte_level, "llama": _sentencepiece}  # by tokenizer.ggml.model


def _add_special_tokens(backend: tokenizers.Tokenizer, tokens: list[str], token_types: list[int]) -> None:
    """Make control and user-defined tokens known as such; their ids are those of the vocabulary.

    Sentencepiece looks for user-defined ones after spaces became "▁"; where nothing else is normalised, so is the
    token, and both spellings are found.
    """
    control = (TokenType.CONTROL, TokenType.UNKNOWN)
    spaces_only = isinstance(backend.normalizer, normalizers.Replace)
    added = [
        AddedToken(token, special=kind in control, normalized=spaces_only and kind not in control)
        for token, kind in zip(tokens, token_types, strict=True)
        if kind in control or kind == TokenType.USER_DEFINED
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])


def _add_ends(backend: tokenizers.Tokenizer, bos: int | None, eos: int | None) -> None:
    """What `add_special_tokens` adds around a prompt."""
    if bos is None and eos is None:
        return
    names = {token_id: backend.id_to_token(token_id) for token_id in (bos, eos) if token_id is not None}
    first, last = ([] if end is None else [names[end]] for end in (bos, eos))
    backend.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=None,
        special_tokens=[(name, token_id) for token_id, name in names.items()],
    )
