// Dropout (../../dropout.cuh) of a warpgroup's P.
#pragma once

#include "attention/dropout.cuh"
#include "attention/forward/sm90/spec.cuh"
#include "device/ring.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/permute.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe {
namespace attention {
namespace sm90 {

// Of a thread's two rows of a tile. Empty without dropout.
template <typename Spec, bool kHasDropout = Spec::kHasDropout, bool kIsDrawn = (Spec::kNumDrawers > 0)>
struct TileDropout {
  using Slot = RingPosition<Spec::kDrawnSlots>;
  struct Block {};
  template <typename Tile>
  __device__ __forceinline__ TileDropout(const ForwardParams&, const Tile&, int) {}
  __device__ __forceinline__ Block draw(int) const { return {}; }
  __device__ __forceinline__ void fetch(Block&, const SharedMemory<Spec>&, int, const Slot&) const {}
  __device__ __forceinline__ void drop(uint32_t (&)[Spec::kBlockN / 4], const Block&, const SharedMemory<Spec>&,
                                       Slot&) const {}
  static __device__ __forceinline__ void skip(const SharedMemory<Spec>&, Slot&) {}
};

// What is kept is scaled with the output. Here the consumer draws: what a block keeps depends on no score, so that it is drawn while the tensor cores
// compute these.
template <typename Spec>
struct TileDropout<Spec, true, false> {
  using Slot = RingPosition<Spec::kDrawnSlots>;
  using Block = KeptPairs<Spec::kBlockN>;

  HeadDropout of_head;
  int row;  // the first of the two; the other is 8 further on

  template <typename Tile>
  __device__ __forceinline__ TileDropout(const ForwardParams& params, const Tile& tile, int row_)
      : of_head(dropout_of(params), tile.head, tile.batch), row(row_) {}

  __device__ __forceinline__ Block draw(int block) const {
    Block drawn;
    drawn.draw(of_head, row, block * Spec::kBlockN);
    return drawn;
  }
  __device__ __forceinline__ void fetch(Block&, const SharedMemory<Spec>&, int, const Slot&) const {}
  __device__ __forceinline__ void drop(uint32_t (&probabilities)[Spec::kBlockN / 4], const Block& drawn,
                                       const SharedMemory<Spec>&, Slot&) const {
#pragma unroll
    for (int i = 0; i < Spec::kBlockN / 4; ++i) probabilities[i] &= drawn.pair(i).halves();
  }
  static __device__ __forceinline__ void skip(const SharedMemory<Spec>&, Slot&) {}
};

// Here other warps have drawn (varlen/drawer.cuh).
template <typename Spec>
struct TileDropout<Spec, true, true> {
  using Slot = RingPosition<Spec::kDrawnSlots>;
  struct Block {
    uint32_t selectors[Spec::kDraws][4];
  };
  template <typename Tile>
  __device__ __forceinline__ TileDropout(const ForwardParams&, const Tile&, int) {}
  __device__ __forceinline__ Block draw(int) const { return {}; }
  // Ahead of a wait, which hides it.
  __device__ __forceinline__ void fetch(Block& block, const SharedMemory<Spec>& shared, int consumer,
                                        const Slot& slot) const {
    ptx::mbarrier_wait(shared.drawn_full(slot.stage), slot.parity);
#pragma unroll
    for (int i = 0; i < Spec::kDraws; ++i) {
      ptx::ld_shared_128(block.selectors[i], shared.drawn(slot.stage, consumer, i, ptx::thread_index() % 128));
    }
  }
  __device__ __forceinline__ void drop(uint32_t (&probabilities)[Spec::kBlockN / 4], const Block& block,
                                       const SharedMemory<Spec>& shared, Slot& slot) const {
#pragma unroll
    for (int i = 0; i < Spec::kBlockN / 4; ++i) {
      uint32_t& both = probabilities[i];
      both = ptx::permute_bytes(both, both, block.selectors[i / 8][i % 8 / 2] >> (i % 2 * 16));
    }
    release(shared, slot);
  }
  static __device__ __forceinline__ void skip(const SharedMemory<Spec>& shared, Slot& slot) {
    ptx::mbarrier_wait(shared.drawn_full(slot.stage), slot.parity);
    release(shared, slot);
  }
  static __device__ __forceinline__ void release(const SharedMemory<Spec>& shared, Slot& slot) {
    ptx::warp_sync();  // all lanes have read
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(shared.drawn_empty(slot.stage));
    slot.advance();
  }
};

}  // namespace sm90
}  // namespace attention
}  // namespace flashmoe
