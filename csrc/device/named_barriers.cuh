// The named barriers of a thread block: 16 in hardware; number 0 is the whole block's (ptx::barrier_sync_block).
//
// A kernel names its own barriers in an enum class in its spec, and says how many threads each joins and which hazard
// it closes. Call ptx::named_barrier_sync(barrier_id(Barrier::kName), threads) directly, so that the emulator reports
// the kernel's line.
#pragma once

#include "ptx/barrier.cuh"

namespace flashmoe {

// Barriers of every kernel with consumer warpgroups.
enum class NamedBarrier : int {
  kBlock = 0,
  kConsumer = 1,  // first of one barrier per consumer, for its 128 threads (sync_consumer)
};

// The barrier's number; `index` for a name that stands for several adjacent barriers.
template <typename Barrier>
__device__ __forceinline__ constexpr int barrier_id(Barrier barrier, int index = 0) {
  return static_cast<int>(barrier) + index;
}

// Joins the 128 threads of one consumer warpgroup: all of them write to shared memory what one of them passes to TMA.
__device__ __forceinline__ void sync_consumer(int consumer) {
  ptx::named_barrier_sync(barrier_id(NamedBarrier::kConsumer, consumer), 128);
}

}  // namespace flashmoe
