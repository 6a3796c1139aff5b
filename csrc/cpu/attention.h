// Attention forward on the CPU: what the host's operator calls.
#pragma once

#include <cstdint>

#include "attention/params/forward.h"

namespace flashmoe {
namespace cpu {

enum class ScalarType { kFloat32, kFloat16, kBFloat16 };

// Calls body(begin, end, context) on disjoint ranges that cover [begin, end), on as many threads as it likes, and
// returns when all are done. Torch's own pool is passed in, so that this library starts no thread of its own.
using ParallelFor = void (*)(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*),
                             void* context);

// out = softmax(scale * q k^T) v and lse, for any head_dim 1..256, seq_q, seq_k >= 0 and any strides with a
// contiguous last dimension. Reads of `params`: q, k, v, out, lse, the strides, the sizes and `scale`; the
// split and schedule fields are not used; a null lse is not written. Rows that see no key get out = 0, lse = -inf. NaN
// and Inf propagate as in a plain softmax, from the keys that a row can see. The result does not depend on num_threads,
// bit for bit.
// num_threads: how many workers to divide the work over (parallel_for's width); at least 1.
// Throws std::invalid_argument for sizes outside of the above, std::bad_alloc.
void attention_forward(const attention::ForwardParams& params, ScalarType type, bool causal, ParallelFor parallel_for,
                       int num_threads);

// The instruction set in use: "baseline", "avx2", "avx512" or "amx". The widest that the CPU and the operating system
// support, unless FLASHMOE_CPU_ISA (read once, at the first call) or set_isa named another.
// Throws std::invalid_argument when FLASHMOE_CPU_ISA names an unknown or unsupported one.
const char* selected_isa();

// Forces an instruction set; null or "" goes back to the default. Returns whether the selection changed.
// Throws std::invalid_argument, naming the supported set, for an unknown or unsupported name.
bool set_isa(const char* name);

// The instruction sets that this machine can run, separated by commas, narrowest first.
const char* supported_isas();

}  // namespace cpu
}  // namespace flashmoe
