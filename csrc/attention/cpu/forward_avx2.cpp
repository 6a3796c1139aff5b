// The avx2 kernel. The target is set here, not by compiler flags, so that all host files are compiled alike; it must
// come before the intrinsics' header. Only this kernel's table entry may be visible outside the translation unit.
#pragma GCC target("avx2,fma,f16c")

#include "cpu/vector_avx2.h"

#include "attention/cpu/run_simd.h"

namespace flashmoe::cpu {

extern const Kernel kAvx2Kernel = {kBlockRows, simd_scratch_bytes, run_simd};

}  // namespace flashmoe::cpu
