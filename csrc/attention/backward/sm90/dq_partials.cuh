// The location of the fp32 partials of dq in varlen kernels: one partial is 64 rows of one sequence, from its first row
// on.
//
// They are found without a search or a table. The ranges of rows are, in order: rows before all sequences, the
// sequences, rows after them. The j-th range, whose first row is row f of the tensor, has the partials from f / 64 + j
// on. Because f' / 64 + 1 >= f / 64 + ceil((f' - f) / 64) for the first row f' of the next range, no two ranges share a
// partial; some stay unused.
#pragma once

#include "attention/params/backward.h"
#include "attention/params/fused_backward.h"
#include "device/math.cuh"

namespace flashmoe::attention::backward::sm90 {

struct DqPartials {
  bool is_ragged;
  int rows_total;  // of a ragged tensor
  int rows;        // per sequence of a dense one
  int batch;

  // Partials per head.
  __device__ __forceinline__ int count() const {
    return is_ragged ? rows_total / kDqPartialRows + batch + 2 : batch * ceil_div(rows, kDqPartialRows);
  }
  // A sequence's first partial among those of a head; first_row: the sequence's in a ragged tensor.
  __device__ __forceinline__ int first(int sequence, int first_row) const {
    return is_ragged ? first_row / kDqPartialRows + sequence + 1 : sequence * ceil_div(rows, kDqPartialRows);
  }
};

__device__ __forceinline__ DqPartials dq_partials(const BackwardParams& params) {
  return DqPartials{params.sequences.cu_seqlens_q != nullptr, params.sequences.rows_total, params.seq_q, params.batch};
}

}  // namespace flashmoe::attention::backward::sm90
