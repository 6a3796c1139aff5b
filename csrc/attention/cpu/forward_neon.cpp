// The kernel for every AArch64.

#include "cpu/vector_neon.h"

#include "attention/cpu/run_simd.h"

namespace flashmoe::cpu {

extern const Kernel kBaselineKernel = {kBlockRows, simd_scratch_bytes, run_simd};

}  // namespace flashmoe::cpu
