// Where the blocks of the stream lie in global and in shared memory, and in which order they come: head by head, in each
// from the last block down to the first. How they are loaded is the family's business (its stream.cuh).
#pragma once

#include "attention/backward/mma_sync/tile.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"

namespace flashmoe {
namespace attention {
namespace backward {
namespace mma_sync {

constexpr float kLog2e = 1.44269504088896340736f;

// A log-sum-exp in base 2. A row without visible keys gets +inf, so that its P is exp2(finite - inf) = 0.
__device__ __forceinline__ float in_base_2(float lse) {
  return lse == ptx::negative_infinity() ? -ptx::negative_infinity() : lse * kLog2e;
}

template <typename Element>
__device__ __forceinline__ const Element* head_of(const void* tensor, const Strides& stride, int batch, int head) {
  return static_cast<const Element*>(tensor) + (batch * stride.batch + head * stride.head);
}

template <typename Spec>
struct StreamSource {
  using Element = typename Spec::Element;

  const BackwardParams& params;
  const int batch;
  const StreamRange range;
  const ptx::SmemPointer smem;  // the block's shared memory
  int next_head;                // of the block that is loaded next
  int next_block;

  __device__ __forceinline__ StreamSource(const BackwardParams& params_, int batch_, const StreamRange& range_,
                                          ptx::SmemPointer smem_)
      : params(params_), batch(batch_), range(range_), smem(smem_), next_head(range.head), next_block(range.end - 1) {}

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

  __device__ __forceinline__ int rows() const { return Spec::kStreamsQueries ? params.seq_q : params.seq_k; }
  __device__ __forceinline__ const Strides& first_stride() const {
    return Spec::kStreamsQueries ? params.q_stride : params.k_stride;
  }
  __device__ __forceinline__ const Strides& second_stride() const {
    return Spec::kStreamsQueries ? params.dout_stride : params.v_stride;
  }
  __device__ __forceinline__ const Element* first_gmem() const {
    return head_of<Element>(Spec::kStreamsQueries ? params.q : params.k, first_stride(), batch, next_head);
  }
  __device__ __forceinline__ const Element* second_gmem() const {
    return head_of<Element>(Spec::kStreamsQueries ? params.dout : params.v, second_stride(), batch, next_head);
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

  // This thread's statistic of the next block: of the first kStreamRows threads the log-sum-exp of a row, of as many others
  // its row_dot.
  __device__ __forceinline__ float fetch_statistic() const {
    const int thread = ptx::recompute(ptx::thread_index());
    const int row = next_block * Spec::kStreamRows + thread % Spec::kStreamRows;
    const bool is_lse = thread < Spec::kStreamRows;
    float value = is_lse ? ptx::negative_infinity() : 0.0f;
    if (thread < 2 * Spec::kStreamRows && row < params.seq_q) {
      const int64_t at = static_cast<int64_t>(batch * params.heads_q + next_head) * params.seq_q + row;
      value = ptx::ld_global_float((is_lse ? params.lse : params.row_dot) + at);
    }
    return is_lse ? in_base_2(value) : value;
  }
  __device__ __forceinline__ void store_statistic(int stage, float value) const {
    const int thread = ptx::recompute(ptx::thread_index());
    if (thread < 2 * Spec::kStreamRows) ptx::st_shared_float(statistics(stage) + thread * 4, value);
  }
};

}  // namespace mma_sync
}  // namespace backward
}  // namespace attention
}  // namespace flashmoe
