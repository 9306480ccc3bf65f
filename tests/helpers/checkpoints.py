"""Tiny checkpoints of each family with random weights, made where a test needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging as transformers_logging

# Sizes that are no powers of two, GQA by 3, a head_dim that isn't hidden_size / num_heads.
SIZES: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
}


CLASSES: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "mistral": (MistralForCausalLM, MistralConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
}
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
INTERLEAVED = ("llama", "mistral")  # whose GGUF files have q_proj and k_proj in another order


def tiny_llama(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random Llama in float32."""
    return tiny_model("llama", seed, **changes)


def tiny_model(kind: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of CLASSES in float32. Norms and biases are random too, so that leaving one out shows."""
    transformers_logging.set_verbosity_error()
    torch.manual_seed(seed)
    model_class, config_class = CLASSES[kind]
    model = model_class(config_class(**(SIZES | changes))).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter) * 0.3 + 1.0)
    return model


def save_hf(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    """Save `model` as a Hugging Face directory (safetensors); returns it."""
    model.save_pretrained(folder, **options)
    return folder


def save_gguf(
    model: PreTrainedModel, path: Path, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32
) -> Path:
    """Save `model` as llama.cpp's conversion would: matrices as `kind`, vectors as float32; returns the file."""
    config = model.config
    family = str(config.model_type)
    writer = gguf.GGUFWriter(path, "llama" if family in INTERLEAVED else family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_token_list([f"token {i} é" for i in range(config.vocab_size)])
    writer.add_array("test.numbers", [1, 2, 3])
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        values = tensor.numpy()
        if heads and family in INTERLEAVED:
            values = interleave(values, heads)
        stem, _, suffix = name.rpartition(".")
        stored = f"{names.get_name(stem)}.{suffix}"
        if values.ndim == 1:
            writer.add_tensor(stored, values)
        else:
            writer.add_tensor(stored, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q_proj or k_proj in llama.cpp's order: row j and row j + half of a head become neighbours."""
    out = np.empty_like(rows)
    head_dim = rows.shape[0] // num_heads
    half = head_dim // 2
    for head in range(num_heads):
        first = head * head_dim
        out[first : first + head_dim : 2] = rows[first : first + half]
        out[first + 1 : first + head_dim : 2] = rows[first + half : first + head_dim]
    return out


def greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """transformers' most likely continuation of `prompt`: `num_tokens` tokens."""
    tokens = torch.tensor([prompt])
    config = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    model.generation_config.eos_token_id = None  # never ends early
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)
    return [int(token) for token in out[0, len(prompt) :]]
