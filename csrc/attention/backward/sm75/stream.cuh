// The stream without cp.async: a block is loaded through registers once all warps are done with the previous one.
#pragma once

#include "attention/backward/mma_sync/stream.cuh"
#include "attention/forward/sm75/load.cuh"
#include "ptx/barrier.cuh"

namespace flashmoe::attention::backward::sm75 {

// Like the sm_80 family's, but nothing is loaded ahead: the accumulators leave no registers for a block in flight.
template <typename Spec>
struct Stream : mma_sync::StreamSource<Spec> {
  using Source = mma_sync::StreamSource<Spec>;
  using Element = typename Spec::Element;
  using Source::Source;

  template <int kRows>
  static __device__ __forceinline__ void copy(ptx::SmemPointer smem, const Element* head_gmem, int64_t row_stride,
                                              int row, int rows, int head_dim) {
    attention::sm75::StagedTile<Spec, kRows> staged;
    staged.fetch(head_gmem + row * row_stride, row_stride, head_dim, rows - row);
    staged.store(smem);
  }
  static __device__ __forceinline__ void commit() {}
  static __device__ __forceinline__ void wait() {}

  static __device__ __forceinline__ void load_own(ptx::SmemPointer smem, const Element* head_gmem, int64_t row_stride,
                                                  int row, int rows, int head_dim) {
    copy<Spec::kOwnRows>(smem, head_gmem, row_stride, row, rows, head_dim);
  }

  __device__ __forceinline__ void start() const {}

  __device__ __forceinline__ void wait_second() {
    ptx::barrier_sync_block();  // all warps are done with the previous block
    const int row = this->next_block * Spec::kStreamRows;
    copy<Spec::kStreamRows>(first(), this->first_gmem(), this->first_stride().row, row, this->rows(),
                            this->params.head_dim);
    copy<Spec::kStreamRows>(second(), this->second_gmem(), this->second_stride().row, row, this->rows(),
                            this->second_columns());
    if constexpr (Spec::kStreamsQueries) this->store_statistic(0, this->fetch_statistic());
    ptx::barrier_sync_block();  // this one is whole, and so are the own rows
    Source::advance();
  }
  __device__ __forceinline__ void wait_first() const {}

  __device__ __forceinline__ ptx::SmemPointer first() const { return Source::first(0); }
  __device__ __forceinline__ ptx::SmemPointer second() const { return Source::second(0); }
  __device__ __forceinline__ ptx::SmemPointer current_statistics() const { return this->statistics(0); }

  __device__ __forceinline__ void advance() const {}
  __device__ __forceinline__ void finish() const {}
};

}  // namespace flashmoe::attention::backward::sm75
