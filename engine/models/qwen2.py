"""Qwen 2 and 2.5: Llama with biases on the projections to queries, keys and values (Yang et al. 2024)."""

from __future__ import annotations

from engine.models.config import Traits
from engine.models.family import Family, gguf_names

QWEN2 = Family(
    "Qwen2ForCausalLM", "qwen2", gguf_names(), traits=Traits(has_qkv_bias=True, has_window=True, has_window_switch=True)
)
