"""A step's forward pass over the KV pool: by PyTorch's operations one after the other, or by one native call."""

from __future__ import annotations

from time import perf_counter
from typing import Protocol

import torch

from engine.attention.backend import AttentionBackend
from engine.models.decoder import Decoder
from engine.runner.inputs import IntArray, StepInputs
from kernels.cpu.native import NativeDecoder, StepTensors
from kernels.cpu.native_library import PHASES

Phases = tuple[tuple[str, float], ...]


class Forward(Protocol):
    """Computes steps of one model over one KV pool."""

    def hidden(self, inputs: StepInputs) -> tuple[torch.Tensor, Phases]:
        """Hidden states before the last norm, `[num_tokens, hidden_size]`, and the seconds of each phase."""

    def rows(self, hidden: torch.Tensor, indices: IntArray) -> torch.Tensor:
        """Hidden states `[n, hidden_size]` of the tokens `indices` `[n]`."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[n, vocab_size]`, float32, of hidden states `[n, hidden_size]`."""


class TorchForward:
    """A `Decoder` and the attention over its pool."""

    def __init__(self, decoder: Decoder, backend: AttentionBackend) -> None:
        """Args: decoder; backend, over the KV pool."""
        self._decoder, self._backend = decoder, backend
        self._dtype = decoder.weights.embedding.dtype
        self.logits = decoder.logits

    def hidden(self, inputs: StepInputs) -> tuple[torch.Tensor, Phases]:
        """See `Forward`."""
        begin = perf_counter()
        attention = self._backend.begin(inputs.attention, self._dtype)
        hidden = self._decoder.forward(inputs.token_ids, inputs.positions, attention)
        return hidden, (("forward", perf_counter() - begin),)

    def rows(self, hidden: torch.Tensor, indices: IntArray) -> torch.Tensor:
        """See `Forward`."""
        return hidden[torch.from_numpy(indices)]


class NativeForward:
    """All layers in one call, which also says how long each kind of work took."""

    def __init__(self, decoder: NativeDecoder) -> None:
        """Args: decoder, bound to the KV pool."""
        self._decoder = decoder
        self.logits = decoder.logits

    def hidden(self, inputs: StepInputs) -> tuple[torch.Tensor, Phases]:
        """See `Forward`."""
        attention = inputs.attention
        tensors = StepTensors(
            inputs.token_ids, inputs.positions, attention.slot_mapping, attention.query_start_loc, attention.seq_lens,
            attention.block_tables,
        )  # fmt: skip
        hidden, seconds = self._decoder.step(tensors)
        return hidden, tuple(zip(PHASES, seconds, strict=True))

    def rows(self, hidden: torch.Tensor, indices: IntArray) -> torch.Tensor:
        """See `Forward`."""
        return hidden[torch.from_numpy(indices)]
