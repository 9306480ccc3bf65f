"""Which implementations each operation has, and the choice between them.

An implementation is named where it lives and imported when it is chosen, so that a package that isn't there costs
nothing until it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
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

    def load(self) -> Callable[..., Any]:
        """The function."""
        function: Callable[..., Any] = getattr(importlib.import_module(self.module), self.op)
        return function


_ATTENTION = ("paged_decode", "paged_prefill", "write_kv", "plan_decode", "plan_prefill", "plan_write")


_SAMPLING = ("all_finite", "argmax", "sample")


def _no_native_kernels() -> str | None:
    from kernels.cpu.native_library import why_not

    return why_not()


def _family(name: str, devices: tuple[str, ...]) -> tuple[Implementation, ...]:
    package = f"kernels.{name}"
    modules = dict.fromkeys(_ATTENTION, f"{package}.attention")
    modules |= dict.fromkeys(("rms_norm", "rope", "silu_and_mul"), f"{package}.elementwise")
    modules |= dict.fromkeys(_SAMPLING, f"{package}.sampling")
    return tuple(Implementation(op, name, devices, module) for op, module in modules.items())


# In order of preference: select() takes the first that runs. The reference is slow and never chosen over another.
IMPLEMENTATIONS: tuple[Implementation, ...] = (
    tuple(Implementation(op, "native", ("cpu",), "kernels.cpu.native_sampling", _no_native_kernels) for op in _SAMPLING)
    + _family("cpu", ("cpu",))
    + _family("reference", ("cpu", "cuda"))
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
        reason = entry.why_not() if device in entry.devices else f"runs on {'/'.join(entry.devices)}, not on {device}"
        if reason is None:
            return entry
        reasons.append(f"{entry.name}: {reason}")
    names = ", ".join(entry.name for entry in implementations(op))
    asked = "no implementation" if requested == "auto" else f"no implementation {requested!r}"
    raise KernelError(f"{asked} of {op} can run on {device} ({'; '.join(reasons) or f'there are {names}'})")
