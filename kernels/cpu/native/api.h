// The C interface: plain structs of numbers and pointers, mirrored in kernels/cpu/native.py.
//
// A unit is 32 bits: one float32 or two bfloat16. Matrices are packed by `pagedeck_pack`; see linear.h for the layout.
#pragma once

#include <cstdint>

extern "C" {

// A packed matrix: out = weight @ in.
struct PagedeckLinear {
    const uint32_t* packed;  // [panels][units of in][2][16]
    const uint8_t* quantised;  // 4- or 8-bit blocks of the same matrix for few rows, or null; see quantised.h
    int32_t out_features;
    int32_t in_features;
    int32_t bits;  // of `quantised`: 4 or 8
    int32_t max_quantised_rows;  // steps with more rows use `packed`
};

struct PagedeckLayer {
    const float* input_norm;           // [hidden]
    const float* post_attention_norm;  // [hidden]
    PagedeckLinear qkv;                // hidden -> (heads + 2 * kv_heads) * head_dim
    PagedeckLinear output;             // heads * head_dim -> hidden
    PagedeckLinear gate_up;            // hidden -> 2 * inner; gate and up rows alternate in sixteens
    PagedeckLinear down;               // inner -> hidden
};

struct PagedeckModel {
    const PagedeckLayer* layers;
    const float* norm;        // [hidden]
    const void* embedding;    // [vocab][hidden], or null: rows of the head
    const float* cos;         // [positions][head_dim], both halves alike
    const float* sin;         // likewise, the first half negated
    PagedeckLinear head;      // hidden -> vocab
    int32_t num_layers;
    int32_t hidden;
    int32_t inner;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t is_bf16;  // weights, activations and cache; else all float32
    float eps;
    float scale;  // of attention's products
};

struct PagedeckCache {
    uint8_t* pool;          // [layers][blocks][2][kv_heads][block_size * head_dim elements]
    int64_t layer_bytes;
    int32_t block_size;
};

// How a row's token is chosen; see kernels/reference/sampling.py.
struct PagedeckSample {
    float temperature;
    int64_t top_k;
    double top_p;
    double min_p;
    double uniform;
};

// One step: sequences that compute a single token first, then the others, tokens in the same order.
struct PagedeckStep {
    int32_t num_tokens;
    int32_t num_seqs;
    int32_t max_blocks;            // columns of block_tables
    const int64_t* token_ids;      // [num_tokens]
    const int64_t* positions;      // [num_tokens]
    const int64_t* slot_mapping;   // [num_tokens]
    const int32_t* query_starts;   // [num_seqs + 1]
    const int32_t* seq_lens;       // [num_seqs] including this step's tokens
    const int32_t* block_tables;   // [num_seqs][max_blocks]
    float* hidden;                 // [num_tokens][hidden], out: the residual stream after the last layer
    double seconds[3];             // out: attention; products; embedding, norm, rope and cache writes
};
}
