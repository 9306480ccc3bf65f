"""The runner's own memory of each sequence, and a step's inputs from it.

Every sequence that runs has a row: its token ids and its block table lie in arrays that stay from step to step, so a
step's inputs are a few vectorised look-ups, whatever the sequences' lengths and the size of the pool.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.metadata import AttentionMetadata
from engine.core.batch import NewSequence, ScheduledSequence

IntArray = npt.NDArray[np.int64]


class RowTable:
    """Token ids and block tables of all known sequences. Rows are reused, the lowest first; the table doubles."""

    def __init__(self, num_rows: int, max_model_len: int, block_size: int) -> None:
        """Args: rows to begin with; longest sequence and block size, tokens."""
        self.block_size = block_size
        # One more than a sequence can hold: the token that ends it at max_model_len is appended too. np.empty takes
        # address space only; a page becomes resident when a sequence gets that long.
        self._num_columns = max_model_len + 1
        self._num_block_columns = -(-self._num_columns // block_size)
        self.capacity = 0
        self.token_ids: npt.NDArray[np.int32]  # [capacity, max_model_len + 1]
        self.block_tables: npt.NDArray[np.int32]  # [capacity, blocks of that]
        self.num_tokens: IntArray  # [capacity] known tokens
        self.num_prompt_tokens: IntArray  # [capacity]
        self.num_blocks: IntArray  # [capacity] filled entries of the block table
        self._allocate(max(1, num_rows))
        self.clear()

    def _allocate(self, capacity: int) -> None:
        token_ids = np.empty((capacity, self._num_columns), dtype=np.int32)
        block_tables = np.empty((capacity, self._num_block_columns), dtype=np.int32)
        num_tokens, num_prompt_tokens = np.zeros(capacity, dtype=np.int64), np.zeros(capacity, dtype=np.int64)
        num_blocks = np.zeros(capacity, dtype=np.int64)
        old = self.capacity
        if old:
            num_tokens[:old], num_prompt_tokens[:old] = self.num_tokens, self.num_prompt_tokens
            num_blocks[:old] = self.num_blocks
            for row in range(old):
                token_ids[row, : num_tokens[row]] = self.token_ids[row, : num_tokens[row]]
                block_tables[row, : num_blocks[row]] = self.block_tables[row, : num_blocks[row]]
        self.token_ids, self.block_tables = token_ids, block_tables
        self.num_tokens, self.num_prompt_tokens, self.num_blocks = num_tokens, num_prompt_tokens, num_blocks
        self.capacity = capacity

    def clear(self) -> None:
        """Forget all sequences."""
        self.row_of: dict[str, int] = {}
        self.num_tokens[:] = 0
        self.num_blocks[:] = 0
        self._free = list(range(self.capacity))

    def _take_row(self, seq_id: str) -> int:
        assert seq_id not in self.row_of, f"{seq_id} is announced twice"
        if not self._free:
            old = self.capacity
            self._allocate(2 * old)
            self._free = list(range(old, self.capacity))  # ascending: a heap
        row = heapq.heappop(self._free)
        self.row_of[seq_id] = row
        return row

    def add(self, new: NewSequence) -> int:
        """Take a row for a sequence; returns it."""
        row = self._take_row(new.seq_id)
        num_tokens, num_blocks = len(new.token_ids), len(new.block_table)
        self.token_ids[row, :num_tokens] = new.token_ids
        self.block_tables[row, :num_blocks] = new.block_table
        self.num_tokens[row], self.num_prompt_tokens[row] = num_tokens, new.num_prompt_tokens
        self.num_blocks[row] = num_blocks
        return row

    def fork(self, parent_id: str, child_id: str) -> int:
        """Take a row for a copy of `parent_id`: its tokens, and the blocks that hold them; returns it."""
        row, parent = self._take_row(child_id), self.row_of[parent_id]
        num_tokens = int(self.num_tokens[parent])
        num_blocks = -(-num_tokens // self.block_size)
        self.token_ids[row, :num_tokens] = self.token_ids[parent, :num_tokens]
        self.block_tables[row, :num_blocks] = self.block_tables[parent, :num_blocks]
        self.num_tokens[row], self.num_prompt_tokens[row] = num_tokens, self.num_prompt_tokens[parent]
        self.num_blocks[row] = num_blocks
        return row

    def remove(self, seq_id: str) -> None:
        """Free a sequence's row."""
        row = self.row_of.pop(seq_id)
        self.num_tokens[row] = self.num_blocks[row] = 0
        heapq.heappush(self._free, row)

    def append_blocks(self, row: int, block_ids: Sequence[int]) -> None:
        """Append to a row's block table."""
        first = int(self.num_blocks[row])
        self.block_tables[row, first : first + len(block_ids)] = block_ids
        self.num_blocks[row] = first + len(block_ids)

    def append_tokens(self, rows: IntArray, token_ids: IntArray) -> None:
        """Append one token to each of `rows` (distinct)."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the model computes in one step."""

    token_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    attention: AttentionMetadata
    last_tokens: IntArray  # [num scheduled] index of each scheduled sequence's last token, in the batch's order


def build_inputs(table: RowTable, scheduled: Sequence[ScheduledSequence]) -> StepInputs:
    """The inputs of a step that computes `scheduled`, each of which has a row."""
    count = len(scheduled)
    rows = np.fromiter((table.row_of[s.seq_id] for s in scheduled), dtype=np.int64, count=count)
    num_computed = np.fromiter((s.num_computed_tokens for s in scheduled), dtype=np.int64, count=count)
    num_new = np.fromiter((s.num_tokens for s in scheduled), dtype=np.int64, count=count)
    assert (num_computed + num_new <= table.num_tokens[rows]).all(), "a step may compute known tokens only"
    # Sequences with a single token first: what attention treats alike lies together.
    order = np.argsort(num_new != 1, kind="stable")
    rows, num_computed, num_new = rows[order], num_computed[order], num_new[order]
    starts = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(num_new, out=starts[1:])
    token_rows = np.repeat(rows, num_new)
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - num_computed, num_new)
    block_ids = table.block_tables[token_rows, positions // table.block_size].astype(np.int64)
    seq_lens = num_computed + num_new
    max_blocks = -(-int(seq_lens.max()) // table.block_size)
    last_tokens = np.empty(count, dtype=np.int64)
    last_tokens[order] = starts[1:] - 1
    return StepInputs(
        token_ids=torch.from_numpy(table.token_ids[token_rows, positions].astype(np.int64)),
        positions=torch.from_numpy(positions),
        attention=AttentionMetadata(
            num_decodes=int((num_new == 1).sum()),
            query_start_loc=torch.from_numpy(starts.astype(np.int32)),
            seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
            block_tables=torch.from_numpy(table.block_tables[rows, :max_blocks]),
            slot_mapping=torch.from_numpy(block_ids * table.block_size + positions % table.block_size),
        ),
        last_tokens=last_tokens,
    )
