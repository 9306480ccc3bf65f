"""AMX's products, with the instructions emulated: the layout, the edges of tiles, and what a row depends on."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from kernels.cpu import native_library
from kernels.cpu.build import INSTRUCTION_SETS, SOURCES
from kernels.cpu.native import NativeKernels, PackedLinear
from kernels.reference import elementwise

pytestmark = pytest.mark.slow

if "avx512_bf16" not in native_library.instruction_sets():
    pytest.skip("the emulation itself needs AVX-512 with bfloat16", allow_module_level=True)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    target = tmp_path_factory.mktemp("amx") / "emulated.so"
    flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-w", "-DPAGEDECK_AMX", "-DPAGEDECK_EMULATE_AMX"]
    source = Path(__file__).with_name("amx_emulation.cpp")
    subprocess.run(
        [compiler, *flags, *INSTRUCTION_SETS["avx512_bf16"], "-DPAGEDECK_ISA=emulated", f"-I{SOURCES}", str(source),
         "-o", str(target)],
        check=True,
    )  # fmt: skip
    library = ctypes.CDLL(str(target))
    pointer = ctypes.c_void_p
    library.emulated_linear.argtypes = [pointer, pointer, ctypes.c_int64, ctypes.c_int32, pointer]
    library.emulated_linear.restype = None
    return library


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    return NativeKernels(1, "avx512_bf16")


def linear(library: ctypes.CDLL, x: torch.Tensor, weight: PackedLinear) -> torch.Tensor:
    if weight.is_gate_up:
        out = torch.full((x.shape[0], weight.out_features // 2), -77.0, dtype=x.dtype)
    else:
        out = torch.full((x.shape[0], weight.out_features), -77.0)
    struct = weight.struct()
    into = 2 if weight.is_gate_up else 0
    library.emulated_linear(ctypes.byref(struct), x.data_ptr(), x.shape[0], into, out.data_ptr())
    return out


def matrices(rows: int, out_features: int, in_features: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, in_features, generator=generator).bfloat16()
    return x, torch.randn(out_features, in_features, generator=generator).bfloat16()


@pytest.mark.parametrize(("out_features", "in_features"), [(32, 32), (100, 96), (16, 64), (577, 32)])
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 31, 32, 33, 50, 128, 129, 145])
def test_products(library: ctypes.CDLL, kernels: NativeKernels, rows: int, out_features: int, in_features: int) -> None:
    x, weight = matrices(rows, out_features, in_features)
    got = linear(library, x, kernels.pack(weight))
    torch.testing.assert_close(got.double(), x.double() @ weight.double().T, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 20, 40])
def test_gate(library: ctypes.CDLL, kernels: NativeKernels, rows: int) -> None:
    x, weight = matrices(rows, 2 * 50, 64)
    expected = elementwise.silu_and_mul((x.double() @ weight.double().T).float())
    got = linear(library, x, kernels.pack(weight, is_gate_up=True))
    torch.testing.assert_close(got.float(), expected, atol=1e-5, rtol=2**-8)


def test_a_row_is_the_same_bits_in_any_batch(library: ctypes.CDLL, kernels: NativeKernels) -> None:
    x, weight = matrices(150, 64, 288)
    packed = kernels.pack(weight)
    together = linear(library, x, packed)
    for row in (0, 15, 16, 31, 32, 149):
        assert torch.equal(linear(library, x[row : row + 1], packed)[0], together[row])
    assert torch.equal(linear(library, x[5:42], packed), together[5:42])


def test_inputs_that_do_not_fill_tiles_go_another_way(library: ctypes.CDLL, kernels: NativeKernels) -> None:
    x, weight = matrices(40, 50, 72)
    got = linear(library, x, kernels.pack(weight))
    torch.testing.assert_close(got.double(), x.double() @ weight.double().T, atol=2e-4, rtol=1e-5)
