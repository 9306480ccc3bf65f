"""The angles of the rotary embedding, computed once for every position."""

from __future__ import annotations

import math

import torch

from engine.models.config import RopeScaling


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, divisors: torch.Tensor | None = None
) -> torch.Tensor:
    """Radians per position of each pair of dimensions, `[head_dim / 2]`, float32.

    Args:
        head_dim: dimensions of a head, even.
        theta: base of the geometric series (Su et al. 2021).
        scaling: stretch, or None.
        divisors: `[head_dim / 2]`, what GGUF files carry in place of the "llama3" scaling's parameters.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if divisors is not None:
        frequencies = frequencies / divisors.float()
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # Llama 3: how often a pair turns within the original context decides. At least high_freq_factor times: as it is;
    # at most low_freq_factor times: stretched; between them: a blend.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


class RotaryTable:
    """cos and signed sin of every position, in the form that `kernels`' rope takes."""

    def __init__(self, frequencies: torch.Tensor, max_len: int, device: torch.device | str = "cpu") -> None:
        """Args: frequencies `[head_dim / 2]`, radians per position, on the CPU; max_len, positions; device to use."""
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies)  # [max_len, head_dim / 2]
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), dim=1).to(device)  # [max_len, head_dim], as is the next
        self._sin = torch.cat((-sin, sin), dim=1).to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin at `positions` `[num_tokens]`: two `[num_tokens, head_dim]`, float32."""
        return self._cos[positions], self._sin[positions]
