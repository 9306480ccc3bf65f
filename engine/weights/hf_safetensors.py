"""The tensors of a Hugging Face directory: `model.safetensors`, or shards with an index."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import StartupError
from engine.weights.checkpoint import read_json
from kernels.cpu.native import StoredMatrix


class SafetensorsFiles:
    """Name -> tensor, read when asked for."""

    def __init__(self, folder: Path) -> None:
        """Open the checkpoint in `folder`.

        Raises:
            StartupError: there is none, or it can't be read.
        """
        self._shards: dict[str, Path] = {}
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise StartupError(f"{index} has no weight_map")
            files = sorted({folder / str(name) for name in weight_map.values()})
        else:
            files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise StartupError(f"{folder} has no *.safetensors file (other formats of weights are not read)")
        for file in files:
            try:
                with safe_open(file, framework="pt") as shard:
                    self._shards |= dict.fromkeys(shard.keys(), file)
            except (OSError, SafetensorError) as error:
                raise StartupError(f"cannot read {file}: {error}") from error

    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._shards)

    def load(self, name: str) -> torch.Tensor:
        """Tensor `name` in its stored dtype."""
        with safe_open(self._shards[name], framework="pt") as shard:
            tensor: torch.Tensor = shard.get_tensor(name)
        return tensor

    def stored(self, name: str) -> StoredMatrix | None:
        """None: these files hold plain numbers."""
        return None

    def quantization(self, dtype: str) -> str:
        """In words."""
        return f"none, {dtype}"
