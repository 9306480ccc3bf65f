"""Every specialisation that the engine uses compiles to machine code for A100 and H100/H200, without either."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import triton

from kernels.gpu import attention, elementwise, sampling
from kernels.gpu.compile import MAX_SHARED, Resources, as_table

ROOT = Path(__file__).parents[3]
TRITON_OF_THE_TABLE = "3.7.1"
MAX_SPECIALISATIONS = 60


@pytest.fixture(scope="module")
def compiled() -> list[Resources]:
    """In a process of its own: here the kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kernels.gpu.compile", "--json"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-4000:]
    return [Resources(**json.loads(line)) for line in result.stdout.splitlines()]


@pytest.mark.slow
def test_all_compile_and_stay_within_the_limits(compiled: list[Resources]) -> None:
    assert {entry.arch for entry in compiled} == {80, 90} == set(MAX_SHARED)
    for arch in MAX_SHARED:
        mine = [entry for entry in compiled if entry.arch == arch]
        assert 0 < len(mine) <= MAX_SPECIALISATIONS
        assert len({(entry.case, entry.kernel) for entry in mine}) == len(mine)
    assert all(entry.cubin > 1000 for entry in compiled)
    assert [entry for entry in compiled if entry.excess()] == []


@pytest.mark.slow
def test_every_kernel_is_in_the_table(compiled: list[Resources]) -> None:
    launched = {
        name.removeprefix("_")
        for module in (attention, elementwise, sampling)
        for name, value in vars(module).items()
        if type(value).__name__ == "InterpretedFunction" and f" {name}[" in _source(module.__file__)
    }
    assert {"decode", "reduce", "prefill", "norm", "rotate", "sample", "penalise"} <= launched
    assert launched == {entry.kernel.split()[0] for entry in compiled}


@pytest.mark.slow
@pytest.mark.skipif(triton.__version__ != TRITON_OF_THE_TABLE, reason="the README's table is of another Triton")
def test_the_readmes_table_is_what_the_compiler_says(compiled: list[Resources]) -> None:
    readme = (ROOT / "kernels" / "README.md").read_text()
    missing = [line for line in as_table(compiled).splitlines() if line not in readme]
    assert missing == [], "python -m kernels.gpu.compile prints the table"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"spilled": 8}, "spills 8 bytes"),
        ({"registers": 256}, "256 registers are more than 255"),
        ({"registers": 200, "threads": 512}, "512 threads of 200 registers don't fit"),
        ({"shared": 163 * 1024 + 1}, "166913 bytes of shared memory"),
        ({"shared": 163 * 1024 + 1, "arch": 90}, None),
        ({"shared": 227 * 1024 + 1, "arch": 90}, "232449 bytes of shared memory"),
    ],
)
def test_limits_can_be_broken(change: dict[str, int], reason: str | None) -> None:
    good = Resources("a case", "decode", 80, 128, 255, 0, 163 * 1024, 5000)
    excess = replace(good, **change).excess()  # type: ignore[arg-type]
    assert (excess is None) if reason is None else (excess is not None and reason in excess)


def test_interpreted_kernels_cannot_be_compiled() -> None:
    command = [sys.executable, "-m", "kernels.gpu.compile"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert "unset TRITON_INTERPRET" in result.stderr


def _source(path: str | None) -> str:
    assert path is not None
    return Path(path).read_text()
