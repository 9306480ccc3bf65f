"""A step's forward pass on a device: inputs go over in one copy, layers are launched one by one or as a graph."""

from __future__ import annotations

from time import perf_counter

import numpy as np
import torch

from engine.attention.backend import AttentionBackend
from engine.attention.metadata import AttentionMetadata
from engine.models.decoder import Decoder
from engine.runner.cuda_graphs import DecodeGraphs, Recorder
from engine.runner.forward import Phases
from engine.runner.inputs import IntArray, StepInputs
from engine.runner.transfer import DeviceLink


class DeviceForward:
    """A `Decoder` and the attention over its pool, both on the device; see `engine.runner.forward.Forward`.

    Nothing in it waits for the device, so the seconds of its phase are those of launching.
    """

    def __init__(self, decoder: Decoder, backend: AttentionBackend, link: DeviceLink) -> None:
        """Args: decoder; backend, over the KV pool; link, to their device."""
        self._decoder, self._backend, self._link = decoder, backend, link
        self._dtype = decoder.weights.embedding.dtype
        self._graphs: DecodeGraphs | None = None
        self.logits = decoder.logits

    @torch.inference_mode()
    def use_graphs(self, graphs: DecodeGraphs, recorder: Recorder) -> None:
        """Capture `graphs`, and use them from now on."""
        graphs.capture(self.compute, recorder)
        self._graphs = graphs

    def compute(self, inputs: StepInputs) -> torch.Tensor:
        """Hidden states `[num_tokens, hidden_size]` of inputs on the device."""
        attention = self._backend.begin(inputs.attention, self._dtype)
        return self._decoder.forward(inputs.token_ids, inputs.positions, attention)

    def hidden(self, inputs: StepInputs) -> tuple[torch.Tensor, Phases]:
        """See `Forward`; of inputs on the host."""
        begin = perf_counter()
        hidden = self._graphs.run(inputs) if self._graphs is not None else None
        if hidden is None:
            hidden = self.compute(self._sent(inputs))
        return hidden, (("launch", perf_counter() - begin),)

    def _sent(self, inputs: StepInputs) -> StepInputs:
        metadata = inputs.attention
        tensors = (
            inputs.token_ids, inputs.positions, metadata.query_start_loc, metadata.seq_lens, metadata.block_tables,
            metadata.slot_mapping,
        )  # fmt: skip
        token_ids, positions, *rest = self._link.send_all([tensor.numpy() for tensor in tensors])
        return StepInputs(token_ids, positions, AttentionMetadata(metadata.num_decodes, *rest), inputs.last_tokens)

    def rows(self, hidden: torch.Tensor, indices: IntArray) -> torch.Tensor:
        """See `Forward`."""
        if np.array_equal(indices, np.arange(len(indices))):  # the first ones in order: as decodes always are
            return hidden[: len(indices)]
        return hidden[self._link.send(indices)]
