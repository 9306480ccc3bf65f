"""What one step's attention needs to know, as plain tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step. Sequences that compute a single token come first, so that both kinds are slices.

    tokens     [0, num_decodes)      one each of the first num_decodes sequences
    tokens     [num_decodes, n)      the others', sequence after sequence
    """

    num_decodes: int  # sequences that compute one token in this step
    query_start_loc: torch.Tensor  # [num_seqs + 1] int32, first token of each sequence in the batch
    seq_lens: torch.Tensor  # [num_seqs] int32, tokens including this step's
    block_tables: torch.Tensor  # [num_seqs, max_blocks] int32; entries past a sequence's last block are stale
    slot_mapping: torch.Tensor  # [num_tokens] int64, where each token's KV goes

    @property
    def num_seqs(self) -> int:
        """Sequences in this step."""
        return int(self.seq_lens.numel())
