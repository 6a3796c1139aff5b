// The scratch memory of a task of attention's backward pass. Include after a vector_*.h. Internal linkage.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/cpu/backward_kernel.h"
#include "cpu/gemm_pack.h"
#include "cpu/gemm_strided.h"
#include "cpu/rows.h"

namespace flashmoe::cpu {
namespace {

constexpr int64_t kScoreStride = kBackwardKeys + 16;  // of scores, between rows: not a power of two

// The layout of a task's scratch memory. "rows" arrays have words along a row; "columns" arrays have one word per
// column, of one row or of two. With words of one element both are the same memory.
template <class T>
struct BackwardScratch {
  int64_t dim_stride;     // of every array with head_dim columns
  int64_t packed_words;   // of the larger head_dim, in k_t and v_t
  float* q_rows;          // [rows, head_dim]
  float* q_columns;       // the same
  float* dout_rows;       // [rows, head_dim]
  float* dout_columns;    // the same
  float* k_t;             // [pair of vectors of keys, words of head_dim, kPairColumns]
  float* v_t;             // the same
  float* k_columns;       // [keys, head_dim]
  float* scores;          // [rows, keys]: S, and P in its place if a word is one element
  float* dscores;         // the same: dP, dS
  float* p_columns;       // [rows, keys]
  float* ds_columns;      // the same
  float* ds_rows;         // the same
  float* dk;              // [keys, head_dim] fp32 sums
  float* dv;              // the same
  float* dq;              // [heads, rows, head_dim] of the task: fp32 sums
  float* lse;             // [rows]; +inf for a row that sees no key, so that its P is 0
  float* row_term;        // [rows]
  float* row_term_error;  // [rows]: the rounding error of the row term, if known; otherwise 0
  float* correction;      // [rows]: the rounding error of -lse, in base 2, if known; otherwise 0
  float* row_terms;       // [heads, rows] of the task: all row terms, from the first block of keys on
  float* square;          // scratch of score_row
  float* slopes;          // [rows, keys], for a softcap
  float* factors;         // [rows, keys], for dropout
  size_t bytes;

  BackwardScratch(void* base, const BackwardTask& task) {
    constexpr bool kIsPair = kWordElements<T> == 2;
    const int32_t head_dim = task.params->head_dim > task.head_dim_v ? task.params->head_dim : task.head_dim_v;
    Arena arena(base);
    dim_stride = round_up(head_dim, kPairColumns) + 16;
    packed_words = round_up(word_count<T>(head_dim), Vector::kWidth);
    q_rows = arena.take<float>(kBackwardRows * dim_stride);
    q_columns = kIsPair ? arena.take<float>(kBackwardRows / 2 * dim_stride) : q_rows;
    dout_rows = arena.take<float>(kBackwardRows * dim_stride);
    dout_columns = kIsPair ? arena.take<float>(kBackwardRows / 2 * dim_stride) : dout_rows;
    k_t = arena.take<float>(kBackwardKeys * packed_words);
    v_t = arena.take<float>(kBackwardKeys * packed_words);
    k_columns = arena.take<float>(kBackwardKeys / kWordElements<T> * dim_stride);
    scores = arena.take<float>(kBackwardRows * kScoreStride);
    dscores = arena.take<float>(kBackwardRows * kScoreStride);
    p_columns = kIsPair ? arena.take<float>(kBackwardRows / 2 * kScoreStride) : scores;
    ds_columns = kIsPair ? arena.take<float>(kBackwardRows / 2 * kScoreStride) : dscores;
    ds_rows = kIsPair ? arena.take<float>(kBackwardRows / 2 * kScoreStride) : dscores;
    dk = arena.take<float>(kBackwardKeys * dim_stride);
    dv = arena.take<float>(kBackwardKeys * dim_stride);
    lse = arena.take<float>(kBackwardRows);
    row_term = arena.take<float>(kBackwardRows);
    row_term_error = arena.take<float>(kBackwardRows);
    correction = arena.take<float>(kBackwardRows);
    square = arena.take<float>(int64_t{2} * Vector::kWidth * Vector::kWidth);
    slopes = arena.take<float>(task.has_options ? kBackwardRows * kScoreStride : 0);
    factors = arena.take<float>(task.dropout != nullptr ? kBackwardRows * kScoreStride : 0);
    const int64_t rows = int64_t{task.head_end - task.head_begin} * (task.row_end - task.row_begin);
    row_terms = arena.take<float>(rows);
    dq = arena.take<float>(task.with_dq ? rows * dim_stride : 0);
    bytes = arena.used();
  }
};

}  // namespace
}  // namespace flashmoe::cpu
