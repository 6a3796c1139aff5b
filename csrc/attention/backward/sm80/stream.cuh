// The stream with cp.async.
#pragma once

#include "attention/backward/mma_sync/stream.cuh"
#include "attention/forward/sm80/load.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"

namespace flashmoe::attention::backward::sm80 {

// Per block: wait_second, work on the second tensor, wait_first, work on the first, advance. Both waits synchronise all
// threads. (With a ring, wait_second waits for both tensors.)
template <typename Spec>
struct Stream : mma_sync::StreamSource<Spec> {
  using Source = mma_sync::StreamSource<Spec>;
  using Element = typename Spec::Element;
  using Loader = attention::sm80::TileLoader<Spec, /*kIsAscending=*/false>;
  static constexpr int kStages = Spec::kNumStages;

  int stage = 0;             // of the current block
  int load_stage = 0;        // of the next block to load
  int statistic_stage = -1;  // of this thread's last statistic, if it has not been stored yet
  float statistic = 0.0f;
  // Varlen, where a sequence's offsets take more registers: the running pointers of the loaders.
  const Element* next_first = nullptr;
  const Element* next_second = nullptr;

  __device__ __forceinline__ Stream(const BackwardParams& params, const typename Source::Tile& tile,
                                    const mma_sync::StreamRange& range, ptx::SmemPointer smem)
      : Source(params, tile, range, smem) {
    if constexpr (Spec::kIsVarlen) begin_head();
  }

  // For when the next block is the last of a head.
  __device__ __forceinline__ void begin_head() {
    const int end_row = (this->next_block + 1) * Spec::kStreamRows;
    next_first = Loader(this->first_gmem(), this->first_stride().row, end_row).next_gmem;
    next_second = Loader(this->second_gmem(), this->second_stride().row, end_row).next_gmem;
  }

  // Starts the copy of rows `row` to row + kRows - 1.
  template <int kRows>
  static __device__ __forceinline__ void copy(ptx::SmemPointer smem, const Element* head_gmem, int64_t row_stride,
                                              int row, int rows, int head_dim) {
    Loader loader(head_gmem, row_stride, row + kRows);
    loader.template load<kRows, false>(smem, row_stride, head_dim, rows - row);
  }
  static __device__ __forceinline__ void commit() { ptx::cp_async_commit(); }
  static __device__ __forceinline__ void wait() { ptx::cp_async_wait<0>(); }

  // Starts the copy of the rows that the thread block owns; it belongs to the stream's first commit group.
  static __device__ __forceinline__ void load_own(ptx::SmemPointer smem, const Element* head_gmem, int64_t row_stride,
                                                  int row, int rows, int head_dim) {
    copy<Spec::kOwnRows>(smem, head_gmem, row_stride, row, rows, head_dim);
  }

  // Of the head of the next block. Only varlen kernels keep a pointer from block to block.
  __device__ __forceinline__ void load_rows(ptx::SmemPointer tile_smem, const Element* head_gmem, int64_t row_stride,
                                            int block, int columns) {
    Loader loader(head_gmem, row_stride, (block + 1) * Spec::kStreamRows);
    loader.template load<Spec::kStreamRows, false>(tile_smem, row_stride, columns, rows_from(block));
  }
  __device__ __forceinline__ void load_next_rows(const Element*& next_gmem, ptx::SmemPointer tile_smem,
                                                 int64_t row_stride, int block, int columns) {
    Loader loader(next_gmem);
    loader.template load<Spec::kStreamRows, false>(tile_smem, row_stride, columns, rows_from(block));
    next_gmem = loader.next_gmem;
  }
  __device__ __forceinline__ int rows_from(int block) const { return this->rows() - block * Spec::kStreamRows; }

  __device__ __forceinline__ void load_first(int block, int to_stage) {
    if constexpr (Spec::kIsVarlen) {
      load_next_rows(next_first, this->first(to_stage), this->first_stride().row, block, this->params.head_dim);
    } else {
      load_rows(this->first(to_stage), this->first_gmem(), this->first_stride().row, block, this->params.head_dim);
    }
  }
  __device__ __forceinline__ void load_second(int block, int to_stage) {
    if constexpr (Spec::kIsVarlen) {
      load_next_rows(next_second, this->second(to_stage), this->second_stride().row, block, this->second_columns());
    } else {
      load_rows(this->second(to_stage), this->second_gmem(), this->second_stride().row, block, this->second_columns());
    }
  }

  __device__ __forceinline__ void load_next() {
    load_first(this->next_block, load_stage);
    load_second(this->next_block, load_stage);
    if constexpr (Spec::kStreamsQueries) {
      statistic = this->fetch_statistic();
      statistic_stage = load_stage;
    }
    load_stage = load_stage == kStages - 1 ? 0 : load_stage + 1;
    Source::advance();
    if constexpr (Spec::kIsVarlen && Spec::kStreamsQueries) {
      if (this->next_block == this->range.end - 1) begin_head();
    }
  }

  __device__ __forceinline__ void store_last_statistic() {
    if constexpr (Spec::kStreamsQueries) {
      if (statistic_stage >= 0) this->store_statistic(statistic_stage, statistic);
      statistic_stage = -1;
    }
  }

  __device__ __forceinline__ void start() {
    if constexpr (kStages == 1) {
      if (this->has_next()) {
        load_second(this->next_block, 0);
        Source::advance();
      }
      ptx::cp_async_commit();
    } else {
#pragma unroll
      for (int ahead = 0; ahead < kStages - 1; ++ahead) {
        store_last_statistic();
        if (this->has_next()) load_next();
        ptx::cp_async_commit();
      }
    }
  }

  // Waits until the own rows have arrived.
  __device__ __forceinline__ void wait_own() const {
    ptx::cp_async_wait<kStages == 1 ? 0 : kStages - 2>();
    ptx::barrier_sync_block();
  }

  __device__ __forceinline__ void wait_second() {
    if constexpr (kStages == 1) {
      ptx::cp_async_wait<0>();
      ptx::barrier_sync_block();  // second tensor has arrived; all warps are done with the previous block's first
      load_first(this->next_block + 1, 0);
      ptx::cp_async_commit();
    } else {
      store_last_statistic();
      ptx::cp_async_wait<kStages - 2>();
      ptx::barrier_sync_block();  // this block has arrived; all warps are done with the last one, whose buffers refill
      if (this->has_next()) load_next();
      ptx::cp_async_commit();
    }
  }

  __device__ __forceinline__ void wait_first() {
    if constexpr (kStages == 1) {
      ptx::cp_async_wait<0>();
      ptx::barrier_sync_block();  // the first tensor has arrived; all warps are done with the second
      if (this->has_next()) {
        load_second(this->next_block, 0);
        Source::advance();
      }
      ptx::cp_async_commit();
    }
  }

  __device__ __forceinline__ ptx::SmemPointer first() const { return Source::first(stage); }
  __device__ __forceinline__ ptx::SmemPointer second() const { return Source::second(stage); }
  __device__ __forceinline__ ptx::SmemPointer current_statistics() const { return this->statistics(stage); }
  using Source::first;
  using Source::second;

  __device__ __forceinline__ void advance() { stage = stage == kStages - 1 ? 0 : stage + 1; }
  __device__ __forceinline__ void finish() const { ptx::cp_async_wait<0>(); }
};

}  // namespace flashmoe::attention::backward::sm80
