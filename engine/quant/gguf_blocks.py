"""GGUF's block formats back to plain numbers, by the `gguf` library's own definitions."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from engine.errors import StartupError

# What GgufFile.raw gives as plain numbers.
PLAIN = ("F32", "F16", "BF16")


def dequantise(data: npt.NDArray[Any], kind: gguf.GGMLQuantizationType) -> npt.NDArray[np.float32]:
    """`data` of storage type `kind` as float32, exactly: scales are half precision, the products are done in float32.

    Args:
        data: `[..., bytes per row]` (or elements, for F32 and F16), rows first.
        kind: the storage type.

    Raises:
        StartupError: the library can't read that type.
    """
    try:
        values: npt.NDArray[Any] = gguf.quants.dequantize(data, kind)
    except NotImplementedError as error:
        raise StartupError(f"GGUF storage type {kind.name} is not supported: {error}") from error
    # float32 is stored as it is: a view of the read-only file, which would keep it open.
    return values.astype(np.float32, order="C", copy=not values.flags.writeable)
