// The backward kernel of avx512. The target comes before the intrinsics' header; only the table entry may be visible
// outside the translation unit.
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")

#include "cpu/vector_avx512.h"

#include "attention/cpu/backward_simd.h"

namespace flashmoe::cpu {

extern const BackwardKernel kBackwardAvx512Kernel = {backward_scratch_bytes, backward_simd};

}  // namespace flashmoe::cpu
