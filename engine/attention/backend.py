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
from engine.models.decoder import HeadNorms
from kernels.layout import layout_of
from kernels.registry import KernelError, select

# Name that a user may ask for -> why it is what it is.
BACKENDS = {
    "native": "a step's layers in one call",
    "cpu": "gathers blocks, then PyTorch's attention",
    "triton": "kernels for GPUs",
    "reference": "float32 loops, slow, for checking",
}


class AttentionBackend:
    """Paged attention over one KV pool with the kernels of one implementation."""

    def __init__(
        self, name: str, device: str, kv_pool: torch.Tensor, scale: float, windows: tuple[int, ...] = ()
    ) -> None:
        """Args: name, one of BACKENDS; device, kind; kv_pool `[num_layers, *cache shape]`; scale of the products;
        windows, tokens that each layer's positions see, 0 = all, () = all in each.

        Raises:
            StartupError: that implementation can't run here.
        """
        self.name = name
        self._windows = windows or (0,) * kv_pool.shape[0]
        self._layers = list(kv_pool.unbind(0))
        self._layout = layout_of(self._layers[0])
        self._scale = scale
        try:
            self._rms_norm: Callable[..., torch.Tensor] = select("rms_norm", device, name).load()
            self._rope: Callable[..., None] = select("rope", device, name).load()
            self._rope_and_write: Callable[..., None] = select("rope_and_write_kv", device, name).load()
            self._write: Callable[..., None] = select("write_kv", device, name).load()
            self._decode: Callable[..., torch.Tensor] = select("paged_decode", device, name).load()
            self._prefill: Callable[..., torch.Tensor] = select("paged_prefill", device, name).load()
            self._plan_write: Callable[..., Any] = select("plan_write", device, name).load()
            self._plan_decode: Callable[..., Any] = select("plan_decode", device, name).load()
            self._plan_prefill: Callable[..., Any] = select("plan_prefill", device, name).load()
        except KernelError as error:
            raise StartupError(f"--attention-backend {name}: {error}") from error

    def store(
        self, layer: int, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norms: HeadNorms | None,
        slot_mapping: torch.Tensor, write_plan: Any,
    ) -> None:  # fmt: skip
        """Norm and rotate queries in place and keys, and store keys and values; see `Attention.attend`."""
        cache, num_kv_heads = self._layers[layer], self._layout.num_kv_heads
        num_heads = heads.shape[1] - 2 * num_kv_heads
        if self.name == "triton":  # one kernel does all of it, and needs no plan
            weights = {} if norms is None else {"q_norm": norms.query, "k_norm": norms.key, "eps": norms.eps}
            self._rope_and_write(heads, cos, sin, cache, slot_mapping, num_heads, num_kv_heads, **weights)
            return
        if norms is not None:
            queries, keys = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
            queries.copy_(self._rms_norm(queries, norms.query, norms.eps))
            keys.copy_(self._rms_norm(keys, norms.key, norms.eps))
        self._rope(heads[:, : num_heads + num_kv_heads], cos, sin)
        self._write(cache, heads[:, num_heads:], slot_mapping, write_plan)

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

    def attend(
        self, layer: int, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norms: HeadNorms | None
    ) -> torch.Tensor:
        """See `engine.models.decoder.Attention`."""
        backend, n = self._backend, self._metadata.num_decodes
        cache, window = backend._layers[layer], backend._windows[layer]
        backend.store(layer, heads, cos, sin, norms, self._metadata.slot_mapping, self._write_plan)
        query = heads[:, : heads.shape[1] - 2 * backend._layout.num_kv_heads]
        parts = []
        if n:
            parts.append(
                backend._decode(
                    query[:n], cache, self._decode_tables, self._decode_lens, backend._scale, self._decode_plan,
                    window=window,
                )
            )  # fmt: skip
        if self._has_prefills:
            parts.append(
                backend._prefill(
                    query[n:], cache, self._prefill_tables, self._prefill_lens, self._prefill_starts,
                    backend._scale, self._prefill_plan, window=window,
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
    if device == "cuda":
        if requested not in ("auto", "triton"):
            raise StartupError(f"--attention-backend {requested}: it computes on the CPU, on cuda there is triton")
        requested = "triton"  # no other comes in its place: they would take minutes per token
    elif requested in ("auto", "native"):
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
