"""The specialisations of the Triton kernels that the engine uses, without a device and without a compiler.

An operation is called as the engine calls it, with tensors that have a shape and no memory (device "meta"), and what it
would launch is written down. So the table can't say anything else than the code does, and an operation that looked at a
value, which on a device would mean waiting for it, fails here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.jit import JITFunction

from kernels.gpu import attention, elementwise, sampling
from kernels.layout import KVLayout

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
_TYPES = {
    BF16: "bf16", FP16: "fp16", FP32: "fp32", torch.float64: "fp64", torch.int32: "i32", torch.int64: "i64",
    torch.bool: "i1",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Specialisation:
    """One kernel as a launch asks for it."""

    case: str  # the first line of CASES that launches it
    kernel: Any  # JITFunction
    signature: dict[str, str]  # parameter -> type, "constexpr" for compile-time ones
    constexprs: dict[str, Any]
    aligned: frozenset[str]  # parameters that are multiples of 16: addresses in bytes, or integers
    num_warps: int
    num_stages: int

    @property
    def name(self) -> str:
        """The kernel's name without the underscore, and what is switched on: "decode split window"."""
        switches = (key.partition("_")[2].lower() for key, value in self.constexprs.items() if value is True)
        return " ".join((str(self.kernel.__name__).removeprefix("_"), *switches))

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for launches that one binary serves."""
        constants = tuple(sorted(self.constexprs.items()))
        types = tuple(self.signature.items())
        return self.name, types, constants, self.aligned, self.num_warps, self.num_stages


@contextmanager
def recorded(case: str, found: list[Specialisation]) -> Iterator[None]:
    """Launches inside append to `found` what they need, and run nothing."""

    def run(
        kernel: Any, *args: Any, grid: Any, warmup: bool, num_warps: int = 4, num_stages: int = 3, **more: Any
    ) -> None:
        assert all(isinstance(size, int) and size > 0 for size in grid), f"{case}: grid {grid}"
        values = dict(zip((p.name for p in kernel.params), args, strict=False)) | more
        signature, constexprs, aligned = {}, {}, set()
        for parameter in kernel.params:
            name, value = parameter.name, values[parameter.name]
            if parameter.is_constexpr:
                signature[name], constexprs[name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name] = f"*{_TYPES[value.dtype]}"
                aligned.add(name)  # what the allocator gives is; a view may not be, and is then compiled anew
            elif isinstance(value, float):
                signature[name] = "fp32"
            elif value == 1 and not parameter.do_not_specialize:
                signature[name], constexprs[name] = "constexpr", 1
            else:
                signature[name] = "i32"
                if value % 16 == 0 and not parameter.do_not_specialize:
                    aligned.add(name)
        found.append(
            Specialisation(case, kernel, signature, constexprs, frozenset(aligned), num_warps, num_stages)
        )  # fmt: skip

    with patch.object(JITFunction, "run", run):
        yield


def _meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _attend(
    head_dim: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype, *, block_size: int = 16, num_seqs: int = 256,
    **options: Any,
) -> None:  # fmt: skip
    """Decode (one long sequence: split; 256: not) or prefill (num_seqs 0) of one layer."""
    layout = KVLayout(num_kv_heads, block_size, head_dim)
    cache = _meta(*layout.cache_shape(1000), dtype=dtype)
    is_prefill, num_seqs = num_seqs == 0, num_seqs or 3
    num_tokens = 1000 if is_prefill else num_seqs
    query = _meta(num_tokens, num_heads, head_dim, dtype=dtype)
    tables = _meta(num_seqs, 500, dtype=torch.int32)
    seq_lens = _meta(num_seqs, dtype=torch.int32)
    if is_prefill:
        starts = _meta(num_seqs + 1, dtype=torch.int32)
        attention.plan_prefill(layout, tables, seq_lens, starts, dtype)
        attention.paged_prefill(query, cache, tables, seq_lens, starts, 0.125, **options)
    else:
        decode_plan = attention.plan_decode(layout, tables, seq_lens, dtype)
        assert (decode_plan.num_sections > 1) == (num_seqs == 1)
        attention.paged_decode(query, cache, tables, seq_lens, 0.125, decode_plan, **options)


def _rotate(head_dim: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype, *, has_norm: bool) -> None:
    layout = KVLayout(num_kv_heads, 16, head_dim)
    qkv = _meta(64, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    angles, weight = _meta(64, head_dim, dtype=FP32), _meta(head_dim, dtype=dtype)
    slots = _meta(64, dtype=torch.int64)
    norm = weight if has_norm else None
    cache = _meta(*layout.cache_shape(1000), dtype=dtype)
    elementwise.rope_and_write_kv(
        qkv, angles, angles, cache, slots, num_heads, num_kv_heads, q_norm=norm, k_norm=norm
    )  # fmt: skip


def _rope(head_dim: int, num_heads: int, dtype: torch.dtype) -> None:
    angles = _meta(64, head_dim, dtype=FP32)
    elementwise.rope(_meta(64, num_heads, head_dim, dtype=dtype), angles, angles)


def _write(head_dim: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    cache = _meta(*KVLayout(num_kv_heads, 16, head_dim).cache_shape(1000), dtype=dtype)
    attention.write_kv(cache, _meta(64, 2 * num_kv_heads, head_dim, dtype=dtype), _meta(64, dtype=torch.int64))


def _norm(size: int, dtype: torch.dtype) -> None:
    """A layer's two norms are one kernel, with the residual's addition; the first of all has none to add."""
    x, weight = _meta(64, size, dtype=dtype), _meta(size, dtype=dtype)
    elementwise.rms_norm(x, weight, 1e-5)
    elementwise.add_rms_norm(x, x, weight, 1e-5)


def _head_norm(num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    qkv = _meta(64, num_heads, head_dim, dtype=dtype)
    elementwise.rms_norm(qkv[:, : num_heads // 2], _meta(head_dim, dtype=dtype), 1e-5)


def _gate(size: int, dtype: torch.dtype, *, is_gelu: bool) -> None:
    gate = elementwise.gelu_and_mul if is_gelu else elementwise.silu_and_mul
    gate(_meta(64, 2 * size, dtype=dtype))


def _choose() -> None:
    logits, counts = _meta(256, 151_936, dtype=FP32), _meta(256, 151_936, dtype=torch.int32)
    floats, doubles = _meta(256, dtype=FP32), _meta(256, dtype=torch.float64)
    longs, tokens = _meta(256, dtype=torch.int64), _meta(256, 4096, dtype=torch.int32)
    sampling.all_finite(logits)
    sampling.argmax(logits)
    sampling.sample(logits, floats, longs, doubles, doubles, sampling.uniform(longs, longs))
    sampling.penalise(logits, tokens, longs, longs, floats, floats, floats, counts)


# What the engine calls, by the models that have these shapes. The first line that needs a kernel gives it its name.
CASES: dict[str, Callable[[], None]] = {
    "SmolLM2 135M bf16, decode": partial(_attend, 64, 9, 3, BF16),
    "SmolLM2 135M bf16, decode split": partial(_attend, 64, 9, 3, BF16, num_seqs=1),
    "SmolLM2 135M bf16, prefill": partial(_attend, 64, 9, 3, BF16, num_seqs=0),
    "SmolLM2 135M bf16, rotate and write": partial(_rotate, 64, 9, 3, BF16, has_norm=False),
    "SmolLM2 135M bf16, rotate": partial(_rope, 64, 12, BF16),
    "SmolLM2 135M bf16, write": partial(_write, 64, 3, BF16),
    "SmolLM2 135M bf16, norm": partial(_norm, 576, BF16),
    "SmolLM2 135M bf16, gate": partial(_gate, 1536, BF16, is_gelu=False),
    "SmolLM2 135M fp32, decode": partial(_attend, 64, 9, 3, FP32),
    "SmolLM2 135M fp32, prefill": partial(_attend, 64, 9, 3, FP32, num_seqs=0),
    "SmolLM2 135M fp32, rotate and write": partial(_rotate, 64, 9, 3, FP32, has_norm=False),
    "SmolLM2 135M fp32, norm": partial(_norm, 576, FP32),
    "SmolLM2 135M fp32, gate": partial(_gate, 1536, FP32, is_gelu=False),
    "Qwen3 0.6B bf16, decode": partial(_attend, 128, 16, 8, BF16),
    "Qwen3 0.6B bf16, decode split": partial(_attend, 128, 16, 8, BF16, num_seqs=1),
    "Qwen3 0.6B bf16, prefill": partial(_attend, 128, 16, 8, BF16, num_seqs=0),
    "Qwen3 0.6B bf16, norm, rotate and write": partial(_rotate, 128, 16, 8, BF16, has_norm=True),
    "Qwen3 0.6B bf16, head norm": partial(_head_norm, 32, 128, BF16),
    "Qwen3 0.6B bf16, norm": partial(_norm, 1024, BF16),
    "Llama 3 8B bf16, rotate and write": partial(_rotate, 128, 32, 8, BF16, has_norm=False),
    "Llama 3 8B bf16, norm": partial(_norm, 4096, BF16),
    "Llama 3 8B bf16, blocks of 32, decode split": partial(_attend, 128, 32, 8, BF16, block_size=32, num_seqs=1),
    "Llama 3 8B bf16, blocks of 32, prefill": partial(_attend, 128, 32, 8, BF16, block_size=32, num_seqs=0),
    "Llama 3 8B bf16, blocks of 64, decode": partial(_attend, 128, 32, 8, BF16, block_size=64),
    "Llama 3 8B bf16, blocks of 64, prefill": partial(_attend, 128, 32, 8, BF16, block_size=64, num_seqs=0),
    "Llama 3 8B fp16, decode": partial(_attend, 128, 32, 8, FP16),
    "Llama 3 8B fp16, decode split": partial(_attend, 128, 32, 8, FP16, num_seqs=1),
    "Llama 3 8B fp16, prefill": partial(_attend, 128, 32, 8, FP16, num_seqs=0),
    "Llama 3 8B fp16, rotate and write": partial(_rotate, 128, 32, 8, FP16, has_norm=False),
    "Llama 3 8B fp32, decode split": partial(_attend, 128, 32, 8, FP32, num_seqs=1),
    "Llama 3 8B fp32, prefill": partial(_attend, 128, 32, 8, FP32, num_seqs=0),
    "heads of 80 bf16, decode": partial(_attend, 80, 32, 32, BF16),
    "heads of 80 bf16, prefill": partial(_attend, 80, 32, 32, BF16, num_seqs=0),
    "heads of 96 bf16, decode": partial(_attend, 96, 32, 32, BF16),
    "heads of 96 bf16, prefill": partial(_attend, 96, 32, 32, BF16, num_seqs=0),
    "Mistral 7B bf16, window, decode split": partial(_attend, 128, 32, 8, BF16, num_seqs=1, window=4096),
    "Mistral 7B bf16, window, prefill": partial(_attend, 128, 32, 8, BF16, num_seqs=0, window=4096),
    "Gemma 2 2B bf16, window and cap, decode": partial(_attend, 256, 8, 4, BF16, window=4096, soft_cap=50.0),
    "Gemma 2 2B bf16, window and cap, prefill": partial(
        _attend, 256, 8, 4, BF16, num_seqs=0, window=4096, soft_cap=50.0
    ),
    "Gemma 2 2B bf16, cap, decode split": partial(_attend, 256, 8, 4, BF16, num_seqs=1, soft_cap=50.0),
    "Gemma 2 2B bf16, cap, prefill": partial(_attend, 256, 8, 4, BF16, num_seqs=0, soft_cap=50.0),
    "Gemma 2 2B bf16, gate": partial(_gate, 9216, BF16, is_gelu=True),
    "sampling": _choose,
}


def all_specialisations(capability: int) -> list[Specialisation]:
    """Every specialisation on devices of a compute capability (80, 90) once, in the order of CASES."""
    found: list[Specialisation] = []
    with patch.object(attention, "capability", lambda index: capability):
        for case, call in CASES.items():
            with recorded(case, found):
                call()
    first: dict[tuple[Any, ...], Specialisation] = {}
    for specialisation in found:
        first.setdefault(specialisation.key, specialisation)
    return list(first.values())
