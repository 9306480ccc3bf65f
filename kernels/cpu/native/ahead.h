// What a thread asks memory for while it multiplies, so that memory isn't idle then: the panel of weights after the one
// in use, and the cached keys and values of the attention to come. Two lines per unit of a register tile at most, into
// the L2 cache; what doesn't fit there goes on to the L3.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "api.h"

namespace pagedeck {
namespace PAGEDECK_ISA {

// Bytes that are next to each other.
struct Run {
    const char* at = nullptr;
    int64_t lines = 0;
};

class Ahead {
  public:
    // No cached keys and values.
    Ahead() = default;

    // Those of every `size`-th sequence from `id` on, in one layer at a time, see `begin_layer`.
    Ahead(const PagedeckCache& cache, const PagedeckStep& step, int64_t block_bytes, int id, int size)
        : cache_(&cache), step_(&step), block_bytes_(block_bytes), id_(id), size_(size), seq_(step.num_seqs) {}

    void begin_layer(int layer) {
        if (!cache_) return;
        layer_ = reinterpret_cast<const char*>(cache_->pool) + cache_->layer_bytes * layer;
        left_ = kMostBytes / size_;
        seq_ = id_;
        block_ = 0;
        cached_ = {};
    }

    void end_layers() {
        left_ = 0;
        cached_ = {};
    }

    // The weights that this thread reads after the panel it is about to use, `tiles` times.
    void begin_panel(const void* next, int64_t bytes, int tiles) {
        weights_ = {static_cast<const char*>(next), bytes / kLine};
        tiles_ = tiles;
    }

    // What a tile of `units` units fetches: up to two runs of as many lines.
    void take(int units, Run& first, Run& second) {
        first = cut(weights_, units);
        tiles_--;
        if (weights_.lines > static_cast<int64_t>(tiles_) * units) {
            second = cut(weights_, units);
            return;
        }
        if (cached_.lines == 0) next_block();
        second = cut(cached_, units);
    }

  private:
    static constexpr int64_t kLine = 64;
    static constexpr int64_t kMostBytes = 12 << 20;  // per layer: what an L3 cache keeps beside a layer's weights

    static Run cut(Run& run, int64_t lines) {
        const Run part{run.at, run.lines < lines ? run.lines : lines};
        run.at += part.lines * kLine;
        run.lines -= part.lines;
        return part;
    }

    void next_block() {
        while (seq_ < (step_ ? step_->num_seqs : 0)) {
            if (block_ * cache_->block_size < step_->seq_lens[seq_] && left_ > 0) {
                const int64_t block = step_->block_tables[static_cast<int64_t>(seq_) * step_->max_blocks + block_++];
                cached_ = {layer_ + block * block_bytes_, block_bytes_ / kLine};
                left_ -= block_bytes_;
                return;
            }
            seq_ += size_;
            block_ = 0;
        }
    }

    const PagedeckCache* cache_ = nullptr;
    const PagedeckStep* step_ = nullptr;
    const char* layer_ = nullptr;
    int64_t block_bytes_ = 0, left_ = 0;
    int id_ = 0, size_ = 1, seq_ = 0, block_ = 0, tiles_ = 0;
    Run weights_, cached_;
};

}  // namespace PAGEDECK_ISA
}  // namespace pagedeck
