"""Each family continues as transformers does, from both file formats; what a family needs and lacks is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import StartupError
from engine.models.config import config_from_hf
from engine.models.native import why_not_native
from engine.models.registry import family_of_gguf, family_of_hf
from engine.runner.executor import load_runner
from engine.weights.checkpoint import resolve_model
from engine.weights.loader import load_weights, open_checkpoint
from tests.helpers.checkpoints import greedy, save_gguf, save_hf, tiny_model
from tests.runner.driver import Driver

PROMPT = [(i * 31) % 300 for i in range(70)]
NUM_TOKENS = 10
WINDOW = {"sliding_window": 24}  # shorter than the prompt, no multiple of the block size

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": False, "num_key_value_heads": 6}),
    ("qwen3", {}),
    ("qwen3", {"num_key_value_heads": 3, "head_dim": 32}),
    ("mistral", {"sliding_window": None}),
]
WINDOWED: list[tuple[str, dict[str, Any]]] = [
    ("mistral", WINDOW),
    ("mistral", {"sliding_window": 2}),
    ("qwen2", WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    ("qwen3", WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                        "use_sliding_window": True}),
]  # fmt: skip


def driver_for(path: Path, **changes: Any) -> Driver:
    values = {"dtype": "float32", "num_kv_blocks": 20, "threads": 1} | changes
    return Driver(load_runner(EngineConfig(str(path), **values)))


def continuation(path: Path, chunk: int, **changes: Any) -> list[int]:
    driver = driver_for(path, **changes)
    driver.add("s", PROMPT)
    driver.run(["s"], NUM_TOKENS, chunk=chunk)
    return driver.output("s")


@pytest.mark.parametrize(("kind", "changes"), VARIANTS)
def test_both_formats_continue_as_transformers_does(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    model = tiny_model(kind, seed=3, **changes)
    expected = greedy(model, PROMPT, NUM_TOKENS)
    assert len(set(expected)) > NUM_TOKENS // 2
    assert continuation(save_hf(model, tmp_path / "m"), 33) == expected
    assert continuation(save_gguf(model, tmp_path / "m.gguf"), 1000) == expected


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(("kind", "changes"), WINDOWED)
def test_sliding_windows_are_transformers(tmp_path: Path, kind: str, changes: dict[str, Any], backend: str) -> None:
    model = tiny_model(kind, seed=4, **changes)
    folder = save_hf(model, tmp_path / "m")
    expected = greedy(model, PROMPT, NUM_TOKENS)
    for chunk in (1000, 13):
        assert continuation(folder, chunk, attention_backend=backend) == expected
    values = json.loads((folder / "config.json").read_text())
    values |= {"sliding_window": None, "layer_types": None}
    (folder / "config.json").write_text(json.dumps(values))
    assert continuation(folder, 1000) != expected, "the window makes no difference here"


def test_a_window_that_is_switched_off_or_for_some_layers_only() -> None:
    qwen = family_of_hf(["Qwen2ForCausalLM"]).traits
    values = {
        "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "sliding_window": 99,
        "max_window_layers": 3,
    }  # fmt: skip
    off = config_from_hf(values, "Qwen2ForCausalLM", qwen)
    assert (off.windows, off.smallest_window) == ((), None)
    on = config_from_hf(values | {"use_sliding_window": True}, "Qwen2ForCausalLM", qwen)
    assert (on.windows, on.smallest_window) == ((0, 0, 0, 99), 99)
    mistral = family_of_hf(["MistralForCausalLM"]).traits
    assert config_from_hf(values, "MistralForCausalLM", mistral).windows == (99,) * 4
    assert config_from_hf(values, "LlamaForCausalLM").windows == ()
    with pytest.raises(StartupError, match=r"layer_types of 1 layers with full_attention is not supported"):
        config_from_hf(values | {"layer_types": ["full_attention"]}, "MistralForCausalLM", mistral)


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("qwen2", {}, "no products with biases"),
        ("qwen3", {}, "no norm of query and key heads"),
        ("mistral", WINDOW, r"no sliding window, and this model's is 24 tokens \(--max-model-len 24 is within it\)"),
    ],
)
def test_the_native_walk_says_what_it_cannot_do(tmp_path: Path, kind: str, changes: dict[str, Any], why: str) -> None:
    folder = save_hf(tiny_model(kind, **changes), tmp_path / "m")
    with pytest.raises(StartupError, match=rf"--attention-backend native: .*{why}"):
        driver_for(folder, attention_backend="native")
    assert driver_for(folder).runner.info.attention_backend.startswith("cpu (")


def test_within_its_window_a_model_has_none(tmp_path: Path) -> None:
    loaded = open_checkpoint(resolve_model(str(save_hf(tiny_model("mistral", **WINDOW), tmp_path / "m"))))
    reasons = [
        why_not_native(loaded.config, loaded.source.names(), torch.float32, torch.float32, n) or "" for n in (24, 25)
    ]
    assert "window" not in reasons[0]
    assert "no sliding window" in reasons[1]


@pytest.mark.parametrize(
    ("kind", "lost"), [("qwen2", "self_attn.k_proj.bias"), ("qwen2", "self_attn.q_proj.bias"),
                       ("qwen3", "self_attn.q_norm.weight"), ("qwen3", "self_attn.k_norm.weight")],
)  # fmt: skip
def test_what_a_family_needs_is_missed(tmp_path: Path, kind: str, lost: str) -> None:
    loaded = open_checkpoint(resolve_model(str(save_hf(tiny_model(kind), tmp_path / "m"))))

    class Without:
        def __getattr__(self, name: str) -> Any:
            return getattr(loaded.source, name)

        def names(self) -> frozenset[str]:
            return frozenset(name for name in loaded.source.names() if not name.endswith(f"layers.1.{lost}"))

    with pytest.raises(StartupError, match=rf"has no tensor model\.layers\.1\.{lost}"):
        load_weights(Without(), loaded.config, torch.float32)  # type: ignore[arg-type]


def test_gguf_architectures_of_the_qwen_families() -> None:
    assert family_of_gguf("qwen2").architecture == "Qwen2ForCausalLM"
    assert family_of_gguf("qwen3").architecture == "Qwen3ForCausalLM"
