"""The native kernels agree with the readable ones, on every instruction set that this processor has."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.cpu import native_library
from kernels.cpu.native import ModelShape, NativeError, NativeKernels, PackedModel, StepTensors
from kernels.layout import KVLayout, allocate
from kernels.reference import attention as reference
from kernels.reference import elementwise

if native_library.why_not() is not None:
    pytest.skip(f"no native kernels here: {native_library.why_not()}", allow_module_level=True)

# float32 sums in another order. bfloat16: outputs are rounded to 8 bits (2^-9 relative), in attention the weights too.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
SHAPES = [  # head_dim, num_kv_heads, query heads of each, block_size
    (64, 3, 3, 16),
    (80, 2, 1, 8),
    (96, 1, 4, 32),
    (128, 2, 8, 16),
    (40, 2, 3, 1),
    (20, 1, 7, 48),
]
ISAS = native_library.instruction_sets()


@pytest.fixture(scope="module", params=ISAS)
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return NativeKernels(2, request.param)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Products


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("out_features", "in_features"), [(32, 64), (100, 72), (1, 2), (577, 36)])
@pytest.mark.parametrize("rows", [1, 2, 7, 13, 37, 200])
def test_linear(kernels: NativeKernels, rows: int, out_features: int, in_features: int, dtype: torch.dtype) -> None:
    weight = torch.randn(out_features, in_features, generator=generator(0)).to(dtype)
    x = torch.randn(rows, in_features, generator=generator(1)).to(dtype)
    expected = x.double() @ weight.double().T
    packed = kernels.pack(weight)
    # The inputs are exact, so only the sum's rounding is left.
    got = kernels.linear(x, packed)
    torch.testing.assert_close(got.double(), expected, atol=2e-5 * math.sqrt(in_features), rtol=1e-5)
    residual = torch.randn(rows, out_features, generator=generator(2))
    before = residual.clone()
    assert kernels.linear(x, packed, residual) is residual
    torch.testing.assert_close(residual, before + got, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("inner", "in_features"), [(16, 64), (100, 72), (5, 6)])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_gate(kernels: NativeKernels, rows: int, inner: int, in_features: int, dtype: torch.dtype) -> None:
    weight = torch.randn(2 * inner, in_features, generator=generator(0)).to(dtype)
    x = torch.randn(rows, in_features, generator=generator(1)).to(dtype)
    expected = elementwise.silu_and_mul((x.double() @ weight.double().T).float())
    got = kernels.linear(x, kernels.pack(weight, is_gate_up=True))
    assert got.dtype == dtype
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)


def test_the_gate_holds_for_extreme_inputs(kernels: NativeKernels) -> None:
    weight = torch.ones(2, 2)
    x = torch.tensor([[-500.0, 0.0], [500.0, 0.0], [-90.0, 0.0], [0.0, 0.0], [float("nan"), 0.0]])
    got = kernels.linear(x, kernels.pack(weight, is_gate_up=True))[:, 0]
    assert got[:4].tolist() == pytest.approx([0.0, 250_000.0, 0.0, 0.0], abs=1e-30)
    assert torch.isnan(got[4])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_of_a_product_is_the_same_bits_in_any_batch(kernels: NativeKernels, dtype: torch.dtype) -> None:
    weight = torch.randn(200, 576, generator=generator(0)).to(dtype)
    x = torch.randn(131, 576, generator=generator(1)).to(dtype)
    packed = kernels.pack(weight)
    together = kernels.linear(x, packed)
    for row in (0, 1, 11, 12, 36, 96, 130):
        assert torch.equal(kernels.linear(x[row : row + 1], packed)[0], together[row])
    assert torch.equal(kernels.linear(x[5:42], packed), together[5:42])


# Rows


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 64), (7, 96), (3, 13), (33, 576)])
def test_rms_norm(kernels: NativeKernels, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=generator(0)) * 30
    weight = torch.randn(shape[1], generator=generator(1))
    expected = elementwise.rms_norm(x, weight, 1e-5)
    tolerance = 2**-8 if dtype == torch.bfloat16 else 2e-6
    got = kernels.rms_norm(x, weight, 1e-5, dtype)
    torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)


# Attention


class Cached:
    """Sequences in scattered blocks of a poisoned cache, in the reference's layout and in the native one."""

    def __init__(
        self, kernels: NativeKernels, shape: tuple[int, int, int, int], dtype: torch.dtype, lengths: list[int],
        num_new: list[int], seed: int = 0,
    ) -> None:  # fmt: skip
        head_dim, num_kv_heads, group, block_size = shape
        layout = KVLayout(num_kv_heads, block_size, head_dim)
        needed = [layout.num_blocks_for(n) for n in lengths]
        total = sum(needed) + 2
        ids = torch.randperm(total - 1, generator=generator(seed))
        tables = torch.full((len(lengths), max(needed) + 2), total - 1, dtype=torch.int32)  # the rest: an unused block
        taken = 0
        for row, count in enumerate(needed):
            tables[row, :count] = ids[taken : taken + count]
            taken += count
        self.scale = 1 / math.sqrt(head_dim)
        # Everything is written as one step of all tokens, then the step under test has the last `num_new` of each.
        positions = torch.cat([torch.arange(n) for n in lengths])
        rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        slots = tables[rows, positions // block_size].long() * block_size + positions % block_size
        angles = torch.rand(max(lengths), head_dim // 2, generator=generator(seed + 1)) * 6
        cos, sin = torch.cat((angles, angles), 1).cos(), torch.cat((-angles, angles), 1).sin()
        qkv = torch.randn(len(positions), (group + 2) * num_kv_heads, head_dim, generator=generator(seed + 2))
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        everything = StepTensors(positions, positions, slots, starts, seq_lens, tables)
        self.native = allocate(layout, 1, total, dtype)[0].fill_(float("nan"))
        query = kernels.rotate_and_write(self.native, qkv, cos, sin, everything)
        self.plain = allocate(layout, 1, total, dtype)[0].fill_(float("nan"))
        rotated, heads = qkv.clone(), group * num_kv_heads
        elementwise.rope(rotated[:, : heads + num_kv_heads], cos[positions], sin[positions])
        reference.write_kv(self.plain, rotated[:, heads:].to(dtype), slots)
        self.rotated = rotated[:, :heads]
        chosen = torch.cat(
            [torch.arange(int(starts[i + 1]) - new, int(starts[i + 1])) for i, new in enumerate(num_new)]
        )
        self.all_queries, self.query = query, query[chosen].contiguous()
        new_starts = torch.tensor([0, *num_new], dtype=torch.int32).cumsum(0).int()
        self.step = StepTensors(positions[chosen], positions[chosen], slots[chosen], new_starts, seq_lens, tables)

    def expected(self) -> torch.Tensor:
        step = self.step
        return reference.paged_prefill(
            self.query, self.plain, step.block_tables, step.seq_lens, step.query_start_loc, self.scale
        )

    def check(self, kernels: NativeKernels, tolerance: float) -> None:
        expected = self.expected()
        assert torch.isfinite(expected).all()
        got = kernels.attend(self.query, self.native, self.step, self.scale)
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_rotated_queries(kernels: NativeKernels, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    cached = Cached(kernels, shape, dtype, [5, 3], [1, 1])
    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(cached.all_queries.float(), cached.rotated, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", [[1], [16, 32], [7, 33, 1, 64, 65, 18], [129, 3, 200]])
def test_decode(
    kernels: NativeKernels, lengths: list[int], shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    Cached(kernels, shape, dtype, lengths, [1] * len(lengths)).check(kernels, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1]])
def test_decode_of_sequences_long_enough_to_be_split(
    kernels: NativeKernels, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    Cached(kernels, shape, dtype, [1500, 4, 512, 513], [1] * 4).check(kernels, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("num_cached", "num_new"),
    [([0], [2]), ([0, 0], [17, 5]), ([40, 0, 3], [9, 16, 1]), ([16], [40]), ([100, 7], [2, 30])],
)
def test_prefill(
    kernels: NativeKernels, num_cached: list[int], num_new: list[int], shape: tuple[int, int, int, int],
    dtype: torch.dtype,
) -> None:  # fmt: skip
    lengths = [c + n for c, n in zip(num_cached, num_new, strict=True)]
    Cached(kernels, shape, dtype, lengths, num_new).check(kernels, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_prefill_across_sections(kernels: NativeKernels, dtype: torch.dtype) -> None:
    Cached(kernels, (16, 1, 3, 16), dtype, [530, 1030], [40, 20]).check(kernels, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_a_row_of_attention_is_the_same_bits_however_it_is_computed(
    kernels: NativeKernels, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """As a decode alone, as a decode in a batch, and in chunks of a prefill, over one section and over several."""
    whole = Cached(kernels, shape, dtype, [40, 600, 1100], [40, 600, 1100])
    expected = kernels.attend(whole.query, whole.native, whole.step, whole.scale)
    starts = whole.step.query_start_loc.tolist()
    for chunk in (1, 7, 37):
        for row, length in ((0, 40), (1, 600), (1, 513), (2, 1100)):
            first = starts[row] + length - chunk
            step = StepTensors(
                whole.step.positions, whole.step.positions, whole.step.slot_mapping,
                torch.tensor([0, chunk], dtype=torch.int32), torch.tensor([length], dtype=torch.int32),
                whole.step.block_tables[row : row + 1].contiguous(),
            )  # fmt: skip
            got = kernels.attend(whole.query[first : first + chunk], whole.native, step, whole.scale)
            assert torch.equal(got, expected[first : first + chunk])


def test_infinite_keys_make_their_own_sequence_not_finite_and_no_other(kernels: NativeKernels) -> None:
    cached = Cached(kernels, SHAPES[0], torch.bfloat16, [20, 30], [1, 1])
    cached.native[int(cached.step.block_tables[0, 0])] = float("nan")
    got = kernels.attend(cached.query, cached.native, cached.step, cached.scale)
    assert torch.isnan(got[0]).all()
    assert torch.isfinite(got[1]).all()


# Refusals


def test_what_does_not_fit_is_refused(kernels: NativeKernels) -> None:
    packed = kernels.pack(torch.zeros(4, 6))
    with pytest.raises(ValueError, match="8 inputs for a matrix of 6"):
        kernels.linear(torch.zeros(1, 8), packed)
    with pytest.raises(ValueError, match=r"contiguous tensor of torch\.float32, got torch\.bfloat16"):
        kernels.linear(torch.zeros(1, 6, dtype=torch.bfloat16), packed)
    with pytest.raises(ValueError, match="contiguous tensor"):
        kernels.pack(torch.zeros(4, 6).T)
    with pytest.raises(ValueError, match="4 heads of 20 over 3 KV heads"):
        kernels.attend(torch.zeros(1, 4, 20), torch.zeros(2, 2, 3, 16, 20), None, 1.0)  # type: ignore[arg-type]
    with pytest.raises(NativeError, match="not sse9"):
        NativeKernels(1, "sse9")


def test_the_sets_are_listed_best_first() -> None:
    order = ["amx", "avx512_bf16", "avx512", "avx2"]
    assert list(ISAS) == [name for name in order if name in ISAS]
    assert NativeKernels(1).instruction_set == ISAS[0]


# Logits


def test_logits_are_the_head_of_the_normed_rows_and_their_memory_is_lent_once(kernels: NativeKernels) -> None:
    head = torch.randn(70, 32, generator=generator(0))
    shape = ModelShape(num_layers=0, hidden=32, inner=8, num_heads=1, num_kv_heads=1, head_dim=16, eps=1e-5, scale=1.0)
    norm = torch.rand(32, generator=generator(1))
    model = PackedModel(shape, (), norm, kernels.pack(head), None, torch.empty(1, 16), torch.empty(1, 16))
    decoder = kernels.bind(model, allocate(KVLayout(1, 16, 16), 1, 1, torch.float32))
    x = torch.randn(5, 32, generator=generator(2))
    expected = elementwise.rms_norm(x, norm, 1e-5) @ head.T
    first = decoder.logits(x)
    second = decoder.logits(x[:2])
    torch.testing.assert_close(first, expected, atol=2e-5, rtol=2e-5)
    assert torch.equal(second, first[:2])
    assert second.data_ptr() != first.data_ptr()
    address = second.data_ptr()
    del second
    assert decoder.logits(x[:1]).data_ptr() == address
