// The grouped products of a mixture-of-experts layer: the loop of one block over the tiles of a product, and the entry
// functions. multiply, which computes the sum of a tile, is that of the Spec's family (pipeline.cuh).
#pragma once

#include "device/persistent.cuh"
#include "moe/grouped_gemm/mma_sync/products.cuh"
#include "ptx/barrier.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::moe::mma_sync {

// Thread 0 finds the next tile while the first loads of this one are in flight. Two buffers alternate: the one
// being written was last read before the barrier at the end of the previous tile.
template <typename Product>
class TileSequence {
 public:
  __device__ __forceinline__ TileSequence(const GemmParams& params, const Product& product, ptx::SmemPointer tiles_smem)
      : params_(params),
        product_(product),
        next_smem_(tiles_smem),
        num_tiles_(product.num_tiles()),
        index_(ptx::block_index()) {
    if (ptx::thread_index() == 0) publish();
    ptx::barrier_sync_block();  // the first tile is written
  }

  __device__ __forceinline__ Tile next() {
    uint32_t words[4];
    ptx::ld_shared_128(words, next_smem_);
    next_smem_ = next_smem_ ^ kSlotBytes;
    Tile tile;
    memcpy(&tile, words, sizeof(Tile));
    return tile;
  }

  __device__ __forceinline__ void fetch_next() {
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

// Shared memory: the ring of tiles, which the epilogue reuses; two buffers for the next tile; the table of row tiles.
template <typename Spec, typename Product, typename Multiply>
__device__ __forceinline__ void run_tiles(const GemmParams& params, Multiply multiply) {
  const ptx::SmemPointer ring_smem = ptx::dynamic_shared_memory();
  const ptx::SmemPointer tiles_smem = ring_smem + Spec::kRingBytes;
  ptx::grid_dependency_wait();  // rows, offsets and the tile counter are written by earlier kernels
  const Product product(params, tiles_smem + 2 * TileSequence<Product>::kSlotBytes);
  TileSequence<Product> sequence(params, product, tiles_smem);
  for (Tile tile = sequence.next(); tile.expert >= 0; tile = sequence.next()) {
    Accumulator<Spec> accum;
    {
      auto operands = product.operands(tile);
      // Leaves the ring free, and contains a barrier even if there is nothing to add.
      multiply(operands, accum, ring_smem, [&] { sequence.fetch_next(); });
    }
    product.finish(tile, accum, ring_smem);
    ptx::barrier_sync_block();  // the next tile's loads overwrite what the epilogue has read; it is published
  }
}

template <typename Spec, typename Product>
__device__ __forceinline__ void run(const GemmParams& params) {
  run_tiles<Spec, Product>(params, [](auto& operands, Accumulator<Spec>& accum, ptx::SmemPointer ring_smem,
                                      auto while_loading) { multiply(operands, accum, ring_smem, while_loading); });
}

template <typename Spec, Weights kWeights>
__device__ __forceinline__ void grouped_gemm(const GemmParams& params) {
  run<Spec, RowProduct<Spec, kWeights, Result::kPlain>>(params);
}

template <typename Spec, Weights kWeights>
__device__ __forceinline__ void grouped_gemm_gated(const GemmParams& params) {
  run<Spec, RowProduct<Spec, kWeights, Result::kActivation>>(params);
}

template <typename Spec, Weights kWeights>
__device__ __forceinline__ void grouped_gemm_gated_backward(const GemmParams& params) {
  run<Spec, RowProduct<Spec, kWeights, Result::kGradient>>(params);
}

template <typename Spec>
__device__ __forceinline__ void grouped_gemm_weight_gradient(const GemmParams& params) {
  run<Spec, WeightGradient<Spec>>(params);
}

}  // namespace flashmoe::moe::mma_sync
