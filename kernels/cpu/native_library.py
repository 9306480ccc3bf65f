"""The library of native kernels and the structs of its C interface (native/api.h), as ctypes sees them."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from kernels.cpu.build import build

_P, _I32, _I64, _F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class LinearStruct(ctypes.Structure):
    """A packed matrix."""

    _fields_ = (
        ("packed", _P), ("quantised", _P), ("out_features", _I32), ("in_features", _I32), ("bits", _I32),
        ("max_quantised_rows", _I32),
    )  # fmt: skip


class LayerStruct(ctypes.Structure):
    """One layer's weights."""

    _fields_ = (
        ("input_norm", _P), ("post_attention_norm", _P), ("qkv", LinearStruct), ("output", LinearStruct),
        ("gate_up", LinearStruct), ("down", LinearStruct),
    )  # fmt: skip


class ModelStruct(ctypes.Structure):
    """All weights and the sizes."""

    _fields_ = (
        ("layers", _P), ("norm", _P), ("embedding", _P), ("cos", _P), ("sin", _P), ("head", LinearStruct),
        ("num_layers", _I32), ("hidden", _I32), ("inner", _I32), ("num_heads", _I32), ("num_kv_heads", _I32),
        ("head_dim", _I32), ("is_bf16", _I32), ("eps", _F32), ("scale", _F32),
    )  # fmt: skip


class CacheStruct(ctypes.Structure):
    """The KV pool."""

    _fields_ = (("pool", _P), ("layer_bytes", _I64), ("block_size", _I32))


class StepStruct(ctypes.Structure):
    """One step's inputs, and its results."""

    _fields_ = (
        ("num_tokens", _I32), ("num_seqs", _I32), ("max_blocks", _I32), ("token_ids", _P), ("positions", _P),
        ("slot_mapping", _P), ("query_starts", _P), ("seq_lens", _P), ("block_tables", _P), ("hidden", _P),
        ("seconds", ctypes.c_double * 3),
    )  # fmt: skip


# Of StepStruct.seconds; "elementwise" is embedding, norms, rotation and the cache's writes. The gate is in "linear".
PHASES = ("attention", "linear", "elementwise")


@lru_cache(maxsize=1)
def load_library() -> tuple[ctypes.CDLL | None, str]:
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
        "free": (None, [_P, _I64]),
        "step": (_I32, [_P, _P, _P, _P]),
        "head": (_I32, [_P, _P, _P, _I64, _P]),
        "pack": (None, [_P, _P, _I32, _I32, _I32, _I32, _P]),
        "pack_quantised": (None, [_P, _I32, _I32, _I32, _I32, _P]),
        "linear": (None, [_P, _P, _I32, _P, _I64, _I64, _I32, _P]),
        "rms_norm": (None, [_P, _P, _P, _I64, _I32, _F32, _I32, _P]),
        "write": (None, [_P, _P, _P, _P, _P, _P]),
        "sample": (_I32, [_P, _P, _I64, _I32, _P, _P]),
        "check_finite": (None, [_P, _P, _I64, _I32, _P]),
        "attend": (_I32, [_P, _P, _P, _P, _P, _P]),
    }
    for name, (result, arguments) in functions.items():
        function = getattr(library, f"pagedeck_{name}")
        function.restype, function.argtypes = result, arguments
    return library, "loaded"


def instruction_sets() -> tuple[str, ...]:
    """Those that the kernels were compiled for and this processor has, best first; () where there are no kernels."""
    library, _ = load_library()
    return () if library is None else tuple(library.pagedeck_instruction_sets().decode().split())


def why_not() -> str | None:
    """Why the native kernels can't run here; None = they can."""
    library, reason = load_library()
    if library is None:
        return reason
    return None if instruction_sets() else "the processor has neither AVX-512 nor AVX2"
