"""Choosing kernels: by device, by name, never silently another."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest

from kernels import registry
from kernels.registry import IMPLEMENTATIONS, KernelError, implementations, select

OPS = sorted({entry.op for entry in IMPLEMENTATIONS})


@pytest.mark.parametrize("op", OPS)
def test_every_operation_has_a_reference_with_the_same_parameters(op: str) -> None:
    entries = implementations(op)
    assert entries[-1].name == "reference"
    names = [list(inspect.signature(entry.load()).parameters) for entry in entries]
    assert all(parameters == names[-1] for parameters in names)


def test_auto_takes_the_best_that_runs_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select("paged_decode").name == "cpu"
    assert select("paged_decode", "cuda").name == "reference"
    broken = tuple(replace(e, why_not=lambda: "needs AVX-512") if e.name == "cpu" else e for e in IMPLEMENTATIONS)
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", broken)
    assert select("paged_decode").name == "reference"
    with pytest.raises(KernelError, match=r"'cpu' of paged_decode can run on cpu .*needs AVX-512"):
        select("paged_decode", requested="cpu")


def test_what_is_asked_for_and_cannot_run_is_an_error() -> None:
    with pytest.raises(KernelError, match="there are cpu, reference"):
        select("paged_decode", requested="triton")
    with pytest.raises(KernelError, match="cpu: runs on cpu, not on cuda"):
        select("paged_decode", "cuda", "cpu")
    with pytest.raises(KernelError, match="no operation 'conv'; there are all_finite, argmax"):
        select("conv")
