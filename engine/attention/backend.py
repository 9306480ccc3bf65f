"""The attention of a step, and the choice of who computes it.

A backend is a set of kernels over one KV pool. `begin` is called once per step and prepares what all layers share;
`attend` is called by each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.attention.metadata import AttentionMetadata
from engine.errors import StartupError
from kernels.layout import layout_of
from kernels.registry import KernelError, select

# Name that a user may ask for -> why it is what it is.
BACKENDS = {
    "native": "a step's layers in one call",
    "cpu": "gathers blocks, then PyTorch's attention",
    "reference": "float32 loops, slow, for checking",
}


class AttentionBackend:
    """Paged attention over one KV pool with the kernels of one implementation."""

    def __init__(self, name: str, device: str, kv_pool: torch.Tensor, scale: float) -> None:
        """Args: name, one of BACKENDS; device, kind; kv_pool `[num_layers, *cache shape]`; scale of the products.

        Raises:
            StartupError: that implementation can't run here.
        """
        self.name = name
        self._layers = list(kv_pool.unbind(0))
        self._layout = layout_of(self._layers[0])
        self._scale = scale
        try:
            self._write: Callable[..., None] = select("write_kv", device, name).load()
            self._decode: Callable[..., torch.Tensor] = select("paged_decode", device, name).load()
            self._prefill: Callable[..., torch.Tensor] = select("paged_prefill", device, name).load()
            self._plan_write: Callable[..., Any] = select("plan_write", device, name).load()
            self._plan_decode: Callable[..., Any] = select("plan_decode", device, name).load()
            self._plan_prefill: Callable[..., Any] = select("plan_prefill", device, name).load()
        except KernelError as error:
            raise StartupError(f"--attention-backend {name}: {error}") from error

    def begin(self, metadata: AttentionMetadata, dtype: torch.dtype) -> StepAttention:
        """The attention of one step, for queries of `dtype`."""
        return StepAttention(self, metadata, dtype)


class StepAttention:
    """One step's attention; implements `engine.models.decoder.Attention`."""

    def __init__(self, backend: AttentionBackend, metadata: AttentionMetadata, dtype: torch.dtype) -> None:
        self._backend = backend
        self._metadata = metadata
        layout, n = backend._layout, metadata.num_decodes
        self._write_plan = backend._plan_write(layout, metadata.slot_mapping)
        self._decode_tables, self._prefill_tables = metadata.block_tables[:n], metadata.block_tables[n:]
        self._decode_lens, self._prefill_lens = metadata.seq_lens[:n], metadata.seq_lens[n:]
        self._prefill_starts = metadata.query_start_loc[n:] - n
        self._has_prefills = metadata.num_seqs > n
        self._decode_plan = self._prefill_plan = None
        if n:
            self._decode_plan = backend._plan_decode(layout, self._decode_tables, self._decode_lens, dtype)
        if self._has_prefills:
            self._prefill_plan = backend._plan_prefill(
                layout, self._prefill_tables, self._prefill_lens, self._prefill_starts, dtype
            )

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        """See `engine.models.decoder.Attention`."""
        backend, n = self._backend, self._metadata.num_decodes
        cache = backend._layers[layer]
        backend._write(cache, key_value, self._metadata.slot_mapping, self._write_plan)
        parts = []
        if n:
            parts.append(
                backend._decode(
                    query[:n], cache, self._decode_tables, self._decode_lens, backend._scale, self._decode_plan
                )
            )
        if self._has_prefills:
            parts.append(
                backend._prefill(
                    query[n:], cache, self._prefill_tables, self._prefill_lens, self._prefill_starts,
                    backend._scale, self._prefill_plan,
                )
            )  # fmt: skip
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def choose_backend(requested: str, device: str, native_obstacle: str | None) -> tuple[str, str]:
    """(name, reason) of the backend for `requested` ("auto" or a name) on `device`.

    Args:
        requested: what the user asks for.
        device: kind.
        native_obstacle: why this model can't be computed natively here; None = it can.

    Raises:
        StartupError: there is no such backend, or it can't run here.
    """
    if requested not in ("auto", *BACKENDS):
        raise StartupError(f"--attention-backend {requested}: there are auto, {', '.join(BACKENDS)}")
    chosen = "best that runs here" if requested == "auto" else "as requested"
    if requested in ("auto", "native"):
        if native_obstacle is None:
            return "native", f"{BACKENDS['native']}; {chosen}"
        if requested == "native":
            raise StartupError(f"--attention-backend native: {native_obstacle}")
        chosen += f"; not native: {native_obstacle}"
    try:
        name = select("paged_decode", device, requested).name
    except KernelError as error:
        raise StartupError(f"--attention-backend {requested}: {error}") from error
    return name, f"{BACKENDS[name]}; {chosen}"
