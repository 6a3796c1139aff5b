// Kernels for the instruction set avx512. The target pragma comes before the intrinsics' header; only the table entry
// may leave the translation unit.
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")

#include "cpu/vector_avx512.h"

#include "moe/cpu/combine.h"

namespace flashmoe::cpu {

extern const MoeKernel kMoeAvx512Kernel = {kPanelColumns, gemm_scratch_bytes, multiply,
                                           combine,       weight_gradients,   bias_gradient};

}  // namespace flashmoe::cpu
