"""The native kernels: C++ behind a C interface, which releases the GIL for the length of a call.

`NativeKernels` holds the memory and the threads of the calls; one thread at a time may use it. The sources, and what
each of them is about, are in `native/`; `build` compiles them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from kernels.cpu.build import build

_P, _I32, _I64, _F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_PANEL = 32  # outputs of a panel, see native/linear.h
MAX_HEAD_DIM = 1024

DTYPES = (torch.bfloat16, torch.float32)


class NativeError(RuntimeError):
    """The native kernels can't be used here, or a call failed; the message says why."""


# The structs of native/api.h.
class _Linear(ctypes.Structure):
    _fields_ = (
        ("packed", _P), ("quantised", _P), ("out_features", _I32), ("in_features", _I32), ("bits", _I32),
        ("max_quantised_rows", _I32),
    )  # fmt: skip


class _Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", _P), ("post_attention_norm", _P), ("qkv", _Linear), ("output", _Linear), ("gate_up", _Linear),
        ("down", _Linear),
    )  # fmt: skip


class _Model(ctypes.Structure):
    _fields_ = (
        ("layers", _P), ("norm", _P), ("embedding", _P), ("cos", _P), ("sin", _P), ("head", _Linear),
        ("num_layers", _I32), ("hidden", _I32), ("inner", _I32), ("num_heads", _I32), ("num_kv_heads", _I32),
        ("head_dim", _I32), ("is_bf16", _I32), ("eps", _F32), ("scale", _F32),
    )  # fmt: skip


class _Cache(ctypes.Structure):
    _fields_ = (("pool", _P), ("layer_bytes", _I64), ("block_size", _I32))


class _Step(ctypes.Structure):
    _fields_ = (
        ("num_tokens", _I32), ("num_seqs", _I32), ("max_blocks", _I32), ("token_ids", _P), ("positions", _P),
        ("slot_mapping", _P), ("query_starts", _P), ("seq_lens", _P), ("block_tables", _P), ("hidden", _P),
        ("seconds", ctypes.c_double * 3),
    )  # fmt: skip


# Of _Step.seconds; "elementwise" is embedding, norms, rotation and the cache's writes. The gate is in "linear".
PHASES = ("attention", "linear", "elementwise")


@lru_cache(maxsize=1)
def _library() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None with the reason."""
    built = build()
    if built.path is None:
        return None, built.reason
    try:
        library = ctypes.CDLL(str(built.path))
    except OSError as error:
        return None, f"{built.path.name} can't be loaded: {error}"
    functions: dict[str, tuple[Any, list[Any]]] = {
        "instruction_sets": (ctypes.c_char_p, []),
        "create": (_P, [ctypes.c_char_p, _I32]),
        "destroy": (None, [_P]),
        "allocate": (_P, [_I64]),
        "free": (None, [_P]),
        "step": (_I32, [_P, _P, _P, _P]),
        "head": (_I32, [_P, _P, _P, _I64, _P]),
        "pack": (None, [_P, _P, _I32, _I32, _I32, _I32, _P]),
        "linear": (None, [_P, _P, _I32, _P, _I64, _I64, _I32, _P]),
        "rms_norm": (None, [_P, _P, _P, _I64, _I32, _F32, _I32, _P]),
        "write": (None, [_P, _P, _P, _P, _P, _P]),
        "attend": (_I32, [_P, _P, _P, _P, _P, _P]),
    }
    for name, (result, arguments) in functions.items():
        function = getattr(library, f"pagedeck_{name}")
        function.restype, function.argtypes = result, arguments
    return library, "loaded"


def instruction_sets() -> tuple[str, ...]:
    """Those that the kernels were compiled for and this processor has, best first; () where there are no kernels."""
    library, _ = _library()
    return () if library is None else tuple(library.pagedeck_instruction_sets().decode().split())


def why_not() -> str | None:
    """Why the native kernels can't run here; None = they can."""
    library, reason = _library()
    if library is None:
        return reason
    return None if instruction_sets() else "the processor has neither AVX-512 nor AVX2"


class Memory:
    """Memory on large pages, freed with the object."""

    def __init__(self, library: ctypes.CDLL, num_bytes: int) -> None:
        """Args: the library; num_bytes, zeroed.

        Raises:
            MemoryError: there isn't so much.
        """
        self._free = library.pagedeck_free
        self.address: int | None = library.pagedeck_allocate(num_bytes)
        self.num_bytes = num_bytes
        if self.address is None:
            raise MemoryError(f"{num_bytes} bytes of weights could not be allocated")

    def __del__(self) -> None:
        if getattr(self, "address", None) is not None:
            self._free(self.address)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A matrix in the layout that the products read."""

    memory: Memory
    out_features: int
    in_features: int
    is_bf16: bool
    is_gate_up: bool  # rows of gate and up alternate in sixteens

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return self.memory.num_bytes

    def struct(self) -> _Linear:
        """For the C interface."""
        return _Linear(self.memory.address, None, self.out_features, self.in_features, 0, 0)


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

    def struct(self) -> _Layer:
        """For the C interface."""
        return _Layer(
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
    def num_bytes(self) -> int:
        """Bytes of the weights in memory."""
        matrices = [
            self.head,
            *(m for layer in self.layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down)),
        ]
        vectors = [self.norm, *(v for layer in self.layers for v in (layer.input_norm, layer.post_attention_norm))]
        rest = vectors if self.embedding is None else [*vectors, self.embedding]
        return sum(matrix.num_bytes for matrix in matrices) + sum(tensor.nbytes for tensor in rest)


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step's inputs. Sequences that compute one token come first; tensors are contiguous, on the CPU."""

    token_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    slot_mapping: torch.Tensor  # [num_tokens] int64
    query_start_loc: torch.Tensor  # [num_seqs + 1] int32
    seq_lens: torch.Tensor  # [num_seqs] int32
    block_tables: torch.Tensor  # [num_seqs, max_blocks] int32

    def struct(self) -> _Step:
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
        return _Step(
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
        library, reason = _library()
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

    def pack(self, weight: torch.Tensor, *, is_gate_up: bool = False) -> PackedLinear:
        """Pack a matrix `[out_features, in_features]`, bfloat16 or float32.

        Args:
            weight: to pack.
            is_gate_up: it is a gate's matrix above an up-projection's: their product is to be `silu(gate) * up`.
        """
        _check(weight, DTYPES)
        out_features, in_features = weight.shape
        is_bf16 = weight.dtype == torch.bfloat16
        panels = -(-out_features // 2 // 16) if is_gate_up else -(-out_features // _PANEL)
        units = -(-in_features // 2) if is_bf16 else in_features
        memory = Memory(self._lib, panels * units * _PANEL * 4)
        self._lib.pagedeck_pack(
            self._handle, weight.data_ptr(), out_features, in_features, is_gate_up, is_bf16, memory.address
        )
        return PackedLinear(memory, out_features, in_features, is_bf16, is_gate_up)

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
        self._layers = (_Layer * len(model.layers))(*(layer.struct() for layer in model.layers))
        self._model = _Model(
            ctypes.cast(self._layers, _P).value, model.norm.data_ptr(),
            None if model.embedding is None else model.embedding.data_ptr(), model.cos.data_ptr(), model.sin.data_ptr(),
            model.head.struct(), shape.num_layers, shape.hidden, shape.inner, shape.num_heads, shape.num_kv_heads,
            shape.head_dim, model.head.is_bf16, shape.eps, shape.scale,
        )  # fmt: skip
        self._cache = _cache(kv_pool)

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
        """`[n, vocab_size]`, float32, of rows `[n, hidden]` of the residual stream."""
        _check(hidden, (torch.float32,))
        logits = torch.empty(hidden.shape[0], self.model.head.out_features)
        status = self.kernels._lib.pagedeck_head(
            self.kernels._handle, ctypes.byref(self._model), hidden.data_ptr(), hidden.shape[0], logits.data_ptr()
        )
        _raise(status)
        return logits


def _check(tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in dtypes or not tensor.is_contiguous():
        names = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"a native kernel wants a contiguous tensor of {names}, got {tensor.dtype}")


def _raise(status: int) -> None:
    if status:
        raise MemoryError("the native kernels got no memory for this step's intermediate results")


def _cache(kv_pool: torch.Tensor) -> _Cache:
    _check(kv_pool, DTYPES)
    return _Cache(kv_pool.data_ptr(), kv_pool.stride(0) * kv_pool.itemsize, kv_pool.shape[4])


def _attention_model(kv_cache: torch.Tensor, num_heads: int, scale: float) -> _Model:
    """A model of one layer with no weights: what attention alone needs to know."""
    _, _, num_kv_heads, _, head_dim = kv_cache.shape
    if head_dim % 2 or head_dim > MAX_HEAD_DIM or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} heads of {head_dim} over {num_kv_heads} KV heads")
    return _Model(
        num_layers=1, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        is_bf16=kv_cache.dtype == torch.bfloat16, scale=scale,
    )  # fmt: skip
