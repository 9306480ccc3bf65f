// Paged attention with an online softmax, for decodes and chunks of prefill alike.
//
// A row is one query head of one token. Its keys are visited in chunks of 64 tokens from the start of the sequence, in
// sections of 512 that are summed up one by one: which instructions a row sees depends on its position only, not on
// how many rows are computed with it, by how many threads, or in how many steps its sequence was computed.
#pragma once

#include <atomic>
#include <cmath>
#include <limits>

#include "api.h"
#include "rows.h"
#include "shared.h"
#include "team.h"
#include "vec.h"

namespace pagedeck {

namespace PAGEDECK_ISA {

struct State {
    float* out;    // [padded head_dim]
    float* total;  // [16]
    float* top;    // [1], of scores in units of log 2
    State(float* memory, int head_dim)
        : out(memory), total(memory + padded_dim(head_dim)), top(memory + padded_dim(head_dim) + 16) {}
    void clear(int head_dim) {
        for (int i = 0; i < padded_dim(head_dim); i += 16) store(out + i, zero());
        store(total, zero());
        *top = -std::numeric_limits<float>::infinity();
    }
};

// A chunk of one KV head: four tiles of keys [unit of head_dim][16 tokens] and of values [16 / per_unit][head_dim].
struct Chunk {
    const uint32_t* keys[4];
    const uint32_t* values[4];
};

// Into the L2 cache: the chunk after this one, line by line between the products, so that memory is never idle and
// never asked for more than it can have under way.
inline void prefetch(const uint32_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

template <class T, int R, int N>
[[gnu::noinline]] void add_values(const Chunk& chunk, const Chunk& next, int tokens, int dim, int column, int width,
                                  const uint32_t* weights, const float* shrink, float* const* out) {
    constexpr int kUnits = 16 / T::kPerUnit;  // per tile
    Vec acc[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) acc[r][n] = mul(load(out[r] + column + 16 * n), splat(shrink[r]));
    }
    const int units = (tokens + T::kPerUnit - 1) / T::kPerUnit;
    for (int first_unit = 0; first_unit < units; first_unit += kUnits) {
        const uint32_t* v = chunk.values[first_unit / kUnits] + column;
        const uint32_t* after = next.values[first_unit / kUnits] + column;
        const int count = units - first_unit < kUnits ? units - first_unit : kUnits;
        for (int u = 0; u < count; u++, v += dim, after += dim) {
            Units value[N];
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                prefetch(after + 16 * n);
                value[n] = n == N - 1 && width < 16 ? load_units(v + 16 * n, width) : load_units(v + 16 * n);
                // The slot after the last token may hold anything, and 0 * NaN is NaN.
                if (T::kPerUnit == 2 && 2 * (first_unit + u) + 1 == tokens) value[n] = low_halves(value[n]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const Units weight = splat_unit(weights[r * kChunk + first_unit + u]);
#pragma GCC unroll 4
                for (int n = 0; n < N; n++) acc[r][n] = dot<T>(acc[r][n], weight, value[n]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) store(out[r] + column + 16 * n, acc[r][n]);
    }
}

// R rows over one chunk. queries: [R] rows of units; limits: tokens of the chunk that each row sees, may be <= 0;
// tokens: the largest of them, >= 1; states: [R].
template <class T, int R>
[[gnu::noinline]] void attend_chunk(const Chunk& chunk, const Chunk& next, int tokens, int dim, float scale,
                                    const uint32_t* const* queries, const int* limits, float* const* states) {
    const int units = dim / T::kPerUnit;
    Vec scores[R][4];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int t = 0; t < 4; t++) scores[r][t] = zero();
    }
    const uint32_t *k0 = chunk.keys[0], *k1 = chunk.keys[1], *k2 = chunk.keys[2], *k3 = chunk.keys[3];
    for (int u = 0; u < units; u++, k0 += 16, k1 += 16, k2 += 16, k3 += 16) {
#pragma GCC unroll 4
        for (int t = 0; t < 4; t++) prefetch(next.keys[t] + 16 * u);
        const Units keys[4] = {load_units(k0), load_units(k1), load_units(k2), load_units(k3)};
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const Units query = splat_unit(queries[r][u]);
#pragma GCC unroll 4
            for (int t = 0; t < 4; t++) scores[r][t] = dot<T>(scores[r][t], query, keys[t]);
        }
    }
    alignas(64) uint32_t weights[R * kChunk];
    float shrink[R];
    float* outs[R];
    const float none = -std::numeric_limits<float>::infinity();
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        State state(states[r], dim);
        outs[r] = state.out;
        Vec top = splat(none);
#pragma GCC unroll 4
        for (int t = 0; t < 4; t++) {
            scores[r][t] = mul(scores[r][t], splat(scale));
            const int visible = limits[r] - 16 * t;
            if (visible < 16) scores[r][t] = fill_from(scores[r][t], visible < 0 ? 0 : visible, none);
            top = max(top, scores[r][t]);
        }
        const float before = *state.top, chunk_top = largest(top);
        const float now = chunk_top > before ? chunk_top : before;
        const Vec base = splat(now == none ? 0.0f : now);
        shrink[r] = 1.0f;
        if (now != before) {
            alignas(64) float factor[16];
            store(factor, exp2(sub(splat(before), base)));
            shrink[r] = factor[0];
            *state.top = now;
        }
        Vec total = mul(load(state.total), splat(shrink[r]));
#pragma GCC unroll 4
        for (int t = 0; t < 4; t++) {
            const Vec weight = exp2<T>(sub(scores[r][t], base));
            total = add(total, weight);
            store_elements<T>(reinterpret_cast<typename T::Element*>(weights + r * kChunk) + 16 * t, weight, 16);
        }
        store(state.total, total);
    }
    for (int column = 0; column < dim; column += 64) {
        const int rest = dim - column, width = rest >= 64 ? 16 : (rest % 16 ? rest % 16 : 16);
        switch (rest >= 64 ? 4 : (rest + 15) / 16) {
            case 4: add_values<T, R, 4>(chunk, next, tokens, dim, column, width, weights, shrink, outs); break;
            case 3: add_values<T, R, 3>(chunk, next, tokens, dim, column, width, weights, shrink, outs); break;
            case 2: add_values<T, R, 2>(chunk, next, tokens, dim, column, width, weights, shrink, outs); break;
            default: add_values<T, R, 1>(chunk, next, tokens, dim, column, width, weights, shrink, outs);
        }
    }
}

template <class T, int R = kHeadRows>
void attend_rows(int rows, const Chunk& chunk, const Chunk& next, int tokens, int dim, float scale,
                 const uint32_t* const* queries, const int* limits, float* const* states) {
    if constexpr (R > 0) {
        if (rows == R) {
            attend_chunk<T, R>(chunk, next, tokens, dim, scale, queries, limits, states);
        } else {
            attend_rows<T, R - 1>(rows, chunk, next, tokens, dim, scale, queries, limits, states);
        }
    }
}

// Adds a section's state to the sum of those before it.
inline void merge(State sum, State section, int dim) {
    const float before = *sum.top, now = *section.top > before ? *section.top : before;
    const Vec base = splat(now == -std::numeric_limits<float>::infinity() ? 0.0f : now);
    const Vec old_factor = exp2(sub(splat(before), base)), new_factor = exp2(sub(splat(*section.top), base));
    for (int i = 0; i < padded_dim(dim); i += 16) {
        store(sum.out + i, fma(load(sum.out + i), old_factor, mul(load(section.out + i), new_factor)));
    }
    store(sum.total, fma(load(sum.total), old_factor, mul(load(section.total), new_factor)));
    *sum.top = now;
}

template <class T>
void finish_row(State state, int dim, typename T::Element* out) {
    const Vec factor = splat(1.0f / sum(load(state.total)));
    for (int i = 0; i < dim; i += 16) {
        const int width = dim - i < 16 ? dim - i : 16;
        store_elements<T>(out + i, mul(load(state.out + i), factor), width);
    }
}

// Per-thread memory of attention.
struct AttentionScratch {
    float* states;      // [rows of a task][state_floats]
    float* sums;        // likewise
    uint32_t* gathered; // keys and values of a chunk: 2 * 64 * head_dim units
    uint32_t* query;    // of one token and KV head
};

// The tiles of tokens [start, start + 64) of a sequence; those past its end repeat the first one and are masked.
template <class T>
Chunk find_chunk(const CacheView<T>& cache, const int32_t* block_table, int kv_head, int start, int seq_len,
                 uint32_t* gathered) {
    const int dim = cache.head_dim, units = dim / T::kPerUnit;
    Chunk chunk;
    if (cache.is_tiled()) {
        for (int t = 0; t < 4; t++) {
            const int token = start + 16 * t < seq_len ? start + 16 * t : start;
            const int64_t block = block_table[token / cache.block_size];
            const int tile = token % cache.block_size / 16;
            chunk.keys[t] = reinterpret_cast<const uint32_t*>(cache.keys(block, kv_head)) + tile * units * 16;
            chunk.values[t] =
                reinterpret_cast<const uint32_t*>(cache.values(block, kv_head)) + tile * (16 / T::kPerUnit) * dim;
        }
        return chunk;
    }
    using Element = typename T::Element;
    const int count = seq_len - start < kChunk ? seq_len - start : kChunk;
    uint32_t* keys = gathered;
    uint32_t* values = gathered + kChunk * units;
    for (int i = 0; i < count; i++) {
        const int64_t block = block_table[(start + i) / cache.block_size];
        const int64_t offset = static_cast<int64_t>((start + i) % cache.block_size) * dim;
        const Element* key = cache.keys(block, kv_head) + offset;
        const Element* value = cache.values(block, kv_head) + offset;
        for (int u = 0; u < units; u++) {
            std::memcpy(keys + ((i / 16) * units + u) * 16 + i % 16, key + u * T::kPerUnit, 4);
        }
        const int64_t first = static_cast<int64_t>(i / T::kPerUnit) * dim * T::kPerUnit;
        Element* target = reinterpret_cast<Element*>(values) + first;
        for (int d = 0; d < dim; d++) target[d * T::kPerUnit + i % T::kPerUnit] = value[d];
    }
    for (int t = 0; t < 4; t++) {
        chunk.keys[t] = keys + t * units * 16;
        chunk.values[t] = values + t * (16 / T::kPerUnit) * dim;
    }
    return chunk;
}

// The first chunk of a task, to be fetched while the one before is computed.
template <class T>
Chunk first_chunk(const CacheView<T>& cache, const PagedeckStep& step, const AttentionTask& task) {
    const int start = task.section > 0 ? task.section * kSection : 0;
    const int32_t* table = step.block_tables + static_cast<int64_t>(task.seq) * step.max_blocks;
    return find_chunk(cache, table, task.kv_head, start, step.seq_lens[task.seq], nullptr);
}

// One task. With `qkv`, the step's products [num_tokens][features], it is a decode whose queries are rotated and whose
// keys and values are written here, which saves all threads a meeting; else `queries` are there and the cache is
// written. `following` is likely to be this thread's next task, or null. queries, out: elements
// [num_tokens][num_heads][head_dim]; partials: of the whole step.
template <class T>
void attend(const PagedeckModel& model, const CacheView<T>& cache, const PagedeckStep& step, const AttentionTask& task,
            const AttentionTask* following, const float* qkv, const typename T::Element* queries,
            typename T::Element* out, const AttentionScratch& scratch, float* partials,
            std::atomic<int32_t>* finished) {
    const int dim = model.head_dim, group = model.num_heads / model.num_kv_heads;
    const int floats = state_floats(dim), seq_len = step.seq_lens[task.seq];
    const int first_token = step.query_starts[task.seq], num_new = step.query_starts[task.seq + 1] - first_token;
    const int num_rows = (task.last - task.first) * group;
    const int seen_first = seq_len - num_new + task.first + 1;  // tokens that the first row sees
    const int seen_last = seq_len - num_new + task.last;
    const int32_t* table = step.block_tables + static_cast<int64_t>(task.seq) * step.max_blocks;
    const float scale = model.scale * kLog2E;
    const bool is_partial = task.section >= 0;
    const int begin = is_partial ? task.section : 0, end = is_partial ? task.section + 1 : task.num_sections;
    float* own = is_partial ? partials + (task.partial + static_cast<int64_t>(task.section) * group) * floats : nullptr;

    const auto head_of = [&](auto* base, int row) {
        const int64_t token = first_token + task.first + row / group;
        return base + (token * model.num_heads + task.kv_head * group + row % group) * dim;
    };
    if (qkv) {
        const float* token = qkv + first_token * static_cast<int64_t>(model.num_heads + 2 * model.num_kv_heads) * dim;
        const int64_t position = step.positions[first_token];
        for (int row = 0; row < group; row++) {
            rotate_query<T>(model, token + (task.kv_head * group + row) * dim, position,
                            reinterpret_cast<typename T::Element*>(scratch.query) + row * dim);
        }
        // The new token is in the last section, which nobody else reads.
        if (end == task.num_sections) {
            rotate_and_write_head(model, cache, token, position, step.slot_mapping[first_token], task.kv_head);
        }
    }
    for (int section = begin; section < end; section++) {
        // The first section goes straight into the sum; a later one into states of its own.
        float* states = is_partial ? own : (section == 0 ? scratch.sums : scratch.states);
        for (int row = 0; row < num_rows; row++) State(states + row * floats, dim).clear(dim);
        const int stop = (section + 1) * kSection < seen_last ? (section + 1) * kSection : seen_last;
        Chunk chunk = find_chunk(cache, table, task.kv_head, section * kSection, seen_last, scratch.gathered);
        for (int start = section * kSection; start < stop; start += kChunk) {
            Chunk next = chunk;
            if (cache.is_tiled()) {
                if (start + kChunk < stop) {
                    next = find_chunk(cache, table, task.kv_head, start + kChunk, seen_last, scratch.gathered);
                } else if (section + 1 == end && following) {
                    next = first_chunk(cache, step, *following);
                }
            }
            for (int row = 0; row < num_rows;) {
                // Tiles of nearly equal height, as in multiply().
                const int tiles = (num_rows - row + kHeadRows - 1) / kHeadRows;
                const int height = (num_rows - row + tiles - 1) / tiles;
                const uint32_t* q[kHeadRows];
                float* s[kHeadRows];
                int limits[kHeadRows];
                for (int r = 0; r < height; r++) {
                    q[r] = qkv ? scratch.query + (row + r) * (dim / T::kPerUnit)
                               : reinterpret_cast<const uint32_t*>(head_of(queries, row + r));
                    s[r] = states + (row + r) * floats;
                    limits[r] = seen_first + (row + r) / group - start;
                }
                const int tokens = limits[height - 1] < kChunk ? limits[height - 1] : kChunk;
                if (tokens > 0) attend_rows<T>(height, chunk, next, tokens, dim, scale, q, limits, s);
                row += height;
            }
            if (start + kChunk < stop) {
                chunk = cache.is_tiled()
                            ? next
                            : find_chunk(cache, table, task.kv_head, start + kChunk, seen_last, scratch.gathered);
            }
        }
        if (!is_partial && section > 0) {
            for (int row = 0; row < num_rows; row++) {
                if (seen_first + row / group <= section * kSection) continue;
                merge(State(scratch.sums + row * floats, dim), State(states + row * floats, dim), dim);
            }
        }
    }
    if (!is_partial) {
        for (int row = 0; row < num_rows; row++) {
            finish_row<T>(State(scratch.sums + row * floats, dim), dim, head_of(out, row));
        }
        return;
    }
    // The last section to be finished sums all of them up, in order; the counter goes on from layer to layer.
    const int done = finished[task.finished].fetch_add(1, std::memory_order_acq_rel) + 1;
    if (done % task.num_sections != 0) return;
    float* sums = partials + task.partial * floats;
    for (int section = 1; section < task.num_sections; section++) {
        for (int row = 0; row < num_rows; row++) {
            float* other = sums + (static_cast<int64_t>(section) * group + row) * floats;
            merge(State(sums + row * floats, dim), State(other, dim), dim);
        }
    }
    for (int row = 0; row < num_rows; row++) finish_row<T>(State(sums + row * floats, dim), dim, head_of(out, row));
}

}  // namespace PAGEDECK_ISA
}  // namespace pagedeck
