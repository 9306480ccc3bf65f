"""The Llama family: what differs between its members is in the config, what differs between file formats is here."""

from __future__ import annotations

from engine.models.config import Traits
from engine.models.family import Family, gguf_names

# llama.cpp rotates neighbouring dimensions of a head, Hugging Face dimension i with i + head_dim / 2; the conversion
# to GGUF reorders the rows of these two so that both compute the same.
_INTERLEAVED = ("q_proj", "k_proj")

LLAMA = Family("LlamaForCausalLM", "llama", gguf_names(), _INTERLEAVED)
MISTRAL = Family(  # its GGUF files say "llama"
    "MistralForCausalLM", None, gguf_names(), _INTERLEAVED, Traits(has_window=True)
)
