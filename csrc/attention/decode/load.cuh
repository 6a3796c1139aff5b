// The loads of a warp: its 16 keys of each key tile, K and V, with cp.async into its own ring; and the item's query
// rows.
#pragma once

#include "attention/decode/plan.cuh"
#include "attention/decode/spec.cuh"
#include "attention/forward/mma_sync/accumulate.cuh"
#include "attention/forward/mma_sync/multiply.cuh"
#include "attention/sequences.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/tma.cuh"

namespace flashmoe::attention::decode {

// Copies one row of a lane's pass; columns from `columns` on, and rows that are not `valid`, become zeros. With
// kHasPolicy the copy has the L2 cache policy `policy`.
template <typename Tile, bool kHasPolicy>
__device__ __forceinline__ void load_row(ptx::SmemPointer tile_smem, int pass, const typename Tile::Element* row_gmem,
                                         bool valid, int columns, ptx::CachePolicy policy) {
  const int lane = ptx::lane_index();
  const int column = lane % Tile::kLanes * Tile::kLaneColumns;
  // Rows of two passes differ by 4, so the swizzle is the same only for every second pass.
  const ptx::SmemPointer row_smem =
      tile_smem + Tile::offset(pass * Tile::kRowsPerPass + lane / Tile::kLanes, lane % Tile::kLanes);
#pragma unroll
  for (int segment = 0; segment < Tile::kSegments; ++segment) {
    const ptx::SmemPointer smem = row_smem + segment * (Tile::kLanes * kChunkBytes);
    const typename Tile::Element* gmem = row_gmem + segment * Tile::kSegmentColumns + column;
    const int bytes = valid && segment * Tile::kSegmentColumns + column < columns ? kChunkBytes : 0;
    if constexpr (kHasPolicy) {
      ptx::cp_async_16(smem, gmem, bytes, policy);
    } else {
      ptx::cp_async_16(smem, gmem, bytes);
    }
  }
}

// Q as A operands: in registers, loaded from global memory after the loads of the first keys (prepare), or in the
// warp's copy in shared memory, whose loads (copy) belong to the next commit group. Rows past the item's last one
// repeat it; their results are never stored.
template <typename Spec>
struct QueryRegisters {
  using Element = typename Spec::Element;

  uint32_t Q_rmem[Spec::kHeadDim / 16][4];

  __device__ __forceinline__ static void copy(const ForwardParams&, const Element*, const Segment&, ptx::SmemPointer) {}

  __device__ __forceinline__ QueryRegisters(const ForwardParams&, const Element*, const Segment&, ptx::SmemPointer) {}

  __device__ __forceinline__ void prepare(const ForwardParams& params, const Element* Q_gmem, const Segment& segment,
                                          ptx::SmemPointer) {
    const int lane = ptx::lane_index();
    const Element* row_gmem[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int index = min(segment.rows - 1, half * 8 + lane / 4);
      row_gmem[half] = Q_gmem + query_row<Spec>(params, segment, index).offset(params.q_stride) + lane % 4 * 2;
    }
#pragma unroll
    for (int k = 0; k < Spec::kHeadDim / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = k * 16 + i / 2 * 8;
        Q_rmem[k][i] = column < params.head_dim ? ptx::ld_global_32(row_gmem[i % 2] + column) : 0;
      }
  }

  __device__ __forceinline__ void get(uint32_t (&a)[1][4], int k) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[0][i] = Q_rmem[k][i];
  }
};

template <typename Spec>
struct QueryCopy : mma_sync::QueryOperand<Spec, Spec::kHeadDim, false> {
  using Element = typename Spec::Element;
  using Tile = RowTile<Element, Spec::kHeadDim>;

  __device__ __forceinline__ static void copy(const ForwardParams& params, const Element* Q_gmem,
                                              const Segment& segment, ptx::SmemPointer Q_smem) {
    ptx::warp_sync();  // write after read: the previous Q
#pragma unroll
    for (int pass = 0; pass < Tile::kPasses; ++pass) {
      const int index = min(segment.rows - 1, pass * Tile::kRowsPerPass + ptx::lane_index() / Tile::kLanes);
      load_row<Tile, false>(Q_smem, pass, Q_gmem + query_row<Spec>(params, segment, index).offset(params.q_stride),
                            true, params.head_dim, ptx::CachePolicy{});
    }
  }

  __device__ __forceinline__ void prepare(const ForwardParams&, const Element*, const Segment&, ptx::SmemPointer) {}

  __device__ __forceinline__ QueryCopy(const ForwardParams&, const Element*, const Segment&, ptx::SmemPointer Q_smem)
      : mma_sync::QueryOperand<Spec, Spec::kHeadDim, false>(Q_smem) {}
};

template <typename Spec, bool kInRegisters = Spec::kQueryInRegisters>
struct QueryOf {
  using Type = QueryRegisters<Spec>;
};
template <typename Spec>
struct QueryOf<Spec, false> {
  using Type = QueryCopy<Spec>;
};

// Whether loads carry an L2 cache hint: never, always, or by KvReuse (none for kOften).
enum class Words { kNever, kAlways, kByReuse };

// Loads a warp's keys, tile by tile. Lanes 0 to 15 hold the location of K of the tile's 16 keys, the others that of V.
template <typename Spec, Words kWords>
struct KeyLoader {
  using Tile = typename Spec::KeyTile;
  using Element = typename Tile::Element;
  static constexpr bool kMayBeWhole =
      sizeof(Element) == 1;  // codes, whose conversion leaves few instructions for the loads

  const ForwardParams& params;
  const Sequence<MaskKind::kRuntime>& sequence;
  const KeyRange visible;  // keys that some row sees; the others become zeros, whatever the tensor holds
  const int first_hinted;  // the tile from which on loads carry a cache hint
  const ptx::CachePolicy policy;
  const uint32_t page_inverse;  // for codes: 2^32 / page_size, rounded down
  const Element* gmem;          // this lane's tensor, from the head's first element on
  // For this lane's key of the next tile: its page, and its row within the page (without pages, within the sequence).
  int page;
  int row;

  __device__ __forceinline__ static bool has_value() { return Spec::kHasValues && ptx::lane_index() >= kWarpKeys; }

  __device__ __forceinline__ KeyLoader(const ForwardParams& params_, const Sequence<MaskKind::kRuntime>& sequence_,
                                       const Segment& segment, KvReuse reuse)
      : params(params_),
        sequence(sequence_),
        visible(segment.seen),
        first_hinted(reuse == KvReuse::kOften || (kMayBeWhole && reuse == KvReuse::kOnce && params_.hints == 0)
                         ? kUnbounded
                     : reuse == KvReuse::kOnce ? segment.tile + params_.hints
                                               : 0),
        policy(reuse == KvReuse::kOnceInSmallBatch || params_.hints != 0 ? ptx::evict_first() : ptx::evict_normal()),
        page_inverse(kMayBeWhole && params_.sequences.block_table != nullptr
                         ? 0xffffffffu / static_cast<uint32_t>(params_.sequences.page_size)
                         : 0) {
    gmem = static_cast<const Element*>(has_value() ? params.v : params.k) +
           sequence.key_offset(has_value() ? params.v_stride : params.k_stride, segment.head_kv);
  }

  __device__ __forceinline__ static int first_key(int tile) {
    return tile * Spec::kTileKeys + ptx::warp_index() * kWarpKeys;
  }

  // Looks up the page of a tile's key, some time before its load.
  __device__ __forceinline__ void find(int tile) {
    const int key = first_key(tile) + ptx::lane_index() % kWarpKeys;
    page = row = 0;
    if (key < visible.begin || key >= visible.end) return;
    row = key;
    if (params.sequences.block_table != nullptr) {
      int page_of_sequence;
      if constexpr (kMayBeWhole) {
        page_of_sequence = static_cast<int>(static_cast<uint64_t>(key) * page_inverse >> 32);  // or one too few
        page_of_sequence += key - page_of_sequence * params.sequences.page_size >= params.sequences.page_size;
      } else {
        page_of_sequence = static_cast<int>(
            static_cast<uint32_t>(key) / static_cast<uint32_t>(params.sequences.page_size));  // once per tile: inlined
      }
      page = sequence.load_page(page_of_sequence);
      row = key - page_of_sequence * params.sequences.page_size;
    }
  }

  // Loads K, and V if the kernel takes values, of the tile whose keys were found; one commit group each.
  __device__ __forceinline__ void load(int tile, int, ptx::SmemPointer stage_smem) const {
    load_keys(tile, stage_smem);
  }
  __device__ __forceinline__ void load_keys(int tile, ptx::SmemPointer stage_smem) const {
    const int64_t page_stride = has_value() ? params.v_stride.batch : params.k_stride.batch;
    const int64_t row_stride = has_value() ? params.v_stride.row : params.k_stride.row;
    const uint64_t own = reinterpret_cast<uint64_t>(gmem + sequence.clamp_page(page) * page_stride + row * row_stride);
    const bool is_silent = kWords == Words::kNever || (kWords == Words::kByReuse && tile < first_hinted);
    if (kMayBeWhole && is_whole(tile)) {
      if (is_silent) {
        load_whole<false>(own, stage_smem);
      } else {
        load_whole<true>(own, stage_smem);
      }
    } else if (is_silent) {
      load_from<false>(own, tile, stage_smem);
    } else {
      load_from<true>(own, tile, stage_smem);
    }
  }

  // Called after the loads of the first tiles.
  __device__ __forceinline__ void begin() {}

  // S = Q K^T, and V in the form that accumulate_tile takes.
  using Query = typename QueryOf<Spec>::Type;
  __device__ __forceinline__ void multiply(float (&S_rmem)[1][Spec::kMmaN][4], const Query& Q, ptx::SmemPointer K_smem,
                                           int, int) const {
    mma_sync::multiply_query_key<Spec>(S_rmem, Q, K_smem);
  }
  __device__ __forceinline__ mma_sync::SharedValues<Spec> values(ptx::SmemPointer V_smem) const { return {V_smem}; }
  // Final change to the output: none.
  __device__ __forceinline__ void finish(float (&)[1][Spec::kMmaD][4]) const {}

  // Returns whether all of the warp's keys are visible and in one page.
  __device__ __forceinline__ bool is_whole(int tile) const {
    const int first = first_key(tile);
    const bool is_one_page = params.sequences.block_table == nullptr || params.sequences.page_size % kWarpKeys == 0;
    return is_one_page && first >= visible.begin && first + kWarpKeys <= visible.end;
  }

  // Loads such keys from the address of the first one.
  template <bool kHasPolicy>
  __device__ __forceinline__ void load_whole(uint64_t own, ptx::SmemPointer stage_smem) const {
    // A constant needs no register, nor a move to a uniform register for each load.
    constexpr ptx::CachePolicy kEvictFirst{static_cast<uint64_t>(ptx::CacheHint::kEvictFirst)};
#pragma unroll
    for (int is_value = 0; is_value < 2; ++is_value) {
      const int64_t row_stride = is_value ? params.v_stride.row : params.k_stride.row;
      const auto* row_gmem = reinterpret_cast<const Element*>(ptx::shuffle_index(own, is_value * kWarpKeys)) +
                             ptx::lane_index() / Tile::kLanes * row_stride;
#pragma unroll
      for (int pass = 0; pass < Tile::kPasses; ++pass) {
        load_row<Tile, kHasPolicy>(stage_smem + is_value * Spec::kTileBytes, pass,
                                   row_gmem + pass * Tile::kRowsPerPass * row_stride, true,
                                   is_value ? params.head_dim_v : params.head_dim, kEvictFirst);
      }
      ptx::cp_async_commit();
    }
  }

  // Loads each key from its own address, which one lane holds.
  template <bool kHasPolicy>
  __device__ __forceinline__ void load_from(uint64_t own, int tile, ptx::SmemPointer stage_smem) const {
#pragma unroll
    for (int is_value = 0; is_value < (Spec::kHasValues ? 2 : 1); ++is_value) {
#pragma unroll
      for (int pass = 0; pass < Tile::kPasses; ++pass) {
        const int key = pass * Tile::kRowsPerPass + ptx::lane_index() / Tile::kLanes;
        const bool valid = first_key(tile) + key >= visible.begin && first_key(tile) + key < visible.end;
        const uint64_t row_gmem = ptx::shuffle_index(own, is_value * kWarpKeys + key);
        load_row<Tile, kHasPolicy>(stage_smem + is_value * Spec::kTileBytes, pass,
                                   reinterpret_cast<const Element*>(row_gmem), valid,
                                   is_value ? params.head_dim_v : params.head_dim, policy);
      }
      ptx::cp_async_commit();
    }
  }
};

}  // namespace flashmoe::attention::decode
