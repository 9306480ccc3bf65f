// One step of a decoder: all layers in one call, by one team of threads.
#pragma once

#include <chrono>

#include "api.h"
#include "attention.h"
#include "quantised.h"
#include "rows.h"
#include "shared.h"

namespace pagedeck {

namespace PAGEDECK_ISA {

class Stopwatch {
  public:
    explicit Stopwatch(bool is_on) : is_on_(is_on), last_(now()) {}
    void add_to(double& seconds) {
        if (!is_on_) return;
        const double time = now();
        seconds += time - last_;
        last_ = time;
    }

  private:
    static double now() {
        return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }
    bool is_on_;
    double last_;
};

inline AttentionScratch scratch_of(const Workspace& space, int id, int head_dim, int group) {
    const int64_t rows = group > kTaskRows ? group : kTaskRows;
    AttentionScratch scratch;
    scratch.states = reinterpret_cast<float*>(space.scratch + space.scratch_bytes * id);
    scratch.sums = scratch.states + rows * state_floats(head_dim);
    scratch.gathered = reinterpret_cast<uint32_t*>(scratch.sums + rows * state_floats(head_dim));
    scratch.query = scratch.gathered + 2 * kChunk * head_dim;
    return scratch;
}

template <class T>
void attend_all(Worker& worker, const PagedeckModel& model, const PagedeckCache& cache, int layer,
                const PagedeckStep& step, const Workspace& space, const Plan& plan, const float* qkv, const void* query,
                void* out) {
    using Element = typename T::Element;
    const CacheView<T> view(cache, model, layer);
    const AttentionScratch scratch =
        scratch_of(space, worker.id(), model.head_dim, model.num_heads / model.num_kv_heads);
    worker.each(plan.num_tasks, [&](int64_t i) {
        const AttentionTask* following = i + 1 < plan.num_tasks ? &plan.tasks[i + 1] : nullptr;
        attend<T>(model, view, step, plan.tasks[i], following, qkv, static_cast<const Element*>(query),
                  static_cast<Element*>(out), scratch, space.partials, space.finished);
    });
    worker.barrier();
}

// Phases are separated by barriers; see Worker::each for who does what.
template <class T>
void walk(Team& team, int id, int size, const PagedeckModel& model, const PagedeckCache& cache, PagedeckStep& step,
          const Workspace& space, const Plan& plan) {
    using Element = typename T::Element;
    constexpr bool kIsBf16 = T::kPerUnit == 2;
    Worker worker(team, id, size);
    Stopwatch watch(id == 0);
    double& attention = step.seconds[0];
    double& linear = step.seconds[1];
    double& rows = step.seconds[2];
    const int64_t n = step.num_tokens;
    const int hidden = model.hidden, query_width = model.num_heads * model.head_dim;
    const int qkv_width = query_width + 2 * model.num_kv_heads * model.head_dim;
    const int64_t hidden_units = units_of(hidden, kIsBf16), query_units = units_of(query_width, kIsBf16);
    const int64_t inner_units = units_of(model.inner, kIsBf16);
    // Rows per claim: a claim costs about as much as a row's norm.
    constexpr int64_t kRowsPerTask = 4;
    const int64_t row_tasks = (n + kRowsPerTask - 1) / kRowsPerTask;
    const auto each_row = [&](auto&& f) {
        worker.each(row_tasks, [&](int64_t task) {
            const int64_t last = (task + 1) * kRowsPerTask < n ? (task + 1) * kRowsPerTask : n;
            for (int64_t row = task * kRowsPerTask; row < last; row++) f(row);
        });
        worker.barrier();
    };
    const bool has_own = n <= kOwnRows, is_decode = n == step.num_seqs;
    uint32_t* normed = space.normed + (has_own ? id * n * hidden_units : 0);
    const auto norm = [&](const float* weight) {
        const auto norm_row = [&](int64_t row) {
            rms_norm<T>(step.hidden + row * hidden, weight, hidden, model.eps,
                        reinterpret_cast<Element*>(normed + row * hidden_units));
        };
        if (has_own) {
            for (int64_t row = 0; row < n; row++) norm_row(row);
        } else {
            each_row(norm_row);
        }
    };

    const int64_t block_bytes = 2ll * model.num_kv_heads * cache.block_size * model.head_dim * sizeof(Element);
    Ahead ahead(cache, step, block_bytes, id, size);
    ahead.begin_layer(0);
    each_row([&](int64_t row) { embed<T>(model, step.token_ids[row], step.hidden + row * hidden); });
    for (int index = 0; index < model.num_layers; index++) {
        const PagedeckLayer& layer = model.layers[index];
        const Output<T> qkv{Into::kStore, space.qkv, nullptr, qkv_width, qkv_width};
        const Output<T> residual{Into::kAdd, step.hidden, nullptr, hidden, hidden};
        const Output<T> gated{Into::kGate, nullptr, reinterpret_cast<Element*>(space.gated),
                              inner_units * T::kPerUnit, model.inner};
        norm(layer.input_norm);
        watch.add_to(rows);
        multiply_best<T>(worker, layer.qkv, normed, hidden_units, n, qkv, ahead, {&layer.output, Into::kAdd});
        watch.add_to(linear);
        const CacheView<T> view(cache, model, index);
        if (!is_decode) {
            each_row([&](int64_t row) {
                Element* query = reinterpret_cast<Element*>(space.query + row * query_units);
                rotate_and_write<T>(model, view, space.qkv + row * qkv_width, step.positions[row],
                                    step.slot_mapping[row], query);
            });
        }
        watch.add_to(rows);
        attend_all<T>(worker, model, cache, index, step, space, plan, is_decode ? space.qkv : nullptr, space.query,
                      space.attended);
        watch.add_to(attention);
        const bool is_last = index + 1 == model.num_layers;
        if (is_last) {
            ahead.end_layers();
        } else {
            ahead.begin_layer(index + 1);
        }
        multiply_best<T>(worker, layer.output, space.attended, query_units, n, residual, ahead,
                         {&layer.gate_up, Into::kGate});
        watch.add_to(linear);
        norm(layer.post_attention_norm);
        watch.add_to(rows);
        multiply_best<T>(worker, layer.gate_up, normed, hidden_units, n, gated, ahead, {&layer.down, Into::kAdd});
        multiply_best<T>(worker, layer.down, space.gated, inner_units, n, residual, ahead,
                         {is_last ? &model.head : &model.layers[index + 1].qkv, Into::kStore});
        watch.add_to(linear);
    }
}

// Logits [rows][vocab] of rows of the residual stream.
template <class T>
void head(Team& team, int id, int size, const PagedeckModel& model, const float* hidden, int64_t rows,
          uint32_t* normed, float* logits) {
    Worker worker(team, id, size);
    const int64_t stride = units_of(model.hidden, T::kPerUnit == 2);
    worker.each(rows, [&](int64_t row) {
        rms_norm<T>(hidden + row * model.hidden, model.norm, model.hidden, model.eps,
                    reinterpret_cast<typename T::Element*>(normed + row * stride));
    });
    worker.barrier();
    const int vocab = model.head.out_features;
    Ahead ahead;
    multiply_best<T>(worker, model.head, normed, stride, rows, Output<T>{Into::kStore, logits, nullptr, vocab, vocab}, ahead);
}

}  // namespace PAGEDECK_ISA
}  // namespace pagedeck
