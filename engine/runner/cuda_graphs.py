"""Steps that only decode, replayed as graphs that were captured at a few sizes.

A captured graph is a fixed list of kernels over fixed memory: a step is copied into that memory, padded to the next
size, and the whole list is launched at once. Padding writes nowhere and reads nothing: its slot is -1 and its sequence
has length 0. Larger steps, and all that prefill, are launched kernel by kernel.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from engine.attention.metadata import AttentionMetadata
from engine.runner.inputs import StepInputs
from engine.runner.transfer import DeviceLink

MAX_GRAPH_SIZE = 512  # beyond, a step's products take longer than launching them
_STEP = 16  # between sizes, from there on

Replay = Callable[[], torch.Tensor]
Compute = Callable[[StepInputs], torch.Tensor]  # inputs on the device -> hidden states


class Recorder(Protocol):
    """Captures what a function launches."""

    def record(self, compute: Replay) -> Replay:
        """A function that does the same again, over the same memory, and gives the same tensor."""


class CudaRecorder:
    """Graphs of CUDA, which share one pool of memory: no two of them run at a time."""

    def __init__(self) -> None:
        self._pool: Any = None  # what PyTorch names a pool by

    def record(self, compute: Replay) -> Replay:
        """See `Recorder`."""
        compute()  # compiles kernels and sets up libraries, which can't be captured
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = compute()
        self._pool = self._pool or graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Sizes to capture, ascending; the last one is `max_num_seqs`, or as large as graphs get."""
    largest = min(max_num_seqs, MAX_GRAPH_SIZE)
    sizes = {1, 2, 4, 8, *range(_STEP, largest + 1, _STEP), largest}
    return tuple(sorted(size for size in sizes if size <= largest))


def padded_size(sizes: Sequence[int], num_seqs: int) -> int | None:
    """The smallest of `sizes` (ascending) that `num_seqs` fit in; None = none is large enough."""
    place = bisect_left(sizes, num_seqs)
    return sizes[place] if place < len(sizes) else None


class DecodeGraphs:
    """Captured graphs, and the memory that they read their inputs from."""

    def __init__(self, sizes: Sequence[int], max_blocks: int, device: torch.device, link: DeviceLink) -> None:
        """Args: sizes, ascending; max_blocks, of the longest sequence; device; link to it."""
        self.sizes = tuple(sizes)
        self._link = link
        largest = self.sizes[-1]
        # Rows: token ids, positions, slots.
        self._longs = torch.zeros((3, largest), dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(largest, dtype=torch.int32, device=device)
        self._tables = torch.zeros((largest, max_blocks), dtype=torch.int32, device=device)
        self._starts = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._longs[2] = -1
        self._graphs: dict[int, Replay] = {}

    def capture(self, compute: Compute, recorder: Recorder) -> None:
        """Capture every size, the largest first: the others fit in the memory that it takes."""
        for size in reversed(self.sizes):
            self._graphs[size] = recorder.record(partial(compute, self._inputs(size)))

    def _inputs(self, size: int) -> StepInputs:
        """The memory of a graph as a step's inputs."""
        metadata = AttentionMetadata(
            num_decodes=size,
            query_start_loc=self._starts[: size + 1],
            seq_lens=self._seq_lens[:size],
            block_tables=self._tables[:size],
            slot_mapping=self._longs[2, :size],
        )
        return StepInputs(self._longs[0, :size], self._longs[1, :size], metadata, np.arange(size))

    def run(self, inputs: StepInputs) -> torch.Tensor | None:
        """Hidden states `[num_seqs, hidden_size]` of a step on the host, until the next one; None = no graph fits."""
        metadata = inputs.attention
        count = metadata.num_seqs
        if metadata.num_decodes < count:
            return None
        size = padded_size(self.sizes, count)
        if size is None or metadata.block_tables.shape[1] > self._tables.shape[1]:
            return None
        longs = np.zeros((3, size), dtype=np.int64)
        longs[2, count:] = -1
        for row, values in zip(longs, (inputs.token_ids, inputs.positions, metadata.slot_mapping), strict=True):
            row[:count] = values.numpy()
        seq_lens = np.zeros(size, dtype=np.int32)
        seq_lens[:count] = metadata.seq_lens.numpy()
        sent = self._link.send_all((longs, seq_lens, metadata.block_tables.numpy()))
        self._longs[:, :size].copy_(sent[0])
        self._seq_lens[:size].copy_(sent[1])
        self._tables[:count, : metadata.block_tables.shape[1]].copy_(sent[2])
        return self._graphs[size]()[:count]
