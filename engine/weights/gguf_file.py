"""A GGUF file: its metadata as Python values and its tensors as float32, read through the `gguf` library.

The library's reader makes several small arrays per element of an array, which takes seconds for a vocabulary. `_Reader`
keeps each array as one view instead; it is decoded when it is asked for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from engine.errors import StartupError

_ARRAY, _STRING = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING


class _Reader(gguf.GGUFReader):  # type: ignore[misc]
    """`GGUFReader` with one part per array: the raw bytes of its strings, or a view of its numbers."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != _ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[no-any-return]
        item_type, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        kind, count, start = gguf.GGUFValueType(int(item_type[0])), int(length[0]), orig_offs + 12
        if kind == _ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[no-any-return]
        if kind == _STRING:
            ends = [end for _, end in _string_ends(memoryview(self.data), start, count, self.length_format)]
            values = self.data[start : ends[-1] if ends else start]
        else:
            values = self._get(start, self.gguf_scalar_to_np[kind], count)
        return 12 + int(values.nbytes), [item_type, length, values], [2], [_ARRAY, kind]

    @property
    def length_format(self) -> str:
        """`struct` format of the 64-bit length before each string."""
        return "=Q" if self.byte_order == "I" else (">Q" if struct.pack("=H", 1) == b"\1\0" else "<Q")


def _string_ends(data: memoryview, start: int, count: int, length_format: str) -> Iterator[tuple[int, int]]:
    """(first byte, end) of each of `count` length-prefixed strings from byte `start` of `data`."""
    unpack_from = struct.Struct(length_format).unpack_from
    for _ in range(count):
        first = start + 8
        start = first + unpack_from(data, start)[0]
        yield first, start


class GgufMetadata(Mapping[str, Any]):
    """Key -> str, int, float, bool or list of those; decoded on access, so that asking for one key is cheap."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader

    def __getitem__(self, key: str) -> Any:
        field = self._reader.fields[key]
        if field.types[0] == _ARRAY and len(field.data) == 1 and len(field.types) == 2:
            values, count = field.parts[field.data[0]], int(field.parts[field.data[0] - 1][0])
            if field.types[1] == _STRING:
                data = values.tobytes()
                ends = _string_ends(memoryview(data), 0, count, self._reader.length_format)
                return [data[first:end].decode("utf-8", errors="replace") for first, end in ends]
            return values.tolist()
        return field.contents()

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader.fields)

    def __len__(self) -> int:
        return len(self._reader.fields)


class GgufFile:
    """An open GGUF file (memory-mapped: opening reads the header only)."""

    def __init__(self, path: str | Path) -> None:
        """Open `path`.

        Raises:
            StartupError: not there, or not a GGUF file.
        """
        self.path = Path(path)
        try:
            self._reader = _Reader(self.path)
        except (OSError, ValueError, KeyError, IndexError, struct.error) as error:
            raise StartupError(f"cannot read {self.path} as GGUF: {error}") from error
        self.metadata = GgufMetadata(self._reader)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of all tensors, in the file's order."""
        return tuple(self._tensors)

    def tensor_type(self, name: str) -> str:
        """The storage type of tensor `name`, e.g. "Q4_1"."""
        return str(self._tensors[name].tensor_type.name)

    def raw(self, name: str) -> tuple[npt.NDArray[Any], gguf.GGMLQuantizationType]:
        """The stored array of tensor `name` (a view of the file, rows first; bytes if quantised) and its type."""
        tensor = self._tensors[name]
        return tensor.data, tensor.tensor_type

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name` once dequantised, rows first (PyTorch's order)."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))
