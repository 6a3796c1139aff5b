// The kernel that every x86-64 runs.

#include "vector_sse2.h"

#include "run_simd.h"

namespace flashmoe {
namespace cpu {

extern const Kernel kBaselineKernel = {"baseline", kGroupRows, simd_scratch_bytes, run_simd_tasks};

}  // namespace cpu
}  // namespace flashmoe
