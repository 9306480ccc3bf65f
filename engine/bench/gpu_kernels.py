"""The GPU kernels against the reference, and what attention reaches of the device's own rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from kernels.bench.gpu_floors import decode_attention, prefill_attention
from kernels.layout import KVLayout
from kernels.registry import select

# Of the largest value of a result; a 16-bit format rounds inputs, weights of the softmax and the result.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass(frozen=True, slots=True)
class KernelSizes:
    """What is checked and timed."""

    num_heads: int = 16  # Qwen3-0.6B's
    num_kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 1024
    vocab: int = 151_936
    block_size: int = 16
    checked_lens: tuple[int, ...] = (1, 16, 37, 300, 513)
    decode_seqs: int = 256
    decode_len: int = 2048
    prefill_len: int = 8192
    copied_bytes: int = 2 << 30
    matrix: int = 8192
    repeats: int = 20


TINY = KernelSizes(
    num_heads=4, num_kv_heads=2, head_dim=16, hidden=24, vocab=130, checked_lens=(1, 20), decode_seqs=2, decode_len=20,
    prefill_len=20, copied_bytes=1 << 16, matrix=32, repeats=1,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Check:
    """One kernel in one format."""

    kernel: str
    dtype: str
    error: float  # the largest, relative to the largest value; for choices, the fraction that differs
    tolerance: float

    @property
    def is_ok(self) -> bool:
        """Whether the error is within the tolerance (NaN isn't)."""
        return self.error <= self.tolerance


def check_kernels(device: torch.device, sizes: KernelSizes) -> list[Check]:
    """Each kernel on the device against the reference, which gets the same inputs on the CPU."""
    checks = []
    for dtype in TOLERANCES:
        checks += _attention_checks(device, sizes, dtype) + _elementwise_checks(device, sizes, dtype)
    return checks + _sampling_checks(device, sizes)


def _both(op: str, device: torch.device) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    return select(op, device.type, "triton").load(), select(op, "cpu", "reference").load()


def _compared(name: str, dtype: torch.dtype, got: torch.Tensor, expected: torch.Tensor) -> Check:
    got, expected = got.detach().cpu().float(), expected.float()
    error = float((got - expected).abs().max() / expected.abs().max())
    return Check(name, str(dtype).removeprefix("torch."), error, TOLERANCES[dtype])


def _scattered(sizes: KernelSizes, lens: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache with random content, and tables of scattered blocks."""
    layout = KVLayout(sizes.num_kv_heads, sizes.block_size, sizes.head_dim)
    counts = [layout.num_blocks_for(length) for length in lens]
    order = torch.randperm(sum(counts))
    tables = torch.zeros((len(lens), max(counts)), dtype=torch.int32)
    first = 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[first : first + count].int()
        first += count
    return torch.randn(layout.cache_shape(sum(counts))).to(dtype), tables


def _attention_checks(device: torch.device, sizes: KernelSizes, dtype: torch.dtype) -> list[Check]:
    torch.manual_seed(0)
    lens, scale = sizes.checked_lens, sizes.head_dim**-0.5
    cache, tables = _scattered(sizes, lens, dtype)
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    on_device = [tensor.to(device) for tensor in (cache, tables, seq_lens)]
    checks = []
    decode, reference_decode = _both("paged_decode", device)
    query = torch.randn(len(lens), sizes.num_heads, sizes.head_dim).to(dtype)
    for name, options in (("", {}), (", window", {"window": 19}), (", soft cap", {"soft_cap": 5.0})):
        got = decode(query.to(device), *on_device, scale, None, **options)
        expected = reference_decode(query, cache, tables, seq_lens, scale, None, **options)
        checks.append(_compared(f"paged_decode{name}", dtype, got, expected))
    prefill, reference_prefill = _both("paged_prefill", device)
    new = [min(length, 1 + length // 2) for length in lens]  # the rest is cached
    starts = torch.tensor([0, *new]).cumsum(0).int()
    query = torch.randn(int(starts[-1]), sizes.num_heads, sizes.head_dim).to(dtype)
    for name, options in (("", {}), (", window", {"window": 19})):
        got = prefill(query.to(device), *on_device, starts.to(device), scale, None, **options)
        expected = reference_prefill(query, cache, tables, seq_lens, starts, scale, None, **options)
        checks.append(_compared(f"paged_prefill{name}", dtype, got, expected))
    return checks


def _elementwise_checks(device: torch.device, sizes: KernelSizes, dtype: torch.dtype) -> list[Check]:
    torch.manual_seed(1)
    checks = []
    rows, hidden, dim = 7, sizes.hidden, sizes.head_dim
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((rows, hidden), (rows, hidden), (hidden,)))
    kernel, reference = _both("add_rms_norm", device)
    moved = residual.to(device, copy=True)  # changed in place, also where the device is the CPU
    got, expected = kernel(x.to(device), moved, weight.to(device), 1e-6), reference(x, residual, weight, 1e-6)
    checks += [_compared("add_rms_norm", dtype, got, expected), _compared("its residual", dtype, moved, residual)]
    kernel, reference = _both("silu_and_mul", device)
    gate_up = torch.randn(rows, 2 * hidden).to(dtype)
    checks.append(_compared("silu_and_mul", dtype, kernel(gate_up.to(device)), reference(gate_up)))
    kernel, reference = _both("rope_and_write_kv", device)
    heads = torch.randn(rows, sizes.num_heads + 2 * sizes.num_kv_heads, dim).to(dtype)
    angles = torch.rand(rows, dim // 2) * 6
    cos, sin = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), 1)
    norms = {"q_norm": torch.randn(dim).to(dtype), "k_norm": torch.randn(dim).to(dtype)}
    cache, _ = _scattered(sizes, (rows,), dtype)
    there, slots = cache.to(device, copy=True), torch.arange(rows)
    moved = heads.to(device, copy=True)
    counts = (sizes.num_heads, sizes.num_kv_heads)
    kernel(moved, cos.to(device), sin.to(device), there, slots.to(device), *counts,
           **{name: norm.to(device) for name, norm in norms.items()})  # fmt: skip
    reference(heads, cos, sin, cache, slots, *counts, **norms)
    queries = slice(0, sizes.num_heads)
    return [
        *checks,
        _compared("rope_and_write_kv", dtype, moved[:, queries], heads[:, queries]),
        _compared("its cache", dtype, there, cache),
    ]


def _sampling_checks(device: torch.device, sizes: KernelSizes) -> list[Check]:
    torch.manual_seed(2)
    rows = 8
    logits = torch.randn(rows, sizes.vocab) * 3
    columns = (
        torch.full((rows,), 0.8), torch.tensor([0, 0, 20, 20] * 2), torch.tensor([1.0, 0.9] * 4, dtype=torch.float64),
        torch.zeros(rows, dtype=torch.float64), torch.linspace(0.05, 0.95, rows, dtype=torch.float64),
    )  # fmt: skip
    checks = []
    for op, arguments in (("argmax", ()), ("sample", columns), ("all_finite", ())):
        kernel, reference = _both(op, device)
        got = kernel(logits.to(device), *(column.to(device) for column in arguments)).cpu()
        differing = float((got != reference(logits, *arguments)).double().mean())
        checks.append(Check(op, "float32", differing, 0.0))
    return checks


def seconds_of(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of one call; on a device, between its own events and after two calls that don't count."""
    for _ in range(2 if device.type == "cuda" else 0):
        call()
    times: list[float] = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1000)
        else:
            started = perf_counter()
            call()
            times.append(perf_counter() - started)
    return float(median(times))


def attention_rates(device: torch.device, dtype: torch.dtype, sizes: KernelSizes) -> dict[str, float]:
    """Decode attention's share of copy bandwidth and prefill attention's of a matrix product's rate, as measured here.

    Returns:
        copy_gb_per_s (read and written), matrix_tflop_per_s, and of both kinds of attention seconds, rate and share.
    """
    copy, matrix = _copy_rate(device, sizes), _matrix_rate(device, dtype, sizes)
    heads, kv_heads, dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    layout, scale = KVLayout(kv_heads, sizes.block_size, dim), dim**-0.5

    lens = (sizes.decode_len,) * sizes.decode_seqs
    decode_s = _attention_seconds(device, dtype, sizes, lens, None, layout, scale)
    decode = decode_attention(list(lens), heads, kv_heads, dim, dtype.itemsize)
    prefill_s = _attention_seconds(device, dtype, sizes, (sizes.prefill_len,), sizes.prefill_len, layout, scale)
    prefill = prefill_attention([sizes.prefill_len], [0], heads, kv_heads, dim, dtype.itemsize)
    return {
        "copy_gb_per_s": copy / 1e9,
        "matrix_tflop_per_s": matrix / 1e12,
        "decode_attention_us": decode_s * 1e6,
        "decode_attention_gb_per_s": decode.bytes / decode_s / 1e9,
        "decode_attention_share_of_copy": decode.bytes / decode_s / copy,
        "prefill_attention_us": prefill_s * 1e6,
        "prefill_attention_tflop_per_s": prefill.flops / prefill_s / 1e12,
        "prefill_attention_share_of_matrix": prefill.flops / prefill_s / matrix,
    }


def _copy_rate(device: torch.device, sizes: KernelSizes) -> float:
    """Bytes read and written per second."""
    source = torch.empty(sizes.copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * sizes.copied_bytes / seconds_of(lambda: target.copy_(source), device, sizes.repeats)


def _matrix_rate(device: torch.device, dtype: torch.dtype, sizes: KernelSizes) -> float:
    """Operations per second of a square product."""
    square = torch.randn(sizes.matrix, sizes.matrix, dtype=dtype, device=device)
    return 2 * sizes.matrix**3 / seconds_of(lambda: square @ square, device, sizes.repeats)


def _attention_seconds(
    device: torch.device, dtype: torch.dtype, sizes: KernelSizes, lens: tuple[int, ...], num_new: int | None,
    layout: KVLayout, scale: float,
) -> float:  # fmt: skip
    """Of one layer; `num_new` tokens of each sequence, None = a decode."""
    num_blocks = layout.num_blocks_for(max(lens))
    cache = torch.randn(layout.cache_shape(num_blocks * len(lens)), dtype=dtype, device=device)
    order = torch.randperm(num_blocks * len(lens), device=device)
    tables = order.int().view(len(lens), num_blocks)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    num_tokens = len(lens) * (num_new or 1)
    query = torch.randn(num_tokens, sizes.num_heads, sizes.head_dim, dtype=dtype, device=device)
    if num_new is None:
        plan = select("plan_decode", device.type, "triton").load()(layout, tables, seq_lens, dtype)
        decode = select("paged_decode", device.type, "triton").load()
        return seconds_of(lambda: decode(query, cache, tables, seq_lens, scale, plan), device, sizes.repeats)
    starts = torch.arange(len(lens) + 1, dtype=torch.int32, device=device) * num_new
    prefill = select("paged_prefill", device.type, "triton").load()
    return seconds_of(lambda: prefill(query, cache, tables, seq_lens, starts, scale, None), device, sizes.repeats)
