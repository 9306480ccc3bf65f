"""The Triton kernels are tested interpreted (tests/conftest.py says so before any is defined), or compiled in a process
of their own; no test here needs a GPU."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN, or the lowest integer: an output that isn't fully written can't pass."""
    empty = torch.empty

    def poisoned(*args: object, **options: object) -> torch.Tensor:
        out: torch.Tensor = empty(*args, **options)  # type: ignore[call-overload]
        if out.device.type == "cpu":
            out.fill_(float("nan") if out.is_floating_point() else 1 if out.dtype == torch.bool else -(2**31))
        return out

    monkeypatch.setattr(torch, "empty", poisoned)
