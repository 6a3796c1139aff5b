// One block's work: tile after tile of a product. Pipeline<Spec, Product>::multiply is the family's way through the sum.
#pragma once

#include "device/persistent.cuh"
#include "moe/grouped_gemm/mma_sync/products.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe {
namespace moe {
namespace mma_sync {

// Shared memory: the ring of tiles, which the epilogue takes over; the table of row tiles; the number of the next tile.
template <typename Spec, typename Product, typename Pipeline>
__device__ __forceinline__ void run_tiles(const GemmParams& params, Pipeline multiply) {
  const ptx::SmemPointer ring_smem = ptx::dynamic_shared_memory();
  const ptx::SmemPointer next_smem = ring_smem + (Spec::kRingBytes + RowTiles<Spec::kBlockM>::kSharedBytes);
  const Product product(params, ring_smem + Spec::kRingBytes);
  const int num_tiles = product.num_tiles();
  int index = ptx::block_index();
  while (index < num_tiles) {
    if (ptx::thread_index() == 0)
      ptx::st_shared_32(next_smem, next_tile_index(params.tile_counter, num_tiles, index));
    const Tile tile = product.locate(index);
    Accumulator<Spec> sums;
    {
      auto operands = product.operands(tile);
      multiply(operands, sums, ring_smem);  // ends with the ring free; has a barrier also where there is nothing to add
    }
    product.finish(tile, sums, ring_smem);
    index = static_cast<int>(ptx::ld_shared_32(next_smem));
    ptx::barrier_sync_block();  // the next tile's loads overwrite what the epilogue has read, its number the one read here
  }
}

}  // namespace mma_sync
}  // namespace moe
}  // namespace flashmoe
