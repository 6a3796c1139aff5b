// Dropout of a warpgroup's P, by what other warps have drawn (varlen/drawer.cuh).
#pragma once

#include "attention/forward/sm90/spec.cuh"
#include "device/ring.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/permute.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe {
namespace attention {
namespace sm90 {

// Empty without dropout.
template <typename Spec, bool kHasDropout = Spec::kHasDropout>
struct BlockDropout {
  static __device__ __forceinline__ void skip(const SharedMemory<Spec>&, RingPosition<Spec::kDrawnSlots>&) {}
  static __device__ __forceinline__ void drop(uint32_t (&)[Spec::kBlockN / 4], const SharedMemory<Spec>&, int,
                                              RingPosition<Spec::kDrawnSlots>&) {}
};

template <typename Spec>
struct BlockDropout<Spec, true> {
  static __device__ __forceinline__ void release(const SharedMemory<Spec>& shared,
                                                 RingPosition<Spec::kDrawnSlots>& drawn) {
    ptx::warp_sync();  // all lanes have read
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(shared.drawn_empty(drawn.stage));
    drawn.advance();
  }
  static __device__ __forceinline__ void skip(const SharedMemory<Spec>& shared,
                                              RingPosition<Spec::kDrawnSlots>& drawn) {
    ptx::mbarrier_wait(shared.drawn_full(drawn.stage), drawn.parity);
    release(shared, drawn);
  }
  // What is kept is scaled with the output.
  static __device__ __forceinline__ void drop(uint32_t (&probabilities)[Spec::kBlockN / 4],
                                              const SharedMemory<Spec>& shared, int consumer,
                                              RingPosition<Spec::kDrawnSlots>& drawn) {
    ptx::mbarrier_wait(shared.drawn_full(drawn.stage), drawn.parity);
#pragma unroll
    for (int i = 0; i < Spec::kDraws; ++i) {
      uint32_t selectors[4];
      ptx::ld_shared_128(selectors, shared.drawn(drawn.stage, consumer, i, ptx::thread_index() % 128));
#pragma unroll
      for (int pair = 0; pair < 8; ++pair) {
        uint32_t& both = probabilities[8 * i + pair];
        both = ptx::permute_bytes(both, both, selectors[pair / 2] >> (pair % 2 * 16));
      }
    }
    release(shared, drawn);
  }
};

}  // namespace sm90
}  // namespace attention
}  // namespace flashmoe
