// Sixteen lanes of 32 bits, for the instruction set that this translation unit is compiled for.
//
// A lane of "units" holds what one multiply-add consumes of each operand: one float32 (F32), or two neighbouring
// bfloat16 (BF16), the first in the low half. `dot` adds the products of two units to a float32 lane. Everything above
// this file is written once, in units.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace pagedeck {
namespace PAGEDECK_ISA {

struct F32 {
    static constexpr int kPerUnit = 1;
    using Element = float;
};
struct BF16 {
    static constexpr int kPerUnit = 2;
    using Element = uint16_t;
};

// Round to nearest even; NaN stays NaN.
inline uint16_t to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

inline float from_bf16(uint16_t value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

#if defined(__AVX512F__)

constexpr int kRows = 12;     // rows of a register tile of a product: 2 vectors each, and 3 left for operands
constexpr int kHeadRows = 6;  // rows of a register tile of attention: 4 vectors each

using Vec = __m512;
using Units = __m512i;

inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline void store(float* p, Vec v, int n) { _mm512_mask_storeu_ps(p, first(n), v); }
inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec splat(float x) { return _mm512_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }  // b where one is NaN
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }  // likewise
inline Vec round(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline float sum(Vec a) { return _mm512_reduce_add_ps(a); }
inline float largest(Vec a) { return _mm512_reduce_max_ps(a); }
// Lanes from n on become x.
inline Vec fill_from(Vec a, int n, float x) { return _mm512_mask_mov_ps(splat(x), first(n), a); }
// 0 where x < limit, else a (also where x is NaN).
inline Vec zero_below(Vec a, Vec x, float limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, splat(limit), _CMP_NLT_UQ), a);
}
// Bit i is set where lane i is at least x.
inline uint32_t at_least(Vec a, float x) { return _mm512_cmp_ps_mask(a, splat(x), _CMP_GE_OQ); }
// 2^n for integral n in [-126, 127].
inline Vec power_of_two(Vec n) {
    const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
}

inline Units load_units(const uint32_t* p) { return _mm512_loadu_si512(p); }
inline Units load_units(const uint32_t* p, int n) { return _mm512_maskz_loadu_epi32(first(n), p); }
inline void store_units(uint32_t* p, Units v) { _mm512_storeu_si512(p, v); }
inline Units splat_unit(uint32_t unit) { return _mm512_set1_epi32(static_cast<int>(unit)); }
inline Units low_halves(Units v) { return _mm512_and_si512(v, _mm512_set1_epi32(0xffff)); }

inline Vec widen(const uint16_t* p, int n) {
    const __m256i narrow = _mm256_maskz_loadu_epi16(first(n), p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

template <class T>
Vec dot(Vec acc, Units a, Units b);

template <>
inline Vec dot<F32>(Vec acc, Units a, Units b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), acc);
}

#if defined(__AVX512BF16__)
template <>
inline Vec dot<BF16>(Vec acc, Units a, Units b) {
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh&>(a), reinterpret_cast<__m512bh&>(b));
}
inline __m256i narrowed(Vec v) {
    const __m256bh narrow = _mm512_cvtneps_pbh(v);
    return reinterpret_cast<const __m256i&>(narrow);
}
#else
template <>
inline Vec dot<BF16>(Vec acc, Units a, Units b) {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    acc = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
                          _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), acc);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)),
                           _mm512_castsi512_ps(_mm512_and_si512(b, high)), acc);
}
inline __m256i narrowed(Vec v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    up = _mm512_mask_mov_epi32(up, is_nan, _mm512_set1_epi32(0x7fc0));
    return _mm512_cvtepi32_epi16(up);
}
#endif

inline void store_bf16(uint16_t* p, Vec v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrowed(v)); }
inline void store_bf16(uint16_t* p, Vec v, int n) { _mm256_mask_storeu_epi16(p, first(n), narrowed(v)); }
// One half of each unit, the other stays.
inline void store_halves(uint32_t* p, Vec v, bool is_high, int n) {
    __m512i wide = _mm512_cvtepu16_epi32(narrowed(v));
    if (is_high) wide = _mm512_slli_epi32(wide, 16);
    const __mmask32 lanes = (is_high ? 0xaaaaaaaau : 0x55555555u) & (n >= 16 ? 0xffffffffu : (1u << (2 * n)) - 1);
    _mm512_mask_storeu_epi16(p, lanes, wide);
}

#else  // AVX2 + FMA

constexpr int kRows = 3;
constexpr int kHeadRows = 1;

struct Vec {
    __m256 a, b;
};
struct Units {
    __m256i a, b;
};

inline __m256i lanes_below(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Vec load(const float* p, int n) {
    return {_mm256_maskload_ps(p, lanes_below(n)), _mm256_maskload_ps(p + 8, lanes_below(n - 8))};
}
inline void store(float* p, Vec v) {
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
}
inline void store(float* p, Vec v, int n) {
    _mm256_maskstore_ps(p, lanes_below(n), v.a);
    _mm256_maskstore_ps(p + 8, lanes_below(n - 8), v.b);
}
inline Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.a, b.a), _mm256_add_ps(a.b, b.b)}; }
inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.a, b.a), _mm256_sub_ps(a.b, b.b)}; }
inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.a, b.a), _mm256_mul_ps(a.b, b.b)}; }
inline Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.a, b.a), _mm256_div_ps(a.b, b.b)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.a, b.a), _mm256_max_ps(a.b, b.b)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.a, b.a), _mm256_min_ps(a.b, b.b)}; }
inline Vec round(Vec v) {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(v.a, kMode), _mm256_round_ps(v.b, kMode)};
}
inline float sum(Vec v) {
    const __m256 halves = _mm256_add_ps(v.a, v.b);
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline float largest(Vec v) {
    const __m256 halves = _mm256_max_ps(v.a, v.b);
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline Vec fill_from(Vec v, int n, float x) {
    const __m256 other = _mm256_set1_ps(x);
    return {_mm256_blendv_ps(other, v.a, _mm256_castsi256_ps(lanes_below(n))),
            _mm256_blendv_ps(other, v.b, _mm256_castsi256_ps(lanes_below(n - 8)))};
}
inline Vec zero_below(Vec v, Vec x, float limit) {
    const __m256 bound = _mm256_set1_ps(limit);
    return {_mm256_and_ps(v.a, _mm256_cmp_ps(x.a, bound, _CMP_NLT_UQ)),
            _mm256_and_ps(v.b, _mm256_cmp_ps(x.b, bound, _CMP_NLT_UQ))};
}
inline uint32_t at_least(Vec v, float x) {
    const __m256 bound = _mm256_set1_ps(x);
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(v.a, bound, _CMP_GE_OQ))) |
           static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(v.b, bound, _CMP_GE_OQ))) << 8;
}
inline Vec power_of_two(Vec n) {
    const __m256i bias = _mm256_set1_epi32(127);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.a), bias), 23)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.b), bias), 23))};
}

inline Units load_units(const uint32_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
inline Units load_units(const uint32_t* p, int n) {
    return {_mm256_maskload_epi32(reinterpret_cast<const int*>(p), lanes_below(n)),
            _mm256_maskload_epi32(reinterpret_cast<const int*>(p + 8), lanes_below(n - 8))};
}
inline void store_units(uint32_t* p, Units v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), v.b);
}
inline Units splat_unit(uint32_t unit) {
    const __m256i v = _mm256_set1_epi32(static_cast<int>(unit));
    return {v, v};
}
inline Units low_halves(Units v) {
    const __m256i low = _mm256_set1_epi32(0xffff);
    return {_mm256_and_si256(v.a, low), _mm256_and_si256(v.b, low)};
}

inline Vec widen(const uint16_t* p, int n) {
    alignas(32) uint32_t wide[16] = {};
    for (int i = 0; i < n; i++) wide[i] = static_cast<uint32_t>(p[i]) << 16;
    return load(reinterpret_cast<const float*>(wide));
}

template <class T>
Vec dot(Vec acc, Units a, Units b);

template <>
inline Vec dot<F32>(Vec acc, Units a, Units b) {
    return {_mm256_fmadd_ps(_mm256_castsi256_ps(a.a), _mm256_castsi256_ps(b.a), acc.a),
            _mm256_fmadd_ps(_mm256_castsi256_ps(a.b), _mm256_castsi256_ps(b.b), acc.b)};
}
inline __m256 dot_halves(__m256 acc, __m256i x, __m256i y) {
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    acc = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)),
                          _mm256_castsi256_ps(_mm256_slli_epi32(y, 16)), acc);
    return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(x, high)),
                           _mm256_castsi256_ps(_mm256_and_si256(y, high)), acc);
}
template <>
inline Vec dot<BF16>(Vec acc, Units a, Units b) {
    return {dot_halves(acc.a, a.a, b.a), dot_halves(acc.b, a.b, b.b)};
}

inline void store_bf16(uint16_t* p, Vec v, int n) {
    alignas(32) float wide[16];
    store(wide, v);
    for (int i = 0; i < n; i++) p[i] = to_bf16(wide[i]);
}
inline void store_bf16(uint16_t* p, Vec v) { store_bf16(p, v, 16); }
inline void store_halves(uint32_t* p, Vec v, bool is_high, int n) {
    alignas(32) float wide[16];
    store(wide, v);
    uint16_t* halves = reinterpret_cast<uint16_t*>(p) + (is_high ? 1 : 0);
    for (int i = 0; i < n; i++) halves[2 * i] = to_bf16(wide[i]);
}

#endif

// Elements of T's storage from and to float32, n <= 16 of them.
template <class T>
inline Vec load_elements(const typename T::Element* p, int n) {
    if constexpr (T::kPerUnit == 1) {
        return load(p, n);
    } else {
        return widen(p, n);
    }
}
template <class T>
inline void store_elements(typename T::Element* p, Vec v, int n) {
    if constexpr (T::kPerUnit == 1) {
        store(p, v, n);
    } else {
        store_bf16(p, v, n);
    }
}

// 2^x, exact at 0; 0 below -126. NaN stays NaN. For F32 the error is below 2 units in the last place: a Taylor polynomial
// of 2^f on [-1/2, 1/2], times a power of two. For BF16 below 2^-18, of a minimax polynomial: results are rounded to 2^-9.
template <class T = F32>
inline Vec exp2(Vec x) {
#if defined(__AVX512F__)
    const Vec n = round(x), f = sub(x, n);
#else
    const Vec bounded = min(splat(127.0f), max(splat(-126.0f), x));
    const Vec n = round(bounded), f = sub(bounded, n);
#endif
    Vec p;
    if constexpr (T::kPerUnit == 1) {
        p = splat(1.54035304e-4f);
        p = fma(p, f, splat(1.33335581e-3f));
        p = fma(p, f, splat(9.61812911e-3f));
        p = fma(p, f, splat(5.55041087e-2f));
        p = fma(p, f, splat(2.40226507e-1f));
        p = fma(p, f, splat(6.93147181e-1f));
    } else {
        p = splat(9.58285322e-03f);
        p = fma(p, f, splat(5.59064262e-02f));
        p = fma(p, f, splat(2.40240986e-01f));
        p = fma(p, f, splat(6.93124193e-01f));
    }
    p = fma(p, f, splat(1.0f));
#if defined(__AVX512F__)
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, splat(-126.0f), _CMP_NLT_UQ), p, n);
#else
    return zero_below(mul(p, power_of_two(n)), x, -126.0f);
#endif
}

constexpr float kLog2E = 1.44269504f;

template <class T>
inline Vec silu(Vec x) {
    const Vec below = add(splat(1.0f), exp2<T>(mul(x, splat(-kLog2E))));
#if defined(__AVX512F__)
    if constexpr (T::kPerUnit == 2) return mul(x, _mm512_rcp14_ps(below));  // error 2^-14
#endif
    return div(x, below);
}

}  // namespace PAGEDECK_ISA
}  // namespace pagedeck
