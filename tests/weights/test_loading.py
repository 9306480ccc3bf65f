"""Both file formats give the same weights; what is missing, extra or misshapen is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine.errors import StartupError
from engine.models.config import ModelConfig
from engine.models.decoder import DecoderWeights
from engine.quant.gguf_blocks import dequantise
from engine.weights.checkpoint import resolve_model
from engine.weights.gguf_file import GgufFile
from engine.weights.loader import load_weights, open_checkpoint, split_halves
from tests.helpers.checkpoints import interleave, save_gguf, save_hf, tiny_llama

# Blocks hold 32 values of a row.
MULTIPLES_OF_32 = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}


def load(path: Path, dtype: torch.dtype = torch.float32) -> tuple[ModelConfig, DecoderWeights]:
    loaded = open_checkpoint(resolve_model(str(path)))
    return loaded.config, load_weights(loaded.source, loaded.config, dtype)


def assert_same(left: DecoderWeights, right: DecoderWeights) -> None:
    for a, b in zip(left.tensors(), right.tensors(), strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, {"attention_bias": True, "mlp_bias": True}])
def test_safetensors_in_one_file_and_in_shards(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = tiny_llama(**changes)
    config, whole = load(save_hf(model, tmp_path / "whole"))
    _, shards = load(save_hf(model, tmp_path / "shards", max_shard_size="60KB"))
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert_same(whole, shards)
    state = model.state_dict()
    layer, prefix = whole.layers[1], "model.layers.1.self_attn"
    projections = [state[f"{prefix}.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(layer.qkv.weight, torch.cat(projections))
    assert (layer.qkv.bias is not None) == bool(changes.get("attention_bias"))
    assert (layer.down.bias is not None) == bool(changes.get("mlp_bias"))
    is_tied = config.tie_word_embeddings
    assert (whole.head.weight.data_ptr() == whole.embedding.data_ptr()) == is_tied
    assert is_tied != ("tie_word_embeddings" in changes)
    assert sum(t.numel() for t in whole.tensors()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}])
def test_gguf_equals_safetensors(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = tiny_llama(**changes)
    hf_config, from_hf = load(save_hf(model, tmp_path / "hf"))
    gguf_config, from_gguf = load(save_gguf(model, tmp_path / "tiny.gguf"))
    assert gguf_config.rms_norm_eps == pytest.approx(hf_config.rms_norm_eps)  # GGUF keeps it in float32
    assert replace(gguf_config, rms_norm_eps=hf_config.rms_norm_eps) == hf_config
    assert_same(from_hf, from_gguf)


def test_the_rotary_permutation_is_undone() -> None:
    rows = np.arange(3 * 8 * 2, dtype=np.float32).reshape(24, 2)
    stored = interleave(rows, 3)
    assert not np.array_equal(stored, rows)
    assert torch.equal(split_halves(torch.from_numpy(stored), 3), torch.from_numpy(rows))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q8_0])
@pytest.mark.parametrize("num_rows", [1, 7, 96])
def test_blocks_are_dequantised_as_the_library_does_row_by_row(kind: Kind, num_rows: int) -> None:
    values = np.random.default_rng(0).normal(size=(num_rows, 64)).astype(np.float32)
    stored = gguf.quants.quantize(values, kind)
    got = dequantise(stored, kind)
    assert got.dtype == np.float32
    assert got.shape == values.shape
    rows = [gguf.quants.dequantize(stored[i : i + 1], kind) for i in range(num_rows)]
    assert np.array_equal(got, np.concatenate(rows))


def test_q4_1_and_q8_0_by_their_definition() -> None:
    """A block of 32: Q4_1 = d * nibble + m, Q8_0 = d * int8, with half-precision d and m, multiplied in float32."""
    d, m = np.float16(0.1), np.float16(-0.7)
    nibbles = np.arange(32) % 16
    packed = (nibbles[:16] | (nibbles[16:] << 4)).astype(np.uint8)
    block = np.concatenate((np.array([d, m]).view(np.uint8), packed))[None]
    expected = np.float32(d) * nibbles.astype(np.float32) + np.float32(m)
    assert np.array_equal(dequantise(block, Kind.Q4_1)[0], expected)
    numbers = np.arange(-16, 16).astype(np.int8)
    block = np.concatenate((np.array([d]).view(np.uint8), numbers.view(np.uint8)))[None]
    assert np.array_equal(dequantise(block, Kind.Q8_0)[0], np.float32(d) * numbers.astype(np.float32))


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_k_blocks_have_the_right_shape(kind: Kind) -> None:
    block_size, type_size = gguf.GGML_QUANT_SIZES[kind]
    stored = np.zeros((6, 2 * type_size), dtype=np.uint8)
    assert dequantise(stored, kind).shape == (6, 2 * block_size)


def test_bfloat16_rounds_the_exact_values(tmp_path: Path) -> None:
    path = save_gguf(tiny_llama(**MULTIPLES_OF_32), tmp_path / "t.gguf", Kind.Q8_0)
    _, exact = load(path)
    _, rounded = load(path, torch.bfloat16)
    for a, b in zip(exact.tensors(), rounded.tensors(), strict=True):
        assert b.dtype == torch.bfloat16
        assert torch.equal(a.bfloat16(), b)


def test_the_quantisation_in_words(tmp_path: Path) -> None:
    model = tiny_llama(**MULTIPLES_OF_32)
    words = {
        kind: open_checkpoint(resolve_model(str(save_gguf(model, tmp_path / f"{kind.name}.gguf", kind))))
        for kind in (Kind.F32, Kind.Q8_0)
    }
    assert words[Kind.F32].source.quantization("bfloat16") == "none, F32 to bfloat16"
    assert words[Kind.Q8_0].source.quantization("bfloat16") == "Q8_0 dequantised to bfloat16"
    folder = save_hf(model, tmp_path / "hf")
    assert open_checkpoint(resolve_model(str(folder))).source.quantization("float32") == "none, float32"


class Altered:
    """A source with one tensor taken away, added or reshaped."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def load(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def quantization(self, dtype: str) -> str:
        return dtype


def test_tensors_that_are_missing_misshapen_or_unused_are_named(tmp_path: Path) -> None:
    model = tiny_llama()
    config = open_checkpoint(resolve_model(str(save_hf(model, tmp_path)))).config
    tensors = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    load_weights(Altered(tensors), config, torch.float32)
    name = "model.layers.2.mlp.up_proj.weight"
    missing = {k: v for k, v in tensors.items() if k != name}
    with pytest.raises(StartupError, match=f"no tensor {name}"):
        load_weights(Altered(missing), config, torch.float32)
    with pytest.raises(StartupError, match=rf"{name} is \(100, 71\), the config says \(100, 72\)"):
        load_weights(Altered(tensors | {name: tensors[name][:, 1:]}), config, torch.float32)
    extra = "model.layers.0.self_attn.q_norm.weight"
    with pytest.raises(StartupError, match=f"doesn't use: {extra}"):
        load_weights(Altered(tensors | {extra: torch.ones(20)}), config, torch.float32)
    old = tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(10), "lm_head.weight": torch.ones(1)}
    load_weights(Altered(old), config, torch.float32)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(StartupError, match=r"cannot read .*broken.gguf as GGUF"):
        GgufFile(tmp_path / "broken.gguf")
    folder = save_hf(tiny_llama(), tmp_path / "hf")
    (folder / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(StartupError, match=r"cannot read .*model.safetensors"):
        open_checkpoint(resolve_model(str(folder)))
    (folder / "model.safetensors").unlink()
    with pytest.raises(StartupError, match=r"has no \*.safetensors file"):
        open_checkpoint(resolve_model(str(folder)))


def test_metadata_is_what_the_librarys_own_reader_gives(tmp_path: Path) -> None:
    path = save_gguf(tiny_llama(), tmp_path / "tiny.gguf")
    metadata = GgufFile(path).metadata
    assert metadata["tokenizer.ggml.tokens"][3] == "token 3 é"
    reader = gguf.GGUFReader(path)
    assert list(metadata) == list(reader.fields)
    assert dict(metadata) == {key: reader_field.contents() for key, reader_field in reader.fields.items()}
