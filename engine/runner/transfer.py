"""Between the host's arrays and the device's tensors: kept memory, few copies there, one copy back per step.

A kernel launch and a copy are only queued; what makes the host wait is a copy back. So results are asked for with
`later`, and the first of them that is needed brings all of them over in one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
Arrays = tuple[Array, ...]

_ALIGNMENT = 16  # bytes: what a vector load of a kernel may ask for
_FIRST_BYTES = 1 << 20

_TORCH_DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.bool_): torch.bool,
}
_NUMPY_DTYPES: dict[torch.dtype, np.dtype[Any]] = {torch_dtype: dtype for dtype, torch_dtype in _TORCH_DTYPES.items()}


class Link(Protocol):
    """How a runner's parts hand arrays to the device and get results from it."""

    def send(self, array: Array) -> torch.Tensor:
        """The array on the device, until the step after this one."""

    def later(self, *tensors: torch.Tensor) -> Callable[[], Arrays]:
        """A function that gives the tensors' values on the host."""


class HostLink:
    """The device is the host: nothing is copied."""

    def send(self, array: Array) -> torch.Tensor:
        """See `Link`."""
        return torch.from_numpy(array)

    def later(self, *tensors: torch.Tensor) -> Callable[[], Arrays]:
        """See `Link`."""
        return lambda: tuple(tensor.numpy() for tensor in tensors)


class DeviceLink:
    """Pinned memory on the host, its twin on the device, and a place for results.

    `send` appends to the step's part of that memory; `begin_step` starts again from its beginning. Memory grows, by
    doubling, until the largest step fits.
    """

    def __init__(self, device: torch.device, num_bytes: int = _FIRST_BYTES) -> None:
        """Args: device; num_bytes, what a step is expected to send."""
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._used = 0
        self._event = torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._pending: list[_Later] = []
        self.num_fetches = 0  # copies to the host so far
        self._allocate(num_bytes)
        self._results = torch.empty(_FIRST_BYTES, dtype=torch.uint8, pin_memory=self._is_cuda)

    def _allocate(self, num_bytes: int) -> None:
        self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
        self._view = self._host.numpy()
        self._twin = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def begin_step(self) -> None:
        """What earlier steps have sent isn't needed any more, once the device has it."""
        if self._event is not None:
            self._event.synchronize()
        self._used = 0
        self._pending.clear()

    def send(self, array: Array) -> torch.Tensor:
        """See `Link`."""
        return self.send_all((array,))[0]

    def send_all(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """The arrays on the device, in one copy, until the step after this one."""
        starts, end = [], self._used
        for array in arrays:
            starts.append(end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if end > len(self._view):
            # Tensors of this step keep the old memory alive, and what is under way is copied from there.
            if self._event is not None:
                self._event.synchronize()
            self._used = 0
            self._allocate(max(2 * len(self._view), 2 * end))
            return self.send_all(arrays)
        first = self._used
        for array, start in zip(arrays, starts, strict=True):
            target = self._view[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            target[...] = array
        self._twin[first:end].copy_(self._host[first:end], non_blocking=True)
        if self._event is not None:
            self._event.record()
        self._used = end
        return [
            self._twin[start : start + array.nbytes].view(_TORCH_DTYPES[array.dtype]).view(array.shape)
            for array, start in zip(arrays, starts, strict=True)
        ]

    def later(self, *tensors: torch.Tensor) -> Callable[[], Arrays]:
        """See `Link`."""
        result = _Later(tensors)
        self._pending.append(result)

        def get() -> Arrays:
            if result.arrays is None:
                self._fetch()
            assert result.arrays is not None, "results of an earlier step"
            return result.arrays

        return get

    def _fetch(self) -> None:
        pending, self._pending = self._pending, []
        tensors = [tensor for later in pending for tensor in later.tensors]
        parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        size = joined.numel()
        if size > self._results.numel():
            self._results = torch.empty(2 * size, dtype=torch.uint8, pin_memory=self._is_cuda)
        self._results[:size].copy_(joined)  # waits for the device
        self.num_fetches += 1
        values = self._results[:size].numpy().copy()
        start = 0
        for later in pending:
            arrays: list[Array] = []
            for tensor in later.tensors:
                end = start + tensor.numel() * tensor.element_size()
                flat: Array = np.frombuffer(values[start:end].tobytes(), dtype=_NUMPY_DTYPES[tensor.dtype])
                arrays.append(flat.reshape(tensor.shape))
                start = end
            later.arrays = tuple(arrays)


class _Later:
    """Results that are asked for, and their values once they are there."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self.tensors = tensors
        self.arrays: Arrays | None = None
