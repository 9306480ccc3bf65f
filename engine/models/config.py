"""What a decoder's shape is, read from a Hugging Face `config.json` or from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import StartupError


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for a longer context."""

    kind: str  # "linear" (all by factor) or "llama3" (the low ones, blending between two wavelengths)
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class Traits:
    """What a family's layers have beyond Llama's."""

    has_qk_norm: bool = False  # an RMS norm over each query head and each key head, before the rotation
    has_qkv_bias: bool = False  # the projections to queries, keys and values always have biases
    has_window: bool = False  # a config's sliding_window counts
    has_window_switch: bool = False  # but only where use_sliding_window is set


LLAMA_TRAITS = Traits()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder-only transformer; sizes are in elements."""

    architecture: str  # Hugging Face's class name, e.g. "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    windows: tuple[int, ...] = ()  # per layer: tokens a position sees, itself included; 0 = all. () = all, everywhere
    traits: Traits = LLAMA_TRAITS

    @property
    def smallest_window(self) -> int | None:
        """The smallest sliding window of any layer: up to that length windows make no difference. None = no window."""
        return min((window for window in self.windows if window), default=None)

    def check(self) -> None:
        """Check that the sizes fit together.

        Raises:
            StartupError: names the sizes that don't.
        """
        if self.num_heads % self.num_kv_heads:
            raise StartupError(f"{self.num_heads} heads are no multiple of {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            raise StartupError(f"head_dim {self.head_dim} is odd: rotary embedding pairs dimensions")


def config_from_hf(values: Mapping[str, Any], architecture: str, traits: Traits = LLAMA_TRAITS) -> ModelConfig:
    """The shape in a `config.json`.

    Args:
        values: of the file.
        architecture: Hugging Face's class, one of `engine.models.registry`.
        traits: of its family.

    Raises:
        StartupError: a field is missing, or asks for something that this decoder doesn't compute.
    """
    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method", "unknown")
        raise StartupError(f"the checkpoint is quantised with {method!r}; supported are unquantised ones and GGUF")
    _refuse_other("hidden_act", values.get("hidden_act", "silu"), "silu")
    try:
        hidden_size, num_heads = int(values["hidden_size"]), int(values["num_attention_heads"])
        config = ModelConfig(
            architecture=architecture,
            vocab_size=int(values["vocab_size"]),
            hidden_size=hidden_size,
            intermediate_size=int(values["intermediate_size"]),
            num_layers=int(values["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(values.get("num_key_value_heads") or num_heads),
            head_dim=int(values.get("head_dim") or hidden_size // num_heads),
            rms_norm_eps=float(values["rms_norm_eps"]),
            max_position_embeddings=int(values["max_position_embeddings"]),
            rope_theta=_hf_rope_theta(values),
            rope_scaling=_hf_rope_scaling(values),
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            windows=_hf_windows(values, traits),
            traits=traits,
        )
    except KeyError as error:
        raise StartupError(f"config.json has no {error}") from error
    config.check()
    return config


def _hf_windows(values: Mapping[str, Any], traits: Traits) -> tuple[int, ...]:
    window = values.get("sliding_window")
    is_on = traits.has_window and (not traits.has_window_switch or values.get("use_sliding_window", False))
    if not window or not is_on:
        return ()
    num_layers = int(values["num_hidden_layers"])
    kinds = values.get("layer_types")
    if kinds is None and traits.has_window_switch:  # before layers were listed: those from max_window_layers on
        first = int(values.get("max_window_layers", 28))
        kinds = ["full_attention"] * min(first, num_layers) + ["sliding_attention"] * max(0, num_layers - first)
    kinds = kinds or ["sliding_attention"] * num_layers
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != num_layers:
        raise StartupError(f"layer_types of {len(kinds)} layers with {', '.join(sorted(set(kinds)))} is not supported")
    windows = tuple(int(window) if kind == "sliding_attention" else 0 for kind in kinds)
    return windows if any(windows) else ()


def _refuse_other(name: str, value: object, supported: object) -> None:
    if value != supported:
        raise StartupError(f"{name} {value!r} is not supported (only {supported!r})")


def _hf_rope(values: Mapping[str, Any]) -> Mapping[str, Any]:
    # transformers 5 writes rope_parameters, which include the base; before, rope_scaling stood beside rope_theta.
    return values.get("rope_parameters") or values.get("rope_scaling") or {}


def _hf_rope_theta(values: Mapping[str, Any]) -> float:
    return float(_hf_rope(values).get("rope_theta") or values.get("rope_theta") or 10_000.0)


def _hf_rope_scaling(values: Mapping[str, Any]) -> RopeScaling | None:
    rope = _hf_rope(values)
    if float(rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0) != 1.0:
        raise StartupError("rotary embedding of a part of each head is not supported")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]),
        )
    raise StartupError(f"rope type {kind!r} is not supported (default, linear and llama3 are)")


def config_from_gguf(
    metadata: Mapping[str, Any],
    architecture: str,
    vocab_size: int,
    *,
    tie_word_embeddings: bool,
    traits: Traits = LLAMA_TRAITS,
) -> ModelConfig:
    """The shape in GGUF metadata.

    Args:
        metadata: of the file.
        architecture: the Hugging Face class that it stands for.
        vocab_size: rows of the embedding (the metadata doesn't always say).
        tie_word_embeddings: whether the file has no output matrix of its own.
        traits: of its family.

    Raises:
        StartupError: a field is missing, or asks for something that this decoder doesn't compute.
    """
    prefix = metadata["general.architecture"]

    def field(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{prefix}.{name}", default)
        if value is None:
            raise StartupError(f"the GGUF metadata has no {prefix}.{name}")
        return value

    if field("expert_count", 0):
        raise StartupError(f"mixture-of-experts models are not supported ({prefix}.expert_count is set)")
    num_heads, hidden_size = field("attention.head_count"), int(field("embedding_length"))
    num_kv_heads = field("attention.head_count_kv", num_heads)
    if isinstance(num_heads, list) or isinstance(num_kv_heads, list):
        raise StartupError("models whose layers differ in their number of heads are not supported")
    head_dim = int(field("attention.key_length", hidden_size // num_heads))
    for name in ("attention.value_length", "rope.dimension_count"):
        _refuse_other(f"{prefix}.{name}", int(field(name, head_dim)), head_dim)
    scaling_kind = field("rope.scaling.type", "none")
    if scaling_kind not in ("none", "linear"):
        raise StartupError(f"rope scaling {scaling_kind!r} is not supported (none and linear are)")
    num_layers, window = int(field("block_count")), int(field("attention.sliding_window", 0))
    config = ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=int(field("feed_forward_length")),
        num_layers=num_layers,
        num_heads=int(num_heads),
        num_kv_heads=int(num_kv_heads),
        head_dim=head_dim,
        rms_norm_eps=float(field("attention.layer_norm_rms_epsilon")),
        max_position_embeddings=int(field("context_length")),
        rope_theta=float(field("rope.freq_base", 10_000.0)),
        rope_scaling=RopeScaling("linear", float(field("rope.scaling.factor"))) if scaling_kind == "linear" else None,
        tie_word_embeddings=tie_word_embeddings,
        windows=(window,) * num_layers if window else (),
        traits=traits,
    )
    config.check()
    return config
