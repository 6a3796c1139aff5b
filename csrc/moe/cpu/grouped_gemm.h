// One task of a grouped matrix product. Include after a vector_*.h. Internal linkage.
//
// The task's rows are packed once; then, block by block, each panel of the weights is packed and used for all rows
// while it is in the caches. With few rows the time is that of reading the weights, each once and in memory order: as
// many blocks of the summed dimension as kLeftFloats allows are packed from the rows, and a panel is multiplied with
// all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/gemm_tile.h"
#include "cpu/rows.h"
#include "moe/cpu/activation.h"
#include "moe/cpu/kernel.h"

namespace flashmoe::cpu {
namespace {

using moe::GemmParams;

constexpr int32_t kMaxBlockElements = 2 * kBlockWords;
constexpr int64_t kLeftFloats = 80 * 1024;  // 320 KiB, in the L2 cache

// The two vectors of a panel: their first column of B and how many columns exist.
struct Panel {
  int32_t first[kPanelVectors];
  int32_t count[kPanelVectors];

  Panel(const GemmTask& task, int32_t index) {
    const int32_t n = task.product == MoeProduct::kWeightGradient ? task.params->k : task.params->n;
    const bool is_split = task.product == MoeProduct::kGated && !task.params->is_interleaved;
    for (int32_t v = 0; v < kPanelVectors; ++v) {
      if (is_split) {  // gates, then their ups
        first[v] = v * (n / 2) + index * Vector::kWidth;
        count[v] = clamp(int64_t{n} / 2 - index * Vector::kWidth, 0, Vector::kWidth);
      } else {
        first[v] = index * kPanelColumns + v * Vector::kWidth;
        count[v] = clamp(int64_t{n} - first[v], 0, Vector::kWidth);
      }
    }
  }
};

struct GemmScratch {
  int64_t a_block;    // floats per packed block of rows
  int32_t blocks;     // packed at once
  float* a;           // [blocks][rows, kLeftStride]
  float* b;           // [kBlockWords, kPanelColumns]
  float* c;           // [panels][rows, kPanelColumns]
  const void** rows;  // of the left operand; weight_gradient: of one block
  size_t bytes;

  GemmScratch(void* memory, int32_t row_count, int32_t panels) {
    Arena arena(memory);
    a_block = round_up(row_count, Vector::kWidth) * kLeftStride;
    blocks = a_block < kLeftFloats ? static_cast<int32_t>(kLeftFloats / a_block) : 1;
    a = arena.take<float>(a_block < kLeftFloats ? kLeftFloats : a_block);  // at least this, even for few rows
    b = arena.take<float>(int64_t{kBlockWords} * kPanelColumns);
    c = arena.take<float>(int64_t{panels} * row_count * kPanelColumns);
    rows = arena.take<const void*>(row_count > kMaxBlockElements ? row_count : kMaxBlockElements);
    bytes = arena.used();
  }
};

// rows[i]: row begin + i of a matrix or, if slots are given, the row of that slot's token.
template <class T>
inline void point_at_rows(const void* base, int64_t stride, const int32_t* slots, int32_t top_k, int32_t begin,
                          int32_t count, const T** rows) {
  for (int32_t i = 0; i < count; ++i) {
    const int64_t row = slots == nullptr ? begin + i : slots[begin + i] / top_k;
    rows[i] = static_cast<const T*>(base) + row * stride;
  }
}

// Loads a vector of which only the first `count` lanes are in memory.
template <class T>
inline Vector::Float load_some(const T* src, int32_t count) {
  if (count >= Vector::kWidth) return Vector::load(src);
  T tail[Vector::kWidth] = {};
  if (count > 0) memcpy(tail, src, static_cast<size_t>(count) * sizeof(T));
  return Vector::load(tail);
}
template <class T>
inline void store_some(T* dst, int32_t count, Vector::Float x) {
  if (count >= Vector::kWidth) return Vector::store(dst, x);
  T tail[Vector::kWidth];
  Vector::store(tail, x);
  if (count > 0) memcpy(dst, tail, static_cast<size_t>(count) * sizeof(T));
}

// Two vectors of alternating gates and ups to one of each; join() does the reverse.
inline void separate(Vector::Float (&x)[kPanelVectors]) {
  float pairs[kPanelColumns], parts[kPanelColumns];
  for (int v = 0; v < kPanelVectors; ++v) Vector::store(pairs + v * Vector::kWidth, x[v]);
  for (int i = 0; i < Vector::kWidth; ++i) {
    parts[i] = pairs[2 * i];
    parts[Vector::kWidth + i] = pairs[2 * i + 1];
  }
  for (int v = 0; v < kPanelVectors; ++v) x[v] = Vector::load(parts + v * Vector::kWidth);
}
inline void join(Vector::Float (&x)[kPanelVectors]) {
  float pairs[kPanelColumns], parts[kPanelColumns];
  for (int v = 0; v < kPanelVectors; ++v) Vector::store(parts + v * Vector::kWidth, x[v]);
  for (int i = 0; i < Vector::kWidth; ++i) {
    pairs[2 * i] = parts[i];
    pairs[2 * i + 1] = parts[Vector::kWidth + i];
  }
  for (int v = 0; v < kPanelVectors; ++v) x[v] = Vector::load(pairs + v * Vector::kWidth);
}

// Stores c: d[row] = c (+ bias).
template <class T>
inline void store_plain(const GemmTask& task, const Panel& panel, const float* c) {
  const GemmParams& params = *task.params;
  const bool is_gradient = task.product == MoeProduct::kWeightGradient;
  T* d = static_cast<T*>(params.d) + (is_gradient ? int64_t{task.expert} * params.n * params.d_stride : 0);
  const T* bias =
      params.bias == nullptr ? nullptr : static_cast<const T*>(params.bias) + int64_t{task.expert} * params.n;
  for (int32_t v = 0; v < kPanelVectors; ++v) {
    if (panel.count[v] == 0) continue;
    const Vector::Float shift = bias == nullptr ? Vector::zero() : load_some(bias + panel.first[v], panel.count[v]);
    for (int32_t row = task.row_begin; row < task.row_end; ++row) {
      const float* sum = c + (row - task.row_begin) * int64_t{kPanelColumns} + v * Vector::kWidth;
      const Vector::Float x = bias == nullptr ? Vector::load(sum) : Vector::add(Vector::load(sum), shift);
      store_some(d + row * params.d_stride + panel.first[v], panel.count[v], x);
    }
  }
}

// d[row] = activation(c + bias), preactivation[row] = c + bias if requested.
template <class T, Activation kActivation>
inline void store_gated(const GemmTask& task, const Panel& panel, int32_t index, const float* c) {
  const GemmParams& params = *task.params;
  const int32_t column = index * Vector::kWidth, count = clamp(params.n / 2 - column, 0, Vector::kWidth);
  Vector::Float bias[kPanelVectors];
  for (int v = 0; v < kPanelVectors; ++v) {
    const T* from = static_cast<const T*>(params.bias) + int64_t{task.expert} * params.n + panel.first[v];
    bias[v] = params.bias == nullptr ? Vector::zero() : load_some(from, panel.count[v]);
  }
  for (int32_t row = task.row_begin; row < task.row_end; ++row, c += kPanelColumns) {
    Vector::Float z[kPanelVectors];
    for (int v = 0; v < kPanelVectors; ++v) {
      z[v] = Vector::load(c + v * Vector::kWidth);
      if (params.bias != nullptr) z[v] = Vector::add(z[v], bias[v]);
      if (params.preactivation == nullptr) continue;
      T* kept = static_cast<T*>(params.preactivation) + int64_t{row} * params.n + panel.first[v];
      store_some(kept, panel.count[v], z[v]);
    }
    if (params.is_interleaved) separate(z);
    T* d = static_cast<T*>(params.d) + row * params.d_stride + column;
    store_some(d, count, activate<kActivation>(z[0], z[1]));
  }
}

// c is s: the gradient of the activation before multiplication by the row's weight. See GemmParams.
template <class T, Activation kActivation>
inline void store_gated_backward(const GemmTask& task, const Panel& panel, int32_t index, const float* c) {
  const GemmParams& params = *task.params;
  for (int32_t row = task.row_begin; row < task.row_end; ++row, c += kPanelColumns) {
    const Vector::Float weight = Vector::broadcast(params.row_weights[row]);
    const T* z = static_cast<const T*>(params.preactivation) + int64_t{2} * row * params.n;
    T* dz = static_cast<T*>(params.d) + row * params.d_stride;
    T* weighted = static_cast<T*>(params.weighted_activation) + int64_t{row} * params.n;
    float dot = 0.0f;
    for (int v = 0; v < kPanelVectors; ++v) {
      const int32_t count = panel.count[v], column = panel.first[v];
      const int32_t pair_counts[2] = {clamp(2 * count, 0, Vector::kWidth),
                                      clamp(2 * count - Vector::kWidth, 0, Vector::kWidth)};
      const int64_t at[2] = {params.is_interleaved ? 2 * column : column,
                             params.is_interleaved ? 2 * column + Vector::kWidth : params.n + column};
      const auto count_of = [&](int i) { return params.is_interleaved ? pair_counts[i] : count; };
      Vector::Float x[kPanelVectors] = {load_some(z + at[0], count_of(0)), load_some(z + at[1], count_of(1))};
      if (params.is_interleaved) separate(x);
      const Vector::Float s = Vector::load(c + v * Vector::kWidth), weighted_s = Vector::mul(weight, s);
      const Derivatives f = differentiate<kActivation>(x[0], x[1]);
      store_some(weighted + column, count, Vector::mul(weight, f.value));
      x[0] = Vector::mul(f.gate, weighted_s);
      x[1] = Vector::mul(f.up, weighted_s);
      if (params.is_interleaved) join(x);
      for (int i = 0; i < 2; ++i) store_some(dz + at[i], count_of(i), x[i]);
      float products[Vector::kWidth];
      Vector::store(products, Vector::mul(f.value, s));
      for (int32_t i = 0; i < count; ++i) dot += products[i];
    }
    params.row_dots[int64_t{index} * params.slots + row] = dot;
  }
}

template <class T>
inline void finish_panel(const GemmTask& task, const Panel& panel, int32_t index, const float* c) {
  if (task.product == MoeProduct::kGated) {
    with_activation(task.params->activation,
                    [&](auto activation) { store_gated<T, activation()>(task, panel, index, c); });
  } else if (task.product == MoeProduct::kGatedBackward) {
    with_activation(task.params->activation,
                    [&](auto activation) { store_gated_backward<T, activation()>(task, panel, index, c); });
  } else {
    store_plain<T>(task, panel, c);
  }
}

// Packs block [k0, k0 + elements) of the task's rows; pack_right: of a panel of the right operand.
template <class T>
inline void pack_left(const GemmTask& task, const T** rows, int32_t k0, int32_t elements, float* a) {
  const GemmParams& params = *task.params;
  const int32_t count = task.row_end - task.row_begin;
  if (task.product != MoeProduct::kWeightGradient) return pack_rows(rows, count, k0, elements, a, kLeftStride);
  const int32_t begin = params.expert_offsets[task.expert] + k0;
  point_at_rows(params.a, params.a_stride, params.a_slots, params.top_k, begin, elements, rows);
  for (int32_t row = 0; row < count; row += Vector::kWidth) {
    pack_columns_as_rows(rows, elements, task.row_begin + row, clamp(count - row, 0, Vector::kWidth),
                         a + row * kLeftStride, kLeftStride);
  }
}
template <class T>
inline void pack_right(const GemmTask& task, const Panel& panel, int32_t k0, int32_t elements, float* b) {
  const GemmParams& params = *task.params;
  const bool is_gradient = task.product == MoeProduct::kWeightGradient;
  const T* weights = static_cast<const T*>(params.b) + (is_gradient ? 0 : task.expert * params.b_expert_stride);
  const T* rows[kMaxBlockElements];
  const bool is_summed_over_rows = is_gradient || task.is_kn;
  const int32_t begin = is_gradient ? params.expert_offsets[task.expert] + k0 : k0;
  if (is_summed_over_rows) {
    point_at_rows(weights, params.b_stride, is_gradient ? params.b_slots : nullptr, params.top_k, begin, elements,
                  rows);
  }
  for (int32_t v = 0; v < kPanelVectors; ++v) {
    float* dst = b + v * Vector::kWidth;
    if (is_summed_over_rows) {
      pack_columns(rows, elements, panel.first[v], panel.count[v], dst, kPanelColumns);
    } else {
      point_at_rows(weights, params.b_stride, nullptr, 1, panel.first[v], panel.count[v], rows);
      pack_transposed(rows, panel.count[v], k0, elements, dst, kPanelColumns);
    }
  }
}

template <class T>
inline void multiply_as(const GemmTask& task, void* memory) {
  const GemmParams& params = *task.params;
  const bool is_gradient = task.product == MoeProduct::kWeightGradient;
  const int32_t rows = task.row_end - task.row_begin;
  const int32_t* offsets = params.expert_offsets + task.expert;
  const int32_t depth = is_gradient ? offsets[1] - offsets[0] : params.k;
  const GemmScratch scratch(memory, rows, task.panel_end - task.panel_begin);
  const T** row_pointers = reinterpret_cast<const T**>(scratch.rows);
  if (!is_gradient) {
    point_at_rows(params.a, params.a_stride, params.a_slots, params.top_k, task.row_begin, rows, row_pointers);
  }
  int32_t begin = 0;
  do {  // once, with nothing to add, for an expert without rows
    const int32_t end = clamp(int64_t{begin} + scratch.blocks * kBlockElements<T>, 0, depth);
    const auto elements_at = [&](int32_t k0) { return end - k0 < kBlockElements<T> ? end - k0 : kBlockElements<T>; };
    float* a = scratch.a;
    for (int32_t k0 = begin; k0 < end; k0 += kBlockElements<T>, a += scratch.a_block) {
      pack_left(task, row_pointers, k0, elements_at(k0), a);
    }
    for (int32_t index = task.panel_begin; index < task.panel_end; ++index) {
      const Panel panel(task, index);
      float* c = scratch.c + int64_t{index - task.panel_begin} * rows * kPanelColumns;
      a = scratch.a;
      int32_t k0 = begin;
      do {
        pack_right<T>(task, panel, k0, elements_at(k0), scratch.b);
        multiply_panel<T>(a, rows, scratch.b, word_count<T>(elements_at(k0)), k0 == 0, c);
        k0 += kBlockElements<T>;
        a += scratch.a_block;
      } while (k0 < end);
      if (end == depth) finish_panel<T>(task, panel, index, c);
    }
    begin = end;
  } while (begin < depth);
}

inline size_t gemm_scratch_bytes(int32_t rows, int32_t panels) { return GemmScratch(nullptr, rows, panels).bytes; }

}  // namespace
}  // namespace flashmoe::cpu
