// Compiled once per instruction set, with PAGEDECK_ISA as its name; see kernels/cpu/build.py.
#include "walk.h"
#if !defined(__AVX512BF16__)
#include "sampling.h"
#endif

namespace pagedeck {
namespace PAGEDECK_ISA {
namespace {

#if defined(__AVX512BF16__)
using Wide = BF16;  // never asked for: the interface takes another unit for float32
#else
using Wide = F32;
#endif

void step(Team& team, int id, int size, const PagedeckModel& model, const PagedeckCache& cache, PagedeckStep& step,
          const Workspace& space, const Plan& plan) {
    if (model.is_bf16) {
        walk<BF16>(team, id, size, model, cache, step, space, plan);
    } else {
        walk<Wide>(team, id, size, model, cache, step, space, plan);
    }
}

void head_rows(Team& team, int id, int size, const PagedeckModel& model, const float* hidden, int64_t rows,
               uint32_t* normed, float* logits) {
    if (model.is_bf16) {
        head<BF16>(team, id, size, model, hidden, rows, normed, logits);
    } else {
        head<Wide>(team, id, size, model, hidden, rows, normed, logits);
    }
}

template <class T>
void pack_as(Worker& worker, const void* weight, int out_features, int in_features, bool is_gate_up, uint32_t* packed) {
    PagedeckLinear shape{};
    shape.out_features = out_features;
    const int64_t panels = panels_of(shape, is_gate_up ? Into::kGate : Into::kStore);
    worker.each(panels, [&](int64_t panel) {
        pack_panels<T>(static_cast<const typename T::Element*>(weight), out_features, in_features, is_gate_up, packed,
                       panel, panel + 1);
    });
}

void pack(Team& team, int id, int size, const void* weight, int out_features, int in_features, bool is_gate_up,
          bool is_bf16, uint32_t* packed) {
    Worker worker(team, id, size);
    if (is_bf16) {
        pack_as<BF16>(worker, weight, out_features, in_features, is_gate_up, packed);
    } else {
        pack_as<Wide>(worker, weight, out_features, in_features, is_gate_up, packed);
    }
}

template <class T>
void linear_as(Worker& worker, const PagedeckLinear& linear, const uint32_t* x, int64_t stride, int64_t rows, Into into,
               void* out) {
    const int columns = into == Into::kGate ? linear.out_features / 2 : linear.out_features;
    Output<T> output{into, nullptr, nullptr, columns, columns};
    if (into == Into::kGate) {
        output.gated = static_cast<typename T::Element*>(out);
    } else {
        output.wide = static_cast<float*>(out);
    }
    Ahead ahead;
    multiply_best<T>(worker, linear, x, stride, rows, output, ahead);
}

void linear(Team& team, int id, int size, const PagedeckLinear& linear, bool is_bf16, const uint32_t* x, int64_t stride,
            int64_t rows, int into, void* out) {
    Worker worker(team, id, size);
    if (is_bf16) {
        linear_as<BF16>(worker, linear, x, stride, rows, static_cast<Into>(into), out);
    } else {
        linear_as<Wide>(worker, linear, x, stride, rows, static_cast<Into>(into), out);
    }
}

void norm_rows(const float* x, const float* weight, int64_t rows, int n, float eps, bool is_bf16, void* out) {
    for (int64_t row = 0; row < rows; row++, x += n) {
        if (is_bf16) {
            rms_norm<BF16>(x, weight, n, eps, static_cast<uint16_t*>(out) + row * n);
        } else {
            rms_norm<Wide>(x, weight, n, eps, static_cast<Wide::Element*>(out) + row * n);
        }
    }
}

template <class T>
void write_as(const PagedeckModel& model, const PagedeckCache& cache, const PagedeckStep& step, const float* qkv,
              void* query) {
    const CacheView<T> view(cache, model, 0);
    const int64_t query_width = static_cast<int64_t>(model.num_heads) * model.head_dim;
    const int64_t width = query_width + 2 * static_cast<int64_t>(model.num_kv_heads) * model.head_dim;
    for (int64_t i = 0; i < step.num_tokens; i++) {
        rotate_and_write<T>(model, view, qkv + i * width, step.positions[i], step.slot_mapping[i],
                            static_cast<typename T::Element*>(query) + i * query_width);
    }
}

void write(const PagedeckModel& model, const PagedeckCache& cache, const PagedeckStep& step, const float* qkv,
           void* query) {
    if (model.is_bf16) {
        write_as<BF16>(model, cache, step, qkv, query);
    } else {
        write_as<Wide>(model, cache, step, qkv, query);
    }
}

void attend_step(Team& team, int id, int size, const PagedeckModel& model, const PagedeckCache& cache,
                 const PagedeckStep& step, const Workspace& space, const Plan& plan, const void* query, void* out) {
    Worker worker(team, id, size);
    if (model.is_bf16) {
        attend_all<BF16>(worker, model, cache, 0, step, space, plan, nullptr, query, out);
    } else {
        attend_all<Wide>(worker, model, cache, 0, step, space, plan, nullptr, query, out);
    }
}

#if !defined(__AVX512BF16__)
void sample_rows(Team& team, int id, int size, const float* logits, int64_t rows, int vocab,
                 const PagedeckSample* options, char* scratch, int64_t* tokens) {
    Worker worker(team, id, size);
    char* memory = scratch + (sample_bytes(vocab) + 63) / 64 * 64 * id;
    worker.each(rows, [&](int64_t row) {
        const float* x = logits + row * vocab;
        int token;
        if (options) {
            token = sample_row(x, vocab, options[row], memory);
        } else {
            find_largest(x, vocab, token);
        }
        tokens[row] = token;
    });
}

void check_rows(Team& team, int id, int size, const float* logits, int64_t rows, int vocab, uint8_t* is_finite) {
    Worker worker(team, id, size);
    worker.each(rows, [&](int64_t row) { is_finite[row] = is_all_finite(logits + row * vocab, vocab); });
}
#else
constexpr auto sample_rows = nullptr;  // float32 is another unit's
constexpr auto check_rows = nullptr;
#endif

}  // namespace

extern const Operations operations;
const Operations operations{step,  head_rows,   pack,        linear,    norm_rows,
                            write, attend_step, sample_rows, check_rows};

}  // namespace PAGEDECK_ISA
}  // namespace pagedeck
