"""GGUF's block formats back to plain numbers, by the `gguf` library's own definitions."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from engine.errors import StartupError

# What GgufFile.raw gives as plain numbers.
PLAIN = ("F32", "F16", "BF16")
_JOINED_BYTES = 40_000  # 16 such rows, dequantised, are a few MB: what fits in the last cache


def dequantise(data: npt.NDArray[Any], kind: gguf.GGMLQuantizationType) -> npt.NDArray[np.float32]:
    """`data` of storage type `kind` as float32, exactly: scales are half precision, the products are done in float32.

    Args:
        data: `[..., bytes per row]` (or elements, for F32 and F16), rows first.
        kind: the storage type.

    Raises:
        StartupError: the library can't read that type.
    """
    plain: npt.NDArray[Any] = np.asarray(data)  # not a memmap, whose every slice costs a Python call
    shape = plain.shape
    if kind.name not in PLAIN and plain.ndim > 1:
        plain = plain.reshape(-1, shape[-1] * _rows_at_once(plain.shape[0], shape[-1]))
    try:
        values: npt.NDArray[Any] = gguf.quants.dequantize(plain, kind)
    except NotImplementedError as error:
        raise StartupError(f"GGUF storage type {kind.name} is not supported: {error}") from error
    # float32 is stored as it is: a view of the read-only file, which would keep it open.
    values = values.astype(np.float32, order="C", copy=not values.flags.writeable)
    return values.reshape(*shape[:-1], -1)


def _rows_at_once(num_rows: int, num_bytes: int) -> int:
    """Rows to hand over as one. Blocks don't span rows, so rows may be joined; the library works on 16 rows at a time,
    and short ones are mostly overhead."""
    count = 1
    while num_rows % (2 * count) == 0 and 2 * count * num_bytes <= _JOINED_BYTES:
        count *= 2
    return count
