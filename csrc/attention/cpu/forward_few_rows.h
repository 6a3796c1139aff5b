// Attention forward of one head with very few query rows (decoding), one row at a time, head_dim in the lanes: K and V
// are read as they lie, and no lane is idle. With rows in the lanes (forward_simd.h) a single query would use one lane
// of kBlockRows. Include after a vector_*.h. Internal linkage.
#pragma once

#include <cstdint>

#include <cstring>

#include "attention/cpu/forward_simd.h"
#include "attention/cpu/mask.h"
#include "attention/cpu/operands.h"
#include "attention/cpu/softmax.h"
#include "cpu/rows.h"

namespace flashmoe {
namespace cpu {
namespace {

// At 4 rows this took 0.6 of the time of rows in the lanes (seq_k = 2048, head_dim 64, AVX-512; bf16 with AMX: 1.1), at
// 8 rows about as long.
constexpr int32_t kFewRows = 4;

struct FewRowsScratch {
  float* q;       // [padded_dim]
  float* out;     // [kFewRows, padded_dim]
  float* scores;  // [kBlockKeys]
  float* square;  // [2][kWidth, kWidth]
  float* k;       // [kBlockKeys, padded_dim], where K is not whole vectors
  float* v;       // the same of V
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

// scores[i] = q . k[i] for i < keys, -inf from there to the next whole vector. q: [padded_dim], k: [keys, padded_dim],
// square: [2][kWidth, kWidth].
template <class T>
inline void score_row(const float* q, const T* k, int64_t k_stride, int32_t keys, int32_t padded_dim, float* square,
                      float* scores) {
  float* transposed = square + Vector::kWidth * Vector::kWidth;
  for (int32_t key = 0; key < keys; key += Vector::kWidth) {
    const int32_t count = clamp(keys - key, 0, Vector::kWidth);
    for (int32_t i = 0; i < count; ++i) {
      const T* row = k + (key + i) * k_stride;
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
template <int kVectors, class T>
inline void add_values(const float* weights, const T* v, int64_t v_stride, int32_t keys, float alpha, float* out) {
  Vector::Float even[kVectors], odd[kVectors];
  for (int i = 0; i < kVectors; ++i) even[i] = odd[i] = Vector::zero();
  int32_t key = 0;
  for (; key + 1 < keys; key += 2, v += 2 * v_stride) {
    const Vector::Float w0 = Vector::broadcast(weights[key]), w1 = Vector::broadcast(weights[key + 1]);
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      even[i] = Vector::fma(w0, Vector::load(v + i * Vector::kWidth), even[i]);
      odd[i] = Vector::fma(w1, Vector::load(v + v_stride + i * Vector::kWidth), odd[i]);
    }
  }
  if (key < keys) {
    const Vector::Float w0 = Vector::broadcast(weights[key]);
    for (int i = 0; i < kVectors; ++i) even[i] = Vector::fma(w0, Vector::load(v + i * Vector::kWidth), even[i]);
  }
  for (int i = 0; i < kVectors; ++i) {
    float* p = out + i * Vector::kWidth;
    Vector::store(p, Vector::fma(Vector::load(p), Vector::broadcast(alpha), Vector::add(even[i], odd[i])));
  }
}

struct RowState {
  float max = kMinusInfinity;  // of the scores, unscaled
  float sum = 0.0f;
};

// Online softmax of one row over one block. k, v: [keys, padded_dim] of fp32 or the element type.
template <int kDegree, class T>
inline void attend_row(const float* q, const T* k, int64_t k_stride, const T* v, int64_t v_stride, int32_t keys,
                       int32_t padded_dim, float scale_log2, const FewRowsScratch& scratch, RowState* state,
                       float* out) {
  score_row(q, k, k_stride, keys, padded_dim, scratch.square, scratch.scores);
  Vector::Float largest = Vector::broadcast(kMinusInfinity);
  for (int32_t key = 0; key < keys; key += Vector::kWidth) {
    largest = Vector::max(Vector::load(scratch.scores + key), largest);
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
    float* s = scratch.scores + key;
    const Vector::Float weight = exp2<kDegree>(Vector::mul(Vector::sub(Vector::load(s), maximum), scale));
    sum = Vector::add(sum, weight);
    Vector::store(s, weight);
  }
  state->sum = state->sum * alpha[0] + sum_of_lanes(sum);
  constexpr int32_t kChunk = 4 * Vector::kWidth;
  int32_t dim = 0;
  for (; dim + kChunk <= padded_dim; dim += kChunk) {
    add_values<4>(scratch.scores, v + dim, v_stride, keys, alpha[0], out + dim);
  }
  for (; dim < padded_dim; dim += Vector::kWidth) {
    add_values<1>(scratch.scores, v + dim, v_stride, keys, alpha[0], out + dim);
  }
}

template <class T>
void forward_few_rows(const Task& task, void* memory) {
  const attention::ForwardParams& params = *task.params;
  const Operands<T> operands(task);
  const int32_t head_dim = params.head_dim;
  const int32_t padded_dim = round_up(head_dim, Vector::kWidth);
  const int32_t rows = task.row_end - task.row_begin;
  const FewRowsScratch scratch(memory, padded_dim);
  const Scale scale = make_scale(params.scale);
  constexpr int kDegree = ExpDegree<T>::value;
  RowState states[kFewRows];
  for (int32_t row = 0; row < rows; ++row) {
    load_row(operands.q + (task.row_begin + row) * params.q_stride.row, head_dim, scratch.q + row * padded_dim,
             Vector::broadcast(scale.q_factor));
  }
  memset(scratch.out, 0, static_cast<size_t>(rows) * static_cast<size_t>(padded_dim) * sizeof(float));

  const Mask mask(task);
  const int32_t key_end = mask.keys(task.row_begin, rows).end;
  for (int32_t key = 0; key < key_end; key += kBlockKeys) {
    const int32_t keys = clamp(int64_t{key_end} - key, 0, kBlockKeys);
    const T* k = operands.k + key * params.k_stride.row;
    const T* v = operands.v + key * params.v_stride.row;
    if (head_dim != padded_dim) {
      convert_rows(k, params.k_stride.row, keys, head_dim, padded_dim, scratch.k);
      convert_rows(v, params.v_stride.row, keys, head_dim, padded_dim, scratch.v);
    }
    for (int32_t row = 0; row < rows; ++row) {
      const int32_t visible = mask.block(task.row_begin + row, key, keys).keys_of(0).end;
      if (visible == 0) continue;
      float* out = scratch.out + row * padded_dim;
      const float* q = scratch.q + row * padded_dim;
      if (head_dim == padded_dim) {
        attend_row<kDegree>(q, k, params.k_stride.row, v, params.v_stride.row, visible, padded_dim, scale.log2, scratch,
                            &states[row], out);
      } else {
        const float* k_rows = scratch.k;
        const float* v_rows = scratch.v;
        attend_row<kDegree>(q, k_rows, padded_dim, v_rows, padded_dim, visible, padded_dim, scale.log2, scratch,
                            &states[row], out);
      }
    }
  }

  for (int32_t row = 0; row < rows; ++row) {
    RowState& state = states[row];
    const float inverse = state.sum == 0.0f ? 0.0f : 1.0f / state.sum;
    const int64_t position = int64_t{task.row_begin} + row;
    store_row(scratch.out + row * padded_dim, head_dim, Vector::broadcast(inverse),
              operands.out + position * params.out_stride.row);
    store_lse({&state.max, &state.sum, nullptr}, 1, scale, operands.lse_row(position));
  }
}

}  // namespace
}  // namespace cpu
}  // namespace flashmoe
