// The AMX products with emulated instructions, for test_native_amx.py.
#include "quantised.h"

using namespace pagedeck;
using namespace pagedeck::PAGEDECK_ISA;

// x: [rows][in_features] bfloat16; into as in pagedeck_linear.
extern "C" void emulated_linear(const PagedeckLinear* linear, const uint32_t* x, int64_t rows, int32_t into, void* out) {
    Team team;
    Worker worker(team, 0, 1);
    const bool is_gate = static_cast<Into>(into) == Into::kGate;
    const int columns = is_gate ? linear->out_features / 2 : linear->out_features;
    const Output<BF16> output{static_cast<Into>(into), static_cast<float*>(out), static_cast<uint16_t*>(out), columns,
                              columns};
    Ahead ahead;
    multiply_best<BF16>(worker, *linear, x, linear->in_features / 2, rows, output, ahead);
}
