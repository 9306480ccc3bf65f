"""The Llama family: what differs between its members is in the config, what differs between file formats is here."""

from __future__ import annotations

from engine.models.family import Family

# GGUF name of a layer's tensor -> Hugging Face's.
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


def hf_name(gguf_name: str) -> str | None:
    """Hugging Face's name of a tensor of a GGUF file; None if there is none."""
    if gguf_name in _NAMES:
        return _NAMES[gguf_name]
    prefix, _, rest = gguf_name.partition(".")
    index, _, tail = rest.partition(".")
    name, _, kind = tail.rpartition(".")
    if prefix != "blk" or not index.isdigit() or name not in _LAYER_NAMES or kind not in ("weight", "bias"):
        return None
    return f"model.layers.{index}.{_LAYER_NAMES[name]}.{kind}"


# llama.cpp rotates neighbouring dimensions of a head, Hugging Face dimension i with i + head_dim / 2; the conversion
# to GGUF reorders the rows of these two so that both compute the same.
_INTERLEAVED = ("q_proj", "k_proj")

LLAMA = Family("LlamaForCausalLM", "llama", hf_name, _INTERLEAVED)
MISTRAL = Family("MistralForCausalLM", None, hf_name, _INTERLEAVED)  # its GGUF files say "llama"
