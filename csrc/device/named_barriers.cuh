// The named barriers of a thread block: 16 in hardware, numbered, 0 the whole block's (ptx::barrier_sync_block).
//
// A kernel gives names to those that it uses itself: an enum class in its spec, and beside each name how many threads it joins and which hazard
// it closes. ptx::named_barrier_sync(barrier_id(Barrier::kName), threads), so that the emulator names the line of the kernel.
#pragma once

#include "ptx/barrier.cuh"

namespace flashmoe {

// Barriers of every kernel with consumer warpgroups.
enum class NamedBarrier : int {
  kBlock = 0,
  kConsumer = 1,  // and as many after it as there are consumers: the 128 threads of each (sync_consumer)
};

// Where a name stands for several barriers, side by side: the one of `index`.
template <typename Barrier>
__device__ __forceinline__ constexpr int barrier_id(Barrier barrier, int index = 0) {
  return static_cast<int>(barrier) + index;
}

// Joins the 128 threads of one consumer warpgroup: all of them write, through shared memory, what one of them hands to the copy engine.
__device__ __forceinline__ void sync_consumer(int consumer) {
  ptx::named_barrier_sync(barrier_id(NamedBarrier::kConsumer, consumer), 128);
}

}  // namespace flashmoe
