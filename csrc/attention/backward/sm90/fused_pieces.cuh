// Where the float32 sums of dq of a batch that a Batch describes lie: pieces of 64 rows of one entry, from its first row on.
//
// No search and no table: rows that lie in front of all entries come first, then the entries, then the rows behind them; the j-th of
// these, whose first row is row f of the tensor, has the pieces from f / 64 + j on. As f' / 64 + 1 >= f / 64 + ceil((f' - f) / 64)
// for the first row f' of the next, no two share a piece; some stay unused.
#pragma once

#include "attention/params/backward.h"
#include "attention/params/fused_backward.h"
#include "device/math.cuh"

namespace flashmoe {
namespace attention {
namespace backward {
namespace sm90 {

struct EntryPieces {
  bool is_ragged;
  int rows_total;  // of a ragged tensor
  int rows;        // of an entry of a dense one
  int batch;

  // Of one head.
  __device__ __forceinline__ int count() const {
    return is_ragged ? rows_total / kDqPartialRows + batch + 2 : batch * ceil_div(rows, kDqPartialRows);
  }
  // Of those of a head; first_row: of the entry in a ragged tensor.
  __device__ __forceinline__ int first(int entry, int first_row) const {
    return is_ragged ? first_row / kDqPartialRows + entry + 1 : entry * ceil_div(rows, kDqPartialRows);
  }
};

__device__ __forceinline__ EntryPieces entry_pieces(const BackwardParams& params) {
  return EntryPieces{params.sequences.cu_seqlens_q != nullptr, params.sequences.rows_total, params.seq_q, params.batch};
}

}  // namespace sm90
}  // namespace backward
}  // namespace attention
}  // namespace flashmoe
