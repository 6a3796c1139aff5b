// The avx2 kernel. The target is set here, not by compiler flags, so that all files of this folder are compiled alike;
// it must come before the intrinsics' header. Nothing but this kernel's table entry may leave the translation unit.
#pragma GCC target("avx2,fma,f16c")

#include "vector_avx2.h"

#include "run_simd.h"

namespace flashmoe {
namespace cpu {

extern const Kernel kAvx2Kernel = {"avx2", kGroupRows, simd_scratch_bytes, run_simd_tasks};

}  // namespace cpu
}  // namespace flashmoe
