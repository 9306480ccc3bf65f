"""The decoder that the model families share: norm, attention, norm, gated MLP, with residuals around both.

Plain functions over tensors. A step's tokens of all sequences lie in one flat `[num_tokens, ...]` batch; which token
sees which is the attention's business, which is passed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.models.config import ModelConfig
from engine.models.layers.linear import Linear
from engine.models.layers.rotary import RotaryTable, inverse_frequencies
from kernels.registry import select


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights of the RMS norms over each query head and each key head, `[head_dim]`."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


class Attention(Protocol):
    """Attention of one step: knows the block tables and the cache."""

    def attend(
        self, layer: int, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norms: HeadNorms | None
    ) -> torch.Tensor:
        """Norm and rotate queries and keys, store keys and values, and attend.

        Args:
            layer: index.
            heads: `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`, queries, keys, values; changed.
            cos, sin: `[num_tokens, head_dim]`, see `engine.models.layers.rotary`.
            norms: None = there are none.

        Returns:
            `[num_tokens, num_heads, head_dim]`.
        """


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer, products of the same input fused into one."""

    input_norm: torch.Tensor  # [hidden_size]
    qkv: Linear  # hidden_size -> (num_heads + 2 * num_kv_heads) * head_dim
    output: Linear  # num_heads * head_dim -> hidden_size
    post_attention_norm: torch.Tensor  # [hidden_size]
    gate_up: Linear  # hidden_size -> 2 * intermediate_size
    down: Linear  # intermediate_size -> hidden_size
    head_norms: HeadNorms | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a model."""

    embedding: torch.Tensor  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [hidden_size]
    head: Linear  # hidden_size -> vocab_size; where they are tied, the embedding's memory or a packed copy
    rope_divisors: torch.Tensor | None = None  # [head_dim / 2], see `inverse_frequencies`

    def tensors(self) -> list[torch.Tensor]:
        """Each distinct tensor once."""
        found = [self.embedding, self.norm, self.head.weight]
        for layer in self.layers:
            found += [layer.input_norm, layer.post_attention_norm]
            found += [] if layer.head_norms is None else [layer.head_norms.query, layer.head_norms.key]
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
                found += [linear.weight] if linear.bias is None else [linear.weight, linear.bias]
        return list({id(tensor): tensor for tensor in found}.values())

    def num_parameters(self, *, is_tied: bool) -> int:
        """Parameters of the model; a head that is tied to the embedding is the same ones, packed or not."""
        total = sum(tensor.numel() for tensor in self.tensors())
        return total - (self.head.weight.numel() if is_tied and self.head.weight is not self.embedding else 0)


class Decoder:
    """Token ids to hidden states to logits."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, max_len: int, *, kernels: str = "auto") -> None:
        """Args: config, weights; max_len, longest sequence; kernels, whose implementation of norm and gate."""
        self.config = config
        self.weights = weights
        device = weights.embedding.device
        frequencies = inverse_frequencies(
            config.head_dim, config.rope_theta, config.rope_scaling, weights.rope_divisors
        )
        self._rotary = RotaryTable(frequencies, max_len, device)
        self._rms_norm: Callable[..., torch.Tensor] = select("rms_norm", device.type, kernels).load()
        self._add_rms_norm: Callable[..., torch.Tensor] = select("add_rms_norm", device.type, kernels).load()
        self._silu_and_mul: Callable[..., torch.Tensor] = select("silu_and_mul", device.type, kernels).load()

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Hidden states before the last norm.

        Args:
            token_ids: `[num_tokens]`.
            positions: `[num_tokens]`, each token's place in its sequence.
            attention: of this step.

        Returns:
            `[num_tokens, hidden_size]`.
        """
        config, eps = self.config, self.config.rms_norm_eps
        cos, sin = self._rotary.at(positions)
        hidden = F.embedding(token_ids, self.weights.embedding)
        x: torch.Tensor | None = None  # what is to be added to the residual stream
        for index, layer in enumerate(self.weights.layers):
            if x is None:
                x = self._rms_norm(hidden, layer.input_norm, eps)
            else:
                x = self._add_rms_norm(x, hidden, layer.input_norm, eps)
            heads = layer.qkv(x).view(x.shape[0], -1, config.head_dim)  # [num_tokens, num_heads + 2 * num_kv_heads, .]
            attended = attention.attend(index, heads, cos, sin, layer.head_norms)
            x = self._add_rms_norm(
                layer.output(attended.reshape(x.shape[0], -1)), hidden, layer.post_attention_norm, eps
            )
            x = layer.down(self._silu_and_mul(layer.gate_up(x)))
        return hidden if x is None else hidden.add_(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[n, vocab_size]`, float32, of hidden states `[n, hidden_size]`."""
        return self.weights.head(self._rms_norm(hidden, self.weights.norm, self.config.rms_norm_eps)).float()
