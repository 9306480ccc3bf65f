"""A decoder whose layers are walked by one native call per step: what can be, and the packing of its weights."""

from __future__ import annotations

from collections.abc import Collection

import torch

from engine.models.config import ModelConfig
from engine.models.decoder import DecoderWeights, LayerWeights
from engine.models.layers.linear import Linear
from engine.models.layers.rotary import RotaryTable, inverse_frequencies
from kernels.cpu.native import (
    DTYPES,
    MAX_HEAD_DIM,
    ModelShape,
    NativeKernels,
    PackedLayer,
    PackedLinear,
    PackedModel,
)
from kernels.cpu.native_library import why_not


def why_not_native(
    config: ModelConfig, tensor_names: Collection[str], dtype: torch.dtype, kv_dtype: torch.dtype, max_len: int
) -> str | None:
    """Why the native walk can't compute a model here; None = it can.

    Args:
        config: of the model.
        tensor_names: Hugging Face's names of its checkpoint's tensors.
        dtype: of weights and activations.
        kv_dtype: of the KV cache.
        max_len: longest sequence to be served, tokens.
    """
    if dtype not in DTYPES:
        return f"it computes in bfloat16 or float32, not in {_name(dtype)}"
    if kv_dtype != dtype:
        return f"it keeps the KV cache in the weights' {_name(dtype)}, not in {_name(kv_dtype)}"
    if config.head_dim > MAX_HEAD_DIM:
        return f"its heads have at most {MAX_HEAD_DIM} dimensions, these have {config.head_dim}"
    if config.traits.has_qk_norm:
        return "it has no norm of query and key heads"
    if any(name.endswith(".bias") for name in tensor_names):
        return "it has no products with biases"
    if config.smallest_window is not None and max_len > config.smallest_window:
        return (
            f"it has no sliding window, and this model's is {config.smallest_window} tokens "
            f"(--max-model-len {config.smallest_window} is within it)"
        )
    return why_not()


def pack_weights(
    kernels: NativeKernels, config: ModelConfig, weights: DecoderWeights, max_len: int, *, uses_stored: bool = True
) -> PackedModel:
    """Pack all matrices. Each one's memory is released once it is packed: `weights` can't be used afterwards.

    Args:
        kernels: that will compute with them.
        config: of the model.
        weights: without biases.
        max_len: longest sequence, for the rotary table.
        uses_stored: steps of few tokens read matrices as their file holds them, whose results are other bits than those
            of larger steps.
    """

    def packed(linear: Linear, *, is_gate_up: bool = False) -> PackedLinear:
        result = kernels.pack(linear.weight, is_gate_up=is_gate_up, stored=linear.stored if uses_stored else None)
        _release(linear.weight)
        return result

    def layer(loaded: LayerWeights) -> PackedLayer:
        return PackedLayer(
            input_norm=loaded.input_norm.float(),
            post_attention_norm=loaded.post_attention_norm.float(),
            qkv=packed(loaded.qkv),
            output=packed(loaded.output),
            gate_up=packed(loaded.gate_up, is_gate_up=True),
            down=packed(loaded.down),
        )

    frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling, weights.rope_divisors)
    cos, sin = RotaryTable(frequencies, max_len).at(torch.arange(max_len))
    shape = ModelShape(
        num_layers=config.num_layers,
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        scale=config.head_dim**-0.5,
    )
    is_tied = weights.embedding.data_ptr() == weights.head.weight.data_ptr()
    layers = tuple(layer(loaded) for loaded in weights.layers)
    return PackedModel(
        shape=shape,
        layers=layers,
        norm=weights.norm.float(),
        head=packed(weights.head),
        embedding=None if is_tied else weights.embedding,
        cos=cos,
        sin=sin,
    )


def _release(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    if storage.resizable():  # one that is mapped from its file goes with its last reference
        storage.resize_(0)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
