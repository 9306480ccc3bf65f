// Choosing tokens; what is chosen is defined by kernels/reference/sampling.py.
//
// No row is sorted. A truncated row's tokens are counted into buckets of nearly equal value, best first; top_k, top_p
// and min_p are then numbers of best tokens, and only the buckets in which such a number or the drawn one falls are sorted.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "api.h"
#include "shared.h"
#include "team.h"
#include "vec.h"

namespace pagedeck {
namespace PAGEDECK_ISA {

constexpr int kSumBlock = 512;       // tokens whose weights are summed before the sum is widened to double
constexpr float kFirstSpan = 8.0f;   // candidates at first: weights down to e^-8 of the best's
constexpr float kSecondSpan = 12.0f; // and then, before all
constexpr int kGroup = 128;          // tokens
constexpr int kMaxGroups = 4096;

// The largest of n values, and its first place.
inline float find_largest(const float* x, int n, int& place) {
    float best = -std::numeric_limits<float>::infinity();
    int block_of_best = 0;
    for (int begin = 0; begin < n; begin += kSumBlock) {
        const int end = n - begin < kSumBlock ? n : begin + kSumBlock;
        Vec top = splat(best);
        int i = begin;
        for (; i + 16 <= end; i += 16) top = max(top, load(x + i));
        if (i < end) top = max(top, fill_from(load(x + i, end - i), end - i, best));
        const float found = largest(top);
        if (found > best) {
            best = found;
            block_of_best = begin;
        }
    }
    place = block_of_best;
    while (place < n - 1 && x[place] != best) place++;
    return best;
}

// A value that at least k of n aren't below: the k-th largest of the maxima of groups; -infinity if there are too few.
inline float find_bound(const float* x, int n, int64_t k) {
    const int groups = n / kGroup;
    if (k > groups / 2 || groups > kMaxGroups) return -std::numeric_limits<float>::infinity();
    float maxima[kMaxGroups];
    for (int g = 0; g < groups; g++) {
        Vec top = load(x + g * kGroup);
        for (int i = 16; i < kGroup; i += 16) top = max(top, load(x + g * kGroup + i));
        maxima[g] = largest(top);
    }
    std::nth_element(maxima, maxima + (k - 1), maxima + groups, std::greater<float>());
    return maxima[k - 1];
}

inline bool is_all_finite(const float* x, int n) {
    Vec nothing = zero();  // 0 * x is NaN where x isn't finite
    int i = 0;
    for (; i + 16 <= n; i += 16) nothing = fma(load(x + i), zero(), nothing);
    if (i < n) nothing = fma(load(x + i, n - i), zero(), nothing);
    return sum(nothing) == 0.0f;
}

// One row's candidates, in order of token ids, and buckets of them.
class Candidates {
  public:
    Candidates(char* memory, int vocab)
        : count_(reinterpret_cast<int32_t*>(memory)), mass_(reinterpret_cast<double*>(count_ + kSampleBuckets)),
          values_(reinterpret_cast<float*>(mass_ + kSampleBuckets)), ids_(reinterpret_cast<int32_t*>(values_ + vocab)),
          picked_(ids_ + vocab), buckets_(reinterpret_cast<uint16_t*>(picked_ + vocab)) {}

    // The prefix of the best `count` candidates: whole buckets, then some of the one after.
    struct Prefix {
        int64_t count;
        double mass;
    };

    // Takes the tokens whose scaled logit is at least `least`; returns how many.
    int64_t take(const float* logits, int vocab, Vec temperature, float top, float least) {
        size_ = 0;
        for (int i = 0; i < vocab; i += 16) {
            const int n = vocab - i < 16 ? vocab - i : 16;
            const Vec scaled = div(load(logits + i, n), temperature);
            uint32_t mask = at_least(scaled, least) & ((1u << n) - 1);
            if (!mask) continue;
            alignas(64) float lanes[16];
            store(lanes, scaled);
            for (; mask; mask &= mask - 1) {
                const int lane = __builtin_ctz(mask);
                values_[size_] = lanes[lane];
                ids_[size_++] = i + lane;
            }
        }
        top_ = top;
        float lowest = top;
        for (int64_t i = 0; i < size_; i++) lowest = values_[i] < lowest ? values_[i] : lowest;
        const float span = top - lowest;
        const float scale = scale_ = span > 0 ? (kSampleBuckets - 1) / span : 0.0f;
        std::memset(count_, 0, kSampleBuckets * sizeof(*count_));
        std::memset(mass_, 0, kSampleBuckets * sizeof(*mass_));
        alignas(64) float weights[16];
        for (int64_t i = 0; i < size_; i += 16) {
            const int n = size_ - i < 16 ? static_cast<int>(size_ - i) : 16;
            store(weights, weights_of(load(values_ + i, n), top));
            for (int j = 0; j < n; j++) {
                const int bucket = static_cast<int>((top - values_[i + j]) * scale);
                buckets_[i + j] = static_cast<uint16_t>(bucket);
                count_[bucket]++;
                mass_[bucket] += weights[j];
            }
        }
        return size_;
    }

    static Vec weights_of(Vec scaled, float top) { return exp2(mul(sub(scaled, splat(top)), splat(kLog2E))); }

    Prefix all() const {
        Prefix whole{size_, 0.0};
        for (int b = 0; b < kSampleBuckets; b++) whole.mass += mass_[b];
        return whole;
    }

    // The best k.
    Prefix best(int64_t k) {
        Prefix prefix{0, 0.0};
        for (int b = 0; b < kSampleBuckets; b++) {
            if (prefix.count + count_[b] > k) {
                sort(b);
                for (int i = 0; prefix.count < k; i++) {
                    prefix.mass += weight(picked_[i]);
                    prefix.count++;
                }
                break;
            }
            prefix.count += count_[b];
            prefix.mass += mass_[b];
        }
        return prefix;
    }

    // The fewest best ones whose mass reaches `wanted`.
    Prefix reaching(double wanted) {
        Prefix prefix{0, 0.0};
        for (int b = 0; b < kSampleBuckets && prefix.mass < wanted; b++) {
            if (prefix.mass + mass_[b] < wanted) {
                prefix.count += count_[b];
                prefix.mass += mass_[b];
                continue;
            }
            const int n = sort(b);
            for (int i = 0; i < n && prefix.mass < wanted; i++) {
                prefix.mass += weight(picked_[i]);
                prefix.count++;
            }
            break;
        }
        return prefix;
    }

    // Those with a weight of at least `least`, > 0.
    Prefix weighing(double least) {
        Prefix prefix{0, 0.0};
        const double inside = -std::log(least) * scale_ - 2.0;  // buckets before this one are above it as a whole
        for (int b = 0; b < kSampleBuckets; b++) {
            if (b < inside) {
                prefix.count += count_[b];
                prefix.mass += mass_[b];
                continue;
            }
            const int n = sort(b);
            for (int i = 0; i < n; i++) {
                const double w = weight(picked_[i]);
                if (w < least) return prefix;
                prefix.mass += w;
                prefix.count++;
            }
        }
        return prefix;
    }

    // The token at which the running sum of the best `count` passes `target`.
    int pick(int64_t count, double target) {
        int64_t before = 0;
        double running = 0.0;
        int last = 0;
        for (int b = 0; b < kSampleBuckets && before < count; b++) {
            if (count_[b] == 0) continue;
            const bool is_last = before + count_[b] >= count;
            if (running + mass_[b] <= target && !is_last) {
                running += mass_[b];
                before += count_[b];
                continue;
            }
            const int n = sort(b);
            for (int i = 0; i < n && before < count; i++, before++) {
                running += weight(picked_[i]);
                last = ids_[picked_[i]];
                if (running > target) return last;
            }
        }
        return last;
    }

  private:
    double weight(int32_t place) const { return std::exp(static_cast<double>(values_[place]) - top_); }

    // Fills picked_ with the places of bucket b, best first, the smaller id among equals; returns how many.
    int sort(int b) {
        if (count_[b] == 0) return 0;
        int n = 0;
        for (int64_t i = 0; n < count_[b]; i++) {
            if (buckets_[i] == b) picked_[n++] = static_cast<int32_t>(i);
        }
        std::sort(picked_, picked_ + n, [this](int32_t x, int32_t y) {
            return values_[x] != values_[y] ? values_[x] > values_[y] : x < y;
        });
        return n;
    }

    int32_t* count_;
    double* mass_;
    float* values_;
    int32_t *ids_, *picked_;
    uint16_t* buckets_;
    int64_t size_ = 0;
    float top_ = 0.0f, scale_ = 0.0f;
};

// Sums of weights in blocks of kSumBlock tokens into `sums`; returns the whole.
inline double sum_weights(const float* logits, int vocab, Vec temperature, float top, double* sums) {
    double whole = 0.0;
    for (int begin = 0, block = 0; begin < vocab; begin += kSumBlock, block++) {
        const int end = vocab - begin < kSumBlock ? vocab : begin + kSumBlock;
        Vec total = zero();
        for (int i = begin; i < end; i += 16) {
            const int n = end - i < 16 ? end - i : 16;
            const Vec weights = Candidates::weights_of(div(load(logits + i, n), temperature), top);
            total = add(total, n < 16 ? fill_from(weights, n, 0.0f) : weights);
        }
        whole += sums[block] = sum(total);
    }
    return whole;
}

// No truncation: tokens in order of their ids.
inline int pick_any(const float* logits, int vocab, float temperature, float top, double uniform, double* sums) {
    const double target = uniform * sum_weights(logits, vocab, splat(temperature), top, sums);
    const int blocks = (vocab + kSumBlock - 1) / kSumBlock;
    double running = 0.0;
    int block = 0;
    while (block < blocks - 1 && running + sums[block] <= target) running += sums[block++];
    int last = -1;
    for (; block < blocks; block++) {
        const int end = vocab - block * kSumBlock < kSumBlock ? vocab : (block + 1) * kSumBlock;
        for (int i = block * kSumBlock; i < end; i++) {
            const double w = std::exp(static_cast<double>(logits[i] / temperature) - top);
            if (w == 0.0) continue;
            running += w;
            last = i;
            if (running > target) return i;
        }
        if (last >= 0) return last;  // past the end by rounding
    }
    while (last < 0) {  // likewise, and the last block has no weight at all
        for (int i = vocab - 1; i >= 0; i--) {
            if (std::exp(static_cast<double>(logits[i] / temperature) - top) > 0.0) return i;
        }
        return 0;
    }
    return last;
}

inline int sample_row(const float* logits, int vocab, const PagedeckSample& options, char* memory) {
    int place;
    const float best = find_largest(logits, vocab, place);
    const Vec temperature = splat(options.temperature);
    const float top = best / options.temperature;
    auto* sums = reinterpret_cast<double*>(memory);
    char* rest = memory + (vocab + kSumBlock - 1) / kSumBlock * sizeof(double);
    const bool has_k = options.top_k > 0, has_p = options.top_p < 1.0, has_min = options.min_p > 0.0;
    if (!has_k && !has_p && !has_min) return pick_any(logits, vocab, options.temperature, top, options.uniform, sums);
    const double total = has_p && !has_k ? sum_weights(logits, vocab, temperature, top, sums) : 0.0;
    Candidates candidates(rest, vocab);
    const float bound = has_k ? find_bound(logits, vocab, options.top_k) / options.temperature : 0.0f;
    const bool is_bounded = has_k && bound >= -std::numeric_limits<float>::max();
    float least = is_bounded ? bound : top - kFirstSpan;
    bool is_by_min = false;
    if (has_min && !(has_p && has_k)) {
        // Nothing below counts, wherever the other truncations end; a hair lower, the exact test comes later.
        const float lowest = top + static_cast<float>(std::log(options.min_p)) - 1e-3f;
        is_by_min = lowest > least;
        least = std::max(least, lowest);
    }
    Candidates::Prefix kept{0, 0.0};
    const auto is_short = [&](int64_t found) {
        if (is_by_min || is_bounded) return false;
        return (has_k && found < options.top_k) || (has_p && !has_k && kept.mass < options.top_p * total) ||
               (!has_k && !has_p);
    };
    const auto take = [&](float from) {
        const int64_t found = candidates.take(logits, vocab, temperature, top, from);
        kept = candidates.all();
        return found;
    };
    if (is_short(take(least)) && is_short(take(top - kSecondSpan))) take(-std::numeric_limits<float>::max());
    if (has_k && options.top_k < kept.count) kept = candidates.best(options.top_k);
    if (has_p) {
        const auto reaching = candidates.reaching(options.top_p * (has_k ? kept.mass : total));
        if (reaching.count < kept.count) kept = reaching;
    }
    if (has_min) {
        const auto weighing = candidates.weighing(options.min_p);
        if (weighing.count < kept.count) kept = weighing;
    }
    return candidates.pick(kept.count, options.uniform * kept.mass);
}

}  // namespace PAGEDECK_ISA
}  // namespace pagedeck
