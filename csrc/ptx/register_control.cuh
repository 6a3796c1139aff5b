// Moves registers between warpgroups (sm_90a). Every warp of a warpgroup executes it; ptxas heeds it only in a kernel
// with a register cap at entry, __launch_bounds__(threads, 1), and warns (C7508) when it does not.
#pragma once

namespace flashmoe::ptx {

// Gives up registers: this warp keeps kRegisters (24 to 256, a multiple of 8) per thread.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0, "setmaxnreg takes 24 to 256 by 8");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Waits until the pool holds enough, then has kRegisters per thread.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0, "setmaxnreg takes 24 to 256 by 8");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace flashmoe::ptx
