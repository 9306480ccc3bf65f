// What the units of all instruction sets and the interface share: data, and no code that a compiler could merge.
#pragma once

#include <atomic>
#include <cstdint>

#include "api.h"

namespace pagedeck {

constexpr int kMaxThreads = 256;

constexpr int kQuantisedBlock = 32;         // inputs
constexpr int kMaxQuantisedRows = 4;        // with more, bfloat16 was faster
constexpr int kMaxQuantisedInputs = 32768;  // bounds the sums that each thread keeps

inline int64_t quantised_block_bytes(int bits) { return bits == 4 ? 128 + 512 : 64 + 1024; }

struct Team {
    struct alignas(64) Counter {
        std::atomic<int64_t> next{0};
    };
    static constexpr int kSlots = 4;

    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<uint32_t> generation{0};
    std::atomic<int> sleepers{0};
    Counter counters[kSlots][kMaxThreads];
};

// A part of a step's attention: the query heads of one KV head, of the tokens [first, last) of a sequence's new ones.
struct AttentionTask {
    int32_t seq;
    int32_t kv_head;
    int32_t first, last;
    int32_t section;  // -1 = all of them, one after the other
    int32_t num_sections;
    int64_t partial;  // first of the sequence's partial results, where sections are tasks of their own
    int64_t finished; // index of the counter of finished sections, likewise
    int64_t cost;
};

constexpr int kChunk = 64;      // tokens
constexpr int kSection = 512;   // tokens
constexpr int kTaskRows = 48;   // rows of a task that prefills, at most (more only if a KV head has more query heads)

inline int padded_dim(int head_dim) { return (head_dim + 15) / 16 * 16; }
// Floats of a row's state: the weighted sum of values, 16 partial sums of weights, the maximum and 15 of nothing.
inline int state_floats(int head_dim) { return padded_dim(head_dim) + 32; }

// Up to so many rows, each thread computes all of a norm for itself: that is cheaper than to wait for the others' part.
constexpr int kOwnRows = 32;

// Memory of a step, planned by interface.cpp; strides in elements of what is pointed to.
struct Workspace {
    uint32_t* normed;   // [tokens][units of hidden]; one for each thread if there are at most kOwnRows tokens
    float* qkv;         // [tokens][qkv features]
    uint32_t* query;    // [tokens][units of heads * head_dim]
    uint32_t* attended; // likewise
    uint32_t* gated;    // [tokens][units of inner]
    float* partials;    // attention's partial results
    std::atomic<int32_t>* finished;
    char* scratch;      // per thread
    int64_t scratch_bytes;
};

struct Plan {
    const AttentionTask* tasks;
    int64_t num_tasks;
};

constexpr int kSampleBuckets = 2048;

// Bytes of a thread's memory of a row's candidates.
inline int64_t sample_bytes(int vocab) {
    return static_cast<int64_t>(vocab) * 16 + (vocab / 512 + 1) * 8 + kSampleBuckets * 12 + 64;
}

// Bytes of a thread's scratch: two sets of states, a gathered chunk, the queries of a token and KV head.
inline int64_t scratch_bytes(int head_dim, int group) {
    const int64_t rows = group > kTaskRows ? group : kTaskRows;
    return 2 * rows * state_floats(head_dim) * 4 + (2 * kChunk + group) * static_cast<int64_t>(head_dim) * 4 + 64;
}

// What a unit compiled for one instruction set offers.
struct Operations {
    void (*step)(Team&, int id, int size, const PagedeckModel&, const PagedeckCache&, PagedeckStep&, const Workspace&,
                 const Plan&);
    void (*head)(Team&, int id, int size, const PagedeckModel&, const float* hidden, int64_t rows, uint32_t* normed,
                 float* logits);
    void (*pack)(Team&, int id, int size, const void* weight, int out_features, int in_features, bool is_gate_up,
                 bool is_bf16, uint32_t* packed);
    void (*linear)(Team&, int id, int size, const PagedeckLinear&, bool is_bf16, const uint32_t* x, int64_t stride,
                   int64_t rows, int into, void* out);
    void (*rms_norm)(const float* x, const float* weight, int64_t rows, int n, float eps, bool is_bf16, void* out);
    void (*write)(const PagedeckModel&, const PagedeckCache&, const PagedeckStep&, const float* qkv, void* query);
    void (*attend)(Team&, int id, int size, const PagedeckModel&, const PagedeckCache&, const PagedeckStep&,
                   const Workspace&, const Plan&, const void* query, void* out);
    // options null: the best token of each row. scratch: sample_bytes(vocab) per thread.
    void (*sample)(Team&, int id, int size, const float* logits, int64_t rows, int vocab, const PagedeckSample* options,
                   char* scratch, int64_t* tokens);
    void (*check_finite)(Team&, int id, int size, const float* logits, int64_t rows, int vocab, uint8_t* is_finite);
};

}  // namespace pagedeck
