// The backward kernel for every AArch64.

#include "cpu/vector_neon.h"

#include "attention/cpu/backward_simd.h"

namespace flashmoe::cpu {

extern const BackwardKernel kBackwardBaselineKernel = {backward_scratch_bytes, backward_simd};

}  // namespace flashmoe::cpu
