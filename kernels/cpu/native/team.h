// The threads of one call: OpenMP's, which are PyTorch's too (see kernels/cpu/build.py), with a barrier that spins, then
// sleeps, and work that is taken from the neighbour when one's own is done.
#pragma once

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "shared.h"

namespace pagedeck {

namespace PAGEDECK_ISA {  // inline functions must not be shared between units compiled for other processors

// One thread's view of its team.
class Worker {
  public:
    Worker(Team& team, int id, int size) : team_(team), id_(id), size_(size), phase_(0) {
        generation_ = team.generation.load(std::memory_order_acquire);
    }

    int id() const { return id_; }
    int size() const { return size_; }

    // Calls f(i) for each i in [0, count) on some thread. Each thread begins with its own contiguous share, so that it
    // reads a matrix as one stream; what a slower thread hasn't begun is taken from it. Ends without a barrier.
    template <class F>
    void each(int64_t count, F&& f) {
        Team::Counter* counters = team_.counters[phase_ % Team::kSlots];
        for (int k = 0; k < size_; k++) {
            const int owner = id_ + k < size_ ? id_ + k : id_ + k - size_;
            const int64_t begin = count * owner / size_, end = count * (owner + 1) / size_;
            while (true) {
                const int64_t i = begin + counters[owner].next.fetch_add(1, std::memory_order_relaxed);
                if (i >= end) break;
                f(i);
            }
        }
    }

    // Waits for all threads. The counters that the phase after the next will use are cleared by the last to arrive:
    // nobody can be using them.
    void barrier() {
        if (team_.arrived.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            Team::Counter* counters = team_.counters[(phase_ + 2) % Team::kSlots];
            for (int i = 0; i < size_; i++) counters[i].next.store(0, std::memory_order_relaxed);
            team_.arrived.store(0, std::memory_order_relaxed);
            team_.generation.store(generation_ + 1);
            if (team_.sleepers.load() > 0) futex(FUTEX_WAKE_PRIVATE, kMaxThreads);
        } else {
            int spins = 0;
            while (spins < kSpins && team_.generation.load(std::memory_order_acquire) == generation_) {
                _mm_pause();
                spins++;
            }
            // Cores that others use too are given up: the missing thread may be waiting for this very one.
            while (team_.generation.load() == generation_) {
                team_.sleepers.fetch_add(1);
                futex(FUTEX_WAIT_PRIVATE, generation_);
                team_.sleepers.fetch_sub(1);
            }
        }
        generation_++;
        phase_++;
    }

  private:
    static constexpr int kSpins = 2000;  // some 20 to 80 us: more than phases differ where nobody else is running

    // Sleeps while the generation is `value`, or wakes up to `value` threads.
    void futex(int operation, uint32_t value) {
        syscall(SYS_futex, &team_.generation, operation, value, nullptr, nullptr, 0);
    }

    Team& team_;
    const int id_, size_;
    uint32_t phase_, generation_;
};

// Clears all counters: before a call's threads begin.
inline void reset(Team& team, int size) {
    for (auto& slot : team.counters) {
        for (int i = 0; i < size; i++) slot[i].next.store(0, std::memory_order_relaxed);
    }
}

}  // namespace PAGEDECK_ISA
}  // namespace pagedeck
