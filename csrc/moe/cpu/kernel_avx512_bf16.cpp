// Kernels for the instruction set avx512_bf16, which multiplies pairs of bf16. The target pragma comes before the
// intrinsics' header; only the table entry may leave the translation unit.
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")

#include "cpu/vector_avx512.h"

#include "cpu/bf16_pairs.h"

#include "moe/cpu/grouped_gemm.h"

namespace flashmoe::cpu {
namespace {

// Only the bf16 product gains anything here; the rest would be compiled a second time.
void multiply_bf16(const GemmTask& task, void* memory) {
  if (task.type != ScalarType::kBFloat16) return kMoeAvx512Kernel.multiply(task, memory);
  multiply_as<BFloat16>(task, memory);
}
void combine(const moe::CombineParams& params, ScalarType type, int64_t begin, int64_t end) {
  kMoeAvx512Kernel.combine(params, type, begin, end);
}
void weight_gradients(const moe::CombineParams& params, ScalarType type, int64_t begin, int64_t end) {
  kMoeAvx512Kernel.weight_gradients(params, type, begin, end);
}
void bias_gradient(const moe::BiasGradientParams& params, ScalarType type, int64_t begin, int64_t end) {
  kMoeAvx512Kernel.bias_gradient(params, type, begin, end);
}

}  // namespace

extern const MoeKernel kMoeAvx512Bf16Kernel = {kPanelColumns, gemm_scratch_bytes, multiply_bf16,
                                               combine,       weight_gradients,   bias_gradient};

}  // namespace flashmoe::cpu
