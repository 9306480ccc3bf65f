// The C interface, compiled for any x86-64: picks the instruction set, plans a step, holds its memory.
#include <cpuid.h>
#include <omp.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "plan.h"
#include "shared.h"


namespace pagedeck {

namespace avx2 {
extern const Operations operations;
}
namespace avx512 {
extern const Operations operations;
}
namespace avx512_bf16 {
extern const Operations operations;
}
namespace amx {
extern const Operations operations;
}

namespace {

// Units with bfloat16 instructions have nothing for float32: that is another unit's.
struct Isa {
    const char* name;
    const Operations* for_bf16;
    const Operations* for_f32;
    bool (*is_supported)();
};

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

// The processor has tiles of bfloat16, the system saves them, and this process may use them, which must be asked for.
bool has_amx() {
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kSystemSaves = 1u << 27;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    unsigned a, b, c, d;
    if (!has_avx512_bf16() || !__get_cpuid(1, &a, &b, &c, &d) || !(c & kSystemSaves)) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kBf16) || !(d & kTile)) return false;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

const Isa kIsas[] = {
    {"amx", &amx::operations, &avx512::operations, has_amx},
    {"avx512_bf16", &avx512_bf16::operations, &avx512::operations, has_avx512_bf16},
    {"avx512", &avx512::operations, &avx512::operations, has_avx512},
    {"avx2", &avx2::operations, &avx2::operations, has_avx2},
};

// Memory that only grows, aligned to a cache line, zeroed.
class Buffer {
  public:
    ~Buffer() { std::free(memory_); }
    void* get(size_t bytes) {
        if (bytes > size_) {
            std::free(memory_);
            memory_ = nullptr;
            size_ = 0;
            const size_t rounded = (bytes + bytes / 4 + 63) / 64 * 64;
            memory_ = std::aligned_alloc(64, rounded);
            if (!memory_) throw std::bad_alloc();
            std::memset(memory_, 0, rounded);
            size_ = rounded;
        }
        return memory_;
    }

  private:
    void* memory_ = nullptr;
    size_t size_ = 0;
};

}  // namespace

struct Context {
    const Isa* isa;
    int threads;

    const Operations& operations(bool is_bf16) const { return is_bf16 ? *isa->for_bf16 : *isa->for_f32; }

    Team team;
    Planner planner;
    Buffer normed, qkv, query, attended, gated, partials, finished, scratch;
};

namespace {

// f(id, size) on all threads of a team, `most` at most.
template <class F>
void run(Context& context, F&& f, int most = kMaxThreads) {
    const int threads = std::min(context.threads, most);
    for (auto& slot : context.team.counters) {
        for (int i = 0; i < threads; i++) slot[i].next.store(0, std::memory_order_relaxed);
    }
    context.team.arrived.store(0);
    if (threads == 1) return f(0, 1);
#pragma omp parallel num_threads(threads)
    f(omp_get_thread_num(), omp_get_num_threads());
}

// For one pass over rows of logits: to wake another thread takes as long as some rows.
int threads_for(int64_t rows) { return rows <= 4 ? 1 : kMaxThreads; }

int64_t units(int64_t elements, bool is_bf16) { return is_bf16 ? (elements + 1) / 2 : elements; }

// What attention alone needs.
Plan prepare_attention(Context& context, const PagedeckModel& model, const PagedeckStep& step, Workspace& space) {
    const Plan plan = context.planner.plan(model, step, context.threads);
    const int group = model.num_heads / model.num_kv_heads;
    space.partials = static_cast<float*>(
        context.partials.get(context.planner.num_partials() * state_floats(model.head_dim) * sizeof(float)));
    const size_t counters = context.planner.num_counters() * sizeof(std::atomic<int32_t>);
    space.finished = static_cast<std::atomic<int32_t>*>(context.finished.get(counters));
    std::memset(static_cast<void*>(space.finished), 0, counters);
    space.scratch_bytes = (scratch_bytes(model.head_dim, group) + 63) / 64 * 64;
    space.scratch = static_cast<char*>(context.scratch.get(space.scratch_bytes * context.threads));
    return plan;
}

Plan prepare(Context& context, const PagedeckModel& model, const PagedeckStep& step, Workspace& space) {
    const size_t n = step.num_tokens;
    const bool is_bf16 = model.is_bf16;
    const int64_t query = static_cast<int64_t>(model.num_heads) * model.head_dim;
    const int64_t qkv = query + 2 * static_cast<int64_t>(model.num_kv_heads) * model.head_dim;
    const auto words = [&](Buffer& buffer, int64_t count) { return buffer.get(n * count * 4); };
    const int64_t copies = step.num_tokens <= kOwnRows ? context.threads : 1;
    space.normed = static_cast<uint32_t*>(words(context.normed, copies * units(model.hidden, is_bf16)));
    space.qkv = static_cast<float*>(words(context.qkv, qkv));
    space.query = static_cast<uint32_t*>(words(context.query, units(query, is_bf16)));
    space.attended = static_cast<uint32_t*>(words(context.attended, units(query, is_bf16)));
    space.gated = static_cast<uint32_t*>(words(context.gated, units(model.inner, is_bf16)));
    return prepare_attention(context, model, step, space);
}

// -8 * x in half precision: Q4_0 is scale * (q - 8). Exact but where it overflows, far from any model's scales.
uint16_t times_minus_eight(uint16_t x) {
    const uint16_t sign = (x & 0x8000) ^ 0x8000;
    uint32_t exponent = (x >> 10) & 31, fraction = x & 1023;
    if (exponent == 0) {
        fraction *= 8;  // of a subnormal: the scale of 2^-24 stays until a leading bit appears
        if (fraction < 1024) return sign | fraction;
        exponent = 1;
        while (fraction >= 2048) {
            exponent++;
            fraction >>= 1;
        }
        return sign | (exponent << 10) | (fraction & 1023);
    }
    exponent += 3;
    return exponent >= 31 ? sign | 0x7c00 : sign | (exponent << 10) | fraction;
}

constexpr int kOk = 0, kOutOfMemory = 1;

}  // namespace
}  // namespace pagedeck

using namespace pagedeck;

#pragma GCC visibility push(default)
extern "C" {

// Names of the instruction sets that this processor has, best first, each followed by a space.
const char* pagedeck_instruction_sets() {
    static char names[64];
    names[0] = 0;
    for (const Isa& isa : kIsas) {
        if (isa.is_supported()) std::strcat(std::strcat(names, isa.name), " ");
    }
    return names;
}

// Null if this processor doesn't have that instruction set.
void* pagedeck_create(const char* instruction_set, int32_t threads) {
    for (const Isa& isa : kIsas) {
        if (std::strcmp(isa.name, instruction_set) || !isa.is_supported()) continue;
        auto* context = new (std::nothrow) Context();
        if (!context) return nullptr;
        context->isa = &isa;
        context->threads = std::clamp(threads, 1, kMaxThreads);
        return context;
    }
    return nullptr;
}

void pagedeck_destroy(void* context) { delete static_cast<Context*>(context); }

// Zeroed memory, a multiple of 2 MiB, on large pages where the system gives them; null if there is none. A page takes
// memory when it is first written to.
void* pagedeck_allocate(int64_t bytes) {
    constexpr uintptr_t kLargePage = uintptr_t{2} << 20;
    void* all = mmap(nullptr, bytes + kLargePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) return nullptr;
    const uintptr_t begin = reinterpret_cast<uintptr_t>(all);
    const uintptr_t aligned = (begin + kLargePage - 1) / kLargePage * kLargePage;
    if (aligned > begin) munmap(all, aligned - begin);
    const uintptr_t rest = begin + kLargePage - aligned;
    if (rest) munmap(reinterpret_cast<void*>(aligned + bytes), rest);
    madvise(reinterpret_cast<void*>(aligned), bytes, MADV_HUGEPAGE);  // a hint: without it things are only slower
    return reinterpret_cast<void*>(aligned);
}

void pagedeck_free(void* memory, int64_t bytes) { munmap(memory, bytes); }

int32_t pagedeck_step(void* handle, const PagedeckModel* model, const PagedeckCache* cache, PagedeckStep* step) {
    Context& context = *static_cast<Context*>(handle);
    try {
        Workspace space;
        const Plan plan = prepare(context, *model, *step, space);
        run(context, [&](int id, int size) {
            context.operations(model->is_bf16).step(context.team, id, size, *model, *cache, *step, space, plan);
        });
    } catch (const std::bad_alloc&) {
        return kOutOfMemory;
    }
    return kOk;
}

// hidden: [rows][hidden]; logits: [rows][vocab].
int32_t pagedeck_head(void* handle, const PagedeckModel* model, const float* hidden, int64_t rows, float* logits) {
    Context& context = *static_cast<Context*>(handle);
    try {
        auto* normed = static_cast<uint32_t*>(context.normed.get(rows * units(model->hidden, model->is_bf16) * 4));
        run(context, [&](int id, int size) {
            context.operations(model->is_bf16).head(context.team, id, size, *model, hidden, rows, normed, logits);
        });
    } catch (const std::bad_alloc&) {
        return kOutOfMemory;
    }
    return kOk;
}

void pagedeck_pack(void* handle, const void* weight, int32_t out_features, int32_t in_features, int32_t is_gate_up,
                   int32_t is_bf16, uint32_t* packed) {
    Context& context = *static_cast<Context*>(handle);
    run(context, [&](int id, int size) {
        context.operations(is_bf16).pack(context.team, id, size, weight, out_features, in_features, is_gate_up, is_bf16,
                                         packed);
    });
}

// Repacks GGUF blocks, losslessly; see quantised.h. rows: [out_features][blocks] of blocks in the file's layout.
// kind: 40, 41 or 80 for Q4_0, Q4_1 and Q8_0.
void pagedeck_pack_quantised(const uint8_t* rows, int32_t kind, int32_t out_features, int32_t in_features,
                             int32_t is_gate_up, uint8_t* packed) {
    const int blocks = in_features / kQuantisedBlock, half = out_features / 2;
    const int64_t panels = is_gate_up ? (half + 15) / 16 : (out_features + 31) / 32;
    const int source_bytes = kind == 40 ? 18 : (kind == 41 ? 20 : 34), header = kind == 41 ? 4 : 2;
    const int64_t block_bytes = quantised_block_bytes(kind == 80 ? 8 : 4);
    for (int64_t panel = 0; panel < panels; panel++) {
        for (int column = 0; column < 32; column++) {
            const int64_t index = panel * 16 + column % 16;
            const int64_t row = is_gate_up ? (column < 16 ? index : half + index) : panel * 32 + column;
            if (is_gate_up ? index >= half : row >= out_features) continue;  // zeros: the memory comes cleared
            for (int b = 0; b < blocks; b++) {
                const uint8_t* source = rows + (row * blocks + b) * source_bytes;
                uint8_t* target = packed + (panel * blocks + b) * block_bytes;
                std::memcpy(target + 2 * column, source, 2);
                uint8_t* bytes = target + (kind == 80 ? 64 + 512 * (column / 16) : 128 + 256 * (column / 16));
                if (kind == 41) {
                    std::memcpy(target + 64 + 2 * column, source + 2, 2);
                } else if (kind == 40) {
                    const uint16_t offset = times_minus_eight(source[0] | source[1] << 8);
                    std::memcpy(target + 64 + 2 * column, &offset, 2);
                }
                for (int p = 0; p < (kind == 80 ? 16 : 8); p++) {
                    std::memcpy(bytes + 32 * p + 2 * (column % 16), source + header + 2 * p, 2);
                }
            }
        }
    }
}

// into: 0 = store float32, 1 = add to float32, 2 = silu(gate) * up as elements.
void pagedeck_linear(void* handle, const PagedeckLinear* linear, int32_t is_bf16, const uint32_t* x, int64_t stride,
                     int64_t rows, int32_t into, void* out) {
    Context& context = *static_cast<Context*>(handle);
    run(context, [&](int id, int size) {
        context.operations(is_bf16).linear(context.team, id, size, *linear, is_bf16, x, stride, rows, into, out);
    });
}

void pagedeck_rms_norm(void* handle, const float* x, const float* weight, int64_t rows, int32_t n, float eps,
                       int32_t is_bf16, void* out) {
    static_cast<Context*>(handle)->operations(is_bf16).rms_norm(x, weight, rows, n, eps, is_bf16, out);
}

// Rotates queries and keys of qkv [num_tokens][features] (float32); keys and values go into layer 0 of the cache.
void pagedeck_write(void* handle, const PagedeckModel* model, const PagedeckCache* cache, const PagedeckStep* step,
                    const float* qkv, void* query) {
    static_cast<Context*>(handle)->operations(model->is_bf16).write(*model, *cache, *step, qkv, query);
}

// Attention over layer 0 of the cache.
int32_t pagedeck_attend(void* handle, const PagedeckModel* model, const PagedeckCache* cache, const PagedeckStep* step,
                        const void* query, void* out) {
    Context& context = *static_cast<Context*>(handle);
    try {
        Workspace space{};
        const Plan plan = prepare_attention(context, *model, *step, space);
        run(context, [&](int id, int size) {
            context.operations(model->is_bf16).attend(context.team, id, size, *model, *cache, *step, space, plan, query,
                                                      out);
        });
    } catch (const std::bad_alloc&) {
        return kOutOfMemory;
    }
    return kOk;
}

// options: [rows], or null for the best token of each row. tokens: [rows].
int32_t pagedeck_sample(void* handle, const float* logits, int64_t rows, int32_t vocab, const PagedeckSample* options,
                        int64_t* tokens) {
    Context& context = *static_cast<Context*>(handle);
    try {
        const int64_t bytes = (sample_bytes(vocab) + 63) / 64 * 64;
        char* scratch = options ? static_cast<char*>(context.scratch.get(bytes * context.threads)) : nullptr;
        run(context, [&](int id, int size) {
            context.operations(false).sample(context.team, id, size, logits, rows, vocab, options, scratch, tokens);
        }, threads_for(rows));
    } catch (const std::bad_alloc&) {
        return kOutOfMemory;
    }
    return kOk;
}

// is_finite: [rows], 1 where all of a row is.
void pagedeck_check_finite(void* handle, const float* logits, int64_t rows, int32_t vocab, uint8_t* is_finite) {
    Context& context = *static_cast<Context*>(handle);
    run(context, [&](int id, int size) {
        context.operations(false).check_finite(context.team, id, size, logits, rows, vocab, is_finite);
    }, threads_for(rows));
}

}  // extern "C"
#pragma GCC visibility pop
