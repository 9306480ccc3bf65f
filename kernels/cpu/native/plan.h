// Which tasks attention has in a step. Compiled for any processor.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "shared.h"

namespace pagedeck {

class Planner {
  public:
    // The tasks of `step`, in shares of about equal cost for `threads` threads (see Worker::each).
    Plan plan(const PagedeckModel& model, const PagedeckStep& step, int threads) {
        const int group = model.num_heads / model.num_kv_heads;
        const int task_tokens = std::max(1, kTaskRows / group);
        tasks_.clear();
        num_partials_ = num_counters_ = 0;
        for (int seq = 0; seq < step.num_seqs; seq++) {
            const int seq_len = step.seq_lens[seq];
            const int num_new = step.query_starts[seq + 1] - step.query_starts[seq];
            for (int head = 0; head < model.num_kv_heads; head++) {
                if (num_new == 1 && seq_len > kSection) {
                    add_sections(seq, head, seq_len, group);
                    continue;
                }
                for (int first = 0; first < num_new; first += task_tokens) {
                    const int last = std::min(first + task_tokens, num_new);
                    const int seen = seq_len - num_new + last;
                    tasks_.push_back({seq, head, first, last, -1, sections_of(seen), 0, 0,
                                      static_cast<int64_t>(seen) * (last - first + 1)});
                }
            }
        }
        share(threads);
        return {tasks_.data(), static_cast<int64_t>(tasks_.size())};
    }

    int64_t num_partials() const { return num_partials_; }  // states
    int64_t num_counters() const { return num_counters_; }

  private:
    static int sections_of(int tokens) { return (tokens + kSection - 1) / kSection; }

    void add_sections(int seq, int head, int seq_len, int group) {
        const int sections = sections_of(seq_len);
        for (int section = 0; section < sections; section++) {
            const int64_t seen = std::min(kSection, seq_len - section * kSection);
            tasks_.push_back({seq, head, 0, 1, section, sections, num_partials_, num_counters_, 2 * seen});
        }
        num_partials_ += static_cast<int64_t>(sections) * group;
        num_counters_++;
    }

    // Costly tasks first, dealt out in turn.
    void share(int threads) {
        std::stable_sort(tasks_.begin(), tasks_.end(),
                         [](const AttentionTask& a, const AttentionTask& b) { return a.cost > b.cost; });
        const int64_t count = static_cast<int64_t>(tasks_.size());
        dealt_.resize(tasks_.size());
        std::vector<int64_t> next(threads), end(threads);  // Worker::each gives thread t these shares
        for (int t = 0; t < threads; t++) {
            next[t] = count * t / threads;
            end[t] = count * (t + 1) / threads;
        }
        for (int64_t i = 0; i < count; i++) {
            int t = static_cast<int>(i % threads);
            while (next[t] == end[t]) t = (t + 1) % threads;
            dealt_[next[t]++] = tasks_[i];
        }
        tasks_.swap(dealt_);
    }

    std::vector<AttentionTask> tasks_, dealt_;
    int64_t num_partials_ = 0, num_counters_ = 0;
};

}  // namespace pagedeck
