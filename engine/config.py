"""The engine's configuration: what is fixed at start. Limits that may change later are in `engine.core.limits`."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core.limits import Limits

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What `Engine.from_config` builds; flags of the same names set it (see `app.settings`)."""

    model: str = "smollm2"  # "smollm2" (the embedded package), a .gguf file, a Hugging Face directory or hub id
    tokenizer: str | None = None  # None = the model's own
    served_model_name: str | None = None  # None = derived from `model`
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    kv_cache_dtype: str = "auto"  # auto = as dtype
    device: str = "auto"  # auto, cpu, cuda
    attention_backend: str = "auto"  # auto, native, cpu, triton, reference
    enforce_eager: bool = False  # on a GPU: no captured graphs
    max_model_len: int | None = None  # None = the model's, shrunk to what the pool holds
    block_size: int = 16
    kv_cache_memory_bytes: int = 2 * GIB  # on a CPU; capped by free memory
    gpu_memory_utilization: float = 0.9  # on a GPU, of all its memory
    num_kv_blocks: int | None = None  # overrides the sizing by memory
    enable_prefix_caching: bool = True
    threads: int | None = None  # None = all cores this process may use
    seed: int = 0  # seeds the draws of per-request seeds
    deterministic: bool = False  # bits that depend on nothing but the request: native kernels only, never 4 bits
    generation_config: str = "auto"  # auto = the model's generation_config.json gives defaults; vllm = it doesn't
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the loaded model is; shown by the console, /v1/models and cache_config_info."""

    name: str  # served name
    architecture: str  # e.g. "LlamaForCausalLM"
    dtype: str
    kv_cache_dtype: str
    device: str  # "cpu" or "cuda"
    attention_backend: str  # implementation in use, with the reason it was chosen
    quantization: str  # e.g. "Q4_1 dequantised to bfloat16"
    num_parameters: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    kv_bytes_per_block: int
    weights_bytes: int
    threads: int
    # The model's own sampling parameters for where a client is silent: (name in SamplingParams, value).
    generation_defaults: tuple[tuple[str, float], ...] = ()
    device_text: str = ""  # the device in words, with the reason it was chosen
