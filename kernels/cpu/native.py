"""The native kernels: C++ behind a C interface, which releases the GIL for the length of a call.

`NativeKernels` holds the memory and the threads of the calls; one thread at a time may use it. The sources, and what
each of them is about, are in `native/`; `build` compiles them.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from kernels.cpu.native_library import (
    CacheStruct,
    LayerStruct,
    LinearStruct,
    ModelStruct,
    StepStruct,
    instruction_sets,
    load_library,
    why_not,
)

_PANEL = 32  # outputs of a panel, see native/linear.h
MAX_HEAD_DIM = 1024

DTYPES = (torch.bfloat16, torch.float32)


class _Quantised(NamedTuple):
    """A block format of GGUF."""

    code: int  # for the C interface
    bits: int
    block_bytes: int  # of 32 inputs


_LARGE_PAGE = 2 << 20
_BLOCK = 32
QUANTISED = {"Q4_0": _Quantised(40, 4, 18), "Q4_1": _Quantised(41, 4, 20), "Q8_0": _Quantised(80, 8, 34)}
MAX_QUANTISED_ROWS = 4  # with more, bfloat16 was faster
_MAX_QUANTISED_INPUTS = 32768


class NativeError(RuntimeError):
    """The native kernels can't be used here, or a call failed; the message says why."""


class Arena:
    """A piece of memory on large pages that matrices are put into one after the other; freed with the last of them."""

    SIZE = 64 << 20

    def __init__(self, library: ctypes.CDLL, num_bytes: int) -> None:
        """Args: the library; num_bytes, a multiple of 2 MiB, zeroed.

        Raises:
            MemoryError: there isn't so much.
        """
        self._free, self._size, self._used = library.pagedeck_free, num_bytes, 0
        self._address: int | None = library.pagedeck_allocate(num_bytes)
        if self._address is None:
            raise MemoryError(f"{num_bytes} bytes of weights could not be allocated")

    def take(self, num_bytes: int) -> Memory | None:
        """The next `num_bytes`; None if there aren't so many left."""
        assert self._address is not None
        if self._used + num_bytes > self._size:
            return None
        memory = Memory(self, self._address + self._used, num_bytes)
        self._used += -(-num_bytes // 64) * 64
        return memory

    def __del__(self) -> None:
        if getattr(self, "_address", None) is not None:
            self._free(self._address, self._size)


@dataclass(frozen=True, slots=True)
class Memory:
    """A part of an arena."""

    arena: Arena
    address: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix as a GGUF file holds it: each row's inputs in blocks of 32."""

    kind: str  # one of QUANTISED
    rows: torch.Tensor  # [out_features, bytes], uint8

    @property
    def in_features(self) -> int:
        """Inputs."""
        return int(self.rows.shape[1]) // QUANTISED[self.kind].block_bytes * _BLOCK


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A matrix in the layouts that the products read."""

    memory: Memory
    out_features: int
    in_features: int
    is_bf16: bool
    is_gate_up: bool  # rows of gate and up alternate in sixteens
    quantised: Memory | None = None  # the same matrix as it is stored, for few rows
    bits: int = 0  # of those
    max_quantised_rows: int = 0  # what is few

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return self.memory.num_bytes + (self.quantised.num_bytes if self.quantised else 0)

    def struct(self) -> LinearStruct:
        """For the C interface."""
        return LinearStruct(
            self.memory.address, self.quantised.address if self.quantised else None, self.out_features,
            self.in_features, self.bits, self.max_quantised_rows,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder, in elements."""

    num_layers: int
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One layer's weights; norms are float32."""

    input_norm: torch.Tensor
    post_attention_norm: torch.Tensor
    qkv: PackedLinear
    output: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear

    def struct(self) -> LayerStruct:
        """For the C interface."""
        return LayerStruct(
            self.input_norm.data_ptr(), self.post_attention_norm.data_ptr(), self.qkv.struct(), self.output.struct(),
            self.gate_up.struct(), self.down.struct(),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PackedModel:
    """All weights of a decoder."""

    shape: ModelShape
    layers: tuple[PackedLayer, ...]
    norm: torch.Tensor  # [hidden], float32
    head: PackedLinear
    embedding: torch.Tensor | None  # [vocab, hidden]; None = it is the head's matrix
    cos: torch.Tensor  # [positions, head_dim], float32
    sin: torch.Tensor  # likewise, the first half negated

    @property
    def matrices(self) -> tuple[PackedLinear, ...]:
        """All of them."""
        return self.head, *(m for layer in self.layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down))

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights in memory."""
        vectors = [self.norm, *(v for layer in self.layers for v in (layer.input_norm, layer.post_attention_norm))]
        rest = vectors if self.embedding is None else [*vectors, self.embedding]
        return sum(matrix.num_bytes for matrix in self.matrices) + sum(tensor.nbytes for tensor in rest)

    @property
    def max_quantised_rows(self) -> int:
        """Rows up to which some matrix is used as it is stored; 0 = none ever is."""
        return max(matrix.max_quantised_rows for matrix in self.matrices)


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step's inputs. Sequences that compute one token come first; tensors are contiguous, on the CPU."""

    token_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    slot_mapping: torch.Tensor  # [num_tokens] int64
    query_start_loc: torch.Tensor  # [num_seqs + 1] int32
    seq_lens: torch.Tensor  # [num_seqs] int32
    block_tables: torch.Tensor  # [num_seqs, max_blocks] int32

    def struct(self) -> StepStruct:
        """For the C interface.

        Raises:
            ValueError: a dtype or a layout is another.
        """
        longs, ints = (self.token_ids, self.positions, self.slot_mapping), (
            self.query_start_loc, self.seq_lens, self.block_tables,
        )  # fmt: skip
        for tensors, dtype in ((longs, torch.int64), (ints, torch.int32)):
            for tensor in tensors:
                if tensor.dtype != dtype or not tensor.is_contiguous():
                    raise ValueError(f"a step's tensor must be contiguous {dtype}, got {tensor.dtype}")
        return StepStruct(
            self.token_ids.numel(), self.seq_lens.numel(), self.block_tables.shape[1],
            *(tensor.data_ptr() for tensor in (*longs, *ints)),
        )  # fmt: skip


class NativeKernels:
    """Threads and memory of native calls."""

    def __init__(self, threads: int, instruction_set: str | None = None) -> None:
        """Args: threads; instruction_set, one of `instruction_sets()`, None = the best.

        Raises:
            NativeError: there are no native kernels here, or that instruction set isn't.
        """
        self._handle: int | None = None
        self._arena: Arena | None = None
        library, reason = load_library()
        available = instruction_sets()
        if library is None or not available:
            raise NativeError(why_not() or reason)
        self.instruction_set = instruction_set or available[0]
        self._lib = library
        self._handle = library.pagedeck_create(self.instruction_set.encode(), threads)
        if self._handle is None:
            raise NativeError(f"this processor has {', '.join(available)}, not {self.instruction_set}")

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self._lib.pagedeck_destroy(self._handle)

    def pack(
        self,
        weight: torch.Tensor,
        *,
        is_gate_up: bool = False,
        stored: StoredMatrix | None = None,
        max_quantised_rows: int = MAX_QUANTISED_ROWS,
    ) -> PackedLinear:
        """Pack a matrix `[out_features, in_features]`, bfloat16 or float32.

        Args:
            weight: to pack.
            is_gate_up: it is a gate's matrix above an up-projection's: their product is to be `silu(gate) * up`.
            stored: the same matrix as its file holds it: products of few rows with a bfloat16 `weight` read that.
            max_quantised_rows: what is few; 0 = none are.
        """
        _check(weight, DTYPES)
        out_features, in_features = weight.shape
        is_bf16 = weight.dtype == torch.bfloat16
        panels = -(-(out_features // 2) // 16) if is_gate_up else -(-out_features // _PANEL)
        units = -(-in_features // 2) if is_bf16 else in_features
        memory = self._take(panels * units * _PANEL * 4)
        self._lib.pagedeck_pack(
            self._handle, weight.data_ptr(), out_features, in_features, is_gate_up, is_bf16, memory.address
        )
        quantised, bits = None, 0
        can_use = is_bf16 and self.instruction_set != "avx2" and in_features <= _MAX_QUANTISED_INPUTS
        if stored is not None and max_quantised_rows and can_use:
            quantised, bits = self._pack_stored(stored, (out_features, in_features), panels, is_gate_up)
        rows = min(max_quantised_rows, MAX_QUANTISED_ROWS) if quantised else 0
        return PackedLinear(memory, out_features, in_features, is_bf16, is_gate_up, quantised, bits, rows)

    def _take(self, num_bytes: int) -> Memory:
        memory = self._arena.take(num_bytes) if self._arena else None
        if memory is None:
            self._arena = Arena(self._lib, max(Arena.SIZE, -(-num_bytes // _LARGE_PAGE) * _LARGE_PAGE))
            memory = self._arena.take(num_bytes)
            assert memory is not None
        return memory

    def _pack_stored(
        self, stored: StoredMatrix, shape: tuple[int, int], panels: int, is_gate_up: bool
    ) -> tuple[Memory, int]:
        _check(stored.rows, (torch.uint8,))
        if (stored.rows.shape[0], stored.in_features) != shape:
            raise ValueError(f"a stored matrix of {stored.rows.shape[0]} x {stored.in_features}, not {shape}")
        kind = QUANTISED[stored.kind]
        block_bytes = 128 + 512 if kind.bits == 4 else 64 + 1024  # of a panel
        memory = self._take(panels * (shape[1] // _BLOCK) * block_bytes)
        self._lib.pagedeck_pack_quantised(stored.rows.data_ptr(), kind.code, *shape, is_gate_up, memory.address)
        return memory, kind.bits

    def linear(self, x: torch.Tensor, weight: PackedLinear, residual: torch.Tensor | None = None) -> torch.Tensor:
        """`x @ weight.T`, float32; with `residual` `[rows, out_features]`, added to it in place.

        Where the weight is a gate's and an up-projection's, `silu(gate) * up` in x's dtype.

        Args:
            x: `[rows, in_features]`, in the weight's dtype; in_features even if that is bfloat16.
            weight: from `pack`.
            residual: float32.
        """
        _check(x, (torch.bfloat16 if weight.is_bf16 else torch.float32,))
        rows, in_features = x.shape
        if in_features != weight.in_features or (weight.is_bf16 and in_features % 2):
            raise ValueError(f"{in_features} inputs for a matrix of {weight.in_features}")
        into = 2 if weight.is_gate_up else int(residual is not None)
        if weight.is_gate_up:
            out = torch.empty(rows, weight.out_features // 2, dtype=x.dtype)
        else:
            out = torch.empty(rows, weight.out_features) if residual is None else residual
        struct, stride = weight.struct(), in_features // (2 if weight.is_bf16 else 1)
        self._lib.pagedeck_linear(
            self._handle, ctypes.byref(struct), weight.is_bf16, x.data_ptr(), stride, rows, into, out.data_ptr()
        )
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
        """`kernels.reference.elementwise.rms_norm` of float32 `x` `[rows, n]`, rounded to `dtype`."""
        _check(x, (torch.float32,))
        _check(weight, (torch.float32,))
        out = torch.empty(x.shape, dtype=dtype)
        self._lib.pagedeck_rms_norm(
            self._handle, x.data_ptr(), weight.data_ptr(), x.shape[0], x.shape[1], eps, dtype == torch.bfloat16,
            out.data_ptr(),
        )  # fmt: skip
        return out

    def rotate_and_write(
        self, kv_cache: torch.Tensor, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: StepTensors
    ) -> torch.Tensor:
        """Rotate queries and keys by their positions, and store keys and values.

        Args:
            kv_cache: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`; what lies where inside a block is the
                native kernels' own (see native/rows.h).
            qkv: `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`, float32.
            cos, sin: `[positions, head_dim]`, see `kernels.reference.elementwise.rope`.
            step: its positions and slot_mapping are used.

        Returns:
            The queries `[num_tokens, num_heads, head_dim]` in the cache's dtype.
        """
        _check(qkv, (torch.float32,))
        num_kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        model = _attention_model(kv_cache, num_heads, 1.0)
        model.cos, model.sin = cos.data_ptr(), sin.data_ptr()
        query = torch.empty(qkv.shape[0], num_heads, head_dim, dtype=kv_cache.dtype)
        cache, struct = _cache(kv_cache.unsqueeze(0)), step.struct()
        self._lib.pagedeck_write(
            self._handle, ctypes.byref(model), ctypes.byref(cache), ctypes.byref(struct), qkv.data_ptr(),
            query.data_ptr(),
        )  # fmt: skip
        return query

    def attend(self, query: torch.Tensor, kv_cache: torch.Tensor, step: StepTensors, scale: float) -> torch.Tensor:
        """`kernels.reference.attention.paged_prefill` over a cache that `rotate_and_write` filled.

        Args:
            query: `[num_tokens, num_heads, head_dim]`, in the cache's dtype.
            kv_cache: one layer's.
            step: which sequences, where, how long; a sequence may have one new token or several.
            scale: factor of the dot products.
        """
        _check(query, (kv_cache.dtype,))
        model, cache, struct = _attention_model(kv_cache, query.shape[1], scale), _cache(kv_cache[None]), step.struct()
        out = torch.empty_like(query)
        status = self._lib.pagedeck_attend(
            self._handle, ctypes.byref(model), ctypes.byref(cache), ctypes.byref(struct), query.data_ptr(),
            out.data_ptr(),
        )  # fmt: skip
        _raise(status)
        return out

    def sample(self, logits: torch.Tensor, options: np.ndarray[tuple[int], np.dtype[np.void]] | None) -> torch.Tensor:
        """A token of each row of `logits` `[rows, vocab_size]`, float32: `[rows]` int64.

        Args:
            logits: without NaN.
            options: `[rows]` structs as in native/api.h; None = the best token.
        """
        _check(logits, (torch.float32,))
        tokens = torch.empty(logits.shape[0], dtype=torch.int64)
        address = None if options is None else options.ctypes.data
        status = self._lib.pagedeck_sample(
            self._handle, logits.data_ptr(), logits.shape[0], logits.shape[1], address, tokens.data_ptr()
        )
        _raise(status)
        return tokens

    def check_finite(self, logits: torch.Tensor) -> torch.Tensor:
        """Whether all of each row of `logits` `[rows, vocab_size]`, float32, is finite: `[rows]` bool."""
        _check(logits, (torch.float32,))
        is_finite = torch.empty(logits.shape[0], dtype=torch.bool)
        self._lib.pagedeck_check_finite(
            self._handle, logits.data_ptr(), logits.shape[0], logits.shape[1], is_finite.data_ptr()
        )
        return is_finite

    def bind(self, model: PackedModel, kv_pool: torch.Tensor) -> NativeDecoder:
        """A decoder of `model` over `kv_pool` `[num_layers, *cache shape]`."""
        return NativeDecoder(self, model, kv_pool)


class NativeDecoder:
    """All layers of a step in one call."""

    def __init__(self, kernels: NativeKernels, model: PackedModel, kv_pool: torch.Tensor) -> None:
        """Args: kernels; model, packed by them; kv_pool `[num_layers, *cache shape]`, in the weights' dtype."""
        self.kernels, self.model = kernels, model
        self._kv_pool = kv_pool  # kept alive: the struct holds its address
        shape = model.shape
        self._layers = (LayerStruct * len(model.layers))(*(layer.struct() for layer in model.layers))
        self._model = ModelStruct(
            ctypes.cast(self._layers, ctypes.c_void_p).value, model.norm.data_ptr(),
            None if model.embedding is None else model.embedding.data_ptr(), model.cos.data_ptr(), model.sin.data_ptr(),
            model.head.struct(), shape.num_layers, shape.hidden, shape.inner, shape.num_heads, shape.num_kv_heads,
            shape.head_dim, model.head.is_bf16, shape.eps, shape.scale,
        )  # fmt: skip
        self._cache = _cache(kv_pool)
        self._logits = torch.empty(0, model.head.out_features)
        self._lent: Callable[[], torch.Tensor | None] = lambda: None  # what was made of it last, if it is still there

    def step(self, inputs: StepTensors) -> tuple[torch.Tensor, tuple[float, ...]]:
        """Compute one step; keys and values go into the pool.

        Returns:
            The residual stream after the last layer `[num_tokens, hidden]`, float32, and the seconds of each of
            `PHASES`.
        """
        struct = inputs.struct()
        hidden = torch.empty(inputs.token_ids.numel(), self.model.shape.hidden)
        struct.hidden = hidden.data_ptr()
        status = self.kernels._lib.pagedeck_step(
            self.kernels._handle, ctypes.byref(self._model), ctypes.byref(self._cache), ctypes.byref(struct)
        )
        _raise(status)
        return hidden, tuple(struct.seconds)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[n, vocab_size]`, float32, of rows `[n, hidden]` of the residual stream.

        Their memory is used again once the tensor is gone, because the system takes milliseconds to give as much anew:
        no view of it may outlive it.
        """
        _check(hidden, (torch.float32,))
        logits = self._lend(hidden.shape[0])
        status = self.kernels._lib.pagedeck_head(
            self.kernels._handle, ctypes.byref(self._model), hidden.data_ptr(), hidden.shape[0], logits.data_ptr()
        )
        _raise(status)
        return logits

    def _lend(self, rows: int) -> torch.Tensor:
        if self._lent() is not None or self._logits.shape[0] < rows:
            self._logits = torch.empty(rows, self.model.head.out_features)
        lent = self._logits[:rows]
        self._lent = weakref.ref(lent)
        return lent


def _check(tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in dtypes or not tensor.is_contiguous():
        names = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"a native kernel wants a contiguous tensor of {names}, got {tensor.dtype}")


def _raise(status: int) -> None:
    if status:
        raise MemoryError("the native kernels got no memory for this step's intermediate results")


def _cache(kv_pool: torch.Tensor) -> CacheStruct:
    _check(kv_pool, DTYPES)
    return CacheStruct(kv_pool.data_ptr(), kv_pool.stride(0) * kv_pool.itemsize, kv_pool.shape[4])


def _attention_model(kv_cache: torch.Tensor, num_heads: int, scale: float) -> ModelStruct:
    """A model of one layer with no weights: what attention alone needs to know."""
    _, _, num_kv_heads, _, head_dim = kv_cache.shape
    if head_dim % 2 or head_dim > MAX_HEAD_DIM or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} heads of {head_dim} over {num_kv_heads} KV heads")
    return ModelStruct(
        num_layers=1, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        is_bf16=kv_cache.dtype == torch.bfloat16, scale=scale,
    )  # fmt: skip
