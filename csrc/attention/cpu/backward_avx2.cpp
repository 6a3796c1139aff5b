// The backward kernel of avx2. The target comes before the intrinsics' header; only the table entry may be visible
// outside the translation unit.
#pragma GCC target("avx2,fma,f16c")

#include "cpu/vector_avx2.h"

#include "attention/cpu/backward_simd.h"

namespace flashmoe::cpu {

extern const BackwardKernel kBackwardAvx2Kernel = {backward_scratch_bytes, backward_simd};

}  // namespace flashmoe::cpu
