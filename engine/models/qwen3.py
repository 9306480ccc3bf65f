"""Qwen 3, dense: Llama with an RMS norm over each query head and each key head (Yang et al. 2025)."""

from __future__ import annotations

from engine.models.config import Traits
from engine.models.family import Family, gguf_names

_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}

QWEN3 = Family(
    "Qwen3ForCausalLM",
    "qwen3",
    gguf_names(_HEAD_NORMS),
    traits=Traits(has_qk_norm=True, has_window=True, has_window_switch=True),
)
