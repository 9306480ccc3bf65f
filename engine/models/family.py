"""What the loader must know of a model family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.models.config import LLAMA_TRAITS, Traits

# GGUF name of a layer's tensor -> Hugging Face's: what all families have.
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_divisors",
}


@dataclass(frozen=True, slots=True)
class Family:
    """One supported architecture."""

    architecture: str  # Hugging Face's class name
    gguf_architecture: str | None  # `general.architecture`; None = its GGUF files go by another family's name
    hf_name: Callable[[str], str | None]  # GGUF tensor name -> Hugging Face's
    interleaved_in_gguf: tuple[str, ...] = ()  # projections whose rows GGUF files order for neighbouring rotary pairs
    traits: Traits = LLAMA_TRAITS


def gguf_names(more: Mapping[str, str] | None = None) -> Callable[[str], str | None]:
    """Hugging Face's name of a tensor of a GGUF file, None if there is none: of all families' tensors and of `more`
    of a layer's."""
    layer_names = {**_LAYER_NAMES, **(more or {})}

    def hf_name(gguf_name: str) -> str | None:
        if gguf_name in _NAMES:
            return _NAMES[gguf_name]
        prefix, _, rest = gguf_name.partition(".")
        index, _, tail = rest.partition(".")
        name, _, kind = tail.rpartition(".")
        if prefix != "blk" or not index.isdigit() or name not in layer_names or kind not in ("weight", "bias"):
            return None
        return f"model.layers.{index}.{layer_names[name]}.{kind}"

    return hf_name
