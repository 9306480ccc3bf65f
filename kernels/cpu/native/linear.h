// Products with packed matrices.
//
// A matrix [out][in] lies as panels of 32 outputs: [panel][unit of in][2][16 outputs], zeros beyond its edges. One pass
// over a panel is one contiguous stream, and a unit of it is two vectors that meet one broadcast unit of each row.
//
// Every output is one chain of `dot`s over the inputs in order, in float32, whatever the number of rows: a row's result
// is the same bits alone and in any batch.
#pragma once

#include "ahead.h"
#include "api.h"
#include "team.h"
#include "vec.h"

namespace pagedeck {
namespace PAGEDECK_ISA {

constexpr int kPanel = 32;                // outputs
constexpr int kBlockRows = 8 * kRows;     // rows per task: their inputs stay in the L2 cache

enum class Into { kStore, kAdd, kGate };

inline int units_of(int elements, bool is_bf16) { return is_bf16 ? (elements + 1) / 2 : elements; }

// Where a product goes.
template <class T>
struct Output {
    Into into;
    float* wide;                 // kStore, kAdd: [rows][stride]
    typename T::Element* gated;  // kGate: [rows][stride], silu(first half of the panel) * second half
    int64_t stride;
    int columns;                 // of the output; kGate: of the gated one
};

template <class T>
inline void finish(const Output<T>& out, int64_t row, int panel, Vec left, Vec right) {
    if (out.into == Into::kGate) {
        const int column = panel * 16, n = out.columns - column < 16 ? out.columns - column : 16;
        store_elements<T>(out.gated + row * out.stride + column, mul(silu<T>(left), right), n);
        return;
    }
    float* p = out.wide + row * out.stride + panel * kPanel;
    const int n = out.columns - panel * kPanel;
    if (n >= kPanel) {
        if (out.into == Into::kAdd) {
            left = add(left, load(p));
            right = add(right, load(p + 16));
        }
        store(p, left);
        store(p + 16, right);
        return;
    }
    const int n_left = n < 16 ? n : 16, n_right = n < 16 ? 0 : n - 16;
    if (out.into == Into::kAdd) {
        left = add(left, load(p, n_left));
        right = add(right, load(p + 16, n_right));
    }
    store(p, left, n_left);
    store(p + 16, right, n_right);
}

// Rows [row, row + R) of one panel, while `first` and `second` are fetched. x: [rows][stride] units.
template <class T, int R>
[[gnu::noinline]] void multiply_tile(const uint32_t* x, int64_t stride, const uint32_t* w, int units,
                                     const Output<T>& out, int64_t row, int panel, Run first, Run second) {
    Vec acc[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = zero();
    // Three rows share a base, so that their addresses are base, base + stride, base + 2 * stride.
    const uint32_t* base[(R + 2) / 3];
#pragma GCC unroll 16
    for (int b = 0; b < (R + 2) / 3; b++) base[b] = x + (row + 3 * b) * stride;
    // A run that has ended stays at its end; one that is empty, at this panel.
    const char* ahead = first.lines ? first.at : reinterpret_cast<const char*>(w);
    const char* beyond = second.lines ? second.at : reinterpret_cast<const char*>(w);
    const char *last = ahead + 64 * (first.lines - 1), *last_beyond = beyond + 64 * (second.lines - 1);
    for (int u = 0; u < units; u++, w += kPanel) {
        _mm_prefetch(ahead, _MM_HINT_T1);
        _mm_prefetch(beyond, _MM_HINT_T1);
        ahead += ahead < last ? 64 : 0;
        beyond += beyond < last_beyond ? 64 : 0;
        const Units left = load_units(w), right = load_units(w + 16);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const Units unit = splat_unit(base[r / 3][(r % 3) * stride + u]);
            acc[r][0] = dot<T>(acc[r][0], unit, left);
            acc[r][1] = dot<T>(acc[r][1], unit, right);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) finish<T>(out, row + r, panel, acc[r][0], acc[r][1]);
}

template <class T, int R = kRows>
void multiply_rows(int rows, const uint32_t* x, int64_t stride, const uint32_t* w, int units, const Output<T>& out,
                   int64_t row, int panel, Run first, Run second) {
    if constexpr (R > 0) {
        if (rows == R) {
            multiply_tile<T, R>(x, stride, w, units, out, row, panel, first, second);
        } else {
            multiply_rows<T, R - 1>(rows, x, stride, w, units, out, row, panel, first, second);
        }
    }
}

inline int panels_of(const PagedeckLinear& linear, Into into) {
    return into == Into::kGate ? (linear.out_features / 2 + 15) / 16 : (linear.out_features + kPanel - 1) / kPanel;
}

// A matrix that a product follows with, and where its outputs go.
struct Following {
    const PagedeckLinear* linear;
    Into into;
};

// out = x @ weight.T over all threads of the team; one phase, ended by a barrier. x: [rows][stride] units.
template <class T>
void multiply(Worker& worker, const PagedeckLinear& linear, const uint32_t* x, int64_t stride, int64_t rows,
              const Output<T>& out, Ahead& ahead, Following following) {
    constexpr bool kIsBf16 = T::kPerUnit == 2;
    const int units = units_of(linear.in_features, kIsBf16);
    const int panels = panels_of(linear, out.into);
    const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows, count = panels * blocks;
    const int64_t own_end = count * (worker.id() + 1) / worker.size();
    worker.each(count, [&](int64_t task) {
        const int64_t block = task / panels;
        const int panel = static_cast<int>(task % panels);
        const uint32_t* w = linear.packed + static_cast<int64_t>(panel) * units * kPanel;
        int64_t row = rows * block / blocks;
        const int64_t end = rows * (block + 1) / blocks;
        // Tiles of nearly equal height: a last one of a single row would cost as much as several.
        int64_t tiles = (end - row + kRows - 1) / kRows;
        if (task + 1 == own_end && following.linear) {
            const int next_units = units_of(following.linear->in_features, kIsBf16);
            const int64_t next_count = panels_of(*following.linear, following.into) * blocks;
            const int64_t next_panel = next_count * worker.id() / worker.size() % (next_count / blocks);
            ahead.begin_panel(following.linear->packed + next_panel * next_units * kPanel, next_units * kPanel * 4, tiles);
        } else {
            const int64_t next_panel = panel + 1 < panels ? panel + 1 : 0;
            ahead.begin_panel(linear.packed + next_panel * units * kPanel, units * kPanel * 4, tiles);
        }
        for (; tiles > 0; tiles--) {
            const int height = static_cast<int>((end - row + tiles - 1) / tiles);
            Run first, second;
            ahead.take(units, first, second);
            multiply_rows<T>(height, x, stride, w, units, out, row, panel, first, second);
            row += height;
        }
    });
    worker.barrier();
}

// Packs rows [first, last) of panels. weight: [out][in] elements, contiguous.
template <class T>
void pack_panels(const typename T::Element* weight, int out_features, int in_features, bool is_gate_up,
                 uint32_t* packed,                 int64_t first, int64_t last) {
    const int units = units_of(in_features, T::kPerUnit == 2), half = out_features / 2;
    for (int64_t panel = first; panel < last; panel++) {
        uint32_t* target = packed + panel * units * kPanel;
        for (int column = 0; column < kPanel; column++) {
            const int64_t index = panel * 16 + column % 16;
            const int64_t row = is_gate_up ? (column < 16 ? index : half + index) : panel * kPanel + column;
            const bool is_inside = is_gate_up ? index < half : row < out_features;
            const typename T::Element* source = weight + row * in_features;
            for (int u = 0; u < units; u++) {
                uint32_t unit = 0;
                if (is_inside) {
                    const int left = in_features - u * T::kPerUnit;
                    std::memcpy(&unit, source + u * T::kPerUnit,
                                sizeof(typename T::Element) * (left < T::kPerUnit ? left : T::kPerUnit));
                }
                target[static_cast<int64_t>(u) * kPanel + column] = unit;
            }
        }
    }
}

}  // namespace PAGEDECK_ISA
}  // namespace pagedeck
