"""The `gguf` library's reader, quick about a vocabulary.

The library makes several numpy views for every element of an array; with a vocabulary and its merges that is two
seconds for a small model. Here arrays are read in one pass, with the same result: the same parts at the same indices
(a test compares them). Everything else, such as tensors and their types, stays the library's.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType

from engine.errors import StartupError

Parts = tuple[int, list[Any], list[int], list[GGUFValueType]]  # bytes read, parts, which parts are data, types
_HEADER = 12  # an array starts with its item type (4 bytes) and its length (8 bytes)


class VocabularyReader(GGUFReader):  # type: ignore[misc]
    """`GGUFReader` with fast arrays. A method the library no longer calls would make it slow, not wrong."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Parts:
        if raw_type == GGUFValueType.ARRAY and self.byte_order == "I":
            bytes_ = self.data.view(np.ndarray)  # a plain view: slicing a memmap costs ten times as much
            item_type = bytes_[orig_offs : orig_offs + 4].view(np.uint32)
            length = bytes_[orig_offs + 4 : orig_offs + _HEADER].view(np.uint64)
            start, count = orig_offs + _HEADER, int(length[0])
            if count and item_type[0] == GGUFValueType.STRING:
                size, strings = _strings(bytes_, start, count)
                types = [GGUFValueType.ARRAY, GGUFValueType.STRING]
                return _HEADER + size, [item_type, length, *strings], list(range(3, 2 + 2 * count, 2)), types
            number = self.gguf_scalar_to_np.get(GGUFValueType(item_type[0]))
            if count and number is not None:
                size = count * np.dtype(number).itemsize
                numbers = bytes_[start : start + size].view(number).reshape(count, 1)
                types = [GGUFValueType.ARRAY, GGUFValueType(item_type[0])]
                return _HEADER + size, [item_type, length, *numbers], list(range(2, 2 + count)), types
        parts: Parts = super()._get_field_parts(orig_offs, raw_type)
        return parts


def _strings(data: np.ndarray[Any, np.dtype[np.uint8]], start: int, count: int) -> tuple[int, list[Any]]:
    """Bytes read, and two parts per string: its length (8 bytes, little-endian) and its bytes."""
    raw = data.data
    parts: list[Any] = []
    offset = start
    for _ in range(count):
        begin = offset + 8
        end = begin + int.from_bytes(raw[offset:begin], "little")
        if end > len(raw):
            raise ValueError("a string runs past the end of the file")
        parts.append(data[offset:begin].view(np.uint64))
        parts.append(data[begin:end])
        offset = end
    return offset - start, parts


def open_gguf(path: str | os.PathLike[str]) -> VocabularyReader:
    """The file's fields and tensors, memory-mapped.

    Raises:
        StartupError: it is not a GGUF file that can be read.
    """
    try:
        return VocabularyReader(path)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise StartupError(f"{os.fspath(path)} is not a GGUF file that can be read: {error}") from error
