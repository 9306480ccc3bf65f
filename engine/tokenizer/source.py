"""Where a tokenizer's files are: the embedded model, a path, or the hub.

A tokenizer may be named without its model (`--tokenizer`), so a directory here need not hold a config.json or weights,
and of a hub id only the tokenizer's files are fetched.
"""

from __future__ import annotations

import re
from pathlib import Path

from engine.errors import StartupError
from engine.weights.checkpoint import EMBEDDED_MODEL, resolve_model

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = [
    "tokenizer*",
    "*.jinja",
    "*.model",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
]
_HUB_FILES += ["generation_config.json", "config.json"]


def find_tokenizer(name: str) -> Path:
    """A .gguf file, or a directory with a tokenizer in it. For a hub id only the tokenizer's files are fetched.

    Raises:
        StartupError: nothing is there; the message says what was looked for.
    """
    if name == EMBEDDED_MODEL:
        return resolve_model(name).path
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise StartupError(f"{name} is neither a .gguf file nor a directory with a tokenizer in it")
        return path
    if path.is_dir():
        return path
    if _HUB_ID.fullmatch(name) is None or path.suffix.lower() == ".gguf":
        raise StartupError(f'{name} is neither "{EMBEDDED_MODEL}", a .gguf file, a directory that exists nor a hub id')
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and only needed here
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, OSError) as error:
        raise StartupError(f"{name} is no directory here and could not be fetched from the hub: {error}") from error
