// What the backward passes of dense and of ragged attention share: which gradients are wanted, and row_dot by itself.
#pragma once

#include <cstdint>

#include "attention/params/backward.h"
#include "attention/params/row_dot.h"
#include "host/launch.h"

namespace flashmoe {
namespace attention {

// The bits of the backward operators' `needs`.
constexpr int64_t kNeedsDq = 1;
constexpr int64_t kNeedsDk = 2;
constexpr int64_t kNeedsDv = 4;
constexpr int64_t kNeedsAll = kNeedsDq | kNeedsDk | kNeedsDv;

// Where no kernel of dq runs. Ragged rows: one batch entry of rows_total.
inline RowDotParams make_row_dot_params(const BackwardParams& params, int32_t head_dim) {
  const bool is_ragged = params.sequences.cu_seqlens_q != nullptr;
  return {params.out,
          params.dout,
          params.lse,
          params.dlse,
          params.row_dot,
          params.out_stride,
          params.dout_stride,
          is_ragged ? 1 : params.batch,
          params.heads_q,
          is_ragged ? params.sequences.rows_total : params.seq_q,
          head_dim};
}

// What FusedQueryParams and VarlenFusedQueryParams have in common; sums come later.
template <class QueryParams>
QueryParams fused_query_params(const BackwardParams& params) {
  QueryParams queries{};
  queries.out = params.out;
  queries.dout = params.dout;
  queries.lse = params.lse;
  queries.dlse = params.dlse;
  queries.row_dot = params.row_dot;
  queries.dq = params.dq;
  queries.out_stride = params.out_stride;
  queries.dout_stride = params.dout_stride;
  queries.dq_stride = params.dq_stride;
  queries.batch = params.batch;
  queries.heads = params.heads_q;
  queries.rows = params.seq_q;
  queries.head_dim = params.head_dim;
  queries.scale = params.scale;
  return queries;
}

inline host::Launch row_dot_launch(const host::Kernel& kernel, const RowDotParams& params) {
  const int64_t rows = static_cast<int64_t>(params.batch) * params.heads * params.rows;
  const int64_t block_rows = kernel.threads / 4;
  return {&kernel, (rows + block_rows - 1) / block_rows, &params, nullptr, /*is_dependent=*/false};
}

}  // namespace attention
}  // namespace flashmoe
