"""Choosing kernels: by device, by name, never silently another."""

from __future__ import annotations

import inspect
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from kernels import registry
from kernels.registry import IMPLEMENTATIONS, KernelError, implementations, select

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed; `make test` installs it"
)
OPS = sorted({entry.op for entry in IMPLEMENTATIONS})


@pytest.mark.parametrize("op", OPS)
def test_every_operation_has_a_reference_with_the_same_parameters(op: str) -> None:
    entries = implementations(op)
    assert entries[-1].name == "reference"
    loadable = [entry for entry in entries if entry.name != "triton" or find_spec("triton")]
    names = [list(inspect.signature(entry.load()).parameters) for entry in loadable]
    assert all(parameters == names[-1] for parameters in names)


def test_auto_takes_the_best_that_runs_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select("paged_decode").name == "cpu"
    assert select("paged_decode", "cuda").name == ("triton" if torch.cuda.is_available() else "reference")
    broken = tuple(replace(e, why_not=lambda: "needs AVX-512") if e.name == "cpu" else e for e in IMPLEMENTATIONS)
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", broken)
    assert select("paged_decode").name == "reference"
    with pytest.raises(KernelError, match=r"'cpu' of paged_decode can run on cpu .*needs AVX-512"):
        select("paged_decode", requested="cpu")


def test_what_is_asked_for_and_cannot_run_is_an_error() -> None:
    with pytest.raises(KernelError, match="there are triton, cpu, reference"):
        select("paged_decode", requested="sycl")
    with pytest.raises(KernelError, match="cpu: runs on cpu, not on cuda"):
        select("paged_decode", "cuda", "cpu")
    with pytest.raises(KernelError, match="no operation 'conv'; there are add_bias, add_rms_norm, all_finite"):
        select("conv")


@needs_triton
def test_triton_runs_on_a_cpu_only_interpreted_and_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select("paged_decode", "cpu", "triton").name == "triton"  # the tests are interpreted
    assert select("paged_decode", "cpu").name == "cpu"
    from kernels.gpu import precision

    monkeypatch.setattr(precision.INTERPRETED, "value", False)
    with pytest.raises(KernelError, match="runs on a CPU only if TRITON_INTERPRET=1 is set before it starts"):
        select("paged_decode", "cpu", "triton")


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_triton_on_a_device_that_is_not_there_says_so() -> None:
    with pytest.raises(KernelError, match=r"'triton' of paged_decode can run on cuda .triton: there is no CUDA device"):
        select("paged_decode", "cuda", "triton")


def test_triton_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    for device in ("cuda", "cpu"):
        with pytest.raises(KernelError, match=r"Triton is not installed .pip install 'pagedeck.gpu.'"):
            select("rms_norm", device, "triton")
