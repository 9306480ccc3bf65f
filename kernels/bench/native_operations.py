"""Times each native operation on the embedded model's shapes: bytes, operations, and the share of the floor reached.

`python -m kernels.bench.native_operations` prints one JSON line per case. A floor is the longer of the bytes over
the bandwidth of reading and the operations over the rate of a product that stays in the cache, both measured in the
same run. Inputs are far larger than the caches where a step's are (weights and KV), so they come from memory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter

import numpy as np
import torch

from kernels.cpu.native import NativeKernels, PackedLinear, StepTensors, StoredMatrix
from kernels.cpu.native_sampling import OPTIONS as SAMPLE_OPTIONS
from kernels.layout import KVLayout, allocate

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 576, 1536, 9, 3, 64, 49_152, 30
BLOCK_SIZE = 16
_ELEMENT = 2  # bytes of a bfloat16


@dataclass(frozen=True, slots=True)
class Floors:
    """What this machine can do, measured."""

    bytes_per_s: float  # reading memory
    operations_per_s: float  # a multiply-add counts as two


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement; the names of the fields are the keys of its JSON line."""

    op: str
    rows: int
    length: int  # tokens of context, 0 where there is none
    seconds: float  # median of the repetitions
    bytes: int
    operations: int
    gb_per_s: float
    gflops: float
    share_of_floor: float  # 1 = as fast as memory or arithmetic allows


def timed(run: Callable[[], object], reps: int) -> float:
    """Median seconds of `reps` calls, after one that warms up."""
    run()
    times = []
    for _ in range(reps):
        begin = perf_counter()
        run()
        times.append(perf_counter() - begin)
    return median(times)


def measure_floors(kernels: NativeKernels, reps: int) -> Floors:
    """Bandwidth of a pass over 256 MiB, and the rate of a product that fits the L2 cache."""
    large = torch.ones(64, 1 << 20)
    bandwidth = large.nbytes / timed(lambda: kernels.check_finite(large), reps)
    weight, x = torch.randn(256, 512).bfloat16(), torch.randn(384, 512).bfloat16()
    packed = kernels.pack(weight)
    return Floors(bandwidth, 2 * 384 * weight.numel() / timed(lambda: kernels.linear(x, packed), 5 * reps))


def case(op: str, rows: int, length: int, seconds: float, num_bytes: int, operations: int, floors: Floors) -> Case:
    """The figures of one measurement."""
    floor = max(num_bytes / floors.bytes_per_s, operations / floors.operations_per_s)
    return Case(
        op, rows, length, round(seconds, 7), num_bytes, operations, round(num_bytes / seconds / 1e9, 2),
        round(operations / seconds / 1e9, 1), round(floor / seconds, 3),
    )  # fmt: skip


def products(kernels: NativeKernels, floors: Floors, rows: list[int], reps: int) -> Iterator[Case]:
    """All matrices of the model's layers, one after the other; with few rows in 4 bits too."""
    shapes = [((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), (HIDDEN, HEADS * HEAD_DIM), (HIDDEN, INNER)]
    gate = (2 * INNER, HIDDEN)
    for name in ("linear bf16", "linear 4-bit"):
        matrices = []
        for _ in range(LAYERS):
            for out_features, in_features in (*shapes, gate):
                blocks = torch.zeros(out_features, in_features // 32 * 20, dtype=torch.uint8)
                stored = StoredMatrix("Q4_1", blocks) if name == "linear 4-bit" else None
                weight = torch.zeros(out_features, in_features, dtype=torch.bfloat16)
                matrices.append(kernels.pack(weight, is_gate_up=(out_features, in_features) == gate, stored=stored))
        for count in rows:
            if stored is not None and count > matrices[0].max_quantised_rows:
                continue
            inputs = {n: torch.ones(count, n, dtype=torch.bfloat16) for n in (HIDDEN, INNER)}

            def run(inputs: dict[int, torch.Tensor] = inputs, matrices: list[PackedLinear] = matrices) -> None:
                for matrix in matrices:
                    kernels.linear(inputs[matrix.in_features], matrix)

            parts = [m.quantised if stored is not None else m.memory for m in matrices]
            num_bytes = sum(part.num_bytes for part in parts if part is not None)
            operations = sum(2 * count * m.out_features * m.in_features for m in matrices)
            yield case(name, count, 0, timed(run, reps), num_bytes, operations, floors)


def attention(kernels: NativeKernels, floors: Floors, rows: list[int], length: int, reps: int) -> Iterator[Case]:
    """All layers' attention: `rows` decodes over `length` tokens each; then one prefill of `length` tokens."""
    layout = KVLayout(KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    per_row = layout.num_blocks_for(length)
    pool = allocate(layout, LAYERS, per_row * max(rows), torch.bfloat16).normal_()
    tables = torch.randperm(per_row * max(rows)).int()
    per_token = 2 * KV_HEADS * HEAD_DIM * _ELEMENT
    scale = HEAD_DIM**-0.5

    def step(num_seqs: int, num_new: int) -> tuple[StepTensors, torch.Tensor]:
        unused = torch.zeros(num_seqs * num_new, dtype=torch.int64)  # attention alone reads no positions
        starts = torch.arange(0, num_seqs * num_new + 1, num_new, dtype=torch.int32)
        lengths = torch.full((num_seqs,), length, dtype=torch.int32)
        table = tables[: num_seqs * per_row].view(num_seqs, per_row)
        inputs = StepTensors(unused, unused, unused, starts, lengths, table)
        return inputs, torch.randn(num_seqs * num_new, HEADS, HEAD_DIM).bfloat16()

    for op, num_seqs, num_new in (*(("paged decode", count, 1) for count in rows), ("paged prefill", 1, length)):
        inputs, query = step(num_seqs, num_new)

        def run(inputs: StepTensors = inputs, query: torch.Tensor = query) -> None:
            for layer in pool:
                kernels.attend(query, layer, inputs, scale)

        seen = length if num_new == 1 else (length + 1) / 2  # tokens that a row sees, on average
        operations = int(4 * num_seqs * num_new * seen * HEADS * HEAD_DIM) * LAYERS
        num_bytes = num_seqs * length * per_token * LAYERS
        yield case(op, num_seqs * num_new, length, timed(run, reps), num_bytes, operations, floors)


def vocabulary(kernels: NativeKernels, floors: Floors, rows: list[int], reps: int) -> Iterator[Case]:
    """Norms, the head's product, and the choice of tokens: the best ones, and drawn ones from truncated rows."""
    head = kernels.pack(torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16))
    for count in rows:
        hidden = torch.ones(count, HIDDEN, dtype=torch.bfloat16)
        seconds = timed(lambda hidden=hidden: kernels.linear(hidden, head), reps)  # type: ignore[misc]
        num_bytes = head.num_bytes + count * VOCAB * 4
        yield case("head bf16", count, 0, seconds, num_bytes, 2 * count * HIDDEN * VOCAB, floors)
        x, weight = torch.randn(count, HIDDEN), torch.ones(HIDDEN)
        seconds = timed(lambda x=x, weight=weight: kernels.rms_norm(x, weight, 1e-5, torch.bfloat16), reps)  # type: ignore[misc]
        yield case("rms norm", count, 0, seconds, x.nbytes + x.numel() * _ELEMENT, 4 * x.numel(), floors)
        logits = torch.randn(count, VOCAB)
        seconds = timed(lambda logits=logits: kernels.sample(logits, None), reps)  # type: ignore[misc]
        yield case("argmax", count, 0, seconds, logits.nbytes, logits.numel(), floors)
        for op, top_k, top_p in (("sample", 0, 1.0), ("sample top_k 50", 50, 1.0), ("sample top_p 0.9", 0, 0.9)):
            options = np.zeros(count, dtype=SAMPLE_OPTIONS)
            options["temperature"], options["top_k"], options["top_p"], options["uniform"] = 0.7, top_k, top_p, 0.5
            peaked = 3 * logits
            seconds = timed(lambda peaked=peaked, options=options: kernels.sample(peaked, options), reps)  # type: ignore[misc]
            yield case(op, count, 0, seconds, peaked.nbytes, 2 * peaked.numel(), floors)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,4,8,32,64,128,256", help="rows of a step, separated by commas")
    parser.add_argument("--length", type=int, default=256, help="tokens of context of each sequence")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--instruction-set", help="one of those that the processor has; the best if none is named")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernels = NativeKernels(options.threads, options.instruction_set)
    rows = [int(count) for count in options.rows.split(",")]
    floors = measure_floors(kernels, options.reps)
    print(json.dumps({"instruction_set": kernels.instruction_set, "threads": options.threads, **asdict(floors)}))
    for measure in (products, vocabulary):
        for found in measure(kernels, floors, rows, options.reps):
            print(json.dumps(asdict(found)), flush=True)
    for found in attention(kernels, floors, rows, options.length, options.reps):
        print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    main()
