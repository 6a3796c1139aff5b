// mbarrier: a 64-bit arrival counter in shared memory (sm_90). A phase ends when the pending arrivals, and the bytes
// announced by arrive_expect_tx, have all come in; then the next phase begins with the count given to init. A waiter
// names the parity (0 or 1) of the phase it waits for: fresh barriers are in phase 0, so a wait for parity 1 passes.
#pragma once

#include "ptx/memory.cuh"

namespace flashmoe::ptx {

using Mbarrier = uint64_t;  // 8-byte aligned, shared memory

__device__ __forceinline__ void mbarrier_init(Mbarrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals) : "memory");
}

// Makes this thread's mbarrier_init visible to TMA; a block barrier must follow for the other threads.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival; what this thread wrote or read before is ordered before the end of the phase.
__device__ __forceinline__ void mbarrier_arrive(Mbarrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// One arrival that also announces `bytes` of TMA writes: the phase waits for them too.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(Mbarrier* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
               : "memory");
}

// One arrival, made once every cp.async that this thread has started before has written its bytes; threads that wait
// for the phase see them. (noinc: it is one of the arrivals given to init.) wgmma and TMA need
// fence_proxy_async_shared() after the wait, because cp.async writes like ordinary stores.
__device__ __forceinline__ void mbarrier_arrive_cp_async(Mbarrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// True when the phase of this parity has ended; may suspend the thread for a time limited by the hardware.
__device__ __forceinline__ bool mbarrier_try_wait(Mbarrier* barrier, int phase_parity) {
  uint32_t done;
  asm volatile(
      "{\n\t"
      ".reg .pred p;\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
      "selp.b32 %0, 1, 0, p;\n\t"
      "}"
      : "=r"(done)
      : "r"(smem_address(barrier)), "r"(phase_parity)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ void mbarrier_wait(Mbarrier* barrier, int phase_parity) {
  while (!mbarrier_try_wait(barrier, phase_parity)) {
  }
}

}  // namespace flashmoe::ptx
