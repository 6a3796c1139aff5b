// Attention's backward pass, one task with vector instructions. Include after a vector_*.h. Internal linkage.
//
// Each block of keys K and V is packed once; then for each block of query rows, with keys in the lanes,
//   S = Q K^T,   P = e^(S * scale - lse),   dP = dO V^T,   dS = P * (dP - row_term),
//   dV += P^T dO,   dK += dS^T Q,   dQ += dS K,
// where row_term = rowsum(dO * O) - dlse; dQ and dK are multiplied by the scale when they are stored. Left operands are
// read element by element, in either memory order, so that P and dS are never transposed. Operands are words
// (gemm_pack.h): fp32, or pairs of bf16 if the processor multiplies such pairs; P and dS are then rounded to bf16, as
// torch rounds them.
//
// The rounding of a large lse exceeds the error that P may have. So for fp32, S has the same bits as in the forward
// pass that computed lse, product and difference are rounded separately, and dO * O is summed in the order of dO V^T:
// for a key that has all of the weight P is exactly 1 and dS exactly 0. If a row's keys are one block, P is divided by
// its sum, and the row term is the mean of dP weighted by P, plus that mean's own rounding error. This avoids the
// rounding of lse and O, which is most of the error if there are few keys.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "attention/cpu/backward_exact.h"
#include "attention/cpu/backward_kernel.h"
#include "attention/cpu/backward_scratch.h"
#include "attention/cpu/forward_few_rows.h"
#include "attention/cpu/mask.h"
#include "attention/cpu/scores.h"
#include "cpu/exp2.h"
#include "cpu/gemm_strided.h"
#include "cpu/rows.h"

namespace flashmoe::cpu {
namespace {

// Words of dP per partial sum. dP - row_term may be a small difference of large sums (if V has a mean): the error of
// one sum over 256 was up to 4 times torch's. With few rows there may be only one such difference: the error of sums
// over 64 was up to 18 times torch's, over 32 up to 3 times.
constexpr int32_t kSumWords = 64;
constexpr int32_t kRowsOfShortSums = 16;

// MaskOf: Mask, or WindowMask, which applies all score options.
template <class T, class MaskOf>
class Backward {
 public:
  Backward(const BackwardTask& task, void* memory)
      : task_(task),
        params_(*task.params),
        mask_(task),
        s_(memory, task),
        dim_(params_.head_dim),
        dim_v_(task.head_dim_v),
        scale_(Vector::broadcast(MaskOf::kHasOptions ? scale_of_options(params_).natural : params_.scale)),
        sum_words_(kIsFloat && (params_.seq_q <= kRowsOfShortSums || has_few_keys<T>(params_.seq_k)) ? kShortSum
                                                                                                     : kSumWords),
        scores_by_row_(kIsFloat && params_.seq_q <= kFewRows && task.dropout == nullptr),
        is_one_block_(params_.seq_k <= kBackwardKeys &&
                      !(MaskOf::kHasOptions && params_.score_options.sinks != nullptr)) {}

  void run() {
    int32_t key_begin = task_.key_begin, key_end = task_.key_end;
    if (!task_.with_dkv) {
      const KeyRange seen = mask_.keys(task_.row_begin, task_.row_end - task_.row_begin);
      key_begin = seen.begin / kBackwardKeys * kBackwardKeys;
      key_end = seen.end;
    }
    if (task_.with_dq) clear(s_.dq, int64_t{task_.head_end - task_.head_begin} * task_rows());
    for (key_ = key_begin; key_ < key_end; key_ += kBackwardKeys) {
      keys_ = clamp(int64_t{key_end} - key_, 0, kBackwardKeys);
      pack_keys();
      for (int32_t head = task_.head_begin; head < task_.head_end; ++head) {
        for (int64_t row = task_.row_begin; row < task_.row_end; row += kBackwardRows) {
          add_block(head, static_cast<int32_t>(row), clamp(task_.row_end - row, 0, kBackwardRows));
        }
      }
      if (!task_.with_dkv) continue;
      store(s_.dk, keys_, dim_, params_.scale, params_.dk, params_.dk_stride, task_.head_kv, key_);
      store(s_.dv, keys_, dim_v_, 1.0f, params_.dv, params_.dv_stride, task_.head_kv, key_);
    }
    for (int32_t head = task_.head_begin; task_.with_dq && head < task_.head_end; ++head) {
      store(dq(head, task_.row_begin), task_rows(), dim_, params_.scale, params_.dq, params_.dq_stride, head,
            task_.row_begin);
    }
  }

 private:
  static constexpr int kElements = kWordElements<T>;
  static constexpr bool kIsFloat = std::is_same_v<T, float>;
  using Word =
      std::conditional_t<kElements == 2, T, float>;  // all words of one element are multiplied by the same code

  // Index of a row's log-sum-exp and of its gradient.
  int64_t statistic(int32_t head, int32_t row) const {
    return (int64_t{task_.batch} * params_.heads_q + head) * task_.lse_stride + row;
  }
  int32_t task_rows() const { return task_.row_end - task_.row_begin; }
  float* dq(int32_t head, int64_t row) const {
    return s_.dq + (int64_t{head - task_.head_begin} * task_rows() + row - task_.row_begin) * s_.dim_stride;
  }
  void clear(float* sums, int64_t rows) const {
    memset(sums, 0, static_cast<size_t>(rows * s_.dim_stride) * sizeof(float));
  }

  const T* row_of(const void* tensor, attention::Strides stride, int32_t head, int64_t row) const {
    return static_cast<const T*>(tensor) + task_.batch * stride.batch + head * stride.head + row * stride.row;
  }

  // Stores the sums of `rows` rows to the tensor, from `row` on; nothing if the tensor is null.
  void store(const float* sums, int32_t rows, int32_t dim, float factor, void* tensor, attention::Strides stride,
             int32_t head, int32_t row) const {
    if (tensor == nullptr) return;
    T* dst = const_cast<T*>(row_of(tensor, stride, head, row));
    for (int32_t i = 0; i < rows; ++i, dst += stride.row, sums += s_.dim_stride) {
      store_row(sums, dim, Vector::broadcast(factor), dst);
    }
  }

  void pack_keys() const {
    const T *k[kBackwardKeys], *v[kBackwardKeys];
    for (int32_t i = 0; i < keys_; ++i) {
      k[i] = row_of(params_.k, params_.k_stride, task_.head_kv, int64_t{key_} + i);
      v[i] = row_of(params_.v, params_.v_stride, task_.head_kv, int64_t{key_} + i);
    }
    for (int32_t i = 0; i < round_up(keys_, kPairColumns); i += Vector::kWidth) {
      const int32_t count = clamp(keys_ - i, 0, Vector::kWidth);
      const int64_t at = i / kPairColumns * s_.packed_words * kPairColumns + i % kPairColumns;
      pack_transposed(k + i, count, 0, dim_, s_.k_t + at, kPairColumns);
      pack_transposed(v + i, count, 0, dim_v_, s_.v_t + at, kPairColumns);
    }
    if (task_.with_dq || scores_by_row_) pack_as_columns(k, keys_, dim_, s_.k_columns);
    if (!task_.with_dkv) return;
    clear(s_.dk, keys_);
    clear(s_.dv, keys_);
  }

  void pack_as_columns(const T* const* rows, int32_t count, int32_t head_dim, float* dst) const {
    for (int32_t dim = 0; dim < head_dim; dim += Vector::kWidth) {
      pack_columns(rows, count, dim, head_dim - dim, dst + dim, s_.dim_stride);
    }
  }

  // sums[i] = a[i] . b[i], added in the order of add_block's dP. Uses the memory of the blocks' scores, which are not
  // computed yet.
  void multiply_rows(const T* const* a, const T* const* b, int32_t rows, float* sums) const {
    const int32_t dim_words = word_count<T>(dim_v_);
    for (int32_t i = 0; i < rows; i += Vector::kWidth) {
      const int32_t count = clamp(rows - i, 0, Vector::kWidth);
      pack_transposed(a + i, count, 0, dim_v_, s_.scores, Vector::kWidth);
      pack_transposed(b + i, count, 0, dim_v_, s_.dscores, Vector::kWidth);
      Vector::Float total = Vector::zero();
      for (int32_t begin = 0; begin < dim_words; begin += sum_words_) {
        Vector::Float sum = Vector::zero();
        for (int32_t word = begin; word < dim_words && word < begin + sum_words_; ++word) {
          const int32_t at = word * Vector::kWidth;
          sum = Words<Word>::multiply_add(Vector::load(s_.scores + at), Vector::load(s_.dscores + at), sum);
        }
        total = Vector::add(total, sum);
      }
      Vector::store(sums + i, total);
    }
  }

  // rowsum(dO * O) - dlse of each row. Every row that sees a key of this task sees one in the first block, unless a
  // window hides it.
  void find_row_terms(const T* const* dout, int32_t head, int32_t row, int32_t rows) const {
    float* kept = s_.row_terms + int64_t{head - task_.head_begin} * task_rows() + row - task_.row_begin;
    if (MaskOf::kHasOptions || key_ == task_.key_begin) {
      const T* out[kBackwardRows];
      for (int32_t i = 0; i < rows; ++i) out[i] = row_of(params_.out, params_.out_stride, head, int64_t{row} + i);
      multiply_rows(dout, out, rows, s_.row_term);
      const float* dlse = params_.dlse == nullptr ? nullptr : params_.dlse + statistic(head, row);
      for (int32_t i = 0; i < rows; ++i) kept[i] = dlse == nullptr ? s_.row_term[i] : s_.row_term[i] - dlse[i];
    }
    memcpy(s_.row_term, kept, static_cast<size_t>(rows) * sizeof(float));
  }

  // Q, dO, and lse and row term of each row. If the last word has only one row, its second row is zero.
  void pack_query_rows(int32_t head, int32_t row, int32_t rows) const {
    const T *q[kBackwardRows], *dout[kBackwardRows];
    for (int32_t i = 0; i < rows; ++i) {
      q[i] = row_of(params_.q, params_.q_stride, head, int64_t{row} + i);
      dout[i] = row_of(params_.dout, params_.dout_stride, head, int64_t{row} + i);
      const float lse = params_.lse[statistic(head, row) + i];
      s_.lse[i] = lse == kMinusInfinity ? -kMinusInfinity : lse;
      s_.correction[i] = s_.row_term_error[i] = 0.0f;
    }
    find_row_terms(dout, head, row, rows);
    pack_rows(q, rows, 0, dim_, s_.q_rows, s_.dim_stride);
    pack_rows(dout, rows, 0, dim_v_, s_.dout_rows, s_.dim_stride);
    if (kElements == 1) return;
    if (task_.with_dkv) {
      pack_as_columns(q, rows, dim_, s_.q_columns);
      pack_as_columns(dout, rows, dim_v_, s_.dout_columns);
    }
    if (rows % 2 == 0) return;
    clear(s_.q_rows + rows * s_.dim_stride, 1);
    clear(s_.dout_rows + rows * s_.dim_stride, 1);
    s_.lse[rows] = s_.row_term[rows] = s_.row_term_error[rows] = s_.correction[rows] = 0.0f;
  }

  // c = a b, with b = K or V transposed, in partial sums of `part` words.
  void multiply_parts(const float* a, int32_t rows, const float* b, int32_t words, int32_t part, int32_t columns,
                      float* c) const {
    for (int32_t word = 0; word < words; word += part) {
      multiply_strided<Word>({a + word, s_.dim_stride, 1}, rows,
                             {b + word * kPairColumns, kPairColumns, s_.packed_words * kPairColumns},
                             clamp(words - word, 0, part), columns, word > 0, c, kScoreStride);
    }
  }

  // S as the forward pass computes it for few fp32 rows, which it sums in another order.
  void score_by_row(int32_t rows, int32_t columns) const {
    const StridedRows<float> k{s_.k_columns, s_.dim_stride};
    for (int32_t i = 0; i < rows; ++i) {
      float* scores = s_.scores + i * kScoreStride;
      score_row(s_.q_rows + i * s_.dim_stride, k, keys_, round_up(dim_, Vector::kWidth), s_.square, scores);
      for (int32_t key = keys_; key < columns; ++key) scores[key] = 0.0f;
    }
  }

  // The contributions of `rows` query rows and this block of keys to each other.
  void add_block(int32_t head, int32_t row, int32_t rows) const {
    const auto mask = mask_.block(row, key_, keys_);
    const int32_t keys = mask.keys_of_any(rows).end;
    if (keys == 0) return;
    pack_query_rows(head, row, rows);
    const int32_t whole_rows = round_up(rows, kElements), columns = round_up(keys, kPairColumns);
    const int32_t dim_columns = round_up(dim_, kPairColumns), dim_columns_v = round_up(dim_v_, kPairColumns);
    if (scores_by_row_) {
      score_by_row(rows, columns);
    } else {
      multiply_parts(s_.q_rows, whole_rows, s_.k_t, word_count<T>(dim_),
                     has_few_keys<T>(params_.seq_k) ? kShortSum
                     : kIsFloat && is_one_block_    ? kSumWords
                                                    : dim_,
                     columns, s_.scores);
    }
    multiply_parts(s_.dout_rows, whole_rows, s_.v_t, word_count<T>(dim_v_), sum_words_, columns, s_.dscores);
    if constexpr (MaskOf::kHasOptions) {
      const bool is_finite = are_finite(rows, columns);
      apply_score_function(head, row, rows, keys);
      if (has_dropout()) drop_gradients(head, row, whole_rows, keys, columns);
      if (!is_finite) return add_seen_keys(head, row, rows, mask);
    }
    if (is_one_block_) renormalize_rows(mask, head, row, rows, columns);
    if (!apply_softmax(mask, rows, columns) && rows > 1) {  // 0 * NaN is NaN: one row sees all of its keys
      for (int32_t i = 0; i < rows; ++i) add_block(head, row + i, 1);
      return;
    }
    if (task_.with_dkv) {
      const int32_t row_words = word_count<T>(rows);
      multiply_strided<Word>({s_.p_columns, 1, kScoreStride}, keys, {s_.dout_columns, s_.dim_stride, kPairColumns},
                             row_words, dim_columns_v, true, s_.dv, s_.dim_stride);
      multiply_strided<Word>({s_.ds_columns, 1, kScoreStride}, keys, {s_.q_columns, s_.dim_stride, kPairColumns},
                             row_words, dim_columns, true, s_.dk, s_.dim_stride);
    }
    if (task_.with_dq) {
      multiply_strided<Word>({s_.ds_rows, kScoreStride / kElements, 1}, rows,
                             {s_.k_columns, s_.dim_stride, kPairColumns}, word_count<T>(keys), dim_columns, true,
                             dq(head, row), s_.dim_stride);
    }
  }

  // log2 of P.
  Vector::Float exponent(int32_t row, int32_t column) const {
    return exponent(row, Vector::load(s_.scores + row * kScoreStride + column));
  }
  Vector::Float exponent(int32_t row, Vector::Float score) const {
    const Vector::Float scaled = rounded(Vector::mul(score, scale_));
    const Vector::Float difference = Vector::sub(scaled, Vector::broadcast(s_.lse[row]));
    return Vector::fma(difference, Vector::broadcast(kLog2E), Vector::broadcast(s_.correction[row]));
  }

  // Corrects P and the row terms of rows that see no key outside this block: there P sums to 1, except for rounding,
  // and the row term is the mean of dP weighted by P. If the sum is not 1, lse and out cover more keys than these
  // (this is a part of a split sequence), and nothing is corrected.
  template <class BlockMaskOf>
  void renormalize_rows(BlockMaskOf mask, int32_t head, int32_t row, int32_t rows, int32_t columns) const {
    float p[kBackwardKeys];
    for (int32_t i = 0; i < rows; ++i) {
      const KeyRange seen = mask.keys_of(i);
      const float* dscores = s_.dscores + i * kScoreStride;
      Vector::Float weights = Vector::zero(), products = Vector::zero();
      for (int32_t column = 0; column < columns; column += Vector::kWidth) {
        Vector::Float weight = exp2<ExpDegree<T>::value>(exponent(i, column));
        weight = Vector::from_lane(seen.end - column, Vector::zero(), weight);
        if (MaskOf::kHasOptions) weight = Vector::from_lane(seen.begin - column, weight, Vector::zero());
        Vector::store(p + column, weight);
        weights = Vector::add(weights, weight);
        products = Vector::fma(weight, seen_of(dscores, column, seen), products);
      }
      const float weight = sum_of_lanes(weights), excess = weight - 1.0f;
      if (weight == 0.0f) {
        s_.row_term[i] = params_.dlse == nullptr ? 0.0f : -params_.dlse[statistic(head, row) + i];
        continue;
      }
      const float rounding = (kIsFloat ? 8e-6f : 1e-3f) + 2e-6f * std::fabs(s_.lse[i]);
      if (!(std::fabs(excess) <= rounding)) continue;
      const float mean = sum_of_lanes(products) / weight;
      const float dlse = params_.dlse == nullptr ? 0.0f : params_.dlse[statistic(head, row) + i];
      s_.row_term[i] = kIsFloat ? mean : mean - dlse;
      if (kIsFloat) s_.row_term_error[i] = mean_difference(p, dscores, seen, columns, mean) - dlse;
      s_.correction[i] =
          kLog2E * excess * (0.5f * excess - 1.0f);  // -log2 of the sum, to the third power of the excess
    }
  }
  // The sum of p * (dscores - mean): the rounding error of the mean.
  float mean_difference(const float* p, const float* dscores, KeyRange seen, int32_t columns, float mean) const {
    Vector::Float sum = Vector::zero();
    for (int32_t column = 0; column < columns; column += Vector::kWidth) {
      const Vector::Float difference = Vector::sub(seen_of(dscores, column, seen), Vector::broadcast(mean));
      sum = Vector::fma(Vector::load(p + column), difference, sum);
    }
    return sum_of_lanes(sum);
  }

  // Zeros from the end of the seen keys on, where operands may hold NaN.
  static Vector::Float seen_of(const float* dscores, int32_t column, KeyRange seen) {
    return Vector::from_lane(seen.end - column, Vector::zero(), Vector::load(dscores + column));
  }

  // Whether a block with score options can be multiplied as a whole: S and dP are finite.
  bool are_finite(int32_t rows, int32_t columns) const {
    Vector::Float sum = Vector::zero();  // of 0 * x, which is not 0 for NaN and Inf
    for (int32_t row = 0; row < rows; ++row) {
      for (int32_t column = 0; column < columns; column += Vector::kWidth) {
        const int64_t at = row * kScoreStride + column;
        sum = Vector::fma(Vector::load(s_.scores + at), Vector::zero(), sum);
        sum = Vector::fma(Vector::load(s_.dscores + at), Vector::zero(), sum);
      }
    }
    return !Vector::any_differs(sum, Vector::zero());
  }

  void apply_score_function(int32_t head, int32_t row, int32_t rows, int32_t keys) const {
    const ScoreFunction<T> score_function(params_.score_options, head, int64_t{params_.seq_k} - params_.seq_q);
    if (!score_function.has_softcap() && !score_function.has_mask()) return;
    for (int32_t i = 0; i < rows; ++i) {
      score_function.apply(int64_t{row} + i, key_, keys, s_.scores + i * kScoreStride, s_.slopes + i * kScoreStride);
    }
  }

  // Adds the contributions of a block with score options key by key, skipping keys that a row does not see: they may
  // hold NaN.
  // Slow.
  void add_seen_keys(int32_t head, int32_t row, int32_t rows, WindowBlockMask mask) const {
    constexpr int32_t kMaxPadded = 512 + Vector::kWidth;
    float q[kMaxPadded], dout[kMaxPadded], k[kMaxPadded], lanes[Vector::kWidth];
    const Vector::Float one = Vector::broadcast(1.0f);
    for (int32_t i = 0; i < rows; ++i) {
      load_row(row_of(params_.q, params_.q_stride, head, int64_t{row} + i), dim_, q, one);
      load_row(row_of(params_.dout, params_.dout_stride, head, int64_t{row} + i), dim_v_, dout, one);
      const KeyRange seen = mask.keys_of(i);
      for (int32_t key = seen.begin; key < seen.end; ++key) {
        const int64_t at = i * kScoreStride + key;
        if (s_.scores[at] == kMinusInfinity) continue;
        Vector::store(lanes, exp2<kExpDegreeFull>(exponent(i, Vector::broadcast(s_.scores[at]))));
        const float p = lanes[0], slope = has_softcap() ? s_.slopes[at] : 1.0f;
        const float ds = p * (s_.dscores[at] - s_.row_term[i] - s_.row_term_error[i]) * slope;
        if (task_.with_dkv) {
          if (!has_dropout() || s_.factors[at] != 0.0f)
            add_scaled(has_dropout() ? p * s_.factors[at] : p, dout, dim_v_, s_.dv + key * s_.dim_stride);
          add_scaled(ds, q, dim_, s_.dk + key * s_.dim_stride);
        }
        if (task_.with_dq) {
          load_row(row_of(params_.k, params_.k_stride, task_.head_kv, int64_t{key_} + key), dim_, k, one);
          add_scaled(ds, k, dim_, dq(head, int64_t{row} + i));
        }
      }
    }
  }

  static void add_scaled(float factor, const float* from, int32_t count, float* to) {
    for (int32_t i = 0; i < count; ++i) to[i] += factor * from[i];
  }

  bool has_dropout() const { return MaskOf::kHasOptions && task_.dropout != nullptr; }
  // Computes the factors of this block and multiplies dP by them. Columns past the keys are zero.
  void drop_gradients(int32_t head, int32_t row, int32_t rows, int32_t keys, int32_t columns) const {
    DropoutFactors(*task_.dropout, task_.sequence, head).fill(row, rows, key_, keys, kScoreStride, 1, s_.factors);
    for (int32_t i = 0; i < rows; ++i) {
      float* factors = s_.factors + i * kScoreStride;
      for (int32_t column = keys; column < columns; ++column) factors[column] = 0.0f;
      drop(s_.dscores + i * kScoreStride, factors, columns);
    }
  }

  bool has_softcap() const { return MaskOf::kHasOptions && params_.score_options.score_factor > 0.0f; }

  // Turns S and dP into P and dS, zero where a row does not see a key. Returns whether all of those hidden scores were
  // finite: otherwise an operand holds NaN or Inf that must not be multiplied by the zero. Scores with options have
  // been checked before.
  template <class BlockMaskOf>
  bool apply_softmax(BlockMaskOf mask, int32_t rows, int32_t columns) const {
    Vector::Float hidden = Vector::zero();  // sum of 0 * x, which is not 0 for NaN and Inf
    for (int32_t row = 0; row < rows; row += kElements) {
      const KeyRange seen[2] = {mask.keys_of(row), row + 1 < rows ? mask.keys_of(row + 1) : KeyRange{0, 0}};
      const bool is_pair = kElements == 2;
      const int32_t all_begin = is_pair && seen[1].begin > seen[0].begin ? seen[1].begin : seen[0].begin;
      const int32_t all_end = is_pair && seen[1].end < seen[0].end ? seen[1].end : seen[0].end;
      for (int32_t column = 0; column < columns; column += kPairColumns) {
        constexpr int kCount = kElements * kPairVectors;
        Vector::Float p[kCount], ds[kCount];
#pragma GCC unroll 4
        for (int i = 0; i < kCount; ++i) {
          p[i] = exponent(row + i / kPairVectors, column + i % kPairVectors * Vector::kWidth);
        }
        exp2_of<ExpDegree<T>::value>(p);
#pragma GCC unroll 4
        for (int i = 0; i < kCount; ++i) {
          const int32_t r = row + i / kPairVectors;
          const float* dscore = s_.dscores + r * kScoreStride + column + i % kPairVectors * Vector::kWidth;
          Vector::Float difference = Vector::sub(Vector::load(dscore), Vector::broadcast(s_.row_term[r]));
          if (kIsFloat) difference = Vector::sub(difference, Vector::broadcast(s_.row_term_error[r]));
          ds[i] = Vector::mul(p[i], difference);
          if (MaskOf::kHasOptions && has_softcap())
            ds[i] = Vector::mul(ds[i], Vector::load(s_.slopes + (dscore - s_.dscores)));
        }
        if (column + kPairColumns > all_end || (MaskOf::kHasOptions && column < all_begin)) {
          for (int i = 0; i < kCount; ++i) {
            const int32_t first = column + i % kPairVectors * Vector::kWidth;
            const int32_t first_lane = seen[i / kPairVectors].end - first;
            if constexpr (MaskOf::kHasOptions) {
              const int32_t begin_lane = seen[i / kPairVectors].begin - first;
              p[i] = Vector::from_lane(begin_lane, p[i], Vector::zero());
              ds[i] = Vector::from_lane(begin_lane, ds[i], Vector::zero());
            } else {
              const int64_t at = (row + i / kPairVectors) * kScoreStride + first;
              const Vector::Float either = Vector::fma(Vector::load(s_.scores + at), Vector::zero(),
                                                       Vector::mul(Vector::load(s_.dscores + at), Vector::zero()));
              hidden = Vector::add(Vector::from_lane(first_lane, either, Vector::zero()), hidden);
            }
            p[i] = Vector::from_lane(first_lane, Vector::zero(), p[i]);
            ds[i] = Vector::from_lane(first_lane, Vector::zero(), ds[i]);
          }
        }
        if (has_dropout()) {
          for (int i = 0; i < kCount; ++i) {
            const int64_t at = (row + i / kPairVectors) * kScoreStride + column + i % kPairVectors * Vector::kWidth;
            p[i] = Vector::mul(p[i], Vector::load(s_.factors + at));
          }
        }
#pragma GCC unroll 2
        for (int v = 0; v < kPairVectors; ++v) {
          const int64_t at = row / kElements * kScoreStride + column + v * Vector::kWidth;
          Vector::store(s_.p_columns + at, Words<T>::of_columns(p[v], p[kCount - kPairVectors + v]));
          Vector::store(s_.ds_columns + at, Words<T>::of_columns(ds[v], ds[kCount - kPairVectors + v]));
        }
        if (kElements == 1) continue;
#pragma GCC unroll 4
        for (int i = 0; i < kCount; ++i) {
          T* words = reinterpret_cast<T*>(s_.ds_rows) + (row + i / kPairVectors) * kScoreStride;
          Vector::store(words + column + i % kPairVectors * Vector::kWidth, ds[i]);
        }
      }
    }
    return !Vector::any_differs(hidden, Vector::zero());
  }

  const BackwardTask& task_;
  const attention::BackwardParams& params_;
  const MaskOf mask_;
  const BackwardScratch<T> s_;
  const int32_t dim_;
  const int32_t dim_v_;
  const Vector::Float scale_;
  const int32_t sum_words_;  // words of dP per partial sum
  const bool scores_by_row_;
  const bool is_one_block_;
  int32_t key_ = 0;   // the first key of the block
  int32_t keys_ = 0;  // and the number of its keys
};

template <class T>
inline void backward_as(const BackwardTask& task, void* memory) {
  return task.has_options ? Backward<T, WindowMask>(task, memory).run() : Backward<T, Mask>(task, memory).run();
}

inline void backward_simd(const BackwardTask& task, void* memory) {
  if (task.is_exact && ExactBackward(task, memory).run()) return;
  switch (task.type) {
    case ScalarType::kFloat32:
      return backward_as<float>(task, memory);
    case ScalarType::kFloat16:
      return backward_as<Half>(task, memory);
    case ScalarType::kBFloat16:
      return backward_as<BFloat16>(task, memory);
  }
}

inline size_t backward_scratch_bytes(const BackwardTask& task) {
  const size_t bytes = task.type == ScalarType::kBFloat16 ? BackwardScratch<BFloat16>(nullptr, task).bytes
                                                          : BackwardScratch<float>(nullptr, task).bytes;
  const size_t exact_bytes = task.is_exact ? ExactScratch(nullptr, task).bytes : 0;
  return exact_bytes > bytes ? exact_bytes : bytes;
}

}  // namespace
}  // namespace flashmoe::cpu
