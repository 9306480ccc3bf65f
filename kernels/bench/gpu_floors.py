"""What each GPU kernel must at least move and compute, and how long that takes on an H200 at best.

    python -m kernels.bench.gpu_floors

No measurement: figures of an arithmetic, for Qwen3-0.6B in bfloat16 with 256 sequences. A kernel's time can't be less
than its bytes over the memory's rate, nor than its operations over the matrix units' rate.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

BYTES_PER_SECOND = 4.8e12  # H200, HBM3e
FLOPS_PER_SECOND = 989e12  # H200, bfloat16 without sparsity


@dataclass(frozen=True, slots=True)
class Work:
    """Of one launch."""

    bytes: float  # read and written, each once
    flops: float  # multiplications and additions

    @property
    def seconds(self) -> float:
        """The floor."""
        return max(self.bytes / BYTES_PER_SECOND, self.flops / FLOPS_PER_SECOND)

    @property
    def bound(self) -> str:
        """What the floor is made of."""
        return "memory" if self.bytes / BYTES_PER_SECOND >= self.flops / FLOPS_PER_SECOND else "compute"

    def __add__(self, other: Work) -> Work:
        """One launch after the other, were they one."""
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    def __mul__(self, times: int) -> Work:
        """The same launch several times."""
        return Work(self.bytes * times, self.flops * times)


def decode_attention(
    seq_lens: list[int], num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int = 2
) -> Work:  # fmt: skip
    """One new token per sequence: its keys and values once, queries and outputs; two products of every head."""
    tokens = sum(seq_lens)
    moved = 2 * tokens * num_kv_heads * head_dim + 2 * len(seq_lens) * num_heads * head_dim
    return Work(moved * itemsize, 4 * tokens * num_heads * head_dim)


def decode_sections(num_seqs: int, num_sections: int, num_heads: int, head_dim: int, itemsize: int = 2) -> Work:
    """What cutting sequences into sections adds: float32 parts written, read, and merged."""
    parts = num_seqs * num_heads * num_sections * (head_dim + 1)
    return Work(2 * 4 * parts + num_seqs * num_heads * head_dim * itemsize, 3 * parts)


def prefill_attention(
    num_new: list[int], num_cached: list[int], num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int = 2
) -> Work:  # fmt: skip
    """Causal: new token i of a sequence sees num_cached + i + 1. Keys and values once, though each tile reads them."""
    pairs = sum(n * c + n * (n + 1) // 2 for n, c in zip(num_new, num_cached, strict=True))
    moved = 2 * (sum(num_new) + sum(num_cached)) * num_kv_heads * head_dim + 2 * sum(num_new) * num_heads * head_dim
    return Work(moved * itemsize, 4 * pairs * num_heads * head_dim)


def norm(num_rows: int, size: int, *, has_residual: bool, itemsize: int = 2) -> Work:
    """RMS norm; with a residual, that is read and written too."""
    return Work(num_rows * size * itemsize * (4 if has_residual else 2), num_rows * size * (5 if has_residual else 4))


def rotate_and_write(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int = 2) -> Work:
    """All heads read; queries written back, keys and values to the cache; cos and sin in float32."""
    moved = 2 * num_tokens * (num_heads + 2 * num_kv_heads) * head_dim * itemsize + 2 * num_tokens * head_dim * 4
    return Work(moved, 3 * num_tokens * (num_heads + num_kv_heads) * head_dim)


def gate(num_tokens: int, intermediate_size: int, itemsize: int = 2) -> Work:
    """Two halves read, one written."""
    return Work(3 * num_tokens * intermediate_size * itemsize, 6 * num_tokens * intermediate_size)


def linear(num_tokens: int, in_features: int, out_features: int, itemsize: int = 2) -> Work:
    """A product by cuBLAS: weights once, inputs and outputs."""
    moved = in_features * out_features + num_tokens * (in_features + out_features)
    return Work(moved * itemsize, 2 * num_tokens * in_features * out_features)


def sample(num_rows: int, vocab_size: int, *, is_truncated: bool) -> Work:
    """Float32 logits from memory: three passes over an untruncated row (best, sum, choice) and over a truncated one
    (best, histogram, copy); 12 operations per logit and pass."""
    num_passes = 3
    copied = 2 * 8 * 4096 * num_rows if is_truncated else 0
    return Work(4 * num_passes * num_rows * vocab_size + copied, 12 * num_passes * num_rows * vocab_size)


LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 28, 1024, 16, 8, 128, 3072, 151_936  # Qwen3-0.6B


def qwen3_decode_step(num_seqs: int, seq_len: int) -> dict[str, Work]:
    """A decode step's kernels, all layers of each."""
    qkv = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    products = (
        linear(num_seqs, HIDDEN, qkv)
        + linear(num_seqs, HEADS * HEAD_DIM, HIDDEN)
        + linear(num_seqs, HIDDEN, 2 * INTERMEDIATE)
        + linear(num_seqs, INTERMEDIATE, HIDDEN)
    )
    return {
        "add_rms_norm": norm(num_seqs, HIDDEN, has_residual=True) * (2 * LAYERS),
        "rope_and_write_kv with head norms": rotate_and_write(num_seqs, HEADS, KV_HEADS, HEAD_DIM) * LAYERS,
        "paged_decode": decode_attention([seq_len] * num_seqs, HEADS, KV_HEADS, HEAD_DIM) * LAYERS,
        "silu_and_mul": gate(num_seqs, INTERMEDIATE) * LAYERS,
        "products (cuBLAS)": products * LAYERS,
        "head (cuBLAS)": linear(num_seqs, HIDDEN, VOCAB) + Work(4 * num_seqs * VOCAB, 0),
        "all_finite": Work(4 * num_seqs * VOCAB, num_seqs * VOCAB),
        "sample": sample(num_seqs, VOCAB, is_truncated=False),
    }


def qwen3_prefill(num_new: int, num_cached: int) -> dict[str, Work]:
    """Attention of one chunk, all layers."""
    work = prefill_attention([num_new], [num_cached], HEADS, KV_HEADS, HEAD_DIM) * LAYERS
    return {f"paged_prefill, {num_new} tokens after {num_cached}": work}


def as_table(works: dict[str, Work]) -> str:
    """Markdown."""
    lines = ["| kernel | MB | GFLOP | floor, µs | bound by |", "| --- | ---: | ---: | ---: | --- |"]
    for name, work in works.items():
        lines.append(
            f"| {name} | {work.bytes / 1e6:.1f} | {work.flops / 1e9:.1f} | {work.seconds * 1e6:.0f} | {work.bound} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Prints the table and one JSON line."""
    step = qwen3_decode_step(256, 560)
    prefill = qwen3_prefill(8192, 0) | qwen3_prefill(2048, 6144)
    total = sum(work.seconds for work in step.values())
    print(as_table(step | prefill))
    print(f"\na decode step of 256 sequences of 560 tokens: at least {total * 1e3:.2f} ms, {256 / total:,.0f} tokens/s")
    print(json.dumps({name: asdict(work) | {"seconds": work.seconds} for name, work in (step | prefill).items()}))


if __name__ == "__main__":
    main()
