// Products of few rows with matrices that stay in GGUF's blocks of 32 inputs: a weight is scale * q + offset.
//
// Panels of 32 outputs, as in linear.h; in each, block after block of 32 inputs:
//   4 bits: scales [32] and offsets [32] in half precision, then for each half of the panel [8][16 outputs][2] bytes
//           whose low four bits are inputs 2p and 2p + 1, and whose high ones are inputs 16 + 2p and 16 + 2p + 1;
//   8 bits: scales [32], then for each half of the panel [16][16 outputs][2] signed bytes, of inputs 2p and 2p + 1.
// q is exact in bfloat16, so a product is more exact than with weights rounded to bfloat16: the sums of q * x and of x
// over a block are scaled in float32. As in linear.h, a row's result doesn't depend on the other rows.
#pragma once

#include "linear.h"
#if defined(PAGEDECK_AMX)
#include "amx.h"
#endif

namespace pagedeck {

namespace PAGEDECK_ISA {

#if defined(__AVX512BW__)
constexpr bool kHasQuantised = true;

inline Vec load_halves(const uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// bfloat16 of 0..15, twice, so that bit 4 of an index doesn't matter.
inline __m512i nibble_table() {
    alignas(64) uint16_t table[32];
    for (int i = 0; i < 32; i++) table[i] = to_bf16(static_cast<float>(i % 16));
    return _mm512_load_si512(table);
}

// sums[block] of each row's inputs.
inline void sum_blocks(const uint32_t* x, int blocks, float* sums) {
    const Units ones = splat_unit(0x3f803f80u);
    for (int b = 0; b < blocks; b++) sums[b] = sum(dot<BF16>(zero(), load_units(x + 16 * b), ones));
}

template <int R>
[[gnu::noinline]] void multiply_4bit(const uint32_t* x, int64_t stride, const float* sums, const uint8_t* w, int blocks,
                                     const Output<BF16>& out, int panel) {
    const __m512i table = nibble_table();
    Vec acc[2][R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) acc[0][r] = acc[1][r] = zero();
    for (int b = 0; b < blocks; b++, w += 640) {
        for (int half = 0; half < 2; half++) {
            const uint8_t* bytes = w + 128 + 256 * half;
            // Two sums, because each waits for the addition before.
            Vec even[R], odd[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) even[r] = odd[r] = zero();
#pragma GCC unroll 8
            for (int p = 0; p < 8; p++) {
                const __m512i wide =
                    _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + 32 * p)));
                const __m512i low = _mm512_permutexvar_epi16(wide, table);
                const __m512i high = _mm512_permutexvar_epi16(_mm512_srli_epi16(wide, 4), table);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    const uint32_t* units = x + r * stride + 16 * b + p;
                    even[r] = dot<BF16>(even[r], splat_unit(units[0]), low);
                    odd[r] = dot<BF16>(odd[r], splat_unit(units[8]), high);
                }
            }
            const Vec scale = load_halves(w + 32 * half), offset = load_halves(w + 64 + 32 * half);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                acc[half][r] = fma(scale, add(even[r], odd[r]), acc[half][r]);
                acc[half][r] = fma(offset, splat(sums[r * blocks + b]), acc[half][r]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) finish<BF16>(out, r, panel, acc[0][r], acc[1][r]);
}

// 16 signed bytes as bfloat16, exactly.
inline __m256i narrow_bytes(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    // The upper half of a float32 holds any integer of 8 bits: nothing is rounded.
    const __m512i bits = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
}

template <int R>
[[gnu::noinline]] void multiply_8bit(const uint32_t* x, int64_t stride, const uint8_t* w, int blocks,
                                     const Output<BF16>& out, int panel) {
    Vec acc[2][R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) acc[0][r] = acc[1][r] = zero();
    for (int b = 0; b < blocks; b++, w += 1088) {
        for (int half = 0; half < 2; half++) {
            const uint8_t* bytes = w + 64 + 512 * half;
            Vec part[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) part[r] = zero();
#pragma GCC unroll 4
            for (int p = 0; p < 16; p++) {
                const __m512i units = _mm512_inserti64x4(_mm512_castsi256_si512(narrow_bytes(bytes + 32 * p)),
                                                         narrow_bytes(bytes + 32 * p + 16), 1);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    part[r] = dot<BF16>(part[r], splat_unit(x[r * stride + 16 * b + p]), units);
                }
            }
            const Vec scale = load_halves(w + 32 * half);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) acc[half][r] = fma(scale, part[r], acc[half][r]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) finish<BF16>(out, r, panel, acc[0][r], acc[1][r]);
}

template <int R = kMaxQuantisedRows>
void multiply_quantised_rows(int rows, int bits, const uint32_t* x, int64_t stride, const float* sums, const uint8_t* w,
                             int blocks, const Output<BF16>& out, int panel) {
    if constexpr (R > 0) {
        if (rows != R) {
            multiply_quantised_rows<R - 1>(rows, bits, x, stride, sums, w, blocks, out, panel);
        } else if (bits == 4) {
            multiply_4bit<R>(x, stride, sums, w, blocks, out, panel);
        } else {
            multiply_8bit<R>(x, stride, w, blocks, out, panel);
        }
    }
}

// One phase, as multiply() is. rows <= kMaxQuantisedRows.
inline void multiply_quantised(Worker& worker, const PagedeckLinear& linear, const uint32_t* x, int64_t stride,
                               int rows, const Output<BF16>& out) {
    const int blocks = linear.in_features / kQuantisedBlock;
    static_assert(kMaxQuantisedRows * (kMaxQuantisedInputs / kQuantisedBlock) * sizeof(float) <= 64 * 1024);
    alignas(64) float sums[kMaxQuantisedRows * (kMaxQuantisedInputs / kQuantisedBlock)];
    if (linear.bits == 4) {
        for (int r = 0; r < rows; r++) sum_blocks(x + r * stride, blocks, sums + r * blocks);
    }
    const int64_t panel_bytes = blocks * quantised_block_bytes(linear.bits);
    worker.each(panels_of(linear, out.into), [&](int64_t panel) {
        multiply_quantised_rows(rows, linear.bits, x, stride, sums, linear.quantised + panel * panel_bytes, blocks, out,
                                static_cast<int>(panel));
    });
    worker.barrier();
}
#else
constexpr bool kHasQuantised = false;

inline void multiply_quantised(Worker&, const PagedeckLinear&, const uint32_t*, int64_t, int, const Output<BF16>&) {}
#endif

// With whichever form of the matrix suits the number of rows.
template <class T>
void multiply_best(Worker& worker, const PagedeckLinear& linear, const uint32_t* x, int64_t stride, int64_t rows,
                   const Output<T>& out, Ahead& ahead, Following following = {}) {
    if constexpr (T::kPerUnit == 2 && kHasQuantised) {
        if (linear.quantised && rows <= linear.max_quantised_rows) {
            multiply_quantised(worker, linear, x, stride, static_cast<int>(rows), out);
            return;
        }
    }
#if defined(PAGEDECK_AMX)
    if constexpr (T::kPerUnit == 2) {
        if (linear.in_features % 32 == 0) {
            multiply_amx(worker, linear, x, stride, rows, out);
            return;
        }
    }
#endif
    multiply<T>(worker, linear, x, stride, rows, out, ahead, following);
}

}  // namespace PAGEDECK_ISA
}  // namespace pagedeck
