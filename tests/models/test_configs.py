"""What a config says is what is computed, or it is refused by name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.config import EngineConfig
from engine.errors import StartupError
from engine.models.config import RopeScaling, config_from_gguf, config_from_hf
from engine.models.layers.rotary import RotaryTable, inverse_frequencies
from engine.models.registry import FAMILIES, family_of_gguf, family_of_hf
from engine.runner.executor import choose_dtype, load_runner, usable_cores
from engine.sampling_params import SamplingParams
from tests.helpers.checkpoints import SIZES, greedy, save_gguf, save_hf, tiny_llama
from tests.runner.driver import Driver

HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
}  # fmt: skip
GGUF: dict[str, Any] = {
    "general.architecture": "llama", "llama.context_length": 512, "llama.embedding_length": 64,
    "llama.block_count": 2, "llama.feed_forward_length": 128, "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
}  # fmt: skip


def test_defaults_of_older_configs() -> None:
    config = config_from_hf(HF, "LlamaForCausalLM")
    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.rope_scaling) == (4, 16, 10_000.0, None)
    assert not config.tie_word_embeddings
    assert config == config_from_gguf(GGUF, "LlamaForCausalLM", 100, tie_word_embeddings=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "a part of each head"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised with 'awq'"),
        ({"num_key_value_heads": 3}, "4 heads are no multiple of 3 KV heads"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
    ],
)
def test_hf_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        config_from_hf(HF | changes, "LlamaForCausalLM")


def test_a_missing_field_is_named() -> None:
    without = {key: value for key, value in HF.items() if key != "rms_norm_eps"}
    with pytest.raises(StartupError, match="no 'rms_norm_eps'"):
        config_from_hf(without, "LlamaForCausalLM")
    with pytest.raises(StartupError, match=r"no llama\.block_count"):
        config_from_gguf(
            {key: value for key, value in GGUF.items() if key != "llama.block_count"},
            "LlamaForCausalLM", 100, tie_word_embeddings=True,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count 8 is not supported"),
        ({"llama.attention.value_length": 8}, "value_length 8 is not supported"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
        ({"llama.attention.head_count_kv": [1, 2]}, "differ in their number of heads"),
    ],
)
def test_gguf_metadata_that_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        config_from_gguf(GGUF | changes, "LlamaForCausalLM", 100, tie_word_embeddings=True)


def test_unknown_architectures_are_refused_with_the_list_of_supported_ones() -> None:
    with pytest.raises(StartupError, match="GPT2LMHeadModel is not supported: LlamaForCausalLM, MistralForCausalLM"):
        family_of_hf(["GPT2LMHeadModel"])
    with pytest.raises(StartupError, match=r"\(none given\) is not supported"):
        family_of_hf(None)
    with pytest.raises(StartupError, match="GGUF architecture 'gemma3' is not supported: llama"):
        family_of_gguf("gemma3")
    assert [family_of_hf([family.architecture]) for family in FAMILIES] == list(FAMILIES)


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    "rope", [{"rope_type": "default", "rope_theta": 1e5}, {"rope_type": "linear", "factor": 4.0}, LLAMA3]
)
@pytest.mark.parametrize("head_dim", [20, 64])
def test_rotary_angles_are_transformers(rope: dict[str, Any], head_dim: int) -> None:
    parameters = {"rope_theta": 10_000.0} | rope
    values = HF | {"head_dim": head_dim, "rope_parameters": parameters}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**values))
    config = config_from_hf(values, "LlamaForCausalLM")
    frequencies = inverse_frequencies(head_dim, config.rope_theta, config.rope_scaling)
    torch.testing.assert_close(frequencies, theirs.inv_freq, atol=0, rtol=1e-6)
    positions = torch.tensor([0, 3, 77])
    cos, sin = RotaryTable(frequencies, 100).at(positions)
    their_cos, their_sin = theirs(torch.zeros(1), positions[None])
    torch.testing.assert_close(cos, their_cos[0], atol=1e-5, rtol=0)
    signs = torch.ones(head_dim)
    signs[: head_dim // 2] = -1
    torch.testing.assert_close(sin, their_sin[0] * signs, atol=1e-5, rtol=0)


def test_divisors_of_gguf_files_replace_the_scaling() -> None:
    divisors = torch.tensor([1.0, 2.0, 8.0, 8.0])
    plain = inverse_frequencies(8, 10_000.0, None)
    assert torch.equal(inverse_frequencies(8, 10_000.0, None, divisors), plain / divisors)
    assert torch.equal(inverse_frequencies(8, 10_000.0, RopeScaling("linear", 2.0)), plain / 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 6, "head_dim": 12},
        {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 96, "num_hidden_layers": 2},
        {"head_dim": 80, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
        {"rope_parameters": LLAMA3},
    ],
)
def test_variants_continue_as_transformers_does(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = tiny_llama(seed=1, **changes)
    folder = save_hf(model, tmp_path / "m")
    driver = Driver(load_runner(EngineConfig(str(folder), dtype="float32", num_kv_blocks=20, threads=1)))
    prompt = [(i * 31) % 300 for i in range(70)]
    driver.add("s", prompt)
    driver.run(["s"], 8, chunk=33)
    assert driver.output("s") == greedy(model, prompt, 8)


def test_a_gguf_file_continues_as_transformers_does(tmp_path: Path) -> None:
    model = tiny_llama(seed=2)
    path = save_gguf(model, tmp_path / "tiny.gguf")
    runner = load_runner(EngineConfig(str(path), dtype="float32", num_kv_blocks=20, threads=1))
    assert runner.info.name == "tiny"
    driver = Driver(runner)
    driver.add("s", [3, 1, 4, 1, 5])
    driver.run(["s"], 8)
    assert driver.output("s") == greedy(model, [3, 1, 4, 1, 5], 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "gpu"}, "--device gpu: there are auto, cpu, cuda"),
        ({"dtype": "int8"}, "--dtype int8: there are auto, float32, bfloat16, float16"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
        ({"attention_backend": "flash"}, "--attention-backend flash: there are auto, native, cpu, triton, reference"),
        ({"block_size": 0}, "--block-size 0"),
        ({"max_model_len": 300}, "the model takes 1 to 256 tokens"),
        ({"num_kv_blocks": None, "kv_cache_memory_bytes": 50_000, "max_model_len": 256}, "largest length that fits"),
        ({"num_kv_blocks": 2**45}, "could not be allocated"),
    ],
)
def test_configurations_that_cannot_start(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = save_hf(tiny_llama(), tmp_path / "m")
    values: dict[str, Any] = {"model": str(folder), "num_kv_blocks": 20, "threads": 1}
    with pytest.raises(StartupError, match=message):
        load_runner(EngineConfig(**(values | changes)))


def test_info_says_what_is_in_force(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = save_hf(tiny_llama(), tmp_path / "m")
    config = EngineConfig(
        str(folder), served_model_name="mine", dtype="bfloat16", kv_cache_dtype="float32", threads=1, num_kv_blocks=9,
        device="cpu",
    )  # fmt: skip
    info = load_runner(config).info
    assert (info.name, info.dtype, info.kv_cache_dtype) == ("mine", "bfloat16", "float32")
    assert (info.device, info.device_text) == ("cpu", "cpu (as requested)")
    assert "device: cpu (as requested)" in caplog.text
    assert info.attention_backend.startswith("cpu (")
    assert "not native: it keeps the KV cache in the weights' bfloat16, not in float32" in info.attention_backend
    assert info.attention_backend in caplog.text
    assert (info.num_blocks, info.max_model_len, info.threads) == (9, 144, 1)
    assert info.kv_bytes_per_block == 3 * 2 * 2 * 16 * 20 * 4
    assert info.vocab_size == SIZES["vocab_size"]
    assert "loaded mine (LlamaForCausalLM)" in caplog.text
    assert "KV cache: 9 blocks of 16 tokens" in caplog.text


@pytest.mark.parametrize(("features", "dtype"), [({"avx512_bf16": True}, torch.bfloat16), ({}, torch.float32)])
def test_auto_is_bfloat16_where_the_cpu_has_it(
    features: dict[str, bool], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    assert choose_dtype("auto")[0] == dtype


def test_usable_cores() -> None:
    assert usable_cores() >= 1


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.5), ("float16", 0.05)])
def test_lower_precision_stays_near_float32(tmp_path: Path, dtype: str, tolerance: float) -> None:
    """Log-probabilities of the best tokens; random weights of this size amplify rounding more than a real model's."""
    folder = save_hf(tiny_llama(), tmp_path / "m")
    found = []
    for precision, cache in (("float32", "auto"), (dtype, "auto"), (dtype, "float32"), ("float32", dtype)):
        config = EngineConfig(str(folder), dtype=precision, kv_cache_dtype=cache, num_kv_blocks=20, threads=1)
        driver = Driver(load_runner(config))
        driver.add("s", [9, 8, 7, 6], SamplingParams(temperature=0.0, logprobs=20))
        driver.step(["s"], chunk=3)
        token = driver.step(["s"])["s"]  # over the cache
        assert token.logprobs is not None
        found.append(dict(zip(token.logprobs.top_token_ids, token.logprobs.top_logprobs, strict=True)))
    exact, *others = found
    best = list(exact)[:3]
    for other in others:
        assert [other[token_id] for token_id in best] == pytest.approx([exact[i] for i in best], abs=tolerance)
    assert others[0] != exact
