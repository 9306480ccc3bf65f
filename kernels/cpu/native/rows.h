// What is done row by row: embedding, norm, rotation with the cache write.
#pragma once

#include <cmath>

#include "api.h"
#include "linear.h"
#include "team.h"
#include "vec.h"

namespace pagedeck {
namespace PAGEDECK_ISA {

constexpr int kMaxHeadDim = 1024;  // the Python side checks it

// x / sqrt(mean(x^2) + eps) * weight, as elements of T.
template <class T>
void rms_norm(const float* x, const float* weight, int n, float eps, typename T::Element* out) {
    Vec squares = zero();
    for (int i = 0; i < n; i += 16) {
        const Vec v = load(x + i, n - i < 16 ? n - i : 16);
        squares = fma(v, v, squares);
    }
    const Vec factor = splat(1.0f / std::sqrt(sum(squares) / static_cast<float>(n) + eps));
    for (int i = 0; i < n; i += 16) {
        const int width = n - i < 16 ? n - i : 16;
        store_elements<T>(out + i, mul(mul(load(x + i, width), factor), load(weight + i, width)), width);
    }
}

// Row `token_id` of the embedding as float32; without an embedding of its own, a column of the packed head.
template <class T>
void embed(const PagedeckModel& model, int64_t token_id, float* out) {
    using Element = typename T::Element;
    const int hidden = model.hidden;
    if (model.embedding) {
        const Element* row = static_cast<const Element*>(model.embedding) + token_id * hidden;
        for (int i = 0; i < hidden; i += 16) {
            const int width = hidden - i < 16 ? hidden - i : 16;
            store(out + i, load_elements<T>(row + i, width), width);
        }
        return;
    }
    const int units = units_of(hidden, T::kPerUnit == 2);
    const uint32_t* column = model.head.packed + token_id / kPanel * units * kPanel + token_id % kPanel;
    for (int i = 0; i < hidden; i++) {
        const uint32_t unit = column[static_cast<int64_t>(i / T::kPerUnit) * kPanel];
        const uint32_t bits = T::kPerUnit == 1 ? unit : (i % 2 ? unit & 0xffff0000u : unit << 16);
        std::memcpy(out + i, &bits, 4);
    }
}

// Where one head's keys and values of a block lie.
//
// If 16 divides the block size, keys are tiles of 16 tokens, [tile][unit of head_dim][16], and values are
// [token / per_unit][head_dim][per_unit]: both are read as vectors of units. Otherwise both are [token][head_dim].
template <class T>
struct CacheView {
    using Element = typename T::Element;
    Element* layer;
    int block_size, num_kv_heads, head_dim;

    CacheView(const PagedeckCache& cache, const PagedeckModel& model, int layer_index)
        : layer(reinterpret_cast<Element*>(cache.pool + cache.layer_bytes * layer_index)),
          block_size(cache.block_size), num_kv_heads(model.num_kv_heads), head_dim(model.head_dim) {}

    bool is_tiled() const { return block_size % 16 == 0; }
    Element* keys(int64_t block, int head) const {
        return layer + ((block * 2) * num_kv_heads + head) * static_cast<int64_t>(block_size) * head_dim;
    }
    Element* values(int64_t block, int head) const { return keys(block, head + num_kv_heads); }
};

// Rotates a head of x by (cos, sin), out of place, float32. x * cos + partner * sin.
inline void rotate(const float* x, const float* cos, const float* sin, int head_dim, float* out) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; i += 16) {
        const int width = half - i < 16 ? half - i : 16;
        const Vec low = load(x + i, width), high = load(x + half + i, width);
        store(out + i, fma(low, load(cos + i, width), mul(high, load(sin + i, width))), width);
        store(out + half + i, fma(high, load(cos + half + i, width), mul(low, load(sin + half + i, width))), width);
    }
}

template <class T>
void write_key(const CacheView<T>& cache, int64_t slot, int head, const float* key) {
    using Element = typename T::Element;
    const int64_t block = slot / cache.block_size;
    const int offset = static_cast<int>(slot % cache.block_size), dim = cache.head_dim;
    Element* keys = cache.keys(block, head);
    if (!cache.is_tiled()) {
        for (int i = 0; i < dim; i += 16) {
            const int width = dim - i < 16 ? dim - i : 16;
            store_elements<T>(keys + static_cast<int64_t>(offset) * dim + i, load(key + i, width), width);
        }
        return;
    }
    uint32_t* tile = reinterpret_cast<uint32_t*>(keys) + (offset / 16) * (dim / T::kPerUnit) * 16 + offset % 16;
    alignas(64) Element narrow[16];
    for (int i = 0; i < dim; i += 16) {
        const int width = dim - i < 16 ? dim - i : 16;
        store_elements<T>(narrow, load(key + i, width), width);
        for (int j = 0; j < width / T::kPerUnit; j++) {
            std::memcpy(tile + (i / T::kPerUnit + j) * 16, narrow + j * T::kPerUnit, 4);
        }
    }
}

template <class T>
void write_value(const CacheView<T>& cache, int64_t slot, int head, const float* value) {
    const int64_t block = slot / cache.block_size;
    const int offset = static_cast<int>(slot % cache.block_size), dim = cache.head_dim;
    typename T::Element* values = cache.values(block, head);
    for (int i = 0; i < dim; i += 16) {
        const int width = dim - i < 16 ? dim - i : 16;
        if (T::kPerUnit == 2 && cache.is_tiled()) {
            uint32_t* pairs = reinterpret_cast<uint32_t*>(values) + (offset / 2) * dim + i;
            store_halves(pairs, load(value + i, width), offset % 2 == 1, width);
        } else {
            store_elements<T>(values + static_cast<int64_t>(offset) * dim + i, load(value + i, width), width);
        }
    }
}

// One head of a token's queries, rotated, as elements of T.
template <class T>
void rotate_query(const PagedeckModel& model, const float* query, int64_t position, typename T::Element* out) {
    const int dim = model.head_dim;
    alignas(64) float rotated[kMaxHeadDim];
    rotate(query, model.cos + position * dim, model.sin + position * dim, dim, rotated);
    for (int i = 0; i < dim; i += 16) {
        const int width = dim - i < 16 ? dim - i : 16;
        store_elements<T>(out + i, load(rotated + i, width), width);
    }
}

// One KV head of a token, into the cache: its keys rotated, and its values. qkv: the token's row.
template <class T>
void rotate_and_write_head(const PagedeckModel& model, const CacheView<T>& cache, const float* qkv, int64_t position,
                           int64_t slot, int head) {
    const int dim = model.head_dim;
    alignas(64) float rotated[kMaxHeadDim];
    const float* key = qkv + static_cast<int64_t>(model.num_heads + head) * dim;
    rotate(key, model.cos + position * dim, model.sin + position * dim, dim, rotated);
    write_key(cache, slot, head, rotated);
    write_value(cache, slot, head, key + static_cast<int64_t>(model.num_kv_heads) * dim);
}

// All heads of one token.
template <class T>
void rotate_and_write(const PagedeckModel& model, const CacheView<T>& cache, const float* qkv, int64_t position,
                      int64_t slot, typename T::Element* query) {
    const int64_t dim = model.head_dim;
    for (int head = 0; head < model.num_heads; head++) {
        rotate_query<T>(model, qkv + head * dim, position, query + head * dim);
    }
    for (int head = 0; head < model.num_kv_heads; head++) {
        rotate_and_write_head(model, cache, qkv, position, slot, head);
    }
}

}  // namespace PAGEDECK_ISA
}  // namespace pagedeck
