"""Which device computes, in which number format, and what is known of its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.errors import StartupError

DEVICES = ("auto", "cpu", "cuda")
_FIRST_WITH_BFLOAT16 = (8, 0)  # compute capability


@dataclass(frozen=True, slots=True)
class Device:
    """The device, and why it is that one."""

    kind: str  # "cpu" or "cuda", as kernels and PyTorch name it
    name: str  # e.g. "NVIDIA H200"; "" = nothing to say
    reason: str
    capability: tuple[int, int] | None = None  # of a CUDA device

    @property
    def text(self) -> str:
        """In words."""
        notes = ", ".join(note for note in (self.name, self.reason) if note)
        return f"{self.kind} ({notes})"


def choose_device(requested: str) -> Device:
    """The device for `requested`: "auto" = cuda where PyTorch sees one, else cpu.

    Raises:
        StartupError: there is no such device here.
    """
    if requested not in DEVICES:
        raise StartupError(f"--device {requested}: there are {', '.join(DEVICES)}")
    reason = "as requested" if requested != "auto" else "the first that PyTorch sees"
    if requested == "cpu":
        return Device("cpu", "", reason)
    obstacle = _no_cuda()
    if obstacle is None:
        return Device("cuda", torch.cuda.get_device_name(), reason, torch.cuda.get_device_capability())
    if requested == "cuda":
        raise StartupError(f"--device cuda: {obstacle}")
    return Device("cpu", "", obstacle)


def _no_cuda() -> str | None:
    if torch.version.cuda is None:
        return "this build of PyTorch has no CUDA"
    return None if torch.cuda.is_available() else "PyTorch sees no CUDA device"


def choose_device_dtype(stored: torch.dtype | None, capability: tuple[int, int]) -> tuple[torch.dtype, str]:
    """(dtype, reason) on a CUDA device: the checkpoint's 16-bit format, bfloat16 only where the device has it.

    Args:
        stored: the checkpoint's; None = it doesn't say.
        capability: the device's compute capability.
    """
    has_bfloat16 = capability >= _FIRST_WITH_BFLOAT16
    if stored == torch.float16:
        return torch.float16, "float16 (as the checkpoint)"
    if has_bfloat16:
        same = stored == torch.bfloat16
        return torch.bfloat16, f"bfloat16 ({'as the checkpoint' if same else 'the device has it'})"
    major, minor = capability
    return torch.float16, f"float16 (compute capability {major}.{minor} has no bfloat16)"


class DeviceMemory(Protocol):
    """Memory of a device, in bytes."""

    def total(self) -> int:
        """All there is."""

    def free(self) -> int:
        """What nobody uses, as the driver sees it."""

    def reserved(self) -> int:
        """What this process's tensors have taken."""

    def peak(self) -> int:
        """The most that `reserved` has been since `release`."""

    def release(self) -> None:
        """Give back what is reserved and unused, and begin a new peak."""


class CudaMemory:
    """The current CUDA device's, by PyTorch's allocator."""

    def total(self) -> int:
        """See `DeviceMemory`."""
        return int(torch.cuda.mem_get_info()[1])

    def free(self) -> int:
        """See `DeviceMemory`."""
        return int(torch.cuda.mem_get_info()[0])

    def reserved(self) -> int:
        """See `DeviceMemory`."""
        return torch.cuda.memory_reserved()

    def peak(self) -> int:
        """See `DeviceMemory`."""
        torch.cuda.synchronize()
        return torch.cuda.max_memory_reserved()

    def release(self) -> None:
        """See `DeviceMemory`."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
