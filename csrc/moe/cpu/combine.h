// Sums of rows: over a token's choices, and over an expert's rows. Include after a vector_*.h. Internal linkage.
#pragma once

#include <cstdint>

#include "moe/cpu/grouped_gemm.h"

namespace flashmoe::cpu {
namespace {

using moe::BiasGradientParams;
using moe::CombineParams;

constexpr int32_t kMaxTopK = 32;

// out[t] = shared[t] + sum over choices of row_weights[row] * rows[row], for tokens [begin, end).
template <class T>
inline void combine_as(const CombineParams& params, int64_t begin, int64_t end) {
  const T* shared = static_cast<const T*>(params.shared);
  for (int64_t token = begin; token < end; ++token) {
    const T* rows[kMaxTopK];
    Vector::Float weights[kMaxTopK];
    int32_t count = 0;
    for (int32_t choice = 0; choice < params.top_k; ++choice) {
      const int32_t row = params.slot_rows[token * params.top_k + choice];
      if (row < 0) continue;
      rows[count] = static_cast<const T*>(params.rows) + int64_t{row} * params.columns;
      weights[count++] = Vector::broadcast(params.row_weights == nullptr ? 1.0f : params.row_weights[row]);
    }
    for (int32_t column = 0; column < params.columns; column += Vector::kWidth) {
      const int32_t lanes = params.columns - column;
      Vector::Float sum = Vector::zero();
      if (shared != nullptr) sum = load_some(shared + token * params.shared_stride + column, lanes);
      for (int32_t i = 0; i < count; ++i) sum = Vector::fma(weights[i], load_some(rows[i] + column, lanes), sum);
      store_some(static_cast<T*>(params.out) + token * params.out_stride + column, lanes, sum);
    }
  }
}

// The gradients of the slots' weights; see CombineParams.
template <class T>
inline void weight_gradients_as(const CombineParams& params, int64_t begin, int64_t end) {
  for (int64_t slot = begin * params.top_k; slot < end * params.top_k; ++slot) {
    const int32_t row = params.slot_rows[slot];
    float sum = 0.0f;
    for (int64_t tile = 0; row >= 0 && tile < params.dot_tiles; ++tile) {
      sum += params.row_dots[tile * params.tokens * params.top_k + row];
    }
    if (row >= 0 && params.bias != nullptr) {
      int32_t expert = 0;
      while (row >= params.expert_offsets[expert + 1]) ++expert;
      const T* bias = static_cast<const T*>(params.bias) + int64_t{expert} * params.columns;
      const T* dout = static_cast<const T*>(params.dout) + slot / params.top_k * params.dout_stride;
      Vector::Float products = Vector::zero();
      for (int32_t column = 0; column < params.columns; column += Vector::kWidth) {
        const int32_t lanes = params.columns - column;
        products = Vector::fma(load_some(bias + column, lanes), load_some(dout + column, lanes), products);
      }
      float parts[Vector::kWidth];
      Vector::store(parts, products);
      for (float part : parts) sum += part;
    }
    params.dweights[slot] = sum;
  }
}

// d[e] = sum over e's rows of row_weights[row] * a[row], in blocks of rows.
template <class T>
inline void bias_gradient_as(const BiasGradientParams& params, int32_t expert) {
  constexpr int32_t kBlockRows = 128;
  const int32_t first = params.expert_offsets[expert], end = params.expert_offsets[expert + 1];
  for (int32_t column = 0; column < params.columns; column += Vector::kWidth) {
    const int32_t lanes = params.columns - column;
    Vector::Float total = Vector::zero();
    for (int32_t block = first; block < end; block += kBlockRows) {
      const int32_t block_end = end - block < kBlockRows ? end : block + kBlockRows;
      Vector::Float sum = Vector::zero();
      for (int32_t row = block; row < block_end; ++row) {
        const int64_t index = params.a_slots == nullptr ? row : params.a_slots[row] / params.top_k;
        const T* a = static_cast<const T*>(params.a) + index * params.a_stride + column;
        const float weight = params.row_weights == nullptr ? 1.0f : params.row_weights[row];
        sum = Vector::fma(Vector::broadcast(weight), load_some(a, lanes), sum);
      }
      total = Vector::add(total, sum);
    }
    store_some(static_cast<T*>(params.d) + int64_t{expert} * params.columns + column, lanes, total);
  }
}

template <class Body>
inline void with_type(ScalarType type, Body body) {
  switch (type) {
    case ScalarType::kFloat32:
      return body(float());
    case ScalarType::kFloat16:
      return body(Half());
    case ScalarType::kBFloat16:
      return body(BFloat16());
  }
}

inline void combine(const CombineParams& params, ScalarType type, int64_t begin, int64_t end) {
  with_type(type, [&](auto zero) { combine_as<decltype(zero)>(params, begin, end); });
}
inline void weight_gradients(const CombineParams& params, ScalarType type, int64_t begin, int64_t end) {
  with_type(type, [&](auto zero) { weight_gradients_as<decltype(zero)>(params, begin, end); });
}
inline void bias_gradient(const BiasGradientParams& params, ScalarType type, int64_t begin, int64_t end) {
  for (int64_t expert = begin; expert < end; ++expert) {
    with_type(type, [&](auto zero) { bias_gradient_as<decltype(zero)>(params, static_cast<int32_t>(expert)); });
  }
}
inline void multiply(const GemmTask& task, void* memory) {
  with_type(task.type, [&](auto zero) { multiply_as<decltype(zero)>(task, memory); });
}

}  // namespace
}  // namespace flashmoe::cpu
