// Products by AMX's tiles: 32 rows times 32 outputs, 32 bfloat16 inputs at a time, over the panels of linear.h.
//
// A panel's 16 units of each half are a tile as they lie. Each output is still one chain of additions in order of the
// inputs, and independent of the other rows. PAGEDECK_EMULATE_AMX replaces the instructions by loops that do what the
// manual says they do, so that everything else about this file can be tested on processors without them.
#pragma once

#include "linear.h"

namespace pagedeck {
namespace PAGEDECK_ISA {

constexpr int kTileRows = 16;
constexpr int kTileUnits = 16;

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

#if defined(PAGEDECK_EMULATE_AMX)
thread_local TileConfig tile_config_;
thread_local uint32_t tiles_[8][16][16];

inline void tile_configure(const TileConfig& config) {
    tile_config_ = config;
    std::memset(tiles_, 0, sizeof(tiles_));
}
inline void tile_release() {}
inline void tile_zero(int t) { std::memset(tiles_[t], 0, sizeof(tiles_[t])); }
inline void tile_load(int t, const void* p, int64_t stride) {
    for (int r = 0; r < tile_config_.rows[t]; r++) {
        std::memcpy(tiles_[t][r], static_cast<const char*>(p) + r * stride, tile_config_.row_bytes[t]);
    }
}
inline void tile_store(int t, void* p, int64_t stride) {
    for (int r = 0; r < tile_config_.rows[t]; r++) {
        std::memcpy(static_cast<char*>(p) + r * stride, tiles_[t][r], tile_config_.row_bytes[t]);
    }
}
inline void tile_dot(int c, int a, int b) {
    for (int m = 0; m < tile_config_.rows[c]; m++) {
        for (int k = 0; k < tile_config_.row_bytes[a] / 4; k++) {
            for (int n = 0; n < tile_config_.row_bytes[c] / 4; n++) {
                const uint32_t x = tiles_[a][m][k], y = tiles_[b][k][n];
                float sum;
                std::memcpy(&sum, &tiles_[c][m][n], 4);
                sum += from_bf16(x & 0xffff) * from_bf16(y & 0xffff);
                sum += from_bf16(x >> 16) * from_bf16(y >> 16);
                std::memcpy(&tiles_[c][m][n], &sum, 4);
            }
        }
    }
}
#else
// The numbers of tiles are part of the instructions.
#define tile_configure(config) _tile_loadconfig(&(config))
#define tile_release() _tile_release()
#define tile_zero(t) _tile_zero(t)
#define tile_load(t, p, stride) _tile_loadd(t, p, stride)
#define tile_store(t, p, stride) _tile_stored(t, p, stride)
#define tile_dot(c, a, b) _tile_dpbf16ps(c, a, b)
#endif

// Tiles 0 to 3 are sums: (rows 0-15, 16-31) x (left, right half of the panel); 4 and 5 inputs; 6 and 7 weights.
inline TileConfig tiles_for(int height) {
    TileConfig config;
    const int upper = height < kTileRows ? height : kTileRows, lower = height - upper;
    const int rows[8] = {upper, upper, lower, lower, upper, lower, kTileUnits, kTileUnits};
    for (int t = 0; t < 8; t++) {
        config.rows[t] = static_cast<uint8_t>(rows[t]);
        config.row_bytes[t] = rows[t] ? 64 : 0;
    }
    return config;
}

// Rows [row, row + height) of one panel, height <= 32, under tiles_for(height).
inline void multiply_tiles(const uint32_t* x, int64_t stride, const uint32_t* w, int units, const Output<BF16>& out,
                           int64_t row, int height, int panel) {
    alignas(64) float sums[2 * kTileRows][kPanel];
    constexpr int kWeightStride = kPanel * 4, kSumStride = kPanel * 4;
    const uint32_t* upper = x + row * stride;
    const uint32_t* lower = upper + kTileRows * stride;
    tile_zero(0);
    tile_zero(1);
    if (height > kTileRows) {
        tile_zero(2);
        tile_zero(3);
        for (int u = 0; u < units; u += kTileUnits, w += kTileUnits * kPanel) {
            tile_load(4, upper + u, stride * 4);
            tile_load(6, w, kWeightStride);
            tile_dot(0, 4, 6);
            tile_load(5, lower + u, stride * 4);
            tile_dot(2, 5, 6);
            tile_load(7, w + 16, kWeightStride);
            tile_dot(1, 4, 7);
            tile_dot(3, 5, 7);
        }
        tile_store(2, sums[kTileRows], kSumStride);
        tile_store(3, sums[kTileRows] + 16, kSumStride);
    } else {
        for (int u = 0; u < units; u += kTileUnits, w += kTileUnits * kPanel) {
            for (int line = 0; line < 2 * kTileUnits; line++) {
                _mm_prefetch(reinterpret_cast<const char*>(w + 2 * kTileUnits * kPanel + 16 * line), _MM_HINT_T0);
            }
            tile_load(4, upper + u, stride * 4);
            tile_load(6, w, kWeightStride);
            tile_dot(0, 4, 6);
            tile_load(7, w + 16, kWeightStride);
            tile_dot(1, 4, 7);
        }
    }
    tile_store(0, sums[0], kSumStride);
    tile_store(1, sums[0] + 16, kSumStride);
    for (int r = 0; r < height; r++) finish<BF16>(out, row + r, panel, load(sums[r]), load(sums[r] + 16));
}

// As multiply(); the inputs are a multiple of 32.
inline void multiply_amx(Worker& worker, const PagedeckLinear& linear, const uint32_t* x, int64_t stride, int64_t rows,
                         const Output<BF16>& out) {
    constexpr int64_t kBlock = 4 * 2 * kTileRows;
    const int units = linear.in_features / 2, panels = panels_of(linear, out.into);
    const int64_t blocks = (rows + kBlock - 1) / kBlock;
    int configured = 0;
    worker.each(panels * blocks, [&](int64_t task) {
        const int64_t block = task / panels;
        const int panel = static_cast<int>(task % panels);
        const uint32_t* w = linear.packed + static_cast<int64_t>(panel) * units * kPanel;
        const int64_t end = (block + 1) * kBlock < rows ? (block + 1) * kBlock : rows;
        for (int64_t row = block * kBlock; row < end;) {
            const int height = static_cast<int>(end - row < 2 * kTileRows ? end - row : 2 * kTileRows);
            if (height != configured) {
                const TileConfig config = tiles_for(height);
                tile_configure(config);
                configured = height;
            }
            multiply_tiles(x, stride, w, units, out, row, height, panel);
            row += height;
        }
    });
    if (configured) tile_release();
    worker.barrier();
}

}  // namespace PAGEDECK_ISA
}  // namespace pagedeck
