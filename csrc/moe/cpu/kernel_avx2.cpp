// Kernels for the instruction set avx2. The target pragma comes before the intrinsics' header; only the table entry may
// leave the translation unit.
#pragma GCC target("avx2,fma,f16c")

#include "cpu/vector_avx2.h"

#include "moe/cpu/combine.h"

namespace flashmoe::cpu {

extern const MoeKernel kMoeAvx2Kernel = {kPanelColumns, gemm_scratch_bytes, multiply,
                                         combine,       weight_gradients,   bias_gradient};

}  // namespace flashmoe::cpu
