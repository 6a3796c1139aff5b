// The location of the stream's blocks in global and in shared memory, and their order: head by head, in each from the
// last block down to the first. How they are loaded depends on the family (its stream.cuh).
#pragma once

#include "attention/backward/mma_sync/tile.cuh"
#include "attention/backward/score_mod.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"

namespace flashmoe::attention::backward::mma_sync {

template <typename Spec>
struct StreamSource {
  using Element = typename Spec::Element;
  static constexpr MaskKind kKind = Spec::kIsVarlen ? MaskKind::kRuntime : MaskKind::kFull;
  using Tile = MaskTile<kKind>;

  const BackwardParams& params;
  const Tile tile;
  const StreamRange range;
  const ptx::SmemPointer smem;  // the block's shared memory
  int next_head;                // of the block that is loaded next
  int next_block;

  __device__ __forceinline__ StreamSource(const BackwardParams& params_, const Tile& tile_, const StreamRange& range_,
                                          ptx::SmemPointer smem_)
      : params(params_), tile(tile_), range(range_), smem(smem_), next_head(range.head), next_block(range.end - 1) {}

  __device__ __forceinline__ bool has_next() const {
    return Spec::kStreamsQueries ? next_head < range.end_head : next_block >= range.begin;
  }
  __device__ __forceinline__ void advance() {
    --next_block;
    if (Spec::kStreamsQueries && next_block < range.begin) {
      next_block = range.end - 1;
      ++next_head;
    }
  }

  __device__ __forceinline__ int rows() const {
    return Spec::kStreamsQueries ? lengths_of(params, tile).rows() : lengths_of(params, tile).keys();
  }
  __device__ __forceinline__ int second_columns() const { return value_columns<kKind>(params); }
  __device__ __forceinline__ const Strides& first_stride() const {
    return Spec::kStreamsQueries ? params.q_stride : params.k_stride;
  }
  __device__ __forceinline__ const Strides& second_stride() const {
    return Spec::kStreamsQueries ? params.dout_stride : params.v_stride;
  }
  __device__ __forceinline__ const Element* first_gmem() const {
    return stream_head(Spec::kStreamsQueries ? params.q : params.k, first_stride());
  }
  __device__ __forceinline__ const Element* second_gmem() const {
    return stream_head(Spec::kStreamsQueries ? params.dout : params.v, second_stride());
  }
  __device__ __forceinline__ const Element* stream_head(const void* tensor, const Strides& stride) const {
    return static_cast<const Element*>(tensor) +
           (Spec::kStreamsQueries ? row_offset(stride, tile, next_head) : key_offset(stride, tile, next_head));
  }

  // [kStreamRows, kHeadDim], swizzled.
  __device__ __forceinline__ ptx::SmemPointer first(int stage) const {
    return smem + (Spec::kStreamOffset + stage * Spec::kStreamBytes);
  }
  __device__ __forceinline__ ptx::SmemPointer second(int stage) const {
    return smem + (Spec::kStreamOffset + (Spec::kNumStages + stage) * Spec::kStreamBytes);
  }
  // [2][kStreamRows] fp32: the log-sum-exp in base 2, then row_dot.
  __device__ __forceinline__ ptx::SmemPointer statistics(int stage) const {
    return smem + (Spec::kStatisticsOffset + stage * Spec::kStatisticsBytes);
  }

  // This thread's statistic of the next block: the first kStreamRows threads fetch the log-sum-exp of a row, the next
  // kStreamRows threads its row_dot.
  __device__ __forceinline__ float fetch_statistic() const {
    const int thread = ptx::recompute(ptx::thread_index());
    const int row = next_block * Spec::kStreamRows + thread % Spec::kStreamRows;
    const bool is_lse = thread < Spec::kStreamRows;
    float value = is_lse ? ptx::negative_infinity() : 0.0f;
    if (thread < 2 * Spec::kStreamRows && row < rows()) {
      const int64_t at = first_statistic(params, tile, next_head) + row;
      value = ptx::ld_global_float((is_lse ? params.lse : params.row_dot) + at);
    }
    return is_lse ? in_base_2(value) : value;
  }
  __device__ __forceinline__ void store_statistic(int stage, float value) const {
    const int thread = ptx::recompute(ptx::thread_index());
    if (thread < 2 * Spec::kStreamRows) ptx::st_shared_float(statistics(stage) + thread * 4, value);
  }
};

}  // namespace flashmoe::attention::backward::mma_sync
