"""Whole engines on a GPU: the CPU's tokens, nothing allocated per step, and a workload against transformers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from engine.bench.offline import run_once, run_warmup
from engine.bench.workloads import Item, Workload
from engine.config import EngineConfig
from engine.core.limits import Limits
from engine.engine import Engine
from engine.runner.executor import load_runner
from engine.tokenizer.token_table import byte_level_alphabet
from engine.tokenizer.tokenizer import Tokenizer

# Qwen3-0.6B's shape.
QWEN3: dict[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
TINY_QWEN3: dict[str, Any] = QWEN3 | {
    "vocab_size": 331, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.3,
}  # fmt: skip


def save_random_model(shape: dict[str, Any], folder: Path, device: torch.device, dtype: torch.dtype) -> Path:
    """A Qwen 3 of `shape` with random weights in Hugging Face's layout; returns the folder."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**shape)).to(dtype)
    model.save_pretrained(folder)
    return folder


def plain_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer for models that were trained on nothing: 256 bytes, then made-up words."""
    vocab = byte_level_alphabet() | {f"w{i}": i for i in range(256, vocab_size)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, eos_token_ids=(), name="random")


def make_engine(config: EngineConfig) -> Engine:
    """An engine for a model without a tokenizer."""
    runner = load_runner(config)
    return Engine(runner, plain_tokenizer(runner.info.vocab_size), config.limits)


def tokens_of(engine: Engine, workload: Workload) -> list[list[int]]:
    """Greedy tokens of each request."""
    from engine.engine import Request
    from engine.sampling_params import SamplingParams

    found: dict[str, list[int]] = {str(i): [] for i in range(len(workload.items))}
    for i, item in enumerate(workload.items):
        params = SamplingParams(temperature=0.0, max_tokens=item.max_tokens, ignore_eos=True)
        engine.add(Request(str(i), item.prompt_token_ids, params))
    while engine.has_work:
        for delta in engine.step().deltas:
            found[delta.request_id] += delta.token_ids
    return list(found.values())


def compare_tokens(folder: Path, device: torch.device, num_requests: int, num_tokens: int) -> dict[str, object]:
    """The same requests on the device and on the CPU, in float32: prompts with a common head, in chunks, in a pool that
    is too small for all."""
    head = tuple(range(16))
    items = [Item((*head, *((7 * i + j) % 300 for j in range(3 * i + 1))), num_tokens) for i in range(num_requests)]
    workload = Workload("tiny", tuple(items))
    # On a GPU float32 products must not be rounded to TF32, which PyTorch's default doesn't.
    limits = Limits(max_num_batched_tokens=32, watermark=0.0)
    config = EngineConfig(str(folder), dtype="float32", num_kv_blocks=8, limits=limits, max_model_len=64)
    found = []
    for kind, backend in ((device.type, "triton"), ("cpu", "cpu")):
        engine = make_engine(replace(config, device=kind, attention_backend=backend))
        found.append(tokens_of(engine, workload))
    differing = sum(a != b for a, b in zip(*found, strict=True))
    return {"requests": len(items), "differing": differing}


@dataclass(frozen=True, slots=True)
class Rate:
    """One repetition of one engine."""

    engine: str
    output_tokens_per_s: float
    seconds: float
    errors: int


class Ours:
    """This engine with a workload."""

    def __init__(self, config: EngineConfig, workload: Workload) -> None:
        started = perf_counter()
        self.engine = make_engine(config)
        self.startup_s = perf_counter() - started
        self._workload = workload
        run_warmup(self.engine, workload, len(workload.items))

    def run(self, rep: int) -> Rate:
        """All requests at once, on an empty prefix cache."""
        result = run_once(self.engine, self._workload, rep, self.startup_s)
        return Rate("pagedeck", result.output_tokens_per_s, result.duration_s, result.errors)


def segments_taken(run: Ours, rep: int) -> int:
    """How many pieces of memory PyTorch takes from the device during a repetition."""
    before = torch.cuda.memory_stats()["segment.all.allocated"]
    run.run(rep)
    return int(torch.cuda.memory_stats()["segment.all.allocated"] - before)


class Transformers:
    """transformers' continuous batching with the same weights and requests."""

    def __init__(
        self, folder: Path, workload: Workload, device: torch.device, dtype: torch.dtype, sizes: dict[str, Any]
    ) -> None:
        """Args: folder of the model; workload; device; dtype; sizes, of its KV cache as its configuration has them."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, attn_implementation="sdpa")
        self._model = model.to(device).eval()
        self._workload, self._sizes = workload, sizes

    @property
    def attention(self) -> str:
        """Which of its attentions the model uses."""
        return str(self._model.config._attn_implementation)

    def run(self, rep: int) -> Rate:
        """All requests at once. Setting its manager up isn't timed."""
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        self._model.generation_config.eos_token_id = None
        generation = GenerationConfig(do_sample=False, max_new_tokens=1, eos_token_id=None, pad_token_id=0)
        batching = ContinuousBatchingConfig(allow_block_sharing=False, **self._sizes)
        wanted: dict[str, int] = {}
        errors = tokens = 0
        with self._model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching, block=True, timeout=5
        ) as manager:
            started = perf_counter()
            for i, item in enumerate(self._workload.items):
                name = f"{rep}-{i}"
                manager.add_request(
                    list(item.prompt_token_ids), request_id=name, max_new_tokens=item.max_tokens, eos_token_id=-1
                )
                wanted[name] = item.max_tokens
            while wanted:
                result = manager.get_result(timeout=1)
                if result is None:
                    if not manager.is_running():
                        break
                    continue
                if result.is_finished():
                    tokens += len(result.generated_tokens)
                    errors += len(result.generated_tokens) != wanted.pop(result.request_id)
            seconds = perf_counter() - started
        return Rate("transformers", tokens / seconds, seconds, errors + len(wanted))
