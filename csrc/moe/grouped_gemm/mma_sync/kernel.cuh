// The loop of one block over the tiles of a product. multiply: the family's way to compute the sum.
#pragma once

#include "device/persistent.cuh"
#include "moe/grouped_gemm/mma_sync/products.cuh"
#include "ptx/barrier.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::moe::mma_sync {

// Thread 0 finds the next tile while the first loads of this one are in flight. Two slots alternate: the slot being
// written was last read before the barrier at the end of the previous tile.
template <typename Product>
class TileSequence {
 public:
  __device__ __forceinline__ TileSequence(const GemmParams& params, const Product& product, ptx::SmemPointer slots_smem)
      : params_(params),
        product_(product),
        next_smem_(slots_smem),
        num_tiles_(product.num_tiles()),
        index_(ptx::block_index()) {
    if (ptx::thread_index() == 0) publish();
    ptx::barrier_sync_block();  // the first tile is written
  }

  __device__ __forceinline__ Tile take() {
    uint32_t words[4];
    ptx::ld_shared_128(words, next_smem_);
    next_smem_ = next_smem_ ^ kSlotBytes;
    Tile tile;
    memcpy(&tile, words, sizeof(Tile));
    return tile;
  }

  __device__ __forceinline__ void find_next() {
    if (ptx::thread_index() != 0) return;
    index_ = next_tile_index(params_.tile_counter, num_tiles_, index_);
    publish();
  }

  static constexpr int kSlotBytes = 16;

 private:
  __device__ __forceinline__ void publish() const {
    Tile tile{-1, 0, 0, 0};
    if (index_ < num_tiles_) tile = product_.locate(index_);
    uint32_t words[4];
    memcpy(words, &tile, sizeof(Tile));
    ptx::st_shared_128(next_smem_, words);
  }

  const GemmParams& params_;
  const Product& product_;
  ptx::SmemPointer next_smem_;
  int num_tiles_;
  int index_;  // only thread 0's advances
};

// Shared memory: the ring of tiles, which the epilogue reuses; two slots for the next tile; the table of row tiles.
template <typename Spec, typename Product, typename Multiply>
__device__ __forceinline__ void run_tiles(const GemmParams& params, Multiply multiply) {
  const ptx::SmemPointer ring_smem = ptx::dynamic_shared_memory();
  const ptx::SmemPointer slots_smem = ring_smem + Spec::kRingBytes;
  ptx::grid_dependency_wait();  // rows, offsets and the tile counter are written by earlier kernels
  const Product product(params, slots_smem + 2 * TileSequence<Product>::kSlotBytes);
  TileSequence<Product> sequence(params, product, slots_smem);
  for (Tile tile = sequence.take(); tile.expert >= 0; tile = sequence.take()) {
    Accumulator<Spec> sums;
    {
      auto operands = product.operands(tile);
      // Leaves the ring free, and contains a barrier even if there is nothing to add.
      multiply(operands, sums, ring_smem, [&] { sequence.find_next(); });
    }
    product.finish(tile, sums, ring_smem);
    ptx::barrier_sync_block();  // the next tile's loads overwrite what the epilogue has read; its slot is written
  }
}

}  // namespace flashmoe::moe::mma_sync
