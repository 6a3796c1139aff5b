// The backward kernel of avx512_bf16, which multiplies pairs of bf16. The target comes before the intrinsics' header; nothing but the table entry may
// leave the translation unit.
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")

#include "cpu/vector_avx512.h"

#include "cpu/bf16_pairs.h"

#include "attention/cpu/backward_simd.h"

namespace flashmoe {
namespace cpu {

extern const BackwardKernel kBackwardAvx512Bf16Kernel = {backward_scratch_bytes, backward_simd};

}  // namespace cpu
}  // namespace flashmoe
