// Emulated: the signatures of csrc/ptx/register_control.cuh plus the call site; a test compares the two.
#pragma once

#include "emulation/machine.h"
#include "ptx/types.cuh"

namespace flashmoe::ptx {

using emulation::Site;

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec(Site site = Site::here()) {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0, "setmaxnreg takes 24 to 256 by 8");
  emulation::set_max_registers(kRegisters, false, site, "setmaxnreg_dec");
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc(Site site = Site::here()) {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0, "setmaxnreg takes 24 to 256 by 8");
  emulation::set_max_registers(kRegisters, true, site, "setmaxnreg_inc");
}

}  // namespace flashmoe::ptx
