"""A tokenizer out of a Hugging Face directory.

`tokenizer.json` is read by the Rust library directly, and it decides what is added around a prompt: the flags
add_bos_token and add_eos_token beside it are, as in transformers, for the older formats only. Which ids end an answer
is spread over three files: generation_config.json (often several ids), config.json and tokenizer_config.json (a
token's name). The chat template is chat_template.jinja or a field of tokenizer_config.json, where it may also be a
list of named templates.

A directory without tokenizer.json goes through transformers, which converts the older formats; its import takes
seconds, hence late.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from engine.errors import StartupError
from engine.tokenizer.chat_template import ChatTemplate
from engine.tokenizer.tokenizer import Tokenizer


def load_hf_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of this directory.

    Raises:
        StartupError: there is none, or one that cannot be read.
    """
    config = _read_json(folder / "tokenizer_config.json")
    backend = _backend(folder)
    named = _special_tokens(folder, config)
    eos = list(_eos_token_ids(folder, backend, named))
    source = _template_source(folder, config)
    return Tokenizer(
        backend,
        eos_token_ids=eos,
        bos_token_id=_id_of(backend, named.get("bos_token")),
        chat_template=None if source is None else ChatTemplate(source, named),
        name=str(folder),
    )


def _backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return _converted(folder)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for whatever it cannot parse
        if type(error) is not Exception:
            raise
        raise StartupError(f"{path} cannot be read: {error}") from error


def _converted(folder: Path) -> tokenizers.Tokenizer:
    from transformers import AutoTokenizer

    try:
        slow_or_fast = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        raise StartupError(f"{folder} has no tokenizer.json, and no other tokenizer could be read: {error}") from error
    backend = getattr(slow_or_fast, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise StartupError(
            f"{folder} has no tokenizer.json, and {type(slow_or_fast).__name__} cannot be converted to one"
        )
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    """The file's object; empty if there is no file."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise StartupError(f"{path} must hold a JSON object")
    return content


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Token names by role ("bos_token", ...): variables of chat templates."""
    roles = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    fallback = _read_json(folder / "special_tokens_map.json")
    named: dict[str, str] = {}
    for role in roles:
        token = config.get(role) or fallback.get(role)
        if isinstance(token, dict):  # an AddedToken written out
            token = token.get("content")
        if isinstance(token, str):
            named[role] = token
    return named


def _eos_token_ids(folder: Path, backend: tokenizers.Tokenizer, named: dict[str, str]) -> Iterator[int]:
    """From every file that says so: a chat model's end of turn is often in only one of them."""
    for file in ("generation_config.json", "config.json"):
        value = _read_json(folder / file).get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if isinstance(token_id, int) and not isinstance(token_id, bool):
                yield token_id
        if value is not None:
            break  # config.json's is older than generation_config.json's
    token_id = _id_of(backend, named.get("eos_token"))
    if token_id is not None:
        yield token_id


def _id_of(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    if token is None:
        return None
    token_id: int | None = backend.token_to_id(token)
    return token_id


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    template = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default") or next(iter(by_name.values()), None)
    return template if isinstance(template, str) else None
