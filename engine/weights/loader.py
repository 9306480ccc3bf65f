"""A checkpoint's tensors, by Hugging Face's names, put together into a decoder's weights.

Both file formats offer the same names. Products of the same input are fused here, so that a step makes fewer calls.
A tensor that is missing and a tensor that nothing uses are both errors: either would compute something else.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.errors import StartupError
from engine.models.config import ModelConfig, config_from_gguf, config_from_hf
from engine.models.decoder import DecoderWeights, HeadNorms, LayerWeights
from engine.models.family import Family
from engine.models.layers.linear import Linear
from engine.models.registry import family_of_gguf, family_of_hf
from engine.quant.gguf_blocks import PLAIN, dequantise
from engine.weights.checkpoint import Checkpoint, read_json
from engine.weights.gguf_file import GgufFile
from engine.weights.hf_safetensors import SafetensorsFiles
from kernels.cpu.native import QUANTISED, StoredMatrix


class WeightSource(Protocol):
    """Tensors by Hugging Face's names."""

    def names(self) -> frozenset[str]:
        """Names of all tensors."""

    def load(self, name: str) -> torch.Tensor:
        """Tensor `name`, rows first."""

    def stored(self, name: str) -> StoredMatrix | None:
        """Tensor `name` in its blocks of few bits, if kernels can compute with those."""

    def quantization(self, dtype: str) -> str:
        """How the weights are stored and what `dtype` made of it, in words."""


class GgufWeights:
    """A GGUF file's tensors under Hugging Face's names, dequantised to float32."""

    def __init__(self, file: GgufFile, family: Family) -> None:
        """Args: an open file, and the family that its names belong to.

        Raises:
            StartupError: the file has a tensor that the family doesn't know.
        """
        self._file, self._family = file, family
        self._gguf_names: dict[str, str] = {}
        for gguf_name in file.tensor_names:
            name = family.hf_name(gguf_name)
            if name is None:
                raise StartupError(f"{file.path}: {family.architecture} has no use for the tensor {gguf_name}")
            self._gguf_names[name] = gguf_name
        self.num_heads = int(file.metadata[f"{family.gguf_architecture}.attention.head_count"])
        self.num_kv_heads = int(
            file.metadata.get(f"{family.gguf_architecture}.attention.head_count_kv", self.num_heads)
        )

    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._gguf_names)

    def load(self, name: str) -> torch.Tensor:
        """Tensor `name`, float32."""
        return self._in_order(name, torch.from_numpy(dequantise(*self._file.raw(self._gguf_names[name]))))

    def stored(self, name: str) -> StoredMatrix | None:
        """See `WeightSource`."""
        rows, kind = self._file.raw(self._gguf_names[name])
        if kind.name not in QUANTISED:
            return None
        # A copy: the library maps the file read-only, which PyTorch warns about.
        return StoredMatrix(kind.name, self._in_order(name, torch.from_numpy(np.array(rows))).contiguous())

    def _in_order(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        projection = name.split(".")[-2] if "." in name else ""
        if projection in self._family.interleaved_in_gguf:
            return split_halves(rows, self.num_heads if projection == "q_proj" else self.num_kv_heads)
        return rows

    def quantization(self, dtype: str) -> str:
        """E.g. "Q4_1 dequantised to bfloat16": the type of most elements."""
        types: Counter[str] = Counter()
        for name in self._file.tensor_names:
            types[self._file.tensor_type(name)] += torch.Size(self._file.shape(name)).numel()
        kind = types.most_common(1)[0][0]
        return f"none, {kind} to {dtype}" if kind in PLAIN else f"{kind} dequantised to {dtype}"


def split_halves(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of `[num_heads * head_dim, ...]` from neighbouring rotary pairs to pairs half a head apart."""
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])  # [num_heads, head_dim / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(tensor.shape)


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint that is open, with nothing of its weights in memory yet."""

    config: ModelConfig
    source: WeightSource
    stored_dtype: torch.dtype | None  # what the file asks for; None = a GGUF file, which asks for nothing


def open_checkpoint(checkpoint: Checkpoint) -> LoadedCheckpoint:
    """Read the shape of a model and find its tensors.

    Raises:
        StartupError: the files can't be read, or the model isn't supported.
    """
    if checkpoint.kind == "gguf":
        file = GgufFile(checkpoint.path)
        family = family_of_gguf(file.metadata.get("general.architecture", "(none given)"))
        names = file.tensor_names
        if "token_embd.weight" not in names:
            raise StartupError(f"{checkpoint.path} has no token_embd.weight: a part of a split file?")
        config = config_from_gguf(
            file.metadata,
            family.architecture,
            file.shape("token_embd.weight")[0],
            tie_word_embeddings="output.weight" not in names,
            traits=family.traits,
        )
        return LoadedCheckpoint(config, GgufWeights(file, family), None)
    values = read_json(checkpoint.path / "config.json")
    family = family_of_hf(values.get("architectures"))
    stored = getattr(torch, str(values.get("dtype") or values.get("torch_dtype")), None)
    return LoadedCheckpoint(
        config_from_hf(values, family.architecture, family.traits),
        SafetensorsFiles(checkpoint.path),
        stored if isinstance(stored, torch.dtype) else None,
    )


def load_weights(
    source: WeightSource,
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    is_packed: bool = False,
    keep_stored: bool = False,
) -> DecoderWeights:
    """Load every weight as `dtype`, one after the other.

    Args:
        source: of the tensors.
        config: of the model.
        dtype: of the weights.
        device: where to.
        is_packed: put those of products into the layout that PyTorch computes fastest with here.
        keep_stored: also keep matrices of few bits as they are stored, see `Linear.stored`.

    Raises:
        StartupError: a tensor is missing, has another shape than the config says, or isn't used.
    """
    unused = set(source.names())

    def take(name: str, *shape: int) -> torch.Tensor:
        if name not in unused:
            raise StartupError(f"the checkpoint has no tensor {name}")
        unused.remove(name)
        tensor = source.load(name)
        if tuple(tensor.shape) != shape:
            raise StartupError(f"tensor {name} is {tuple(tensor.shape)}, the config says {shape}")
        return tensor.to(device, dtype)

    def fused(names: list[tuple[str, int]], in_features: int, *, must_have_bias: bool = False) -> Linear:
        weight = torch.cat([take(f"{name}.weight", rows, in_features) for name, rows in names])
        bias = None
        if must_have_bias or f"{names[0][0]}.bias" in unused:
            bias = torch.cat([take(f"{name}.bias", rows) for name, rows in names])
        linear = Linear(weight, bias, stored([f"{name}.weight" for name, _ in names]))
        return linear.packed() if is_packed else linear

    def stored(names: list[str]) -> StoredMatrix | None:
        parts = [source.stored(name) for name in names] if keep_stored else []
        found = [part for part in parts if part is not None]
        if not found or len(found) < len(parts) or len({part.kind for part in found}) > 1:
            return None
        return StoredMatrix(found[0].kind, torch.cat([part.rows for part in found]))

    def layer(index: int) -> LayerWeights:
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return LayerWeights(
            input_norm=take(f"{prefix}.input_layernorm.weight", hidden),
            qkv=fused(
                [(f"{attention}.q_proj", q_rows), (f"{attention}.k_proj", kv_rows), (f"{attention}.v_proj", kv_rows)],
                hidden,
                must_have_bias=traits.has_qkv_bias,
            ),
            output=fused([(f"{attention}.o_proj", hidden)], q_rows),
            post_attention_norm=take(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=fused([(f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner)], hidden),
            down=fused([(f"{mlp}.down_proj", hidden)], inner),
            head_norms=head_norms(attention) if traits.has_qk_norm else None,
        )

    def head_norms(attention: str) -> HeadNorms:
        query, key = (take(f"{attention}.{name}_norm.weight", config.head_dim) for name in "qk")
        return HeadNorms(query, key, config.rms_norm_eps)

    hidden, inner, traits = config.hidden_size, config.intermediate_size, config.traits
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    embedding = take("model.embed_tokens.weight", config.vocab_size, hidden)
    if config.tie_word_embeddings:
        head, head_name = embedding, "model.embed_tokens.weight"
        unused.discard("lm_head.weight")  # some files store the tied matrix twice
    else:
        head_name = "lm_head.weight"
        head = take(head_name, config.vocab_size, hidden)
    weights = DecoderWeights(
        embedding=embedding,
        layers=tuple(layer(index) for index in range(config.num_layers)),
        norm=take("model.norm.weight", hidden),
        head=Linear(head).packed() if is_packed else Linear(head, stored=stored([head_name])),
        rope_divisors=take("rope_divisors", config.head_dim // 2).float().cpu() if "rope_divisors" in unused else None,
    )
    unused = {name for name in unused if not name.endswith("rotary_emb.inv_freq")}  # old files store the angles
    if unused:
        raise StartupError(f"the checkpoint has tensors that this model doesn't use: {', '.join(sorted(unused)[:5])}")
    return weights
