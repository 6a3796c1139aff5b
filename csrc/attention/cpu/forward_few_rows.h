// Attention forward of one head with very few query rows (decoding), one row at a time, head_dim in the lanes: K and V
// are read in place, and no lane is idle. With rows in the lanes (forward_simd.h) a single query would use one lane of
// kBlockRows. Include after a vector_*.h. Internal linkage.
#pragma once

#include <cstdint>

#include <cstring>

#include "attention/cpu/forward_simd.h"
#include "attention/cpu/mask.h"
#include "attention/cpu/operands.h"
#include "attention/cpu/scores.h"
#include "attention/cpu/softmax.h"
#include "cpu/rows.h"

namespace flashmoe::cpu {
namespace {

// At 4 rows this took 0.6 times as long as rows in the lanes (seq_k = 2048, head_dim 64, AVX-512; bf16 with AMX: 1.1),
// at 8 rows about as long.
constexpr int32_t kFewRows = 4;

// This path sums in another order: consistent calls keep rows in the lanes, however few there are.
inline bool has_few_rows(const attention::ForwardParams& params) {
  return params.seq_q <= kFewRows && params.is_consistent == 0;
}

struct FewRowsScratch {
  float* q;       // [padded_dim]
  float* out;     // [kFewRows, padded_dim]
  float* scores;  // [kBlockKeys]
  float* square;  // [2][kWidth, kWidth]
  float* k;       // [kBlockKeys, padded_dim], if rows of K are not whole vectors
  float* v;       // the same for V
  size_t bytes;

  FewRowsScratch(void* base, int32_t padded_dim) {
    Arena arena(base);
    q = arena.take<float>(int64_t{kFewRows} * padded_dim);
    out = arena.take<float>(int64_t{kFewRows} * padded_dim);
    scores = arena.take<float>(kBlockKeys);
    square = arena.take<float>(int64_t{2} * Vector::kWidth * Vector::kWidth);
    k = arena.take<float>(int64_t{kBlockKeys} * padded_dim);
    v = arena.take<float>(int64_t{kBlockKeys} * padded_dim);
    bytes = arena.used();
  }
};

inline float largest_lane(Vector::Float x) {
  float lanes[Vector::kWidth];
  Vector::store(lanes, x);
  float result = lanes[0];
  for (int i = 1; i < Vector::kWidth; ++i) result = lanes[i] > result ? lanes[i] : result;
  return result;
}

inline float sum_of_lanes(Vector::Float x) {
  float lanes[Vector::kWidth];
  Vector::store(lanes, x);
  for (int width = Vector::kWidth / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// Rows of K or V in one block of keys: at a fixed stride, or at separate addresses.
template <class T>
struct StridedRows {
  const T* first;
  int64_t stride;
  const T* operator[](int32_t row) const { return first + row * stride; }
};
template <class T>
struct FoundRows {
  const T* const* rows;
  const T* operator[](int32_t row) const { return rows[row]; }
};

// scores[i] = q . k[i] for i < keys, and -inf after that up to a whole vector. q: [padded_dim], k: [keys, padded_dim],
// square: [2][kWidth, kWidth].
template <class Rows>
inline void score_row(const float* q, Rows k, int32_t keys, int32_t padded_dim, float* square, float* scores) {
  float* transposed = square + Vector::kWidth * Vector::kWidth;
  for (int32_t key = 0; key < keys; key += Vector::kWidth) {
    const int32_t count = clamp(keys - key, 0, Vector::kWidth);
    for (int32_t i = 0; i < count; ++i) {
      const auto* row = k[key + i];
      Vector::Float sum = Vector::mul(Vector::load(q), Vector::load(row));
      for (int32_t dim = Vector::kWidth; dim < padded_dim; dim += Vector::kWidth) {
        sum = Vector::fma(Vector::load(q + dim), Vector::load(row + dim), sum);
      }
      Vector::store(square + i * Vector::kWidth, sum);
    }
    for (int32_t i = count; i < Vector::kWidth; ++i) {
      Vector::store(square + i * Vector::kWidth, Vector::broadcast(kMinusInfinity));
    }
    transpose(square, Vector::kWidth, transposed, Vector::kWidth);
    Vector::Float total = Vector::load(transposed);
    for (int i = 1; i < Vector::kWidth; ++i) total = Vector::add(total, Vector::load(transposed + i * Vector::kWidth));
    Vector::store(scores + key, total);
  }
}

// out[dim] = out[dim] * alpha + sum_i weights[i] v[i, dim] for kVectors vectors of head_dim from `dim` on.
template <int kVectors, class Rows>
inline void add_values(const float* weights, Rows v, int32_t dim, int32_t keys, float alpha, float* out) {
  Vector::Float even[kVectors], odd[kVectors];
  for (int i = 0; i < kVectors; ++i) even[i] = odd[i] = Vector::zero();
  int32_t key = 0;
  for (; key + 1 < keys; key += 2) {
    const auto *v0 = v[key] + dim, *v1 = v[key + 1] + dim;
    const Vector::Float w0 = Vector::broadcast(weights[key]), w1 = Vector::broadcast(weights[key + 1]);
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      even[i] = Vector::fma(w0, Vector::load(v0 + i * Vector::kWidth), even[i]);
      odd[i] = Vector::fma(w1, Vector::load(v1 + i * Vector::kWidth), odd[i]);
    }
  }
  if (key < keys) {
    const auto* v0 = v[key] + dim;
    const Vector::Float w0 = Vector::broadcast(weights[key]);
    for (int i = 0; i < kVectors; ++i) even[i] = Vector::fma(w0, Vector::load(v0 + i * Vector::kWidth), even[i]);
  }
  for (int i = 0; i < kVectors; ++i) {
    float* p = out + dim + i * Vector::kWidth;
    Vector::store(p, Vector::fma(Vector::load(p), Vector::broadcast(alpha), Vector::add(even[i], odd[i])));
  }
}

struct RowState {
  float max = kMinusInfinity;  // of the scores, unscaled
  float sum = 0.0f;
};

// Turns the scores of one row over one block into weights, in place, up to a whole vector; returns alpha.
template <int kDegree>
inline float weigh_row(float* scores, int32_t keys, float scale_log2, RowState* state) {
  Vector::Float largest = Vector::broadcast(kMinusInfinity);
  for (int32_t key = 0; key < keys; key += Vector::kWidth) {
    largest = Vector::max(Vector::load(scores + key), largest);
  }
  const float block_max = largest_lane(largest);
  const float before = state->max;
  state->max = block_max > before ? block_max : before;
  const float shift = state->max == kMinusInfinity ? 0.0f : state->max;
  float alpha[Vector::kWidth];
  Vector::store(alpha, exp2<kExpDegreeFull>(Vector::broadcast((before - shift) * scale_log2)));
  const Vector::Float maximum = Vector::broadcast(shift), scale = Vector::broadcast(scale_log2);
  Vector::Float sum = Vector::zero();
  for (int32_t key = 0; key < keys; key += Vector::kWidth) {
    float* s = scores + key;
    const Vector::Float weight = exp2<kDegree>(Vector::mul(Vector::sub(Vector::load(s), maximum), scale));
    sum = Vector::add(sum, weight);
    Vector::store(s, weight);
  }
  state->sum = state->sum * alpha[0] + sum_of_lanes(sum);
  return alpha[0];
}

// out = out * alpha + weights v, v: [keys, padded_dim].
template <class Rows>
inline void add_all_values(const float* weights, Rows v, int32_t keys, int32_t padded_dim, float alpha, float* out) {
  constexpr int32_t kChunk = 4 * Vector::kWidth;
  int32_t dim = 0;
  for (; dim + kChunk <= padded_dim; dim += kChunk) add_values<4>(weights, v, dim, keys, alpha, out);
  for (; dim < padded_dim; dim += Vector::kWidth) add_values<1>(weights, v, dim, keys, alpha, out);
}

// One task of up to kFewRows rows. MaskOf: Mask, or WindowMask, which applies all score options.
template <class T, class MaskOf>
class FewRowsForward {
 public:
  FewRowsForward(const Task& task, void* memory)
      : task_(task),
        params_(*task.params),
        operands_(task),
        mask_(task),
        score_function_(params_.score_options, task.head_q, int64_t{params_.seq_k} - params_.seq_q),
        dim_(params_.head_dim),
        dim_v_(task.head_dim_v),
        padded_dim_(round_up(dim_, Vector::kWidth)),
        padded_dim_v_(round_up(dim_v_, Vector::kWidth)),
        s_(memory, padded_dim_ > padded_dim_v_ ? padded_dim_ : padded_dim_v_),
        scale_(MaskOf::kHasOptions ? scale_of_options(params_) : make_scale(params_.scale)) {}

  void run() {
    const int32_t rows = task_.row_end - task_.row_begin;
    for (int32_t row = 0; row < rows; ++row) {
      load_row(operands_.q + (task_.row_begin + row) * params_.q_stride.row, dim_, s_.q + row * padded_dim_,
               Vector::broadcast(scale_.q_factor));
      if constexpr (MaskOf::kHasOptions) {
        const RowStart start = start_of_row(params_.score_options, task_.head_q, scale_);
        states_[row] = {start.max, start.sum};
      }
    }
    memset(s_.out, 0, static_cast<size_t>(rows) * static_cast<size_t>(padded_dim_v_) * sizeof(float));

    const KeyRange seen = mask_.keys(task_.row_begin, rows);
    for (int32_t key = seen.begin / kBlockKeys * kBlockKeys; key < seen.end; key += kBlockKeys) {
      add_keys(rows, key, clamp(int64_t{seen.end} - key, 0, kBlockKeys));
    }

    for (int32_t row = 0; row < rows; ++row) {
      RowState& state = states_[row];
      const float inverse = state.sum == 0.0f ? 0.0f : 1.0f / state.sum;
      const int64_t position = int64_t{task_.row_begin} + row;
      store_row(s_.out + row * padded_dim_v_, dim_v_, Vector::broadcast(inverse),
                operands_.out + position * params_.out_stride.row);
      store_lse({&state.max, &state.sum, nullptr}, 1, scale_, operands_.lse_row(position));
    }
  }

 private:
  // Rows that are not a whole number of vectors are converted.
  void add_keys(int32_t rows, int32_t key, int32_t keys) {
    if constexpr (MaskOf::kHasOptions) {
      const T *k[kBlockKeys], *v[kBlockKeys];
      find_rows(operands_.k, params_.k_stride, params_.sequences, key, keys, k);
      find_rows(operands_.v, params_.v_stride, params_.sequences, key, keys, v);
      if (dim_ == padded_dim_ && dim_v_ == padded_dim_v_) {
        add_masked_rows<T>(rows, key, keys, k, v);
      } else {
        const float *k_converted[kBlockKeys], *v_converted[kBlockKeys];
        for (int32_t i = 0; i < keys; ++i) {
          k_converted[i] = convert(k[i], dim_, s_.k + int64_t{i} * padded_dim_);
          v_converted[i] = convert(v[i], dim_v_, s_.v + int64_t{i} * padded_dim_v_);
        }
        add_masked_rows<float>(rows, key, keys, k_converted, v_converted);
      }
    } else {
      const T* k = operands_.k + key * params_.k_stride.row;
      const T* v = operands_.v + key * params_.v_stride.row;
      if (dim_ == padded_dim_ && dim_v_ == padded_dim_v_) {
        add_rows(rows, key, keys, StridedRows<T>{k, params_.k_stride.row}, StridedRows<T>{v, params_.v_stride.row});
      } else {
        convert_rows(k, params_.k_stride.row, keys, dim_, padded_dim_, s_.k);
        convert_rows(v, params_.v_stride.row, keys, dim_v_, padded_dim_v_, s_.v);
        add_rows(rows, key, keys, StridedRows<float>{s_.k, padded_dim_}, StridedRows<float>{s_.v, padded_dim_v_});
      }
    }
  }

  static const float* convert(const T* src, int32_t count, float* dst) {
    load_row(src, count, dst, Vector::broadcast(1.0f));
    return dst;
  }

  template <class Rows>
  void add_rows(int32_t rows, int32_t key, int32_t keys, Rows k, Rows v) {
    for (int32_t row = 0; row < rows; ++row) {
      const int32_t visible = mask_.block(task_.row_begin + row, key, keys).keys_of(0).end;
      if (visible == 0) continue;
      score_row(s_.q + row * padded_dim_, k, visible, padded_dim_, s_.square, s_.scores);
      const float alpha = weigh_row<ExpDegree<T>::value>(s_.scores, visible, scale_.log2, &states_[row]);
      add_all_values(s_.scores, v, visible, padded_dim_v_, alpha, s_.out + row * padded_dim_v_);
    }
  }

  template <class U>
  void add_masked_rows(int32_t rows, int32_t key, int32_t keys, const U* const* k, const U* const* v) {
    for (int32_t row = 0; row < rows; ++row) {
      const KeyRange seen = mask_.block(task_.row_begin + row, key, keys).keys_of(0);
      if (seen.end == 0) continue;
      int32_t count = seen.end - seen.begin;
      score_row(s_.q + row * padded_dim_, FoundRows<U>{k + seen.begin}, count, padded_dim_, s_.square, s_.scores);
      score_function_.apply(task_.row_begin + row, key + seen.begin, count, s_.scores, nullptr);
      for (int32_t i = count; i < round_up(count, Vector::kWidth); ++i) s_.scores[i] = kMinusInfinity;
      const float alpha = weigh_row<ExpDegree<T>::value>(s_.scores, count, scale_.log2, &states_[row]);
      const U* shown[kBlockKeys];  // V of hidden keys may hold NaN, so it is not multiplied by their zero weights
      const U* const* values = v + seen.begin;
      if (score_function_.has_mask()) {
        count = drop_hidden(s_.scores, values, count, shown);
        values = shown;
      }
      add_all_values(s_.scores, FoundRows<U>{values}, count, padded_dim_v_, alpha, s_.out + row * padded_dim_v_);
    }
  }

  // Moves the nonzero weights to the front, and their rows to `shown`; returns their number.
  template <class U>
  static int32_t drop_hidden(float* weights, const U* const* rows, int32_t count, const U** shown) {
    int32_t left = 0;
    for (int32_t i = 0; i < count; ++i) {
      if (weights[i] == 0.0f) continue;
      weights[left] = weights[i];
      shown[left++] = rows[i];
    }
    return left;
  }

  const Task& task_;
  const attention::ForwardParams& params_;
  const Operands<T> operands_;
  const MaskOf mask_;
  const ScoreFunction<T> score_function_;
  const int32_t dim_;
  const int32_t dim_v_;
  const int32_t padded_dim_;
  const int32_t padded_dim_v_;
  const FewRowsScratch s_;
  const Scale scale_;
  RowState states_[kFewRows];
};

template <class T>
void forward_few_rows(const Task& task, void* memory) {
  return task.has_options ? FewRowsForward<T, WindowMask>(task, memory).run()
                          : FewRowsForward<T, Mask>(task, memory).run();
}

}  // namespace
}  // namespace flashmoe::cpu
