// The avx512 kernel. The target is set here, not by compiler flags, so that all files of this folder are compiled
// alike; it must come before the intrinsics' header. Only this kernel's table entry may be visible outside the
// translation unit.
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")

#include "cpu/vector_avx512.h"

#include "attention/cpu/run_simd.h"

namespace flashmoe::cpu {

extern const Kernel kAvx512Kernel = {kBlockRows, simd_scratch_bytes, run_simd};

}  // namespace flashmoe::cpu
