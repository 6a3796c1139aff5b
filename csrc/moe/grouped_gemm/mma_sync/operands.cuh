// Chooses the chunks of global memory that a thread copies to an operand's tiles, one tile after another along the sum.
//
// visit(copy) calls copy(pass, gmem, valid) for each of the thread's kPasses chunks of the next tile; an invalid chunk
// becomes zeros, and its address is not read. Chunk `pass` belongs at smem_offset(pass).
#pragma once

#include "device/math.cuh"
#include "moe/grouped_gemm/mma_sync/tile.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::moe::mma_sync {

// Tiles [kRows, kBlockK] of rows at arbitrary addresses.
template <typename Spec, int kRows>
class RowsOperand {
 public:
  using Element = typename Spec::Element;
  static constexpr bool kIsMn = false;
  static constexpr int kRowsPerPass = Spec::kNumThreads / kRowChunks;  // a multiple of 8: the swizzle stays the same
  static constexpr int kPasses = kRows / kRowsPerPass;
  static_assert(kPasses * kRowsPerPass == kRows, "a pass must end with the tile");

  // row_of(r): the start of row r of the tile, [k]; for rows that do not count, any readable row.
  template <typename RowOf>
  __device__ __forceinline__ RowsOperand(int k, RowOf row_of) {
    const int thread = ptx::thread_index();
    const int column = thread % kRowChunks * kChunkElements;
    left_ = k - column;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
      chunk_gmem_[pass] = row_of(thread / kRowChunks + pass * kRowsPerPass) + column;
  }

  static __device__ __forceinline__ int smem_offset(int pass) {
    const int thread = ptx::thread_index();
    return row_offset(thread / kRowChunks, thread % kRowChunks) + pass * kRowsPerPass * kRowBytes;
  }

  template <typename Copy>
  __device__ __forceinline__ void visit(Copy copy) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      copy(pass, chunk_gmem_[pass], left_ > 0);
      chunk_gmem_[pass] += kBlockK;
    }
    left_ -= kBlockK;
  }

 private:
  const Element* chunk_gmem_[kPasses];
  int left_;  // elements from the chunk to the row's end
};

// Shared by the two operands below: tiles [kBlockK, kColumns] of neighbouring columns, chunk by chunk.
template <typename Spec, int kColumns>
struct ColumnChunks {
  static constexpr bool kIsMn = true;
  static constexpr int kChunks = kColumns / kChunkElements;
  static constexpr int kRowsPerPass = Spec::kNumThreads / kChunks;  // a multiple of 8, as above
  static constexpr int kPasses = kBlockK / kRowsPerPass;
  static_assert(kPasses * kRowsPerPass == kBlockK && kRowsPerPass % 8 == 0, "a pass must end with the tile");

  static __device__ __forceinline__ int row() { return ptx::thread_index() / kChunks; }
  static __device__ __forceinline__ int column() { return ptx::thread_index() % kChunks * kChunkElements; }

  static __device__ __forceinline__ int smem_offset(int pass) {
    return swizzled_offset<kColumns>(row(), ptx::thread_index() % kChunks) + pass * kRowsPerPass * kColumns * 2;
  }
};

// Rows at a constant stride: weights [k, n].
template <typename Spec, int kColumns>
class ColumnsOperand : public ColumnChunks<Spec, kColumns> {
 public:
  using Element = typename Spec::Element;
  using Chunks = ColumnChunks<Spec, kColumns>;

  // column_gmem: the thread's chunk in row 0.
  __device__ __forceinline__ ColumnsOperand(int k, const Element* column_gmem, int64_t stride, bool has_column)
      : chunk_gmem_(column_gmem + Chunks::row() * stride), stride_(stride), left_(has_column ? k - Chunks::row() : 0) {}

  template <typename Copy>
  __device__ __forceinline__ void visit(Copy copy) {
#pragma unroll
    for (int pass = 0; pass < Chunks::kPasses; ++pass) {
      copy(pass, chunk_gmem_, left_ > pass * Chunks::kRowsPerPass);
      chunk_gmem_ += Chunks::kRowsPerPass * stride_;
    }
    left_ -= kBlockK;
  }

 private:
  const Element* chunk_gmem_;
  int64_t stride_;
  int left_;  // rows from the thread's first to the end
};

// The rows of an expert, which are summed over: row i is row i of the tensor, or the row of its slot's token.
template <typename Spec, int kColumns>
class SummedRowsOperand : public ColumnChunks<Spec, kColumns> {
 public:
  using Element = typename Spec::Element;
  using Chunks = ColumnChunks<Spec, kColumns>;

  // column_gmem: the thread's chunk in row 0 of the tensor; first_row, rows: those of the expert.
  __device__ __forceinline__ SummedRowsOperand(const Element* column_gmem, int64_t stride, bool has_column,
                                               const int32_t* slots, int top_k, int first_row, int rows)
      : column_gmem_(column_gmem),
        slots_(slots),
        stride_(stride),
        top_k_(top_k),
        row_(first_row),
        end_row_(first_row + rows),
        has_column_(has_column) {
    fetch_slot();
  }

  // Rows past the expert's end belong to the next one and are replaced by zeros, since 0 * NaN is NaN.
  template <typename Copy>
  __device__ __forceinline__ void visit(Copy copy) {
    if (slots_ == nullptr) {
      const Element* next_gmem = column_gmem_ + (row_ + Chunks::row()) * stride_;
      visit_rows(copy, [&](int) {
        const Element* chunk_gmem = next_gmem;
        next_gmem += Chunks::kRowsPerPass * stride_;
        return chunk_gmem;
      });
    } else {
      const int token = slot_ / top_k_;  // for the tile's row `lane`
      visit_rows(copy, [&](int row) { return column_gmem_ + ptx::shuffle_index(token, row) * stride_; });
    }
    row_ += kBlockK;
    fetch_slot();
  }

 private:
  template <typename Copy, typename Source>
  __device__ __forceinline__ void visit_rows(Copy copy, Source source_of) const {
#pragma unroll
    for (int pass = 0; pass < Chunks::kPasses; ++pass) {
      const int row = Chunks::row() + pass * Chunks::kRowsPerPass;
      copy(pass, source_of(row), has_column_ && row_ + row < end_row_);
    }
  }

  // One tile ahead, and divided only when it is used: a division right after the load would wait for it.
  __device__ __forceinline__ void fetch_slot() {
    const int row = row_ + ptx::lane_index();
    slot_ = slots_ != nullptr && row < end_row_ ? static_cast<int>(ptx::ld_global_32(slots_ + row)) : 0;
  }

  const Element* column_gmem_;
  const int32_t* slots_;
  int64_t stride_;
  int top_k_;
  int row_;  // first row of the next tile
  int end_row_;
  int slot_;  // of row row_ + lane
  bool has_column_;

  static_assert(kBlockK == 32, "a lane holds the slot of one row of a tile");
};

}  // namespace flashmoe::moe::mma_sync
