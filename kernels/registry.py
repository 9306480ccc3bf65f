"""Which implementations each operation has, and the choice between them.

An implementation is named where it lives and imported when it is chosen, so that a package that isn't there costs
nothing until it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any


class KernelError(RuntimeError):
    """A kernel that was asked for by name doesn't exist or can't run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute an operation."""

    op: str
    name: str  # "cpu", "reference"
    devices: tuple[str, ...]  # kinds of device it runs on
    module: str  # where the function `op` is
    why_not: Callable[[], str | None] = lambda: None  # the reason why it can't run on this machine, or None
    # Kind of device -> why it can't run there: where it runs when asked for by name, but is never the best.
    on_request: Mapping[str, Callable[[], str | None]] = field(default_factory=dict)

    def obstacle(self, device: str, *, is_requested: bool) -> str | None:
        """Why it isn't to run on a kind of device; None if it is."""
        if device in self.devices:
            return self.why_not()
        if is_requested and device in self.on_request:
            return self.on_request[device]()
        return f"runs on {'/'.join(self.devices)}, not on {device}"

    def load(self) -> Callable[..., Any]:
        """The function."""
        function: Callable[..., Any] = getattr(importlib.import_module(self.module), self.op)
        return function


_ATTENTION = ("paged_decode", "paged_prefill", "write_kv", "plan_decode", "plan_prefill", "plan_write")
_ELEMENTWISE = ("rms_norm", "add_rms_norm", "rope", "rope_and_write_kv", "silu_and_mul", "gelu_and_mul")
_SAMPLING = ("all_finite", "argmax", "sample")
_LOGITS = ("uniform", "penalise", "add_bias", "forbid")  # what the CPU's sampler does itself


def _no_native_kernels() -> str | None:
    from kernels.cpu.native_library import why_not

    return why_not()


def _no_triton() -> str | None:
    return None if find_spec("triton") else "Triton is not installed (pip install 'pagedeck[gpu]')"


def _no_triton_device() -> str | None:
    reason = _no_triton()
    if reason is None:
        import torch

        reason = None if torch.cuda.is_available() else "there is no CUDA device"
    return reason


def _no_triton_interpreter() -> str | None:
    reason = _no_triton()
    if reason is None:
        from kernels.gpu.precision import INTERPRETED

        reason = None if INTERPRETED.value else "runs on a CPU only if TRITON_INTERPRET=1 is set before it starts"
    return reason


def _family(
    name: str, package: str, devices: tuple[str, ...], sampling: tuple[str, ...] = _SAMPLING + _LOGITS, **more: Any
) -> tuple[Implementation, ...]:
    modules = dict.fromkeys(_ATTENTION, f"{package}.attention")
    modules |= dict.fromkeys(_ELEMENTWISE, f"{package}.elementwise")
    modules |= dict.fromkeys(sampling, f"{package}.sampling")
    return tuple(Implementation(op, name, devices, module, **more) for op, module in modules.items())


# In order of preference: select() takes the first that runs. The reference is slow and never chosen over another.
IMPLEMENTATIONS: tuple[Implementation, ...] = (
    _family("triton", "kernels.gpu", ("cuda",), why_not=_no_triton_device, on_request={"cpu": _no_triton_interpreter})
    + tuple(
        Implementation(op, "native", ("cpu",), "kernels.cpu.native_sampling", _no_native_kernels) for op in _SAMPLING
    )
    + _family("cpu", "kernels.cpu", ("cpu",), _SAMPLING)
    + _family("reference", "kernels.reference", ("cpu", "cuda"))
)


def implementations(op: str) -> tuple[Implementation, ...]:
    """All implementations of `op`, best first.

    Raises:
        KernelError: there is no such operation.
    """
    found = tuple(entry for entry in IMPLEMENTATIONS if entry.op == op)
    if not found:
        raise KernelError(f"no operation {op!r}; there are {', '.join(sorted({e.op for e in IMPLEMENTATIONS}))}")
    return found


def select(op: str, device: str = "cpu", requested: str = "auto") -> Implementation:
    """The implementation of `op` to use on `device` ("cpu", "cuda"): the one requested, or for "auto" the best.

    Raises:
        KernelError: none runs there, or the requested one doesn't; nothing else is taken in its place.
    """
    reasons: list[str] = []
    for entry in implementations(op):
        if requested not in ("auto", entry.name):
            continue
        reason = entry.obstacle(device, is_requested=requested == entry.name)
        if reason is None:
            return entry
        reasons.append(f"{entry.name}: {reason}")
    names = ", ".join(entry.name for entry in implementations(op))
    asked = "no implementation" if requested == "auto" else f"no implementation {requested!r}"
    raise KernelError(f"{asked} of {op} can run on {device} ({'; '.join(reasons) or f'there are {names}'})")
