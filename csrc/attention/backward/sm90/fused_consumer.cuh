// The fused kernel's (fused.cuh) spec, shared memory and consumers: each computes dk and dv of 64 keys, and passes dS^T
// on.
#pragma once

#include "attention/backward/sm90/dq_partials.cuh"
#include "attention/backward/sm90/dropout.cuh"
#include "attention/backward/sm90/key_value_consumer.cuh"
#include "attention/params/fused_backward.h"
#include "attention/params/mask_backward.h"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/stmatrix_trans.cuh"

namespace flashmoe::attention::backward::sm90 {

// Like the spec of dk and dv, with 16 warps: producer and reducing warps, two consumers, the dq warpgroup; or with 12,
// without the last.
//   kIsMasked_   the ring's stages also hold an additive mask's blocks, next to those of Q and dO
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps_,
          bool kIsVarlen_ = false, int kAlibi_ = 0, bool kIsMasked_ = false>
struct FusedSpec : KeyValueGradientSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, 12, 0, 0, kIsVarlen_> {
  using Base = KeyValueGradientSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, 12, 0, 0, kIsVarlen_>;
  static constexpr bool kStoresGradient = false;
  static constexpr bool kHasAlibi = kAlibi_ != 0;   // without a softcap, unlike in the split kernels
  static constexpr bool kIsWide = kHeadDim == 128;  // no dq warpgroup: the consumers do its work (fused_wide.cuh)
  static_assert(kHeadDim <= 128, "dk and dv of more columns need more registers than there are");
  static_assert(kNumWarps_ == (kIsWide ? 12 : 16) && kBlockM == 64 && kBlockN == kFusedTileKeys,
                "two consumers of 64 keys, dQ of one product's 64 rows");
  static constexpr int kNumThreads = 32 * kNumWarps_;
  static constexpr bool kOrdersReduction = true;
  static constexpr int kTileReaders = !kIsVarlen_ ? 0 : kIsWide ? 1 : 5;  // the statistics warp; the four dq warps
  static constexpr int kSectionHeads = kIsWide ? 16 : 0;        // eight tiles of each in flight on 132 multiprocessors
  static constexpr int kProducerRegisters = kIsWide ? 24 : 32;  // 128 * (32 + 2 * 208 + 64) = 65536
  static constexpr int kConsumerRegisters = kIsWide ? 240 : 208;
  static constexpr int kQueryRegisters = 64;

  static constexpr int kQueryBuffers = 2;                            // of dS^T
  static constexpr int kSumBuffers = kIsMasked_ && kIsWide ? 1 : 2;  // of dQ; a mask takes the place of the second
  using ScoreTile = SharedTile<kBlockN, kBlockM>;                    // dS^T of a block
  static constexpr int kScoreBytes = ScoreTile::kBytes;
  static constexpr int kQueryBytes = kBlockM * kHeadDim * 4;  // dQ of a block
  static constexpr int kScoreOffset = (Base::kSharedBytes + 1023) / 1024 * 1024;
  static constexpr int kQueryOffset = kScoreOffset + kQueryBuffers * kScoreBytes;
  using MaskTile = SharedTile<kBlockM, kBlockN>;  // a slab for each consumer
  static constexpr int kMaskBytes = kIsMasked_ ? MaskTile::kBytes : 0;
  static constexpr int kMaskOffset = kQueryOffset + kSumBuffers * kQueryBytes;
  static constexpr int kScoreBarrierOffset = kMaskOffset + kNumStages * kMaskBytes;
  static constexpr int kSharedBytes = kScoreBarrierOffset + kQueryBuffers * (4 * 8 + 16);
  static_assert(kSharedBytes <= 232448, "sm_90 gives a block at most 227 KiB");
};

// For MaskKind::kRuntime.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kAlibi>
using VarlenFusedSpec = FusedSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, true, kAlibi>;

// The same with dropout; takes DropoutBackwardParams.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kAlibi>
struct DropoutFusedSpec : VarlenFusedSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, kAlibi> {
  using Fused = VarlenFusedSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, kAlibi>;
  static constexpr bool kHasDropout = true;
  static constexpr int kNumDrawers = Fused::kIsWide ? 0 : 4;         // the dq warpgroup, if there is one
  static constexpr int kDrawnBytes = Fused::kIsWide ? 0 : 2 * 4096;  // per block: of both consumers (FusedDropout)
  static constexpr int kDrawnOffset = Fused::kScoreBarrierOffset;
  static constexpr int kScoreBarrierOffset = kDrawnOffset + kNumStages * kDrawnBytes;
  static constexpr int kDrawnBarrierOffset = kScoreBarrierOffset + Fused::kQueryBuffers * (4 * 8 + 16);
  static constexpr int kSharedBytes = kDrawnBarrierOffset + (kNumDrawers == 0 ? 0 : 2 * kNumStages * 8);
  static_assert(kSharedBytes <= 232448, "sm_90 gives a block at most 227 KiB");
};

// The same with an additive mask that has an element for each row and key; without a softcap. kGradient_: the mask's
// gradient is stored.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kGradient_>
struct MaskFusedSpec : FusedSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, true, 0, true> {
  static constexpr bool kStoresGradient = kGradient_ != 0;
};

template <typename Spec>
struct FusedMemory : SharedMemory<Spec> {
  using SharedMemory<Spec>::base;

  // dS^T, [128 keys][64 queries], half from each consumer.
  __device__ __forceinline__ typename Spec::ScoreTile scores(int buffer) const {
    return {base + Spec::kScoreOffset + buffer * Spec::kScoreBytes};
  }
  // dS as the left operand of dQ's products; one slab.
  __device__ __forceinline__ MnMajorOperand score_operand(int buffer) const {
    return {ptx::make_smem_descriptor(scores(buffer).smem, 0, kSwizzleBytes)};
  }
  // A partial of dq, in the order of FusedQueries::publish_sums.
  __device__ __forceinline__ unsigned char* query_sums(int buffer) const {
    return base + Spec::kQueryOffset + buffer * Spec::kQueryBytes;
  }
  // [64 queries][128 keys] of the mask, for the block in first(stage).
  __device__ __forceinline__ typename Spec::MaskTile mask(int stage) const {
    return {base + Spec::kMaskOffset + stage * Spec::kMaskBytes};
  }
  // With dropout: FusedDropout's words of `consumer` for the block in first(stage). They have separate barriers: the
  // words are needed later than Q, and their slot is free once dS^T is computed, before the products with it are done.
  __device__ __forceinline__ unsigned char* drawn(int stage, int consumer) const {
    return base + Spec::kDrawnOffset + stage * Spec::kDrawnBytes + consumer * (Spec::kDrawnBytes / 2);
  }
  __device__ __forceinline__ ptx::Mbarrier* drawn_full(int stage) const {
    return reinterpret_cast<ptx::Mbarrier*>(base + Spec::kDrawnBarrierOffset) + stage;
  }
  __device__ __forceinline__ ptx::Mbarrier* drawn_empty(int stage) const {
    return drawn_full(Spec::kFirstStages + stage);
  }
  __device__ __forceinline__ ptx::Mbarrier* scores_full(int buffer) const {
    return reinterpret_cast<ptx::Mbarrier*>(base + Spec::kScoreBarrierOffset) + buffer;
  }
  __device__ __forceinline__ ptx::Mbarrier* scores_empty(int buffer) const {
    return scores_full(Spec::kQueryBuffers + buffer);
  }
  __device__ __forceinline__ ptx::Mbarrier* sums_full(int buffer) const {
    return scores_full(2 * Spec::kQueryBuffers + buffer);
  }
  __device__ __forceinline__ ptx::Mbarrier* sums_empty(int buffer) const {
    return scores_full(3 * Spec::kQueryBuffers + buffer);
  }
  // The number of the partial that query_sums(buffer) belongs to, or -1, and this tile's rank in it; guarded by the
  // same barriers.
  __device__ __forceinline__ unsigned char* partial_record(int buffer) const {
    return base + Spec::kScoreBarrierOffset + Spec::kQueryBuffers * 4 * 8 + 16 * buffer;
  }
};

// K of both consumers' own tiles, from a slab on, as the right operand of dQ = dS K: four k steps for each.
template <typename Spec>
struct TileKeys {
  static constexpr bool kIsTransposed = true;
  uint64_t descriptor;

  __device__ __forceinline__ TileKeys(const unsigned char* smem)
      : descriptor(ptx::make_smem_descriptor(smem, Spec::OwnTile::kSlabBytes, kSwizzleBytes)) {}
  __device__ __forceinline__ uint64_t k_step(int step) const {
    return ptx::advance_smem_descriptor(descriptor, step / 4 * 2 * Spec::kOwnBytes + step % 4 * 16 * kSlabRowBytes);
  }
};

// Whether some of the 64 keys from first_key on are past the last.
__device__ __forceinline__ bool has_missing_keys(const BackwardParams& params, const Tile&, int first_key) {
  return first_key + 64 > params.seq_k;
}
__device__ __forceinline__ bool has_missing_keys(const BackwardParams&, const VarlenTile& tile, int first_key) {
  return first_key + 64 > tile.extents.key_count;
}

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

// Blocks of a tile's heads that see only the other consumer's keys, before and after a consumer's own range.
struct SkippedBlocks {
  int before;
  int behind;
};
__device__ __forceinline__ SkippedBlocks skipped_blocks(const Tile&, const BlockRange& own, const BlockRange& all,
                                                        int heads) {
  return SkippedBlocks{heads * (own.begin - all.begin), 0};
}
__device__ __forceinline__ SkippedBlocks skipped_blocks(const VarlenTile&, const BlockRange& own, const BlockRange& all,
                                                        int heads) {
  if (own.begin >= own.end) return SkippedBlocks{heads * (all.end - all.begin), 0};
  return SkippedBlocks{heads * (own.begin - all.begin), heads * (all.end - own.end)};
}

// The number of the first partial of a tile's sequence and head.
__device__ __forceinline__ int first_partial(const BackwardParams& params, const Tile& tile, int head) {
  return (tile.batch * params.heads_q + head) * ceil_div(params.seq_q, kDqPartialRows);
}
__device__ __forceinline__ int first_partial(const BackwardParams& params, const VarlenTile& tile, int head) {
  const DqPartials partials = dq_partials(params);
  return head * partials.count() + partials.first(tile.batch, tile.extents.first_row);
}

// The tile of the last keys that any row of block `block` sees; the block must see some.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ int last_tile(const BackwardParams& params, int block) {
  const int end_key = visible_keys<kMask>(params, Lengths{params}, (block + 1) * Spec::kStreamRows - 1).end;
  return static_cast<int>(static_cast<uint32_t>(end_key - 1) / Spec::kOwnRows);
}

// The number of tiles that add to a partial before this one.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ int reduction_rank(const BackwardParams& params, const Tile& tile, int block) {
  return is_descending<kMask>(tile) ? tile.index : last_tile<Spec, kMask>(params, block) - tile.index;
}
// Varlen: tiles whose query_blocks include the block add to it, up to the last tile that its last row sees; that row
// may be past the sequence's end, because blocks are counted whole. Descending tiles have no window that would exclude
// earlier tiles.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ int reduction_rank(const BackwardParams& params, const VarlenTile& tile, int block) {
  if (is_descending<kMask>(tile)) return tile.index;
  // The window of a row past the last may begin after the last key.
  const int end_key = window_keys(params.score_options, tile.extents, (block + 1) * Spec::kStreamRows - 1).end;
  return (minimum(end_key, tile.extents.keys()) - 1) / Spec::kOwnRows - tile.index;
}

// A block's ALiBi, read before its scores. Empty without ALiBi.
template <typename Spec, bool kHasAlibi = Spec::kHasAlibi>
struct BlockAlibi {
  __device__ __forceinline__ BlockAlibi(const BackwardParams&, const BlockCoordinates&) {}
};
template <typename Spec>
struct BlockAlibi<Spec, true> : Alibi {
  __device__ __forceinline__ BlockAlibi(const BackwardParams& params, const BlockCoordinates& coordinates)
      : Alibi(mask_pointer<Spec>(params, coordinates)) {
    slope *= params.score_options.mask_factor / kLog2E;  // in units of the scores, which exponentials() scales
  }
};

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

// Turns scores (S^T) into P^T. Unlike in the dk, dv kernel, a key past the last must have P = 0, because its dS is a
// factor of dQ.
template <typename Spec, MaskKind kMask, bool kIsMasked>
__device__ __forceinline__ void fused_exponentials(const BackwardParams& params, float (&scores)[Spec::kStreamRows / 2],
                                                   const float (&lse_log2)[Spec::kStreamRows / 4],
                                                   const BlockAlibi<Spec>& alibi, const BlockMask<Spec>& mask,
                                                   const BlockCoordinates& coordinates) {
  if constexpr (Spec::kHasAlibi) {
#pragma unroll
    for (int i = 0; i < Spec::kStreamRows / 2; ++i) {
      scores[i] = alibi.add(scores[i], i / 2 % 2, 8 * (i / 4) + i % 2);
    }
  }
  if constexpr (Spec::kMaskBytes > 0) {
    mask.apply_softmax(params, scores, lse_log2);
    if constexpr (kIsMasked) {
      KeyRange visible[2] = {{0, 0}, {0, 0}};
      visible_columns<Spec, kMask>(visible, params, coordinates);
#pragma unroll
      for (int i = 0; i < Spec::kStreamRows / 2; ++i) {
        const int column = 8 * (i / 4) + i % 2;
        if (column < visible[i / 2 % 2].begin || column >= visible[i / 2 % 2].end) scores[i] = 0.0f;
      }
    }
    return;
  }
  if constexpr (kMask == MaskKind::kRuntime)
    return exponentials<Spec, kMask, kIsMasked>(params, scores, lse_log2, coordinates);
  constexpr int kNever = 1 << 30;
  int begin[2] = {0, 0};
  if constexpr (kIsMasked) {
    const int lane = ptx::lane_index();
    const int key = coordinates.first_key + ptx::warp_index() % 4 * 16 + lane / 4;
    const int column = coordinates.block * Spec::kStreamRows + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int first = kMask == MaskKind::kCausal ? diagonal_row(Lengths{params}, key + 8 * r) - column : 0;
      begin[r] = key + 8 * r < params.seq_k ? first : kNever;
    }
  }
#pragma unroll
  for (int i = 0; i < Spec::kStreamRows / 2; ++i) {
    scores[i] = ptx::exp2_approx(ptx::fma_rn(scores[i], params.scale_log2, -lse_log2[i / 4 * 2 + i % 2]));
    if constexpr (kIsMasked) {
      if (8 * (i / 4) + i % 2 < begin[i / 2 % 2]) scores[i] = 0.0f;
    }
  }
}

template <typename Spec, MaskKind kMask, typename Mask>
struct FusedConsumer : MaskGradient<Spec, Mask> {
  using Product = Products<Spec>;
  using Element = typename Spec::Element;
  using Tile = MaskTile<kMask>;
  static constexpr bool kIsVarlen = kMask == MaskKind::kRuntime;
  static constexpr int kOwn = Spec::kHeadDim / 4;  // registers per thread for 64 rows of K, or V

  const BackwardParams& params;
  const FusedMemory<Spec> shared;
  const int consumer;  // 0 or 1
  RingPosition<Spec::kFirstStages> at;
  RingPosition<Spec::kFirstStages> used;  // the oldest that has not been released: `at`, or one behind
  RingPosition<Spec::kQueryBuffers> published;

  __device__ __forceinline__ FusedConsumer(const BackwardParams& params_, const FusedMemory<Spec>& shared_,
                                           int consumer_, const Mask& mask)
      : MaskGradient<Spec, Mask>(mask), params(params_), shared(shared_), consumer(consumer_) {}

  __device__ __forceinline__ void release_used() {
    this->wait_read();
    release(shared.first_empty(used.stage));
    used.advance();
  }
  __device__ __forceinline__ void wait_block() const { ptx::mbarrier_wait(shared.first_full(at.stage), at.parity); }

  // The current block of Q, or of dO, as a right operand. Varlen: its descriptor is computed in the constructor; dense:
  // at each use.
  template <bool kIsSecond>
  struct StreamBlock {
    const FusedConsumer& owner;
    uint64_t descriptor = 0;

    __device__ __forceinline__ explicit StreamBlock(const FusedConsumer& owner_) : owner(owner_) {
      if constexpr (kIsVarlen) {
        descriptor = static_cast<uint64_t>(ptx::recompute(static_cast<int64_t>(tile().k_major().descriptor)));
      }
    }
    __device__ __forceinline__ typename Spec::StreamTile tile() const {
      return kIsSecond ? owner.shared.second(owner.at.stage) : owner.shared.first(owner.at.stage);
    }
    __device__ __forceinline__ KMajorOperand<Spec::kStreamRows> k_major() const {
      if constexpr (kIsVarlen) return {descriptor};
      return tile().k_major();
    }
    __device__ __forceinline__ MnMajorOperand mn_major() const {
      if constexpr (kIsVarlen) return {descriptor | static_cast<uint64_t>(Spec::StreamTile::kSlabBytes >> 4) << 16};
      return tile().mn_major();
    }
  };

  // The own rows in registers, as the left operand of S^T and dP^T: the products' shared-memory reads limit this
  // kernel.
  static __device__ __forceinline__ void load_own(uint32_t (&own)[kOwn], const typename Spec::OwnTile& tile) {
    const int lane = ptx::lane_index();
    const int row = ptx::warp_index() % 4 * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < Product::kSteps; ++step) {
      uint32_t words[4];
      ptx::ldmatrix_x4(words, tile.smem + row * kSlabRowBytes + ((step * 2 + lane / 16) ^ (row % 8)) * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) own[4 * step + i] = words[i];
    }
  }

  // Passes dS^T to the dq warpgroup, once that has finished with the buffer's previous content.
  __device__ __forceinline__ void publish_scores(const uint32_t (&packed)[Product::kPacked]) {
    ptx::mbarrier_wait(shared.scores_empty(published.stage), published.parity ^ 1);
    const int lane = ptx::lane_index();
    const int row = ptx::warp_index() % 4 * 16 + lane % 16;
    unsigned char* row_smem = shared.scores(published.stage).smem + (consumer * 64 + row) * kSlabRowBytes;
#pragma unroll
    for (int step = 0; step < Spec::kStreamRows / 16; ++step) {
      const uint32_t words[4] = {packed[4 * step], packed[4 * step + 1], packed[4 * step + 2], packed[4 * step + 3]};
      ptx::stmatrix_x4(row_smem + ((step * 2 + lane / 16) ^ (row % 8)) * 16, words);
    }
    // Hazard: the product of dq reads dS before it is written and visible to it.
    ptx::fence_proxy_async_shared();
    pass_scores();
  }
  __device__ __forceinline__ void pass_scores() {
    release(shared.scores_full(published.stage));
    published.advance();
  }

  __device__ __forceinline__ void step(float (&dk)[Product::kOutputs], float (&dv)[Product::kOutputs],
                                       uint32_t (&p_packed)[Product::kPacked], uint32_t (&ds_packed)[Product::kPacked],
                                       uint32_t (&own_k)[kOwn], uint32_t (&own_v)[kOwn],
                                       const TileDropout<Spec>& tile_dropout, const BlockCoordinates& coordinates,
                                       bool is_masked) {
    float scores[Product::kScores];
    float gradients[Product::kScores];  // dP^T, then dS^T
    float lse_log2[Product::kColumns];
    float row_dot[Product::kColumns];
    // Varlen: computed before the wait, across which ptxas moves nothing: otherwise the first product would be issued
    // later.
    const StreamBlock<false> q(*this);
    const StreamBlock<true> dout(*this);
    const int statistics =
        kIsVarlen ? ptx::recompute(at.stage * Spec::kStatisticsBytes) : at.stage * Spec::kStatisticsBytes;
    const BlockAlibi<Spec> alibi(params, coordinates);
    FusedDropout<Spec> dropout(tile_dropout, coordinates, shared, at, consumer);
    const BlockMask<Spec> mask(shared, at.stage, consumer);
    wait_block();
    load_columns<Spec>(lse_log2, shared.statistics(0) + statistics);
    issue_product<Element>(scores, own_k, q.k_major());
    // dV and dK of the previous block, before S^T: dP^T can then use the registers of their P^T and dS^T.
    ptx::wgmma_wait<1>();
    ptx::wgmma_fence_operands(dv);
    ptx::wgmma_fence_operands(dk);
    if (used.stage != at.stage) release_used();
    issue_product<Element>(gradients, own_v, dout.k_major());

    dropout.wait();
    ptx::wgmma_wait<1>();  // S^T
    ptx::wgmma_fence_operands(scores);
    if (is_masked) {
      // Varlen: values that depend on the block are computed here, not before the branch for every block.
      const int block = kIsVarlen ? ptx::recompute(coordinates.block) : coordinates.block;
      fused_exponentials<Spec, kMask, true>(
          params, scores, lse_log2, alibi, mask,
          BlockCoordinates{coordinates.tile_smem, coordinates.head, coordinates.first_key, block});
    } else {
      fused_exponentials<Spec, kMask, false>(params, scores, lse_log2, alibi, mask, coordinates);
    }
    load_columns<Spec>(row_dot, shared.statistics(at.stage) + Spec::kStreamRows * 4);
    dropout.fetch();
    pack_operand<Element>(p_packed, scores);
    dropout.drop_weights(p_packed);
    issue_product<Element, true>(dv, p_packed, dout.mn_major());

    dropout.fetch();
    ptx::wgmma_wait<1>();  // dP^T
    ptx::wgmma_fence_operands(gradients);
    dropout.score_gradients(gradients, scores, row_dot);
    pack_operand<Element>(ds_packed, gradients);
    this->put_gradient(shared, at.stage, consumer, ds_packed);
    publish_scores(ds_packed);
    issue_product<Element, true>(dk, ds_packed, q.mn_major());
    this->sync_gradient(consumer);
    this->store_gradient(shared, at.stage, consumer, coordinates.head, coordinates.block);
    at.advance();
  }

  // Skips a block that sees only keys of the other warpgroup. It passes on nothing, but advances the ring.
  __device__ __forceinline__ void skip_block() {
    wait_block();
    skip_drawn<Spec>(shared, at);
    at.advance();
    release_used();
    ptx::mbarrier_wait(shared.scores_empty(published.stage), published.parity ^ 1);
    pass_scores();
  }

  __device__ __forceinline__ void finish_products(float (&dk)[Product::kOutputs], float (&dv)[Product::kOutputs]) {
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operands(dk);
    ptx::wgmma_fence_operands(dv);
    if (used.stage != at.stage) release_used();
  }

  // Hazard: dK overwrites K while the dq warpgroup still multiplies with it.
  __device__ __forceinline__ void wait_for_query_products() const {
    RingPosition<Spec::kQueryBuffers> buffer = published;  // the oldest of all of them
#pragma unroll
    for (int i = 0; i < Spec::kQueryBuffers; ++i) {
      ptx::mbarrier_wait(shared.scores_empty(buffer.stage), buffer.parity ^ 1);
      buffer.advance();
    }
  }

  __device__ __forceinline__ void run(const ptx::TensorMap& dk_map, const ptx::TensorMap& dv_map) {
    const int heads = params.heads_q / params.heads_kv;
    for (int parity = 0;; parity ^= 1) {
      ptx::mbarrier_wait(shared.tile_full(consumer), parity);
      const Tile tile = read_tile<Tile>(shared.tile(consumer));
      if (tile.index < 0) break;
      ptx::mbarrier_wait(shared.own_full(consumer), parity);
      const int tile_key = tile.index * Spec::kOwnRows;
      const int first_key = tile_key + consumer * 64;
      const BlockRange range =
          within_tile<Spec>(query_blocks<Spec, kMask>(params, tile, first_key, first_key + 64), tile);
      const BlockRange all = tile_blocks(
          tile, [&] { return query_blocks<Spec, kMask>(params, tile, tile_key, tile_key + Spec::kOwnRows); });
      if (first_key < key_room(params, tile)) {
        const bool is_masked = has_missing_keys(params, tile, first_key);
        float dk[Product::kOutputs];
        float dv[Product::kOutputs];
        uint32_t p_packed[Product::kPacked];
        uint32_t ds_packed[Product::kPacked];
        uint32_t own_k[kOwn], own_v[kOwn];
        load_own(own_k, shared.own_first(consumer));
        load_own(own_v, shared.own_second(consumer));
        Product::clear(dk);
        Product::clear(dv);
        const TileDropout<Spec> dropout(params, tile);
        const SkippedBlocks skipped = skipped_blocks(tile, range, all, heads);
        for (int left = is_descending<kMask>(tile) ? skipped.behind : skipped.before; left > 0; --left) skip_block();
        if constexpr (kMask == MaskKind::kRuntime) {
          // Keep as little code between two blocks as in the dense kernel: nothing overlaps it.
          const int onwards = is_descending<kMask>(tile) ? -1 : 1;
          const int num_full = is_masked ? 0 : maximum(0, range.full_end - range.full_begin);
          int block = is_descending<kMask>(tile) ? range.end - 1 : range.begin;
          for (int left = range.end - range.begin; left > 0; --left, block += onwards) {
            const BlockCoordinates coordinates{shared.tile(consumer), 0, first_key, block};
            const bool is_full = static_cast<uint32_t>(block - range.full_begin) < static_cast<uint32_t>(num_full);
            const int needs_mask = ptx::recompute(is_full ? 0 : 1);
            int head = heads;
            do {
              if constexpr (Spec::kStoresGradient) {
                step(dk, dv, p_packed, ds_packed, own_k, own_v, dropout,
                     BlockCoordinates{shared.tile(consumer), heads - head, first_key, block}, needs_mask != 0);
              } else if constexpr (Spec::kHasAlibi) {  // the others do not use the head
                const int query_head = (tile.head + 1) * heads - head;
                step(dk, dv, p_packed, ds_packed, own_k, own_v, dropout,
                     BlockCoordinates{shared.tile(consumer), query_head, first_key, block}, needs_mask != 0);
              } else {
                step(dk, dv, p_packed, ds_packed, own_k, own_v, dropout, coordinates, needs_mask != 0);
              }
            } while (--head > 0);
          }
        } else {
          for (int i = range.begin; i < range.end; ++i) {
            const int block = is_descending<kMask>(tile) ? range.begin + range.end - 1 - i : i;
            const BlockCoordinates coordinates{shared.tile(consumer), 0, first_key, block};
            for (int head = 0; head < heads; ++head) {
              step(dk, dv, p_packed, ds_packed, own_k, own_v, dropout, coordinates,
                   is_masked || block < range.full_begin);
            }
          }
        }
        finish_products(dk, dv);
        for (int left = is_descending<kMask>(tile) ? skipped.before : skipped.behind; left > 0; --left) skip_block();
        wait_for_query_products();
        // Hazard: dK and dV overwrite K and V while another warp of the warpgroup still multiplies with them.
        sync_consumer(consumer);
        Product::store_shared(shared.own_second(consumer), dv, value_scale<Spec>(params));
        Product::store_shared(shared.own_first(consumer), dk, params.scale * value_scale<Spec>(params));
        // Hazard: TMA reads before all 64 rows are written and visible to it.
        ptx::fence_proxy_async_shared();
        sync_consumer(consumer);
        if (ptx::thread_index() % 128 == 0) {
          const Tile done =
              read_tile<Tile>(shared.tile(consumer));  // read again: no register holds it through the loop
          const int row = done.index * Spec::kOwnRows + consumer * 64;
          Product::store_global(dv_map, shared.own_second(consumer), row, keys_stored(params.sequence_rows.dv, done));
          Product::store_global(dk_map, shared.own_first(consumer), row, keys_stored(params.sequence_rows.dk, done));
          ptx::tma_store_commit();
          // Hazard: the next tile's K and V overwrite the gradients while the store still reads them.
          ptx::tma_store_wait_read<0>();
        }
      } else {
        // Keys past the end: nothing to compute or to store.
        for (int left = heads * (all.end - all.begin); left > 0; --left) skip_block();
        sync_consumer(consumer);  // every warp has read the tile's record
      }
      if (ptx::thread_index() % 128 == 0) ptx::mbarrier_arrive(shared.own_empty(consumer));
    }
  }
};

}  // namespace flashmoe::attention::backward::sm90
