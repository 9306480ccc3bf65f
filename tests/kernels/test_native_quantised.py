"""Products with matrices that stay in GGUF's blocks agree with what the `gguf` library dequantises them to."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from kernels.cpu import native_library
from kernels.cpu.native import MAX_QUANTISED_ROWS, QUANTISED, NativeKernels, PackedLinear, StoredMatrix
from kernels.reference import elementwise

if native_library.why_not() is not None:
    pytest.skip(f"no native kernels here: {native_library.why_not()}", allow_module_level=True)


@pytest.fixture(scope="module", params=native_library.instruction_sets())
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return NativeKernels(2, request.param)


def matrix(
    kernels: NativeKernels,
    kind: str,
    shape: tuple[int, int],
    *,
    is_gate_up: bool = False,
    max_rows: int = MAX_QUANTISED_ROWS,
) -> tuple[torch.Tensor, PackedLinear]:
    """A matrix as the library dequantises it (float64), and packed in both forms."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=shape).astype(np.float32) * np.float32(0.1)
    values[0, :32] = 0.0
    values[1, :32] *= 1e-5  # a scale that is subnormal in half precision
    storage = getattr(gguf.GGMLQuantizationType, kind)
    rows = gguf.quants.quantize(values, storage)
    exact = torch.from_numpy(gguf.quants.dequantize(rows, storage))
    stored = StoredMatrix(kind, torch.from_numpy(rows))
    packed = kernels.pack(exact.bfloat16(), is_gate_up=is_gate_up, stored=stored, max_quantised_rows=max_rows)
    return exact.double(), packed


def inputs(rows: int, in_features: int) -> torch.Tensor:
    return torch.randn(rows, in_features, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("shape", [(32, 32), (100, 96), (577, 192)])
@pytest.mark.parametrize("rows", range(1, MAX_QUANTISED_ROWS + 1))
def test_few_rows_use_the_exact_weights(kernels: NativeKernels, kind: str, shape: tuple[int, int], rows: int) -> None:
    exact, packed = matrix(kernels, kind, shape)
    x = inputs(rows, shape[1])
    # Weights rounded to bfloat16 would be off by 2^-9 of each: some 1e-3 here. AVX2 has that path only.
    used = exact.bfloat16().double() if kernels.instruction_set == "avx2" else exact
    expected = x.double() @ used.T
    torch.testing.assert_close(kernels.linear(x, packed).double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", QUANTISED)
def test_many_rows_use_bfloat16(kernels: NativeKernels, kind: str) -> None:
    exact, packed = matrix(kernels, kind, (100, 96))
    x = inputs(MAX_QUANTISED_ROWS + 1, 96)
    expected = x.double() @ exact.bfloat16().double().T
    torch.testing.assert_close(kernels.linear(x, packed).double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", QUANTISED)
def test_gate(kernels: NativeKernels, kind: str) -> None:
    exact, packed = matrix(kernels, kind, (2 * 50, 64), is_gate_up=True)
    x = inputs(3, 64)
    used = exact.bfloat16().double() if kernels.instruction_set == "avx2" else exact
    expected = elementwise.silu_and_mul((x.double() @ used.T).float())
    torch.testing.assert_close(kernels.linear(x, packed).float(), expected, atol=1e-5, rtol=2**-8)


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_row_is_the_same_bits_among_few_rows(kernels: NativeKernels, kind: str) -> None:
    _, packed = matrix(kernels, kind, (100, 576))
    x = inputs(MAX_QUANTISED_ROWS, 576)
    together = kernels.linear(x, packed)
    for row in range(MAX_QUANTISED_ROWS):
        assert torch.equal(kernels.linear(x[row : row + 1], packed)[0], together[row])


def test_what_counts_as_few_can_be_set(kernels: NativeKernels) -> None:
    exact, packed = matrix(kernels, "Q4_0", (64, 64), max_rows=0)
    assert packed.quantised is None
    x = inputs(1, 64)
    expected = x.double() @ exact.bfloat16().double().T
    torch.testing.assert_close(kernels.linear(x, packed).double(), expected, atol=2e-5, rtol=2e-5)


def test_float32_never_uses_them(kernels: NativeKernels) -> None:
    rows = torch.from_numpy(gguf.quants.quantize(np.ones((4, 64), np.float32), gguf.GGMLQuantizationType.Q8_0))
    assert kernels.pack(torch.ones(4, 64), stored=StoredMatrix("Q8_0", rows)).quantised is None


def test_another_matrix_is_refused(kernels: NativeKernels) -> None:
    if kernels.instruction_set == "avx2":
        pytest.skip("AVX2 doesn't use stored matrices")
    rows = torch.zeros(4, 34, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"a stored matrix of 4 x 32, not \(4, 64\)"):
        kernels.pack(torch.ones(4, 64).bfloat16(), stored=StoredMatrix("Q8_0", rows))
