// The mask that the fused kernel (fused.cuh) streams: its loads, which blocks of it are skipped, its values in the softmax,
// and the stores of its gradient.
#pragma once

#include "attention/backward/sm90/fused_spec.cuh"
#include "attention/params/mask_backward.h"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/stmatrix_trans.cuh"

namespace flashmoe::attention::backward::sm90 {

// A range of blocks without those that a streamed mask hides from the whole tile.
template <typename Spec>
__device__ __forceinline__ BlockRange within_tile(BlockRange range, const Tile&) {
  return range;
}
template <typename Spec>
__device__ __forceinline__ BlockRange within_tile(BlockRange range, const VarlenTile& tile) {
  if constexpr (Spec::kMaskBytes > 0) {
    range.begin = maximum(range.begin, tile.begin_block);
    range.end = minimum(range.end, tile.end_block);
  }
  return range;
}

// A consumer's 64 keys of a stage's mask; empty without a mask.
template <typename Spec, bool kHasMask = (Spec::kMaskBytes > 0)>
struct BlockMask {
  __device__ __forceinline__ BlockMask(const FusedMemory<Spec>&, int, int) {}
};
template <typename Spec>
struct BlockMask<Spec, true> {
  using Element = typename Spec::Element;
  unsigned char* lane_smem;  // the lane's eight keys, for the first of its queries

  __device__ __forceinline__ BlockMask(const FusedMemory<Spec>& shared, int stage, int consumer) {
    const int lane = ptx::recompute(ptx::lane_index());  // no address lives through the loop
    const int query = lane / 16 * 8 + lane % 8;
    const int chunk = ptx::warp_index() % 4 * 2 + lane / 8 % 2;
    lane_smem = shared.mask(stage).slab(consumer) + query * kSlabRowBytes + (chunk ^ (query % 8)) * 16;
  }
  // Turns scores (S^T) into P^T for all keys and queries.
  __device__ __forceinline__ void apply_softmax(const BackwardParams& params, float (&scores)[Spec::kStreamRows / 2],
                                                const float (&lse_log2)[Spec::kStreamRows / 4]) const {
#pragma unroll
    for (int step = 0; step < Spec::kStreamRows / 16; ++step) {
      uint32_t values[4];  // for 8 queries the first 8 keys, and the other 8; then for the next 8 queries
      ptx::ldmatrix_x4_trans(values, lane_smem + step * 16 * kSlabRowBytes);
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const float2 value = unpack<Element>(values[pair]);
        const int first = 8 * step + pair / 2 * 4 + pair % 2 * 2;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& score = scores[first + c];
          const float exponent = ptx::fma_rn(score, params.scale_log2, -lse_log2[first / 4 * 2 + c]);
          // P is at most 1, but for scores near the lowest float the difference is only rounding error.
          score = ptx::exp2_approx(min(ptx::fma_rn(c == 0 ? value.x : value.y, kLog2E, exponent), 0.0f));
        }
      }
    }
  }
};

// An additive mask of dense rows and keys; map: a dense map of the mask. gradient_map: of dS for every sequence and
// head, if it is stored.
struct StreamedMask {
  const MaskBackwardParams& launched;
  const ptx::TensorMap& map;
  const ptx::TensorMap& gradient_map;

  // Narrows the range to the blocks from the first to the last that see a key of the tile. Without the mask the range
  // has all blocks, because there is neither a window nor a length per sequence.
  __device__ __forceinline__ void narrow(BlockRange& range, const VarlenTile& tile) const {
    const VisibleTiles& visible = launched.visible;
    if (visible.ranges == nullptr) return;
    const int matrix = tile.batch * visible.per_sequence + tile.head * visible.per_head;
    uint32_t seen[2];
    ptx::ld_global_64(seen, visible.ranges + 2 * (matrix * visible.tiles + tile.index));
    range.begin = static_cast<int>(seen[0]);
    range.end = static_cast<int>(seen[1]);
  }

  // The rank of a tile in a partial of dq, from its rank if every tile added to it: the number of later tiles.
  __device__ __forceinline__ int rank_of(const BackwardParams& params, int partial, int rank) const {
    const VisibleTiles& visible = launched.visible;
    if (visible.ranks == nullptr) return rank;
    const int of_sequence = partial / visible.row_blocks;
    const int head = of_sequence / params.batch;
    const int matrix = (of_sequence - head * params.batch) * visible.per_sequence + head * visible.per_head;
    const int tile = visible.tiles - 1 - rank;
    return static_cast<int>(ptx::ld_global_32(visible.ranks + (matrix * visible.tiles + tile) * visible.row_blocks +
                                              (partial - of_sequence * visible.row_blocks)));
  }

  // Loads the mask of a block of queries and the published tile's keys, on the barrier of the block.
  template <typename Spec>
  __device__ __forceinline__ void load(const BackwardParams& params, const SharedMemory<Spec>& shared, int stage,
                                       int row, int head) const {
    const typename Spec::MaskTile tile = FusedMemory<Spec>{shared.base}.mask(stage);
    const ScoreOptions& options = params.score_options;
    const int first_key = static_cast<int>(ptx::ld_shared_32(shared.produced_tile())) * Spec::kOwnRows;
    const int sequence = static_cast<int>(ptx::ld_shared_32(shared.produced_tile() + 8));
    const DenseCoordinates at{options.mask_stride_head == 0 ? 0 : head, options.mask_stride_batch == 0 ? 0 : sequence};
#pragma unroll
    for (int slab = 0; slab < Spec::MaskTile::kNumSlabs; ++slab) {
      load_box(tile.slab(slab), map, shared.first_full(stage), first_key + slab * kSlabColumns, row, at,
               ptx::CacheHint::kEvictNormal);  // heads and sequences may share it
    }
  }
};

// Stores dS of a block, if required: in the stage it overwrites the mask, each warp its own 16 keys, which only that
// warp has read. Empty otherwise; a base class of the consumer, so that it takes no space there.
template <typename Spec, typename Mask, bool kStores = Spec::kStoresGradient>
struct MaskGradient {
  __device__ __forceinline__ explicit MaskGradient(const Mask&) {}
  __device__ __forceinline__ void put_gradient(const FusedMemory<Spec>&, int, int,
                                               const uint32_t (&)[Products<Spec>::kPacked]) const {}
  __device__ __forceinline__ void sync_gradient(int) const {}
  __device__ __forceinline__ void store_gradient(const FusedMemory<Spec>&, int, int, int, int) const {}
  __device__ __forceinline__ void wait_read() const {}
};
template <typename Spec>
struct MaskGradient<Spec, StreamedMask, true> {
  const StreamedMask& mask;

  __device__ __forceinline__ explicit MaskGradient(const StreamedMask& mask_) : mask(mask_) {}

  // packed: dS^T, as an operand. The caller must order it before the TMA reads.
  __device__ __forceinline__ void put_gradient(const FusedMemory<Spec>& shared, int stage, int consumer,
                                               const uint32_t (&packed)[Products<Spec>::kPacked]) const {
    unsigned char* lane_smem = BlockMask<Spec>(shared, stage, consumer).lane_smem;
#pragma unroll
    for (int step = 0; step < Spec::kStreamRows / 16; ++step) {
      const uint32_t words[4] = {packed[4 * step], packed[4 * step + 1], packed[4 * step + 2], packed[4 * step + 3]};
      ptx::stmatrix_x4_trans(lane_smem + step * 16 * kSlabRowBytes, words);
    }
  }
  // Hazard: TMA reads before all warps of the consumer have written.
  __device__ __forceinline__ void sync_gradient(int consumer) const { sync_consumer(consumer); }
  // head: within the tile's group. Everything else is read from the tile's record: no register holds it through the
  // block.
  __device__ __forceinline__ void store_gradient(const FusedMemory<Spec>& shared, int stage, int consumer, int head,
                                                 int block) const {
    if (ptx::thread_index() % 128 != 0) return;
    uint32_t tile[4];  // of a VarlenTile
    ptx::ld_shared_128(tile, shared.tile(consumer));
    const BackwardParams& params = mask.launched.backward;
    const int first_key = static_cast<int>(tile[0]) * Spec::kOwnRows + consumer * 64;
    const int query_head = static_cast<int>(tile[1]) * (params.heads_q / params.heads_kv) + head;
    store_box(mask.gradient_map, shared.mask(stage).slab(consumer), first_key, block * Spec::kStreamRows,
              DenseCoordinates{query_head, static_cast<int>(tile[2])});
    ptx::tma_store_commit();
  }
  // Called before the stage is released. Hazard: the next block's mask overwrites dS while it is read.
  __device__ __forceinline__ void wait_read() const {
    if (ptx::thread_index() % 128 == 0) ptx::tma_store_wait_read<0>();
  }
};

}  // namespace flashmoe::attention::backward::sm90
