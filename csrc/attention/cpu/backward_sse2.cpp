// The backward kernel for every x86-64.

#include "cpu/vector_sse2.h"

#include "attention/cpu/backward_simd.h"

namespace flashmoe::cpu {

extern const BackwardKernel kBackwardBaselineKernel = {backward_scratch_bytes, backward_simd};

}  // namespace flashmoe::cpu
