// Kernels for the instruction set that every x86-64 CPU has. Only the table entry may leave the translation unit.

#include "cpu/vector_sse2.h"

#include "moe/cpu/combine.h"

namespace flashmoe::cpu {

extern const MoeKernel kMoeBaselineKernel = {kPanelColumns, gemm_scratch_bytes, multiply,
                                             combine,       weight_gradients,   bias_gradient};

}  // namespace flashmoe::cpu
