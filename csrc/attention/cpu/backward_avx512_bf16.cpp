// The backward kernel of avx512_bf16, which multiplies pairs of bf16. The target comes before the intrinsics' header;
// only the table entry may be visible outside the translation unit.
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")

#include "cpu/vector_avx512.h"

#include "cpu/bf16_pairs.h"

#include "attention/cpu/backward_simd.h"

namespace flashmoe::cpu {
namespace {

// The other types would gain nothing here, and each would take a third of this file's compile time.
void run_bf16(const BackwardTask& task, void* memory) {
  if (task.type != ScalarType::kBFloat16) return kBackwardAvx512Kernel.run(task, memory);
  if (task.is_exact && ExactBackward(task, memory).run()) return;
  backward_as<BFloat16>(task, memory);
}

}  // namespace

extern const BackwardKernel kBackwardAvx512Bf16Kernel = {backward_scratch_bytes, run_bf16};

}  // namespace flashmoe::cpu
