// The kernel for every x86-64.

#include "cpu/vector_sse2.h"

#include "attention/cpu/run_simd.h"

namespace flashmoe::cpu {

extern const Kernel kBaselineKernel = {kBlockRows, simd_scratch_bytes, run_simd};

}  // namespace flashmoe::cpu
