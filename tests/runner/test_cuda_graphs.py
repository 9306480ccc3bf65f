"""Which graph a step takes, and that padding touches nothing: on the CPU, with a recorder that remembers functions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.core.batch import NewSequence, ScheduledSequence
from engine.runner.cuda_graphs import MAX_GRAPH_SIZE, DecodeGraphs, graph_sizes, padded_size
from engine.runner.inputs import RowTable, StepInputs, build_inputs
from engine.runner.transfer import DeviceLink
from engine.sampling_params import SamplingParams

CPU = torch.device("cpu")
MAX_BLOCKS = 6


class FakeRecorder:
    """Runs a function once, as a capture does, and again for each replay."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.replays: list[int] = []

    def record(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        size = len(compute())
        self.sizes.append(size)

        def replay() -> torch.Tensor:
            self.replays.append(size)
            return compute()

        return replay


def what_is_read(inputs: StepInputs) -> torch.Tensor:
    """Stands for a model: per row its token, position, slot, length, and the sum of the blocks that it may read."""
    metadata = inputs.attention
    assert metadata.num_decodes == metadata.num_seqs == len(inputs.token_ids)
    assert metadata.query_start_loc.tolist() == list(range(metadata.num_seqs + 1))
    used = -(-metadata.seq_lens // 16)
    blocks = torch.where(torch.arange(MAX_BLOCKS) < used.unsqueeze(1), metadata.block_tables, 0).sum(1)
    columns = (inputs.token_ids, inputs.positions, metadata.slot_mapping, metadata.seq_lens, blocks)
    return torch.stack([column.to(torch.int64) for column in columns], 1)


def step(lengths: list[int], num_new: int = 1) -> StepInputs:
    """Sequence i has `lengths[i]` tokens, all i + 1, in blocks of its own, and computes the last ones."""
    table = RowTable(4, MAX_BLOCKS * 16 - 1, 16)
    scheduled = []
    for i, length in enumerate(lengths):
        blocks = tuple(100 * (i + 1) + j for j in range(-(-length // 16)))
        table.add(NewSequence(f"s{i}", (i + 1,) * length, length, blocks, SamplingParams(), ()))
        scheduled.append(ScheduledSequence(f"s{i}", length - num_new, num_new, (), True))
    return build_inputs(table, scheduled)


def make(sizes: tuple[int, ...], recorder: FakeRecorder) -> DecodeGraphs:
    graphs = DecodeGraphs(sizes, MAX_BLOCKS, CPU, DeviceLink(CPU, 64))
    graphs.capture(what_is_read, recorder)
    return graphs


def test_sizes_grow_in_steps_up_to_the_most_sequences() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(5) == (1, 2, 4, 5)
    assert graph_sizes(40) == (1, 2, 4, 8, 16, 32, 40)
    assert graph_sizes(256) == (1, 2, 4, 8, *range(16, 257, 16))
    assert graph_sizes(4096)[-1] == MAX_GRAPH_SIZE


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 2), (3, 4), (8, 8), (9, 16), (16, 16), (17, None)])
def test_the_next_size_is_taken_and_none_beyond_the_largest(count: int, size: int | None) -> None:
    assert padded_size((1, 2, 4, 8, 16), count) == size


def test_the_largest_is_captured_first_and_capturing_touches_nothing() -> None:
    recorder = FakeRecorder()
    seen = []

    def compute(inputs: StepInputs) -> torch.Tensor:
        seen.append(what_is_read(inputs))
        return seen[-1]

    DecodeGraphs((1, 2, 4), MAX_BLOCKS, CPU, DeviceLink(CPU)).capture(compute, recorder)
    assert recorder.sizes == [4, 2, 1]
    for rows in seen:
        assert (rows[:, 2] == -1).all()  # no slot
        assert (rows[:, 3] == 0).all()  # no length


def test_a_step_is_what_it_is_without_a_graph_and_padding_is_inert() -> None:
    recorder = FakeRecorder()
    graphs = make((1, 2, 4, 8), recorder)
    padding = []

    for lengths in ([33], [1, 50, 16], [90, 2], [7, 8, 9, 10, 11], [3]):
        inputs = step(lengths)
        expected = []
        for i, length in enumerate(lengths):
            table = [100 * (i + 1) + j for j in range(-(-length // 16))]
            slot = table[(length - 1) // 16] * 16 + (length - 1) % 16
            expected.append([i + 1, length - 1, slot, length, sum(table)])
        rows = graphs.run(inputs)
        assert rows is not None
        assert rows.tolist() == expected
        size = recorder.replays[-1]
        all_rows = what_is_read(graphs._inputs(size))
        padding += all_rows[len(lengths) :].tolist()
    assert recorder.replays == [1, 4, 2, 8, 1]
    assert len(padding) == 1 + 3
    assert {tuple(row) for row in padding} == {(0, 0, -1, 0, 0)}


def test_prefills_and_steps_that_are_too_large_have_no_graph() -> None:
    recorder = FakeRecorder()
    graphs = make((1, 2), recorder)
    assert graphs.run(step([5, 6, 7])) is None
    assert graphs.run(step([20], num_new=2)) is None
    mixed = step([20])
    assert graphs.run(mixed) is not None
    assert recorder.replays == [1]


def test_sending_is_one_copy_whose_tensors_are_kept_when_memory_grows() -> None:
    link = DeviceLink(CPU, 32)
    first = link.send(np.array([1, 2, 3], dtype=np.int64))
    parts = link.send_all([np.arange(n, dtype=np.int32) for n in (0, 1, 40)])
    assert first.tolist() == [1, 2, 3]
    assert [part.tolist() for part in parts] == [[], [0], list(range(40))]
    flags = link.send(np.array([[True, False]]))
    assert flags.tolist() == [[True, False]]
    link.begin_step()
    again = link.send(np.array([0.5], dtype=np.float64))
    assert again.tolist() == [0.5]


def test_all_results_that_are_asked_for_come_in_one_copy() -> None:
    link = DeviceLink(CPU)
    one = link.later(torch.tensor([[1, 2], [3, 4]])[:, 1], torch.tensor([True, False]))
    two = link.later(torch.tensor([[0.5]]), torch.tensor([7], dtype=torch.int32))
    assert [array.tolist() for array in two()] == [[[0.5]], [7]]
    assert [array.tolist() for array in one()] == [[2, 4], [True, False]]
    assert link.num_fetches == 1
    assert link.later(torch.zeros(400_000))()[0].sum() == 0  # more than was kept for results
    assert link.num_fetches == 2
