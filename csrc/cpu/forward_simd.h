// Attention forward of one task with vector instructions. Include after a vector_*.h. Internal linkage.
//
// Everything is transposed: S^T = K Q^T and O^T += V^T P^T, with query rows in the lanes. Then the vector operand is
// Q^T (packed once a task) or P^T (as the softmax leaves it), and the elements of K and V are broadcast from where they
// are: fp32 K and V need no packing at all, 16-bit ones only a conversion a block. Rejected: lanes over keys, which
// needs K packed and transposed for every task, and reductions across lanes in the softmax.
#pragma once

#include <cstdint>

#include "kernel.h"
#include "rows.h"
#include "softmax.h"

namespace flashmoe {
namespace cpu {
namespace {

// Keys of one step of the online softmax: scores of a group (16 KiB with AVX-512) and Q^T stay in the L1 cache.
constexpr int32_t kBlockKeys = 128;

// scores_t[r, group] = sum_d k[r, d] q_t[d, group] for r < kRows.
template <int kRows>
void scores_tile(const float* q_t, const float* k, int64_t k_stride, int32_t head_dim, float* scores_t) {
  Vector::Float sum[kRows][kGroupVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < kGroupVectors; ++c) sum[r][c] = Vector::zero();
  }
  // Four rows a pointer: x86 addresses p, p + stride, p + 2 stride without further registers.
  const float* rows[(kRows + 3) / 4];
#pragma GCC unroll 4
  for (int i = 0; i < (kRows + 3) / 4; ++i) rows[i] = k + 4 * i * k_stride;
  const int64_t stride3 = 3 * k_stride;
  for (int32_t d = 0; d < head_dim; ++d) {
    Vector::Float q[kGroupVectors];
#pragma GCC unroll 2
    for (int c = 0; c < kGroupVectors; ++c) q[c] = Vector::load(q_t + c * Vector::kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const float* p = rows[r / 4] + (r % 4 == 3 ? stride3 : (r % 4) * k_stride);
      const Vector::Float element = Vector::broadcast(*p);
#pragma GCC unroll 2
      for (int c = 0; c < kGroupVectors; ++c) sum[r][c] = Vector::fma(q[c], element, sum[r][c]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < (kRows + 3) / 4; ++i) ++rows[i];
    q_t += kGroupRows;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < kGroupVectors; ++c) {
      Vector::store(scores_t + r * kGroupRows + c * Vector::kWidth, sum[r][c]);
    }
  }
}

// out_t[r, group] = out_t[r, group] * alpha[group] + sum_n v[n, r] p_t[n, group] for r < kRows. The block is
// summed from zero, which rounds less than a running sum over all keys.
template <int kRows>
void output_tile(const float* p_t, const float* v, int64_t v_stride, int32_t keys, const float* alpha, float* out_t) {
  Vector::Float sum[kRows][kGroupVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < kGroupVectors; ++c) sum[r][c] = Vector::zero();
  }
  for (int32_t n = 0; n < keys; ++n) {
    Vector::Float p[kGroupVectors];
#pragma GCC unroll 2
    for (int c = 0; c < kGroupVectors; ++c) p[c] = Vector::load(p_t + c * Vector::kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vector::Float element = Vector::broadcast(v[r]);
#pragma GCC unroll 2
      for (int c = 0; c < kGroupVectors; ++c) sum[r][c] = Vector::fma(p[c], element, sum[r][c]);
    }
    v += v_stride;
    p_t += kGroupRows;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < kGroupVectors; ++c) {
      float* out = out_t + r * kGroupRows + c * Vector::kWidth;
      Vector::store(out, Vector::fma(Vector::load(out), Vector::load(alpha + c * Vector::kWidth), sum[r][c]));
    }
  }
}

// Calls the tile of the given height. The recursion ends at kRows = 1: heights are 1..kMaxTileRows.
template <int kRows = Vector::kMaxTileRows>
inline void scores_tile_of(int32_t rows, const float* q_t, const float* k, int64_t k_stride, int32_t head_dim,
                           float* scores_t) {
  if (kRows == 1 || rows == kRows) return scores_tile<kRows>(q_t, k, k_stride, head_dim, scores_t);
  return scores_tile_of<(kRows > 1 ? kRows - 1 : 1)>(rows, q_t, k, k_stride, head_dim, scores_t);
}

template <int kRows = Vector::kMaxTileRows>
inline void output_tile_of(int32_t rows, const float* p_t, const float* v, int64_t v_stride, int32_t keys,
                           const float* alpha, float* out_t) {
  if (kRows == 1 || rows == kRows) return output_tile<kRows>(p_t, v, v_stride, keys, alpha, out_t);
  return output_tile_of<(kRows > 1 ? kRows - 1 : 1)>(rows, p_t, v, v_stride, keys, alpha, out_t);
}

// Divides `count` rows into the fewest tiles, of heights that differ by at most one: a tile of 4 after five of 12 would
// wait for its own additions.
inline int32_t tile_count(int32_t count) { return (count + Vector::kMaxTileRows - 1) / Vector::kMaxTileRows; }

// scores_t [keys, group] of k [keys, head_dim].
inline void compute_scores(const float* q_t, const float* k, int64_t k_stride, int32_t keys, int32_t head_dim,
                           float* scores_t) {
  const int32_t tiles = tile_count(keys);
  for (int32_t tile = 0; tile < tiles; ++tile) {
    const int32_t begin = keys * tile / tiles;
    const int32_t end = keys * (tile + 1) / tiles;
    scores_tile_of(end - begin, q_t, k + begin * k_stride, k_stride, head_dim,
                   scores_t + int64_t{begin} * kGroupRows);
  }
}

// out_t [head_dim, group] = out_t * alpha + v^T p_t, v [keys, head_dim].
inline void accumulate_output(const float* p_t, const float* v, int64_t v_stride, int32_t keys, int32_t head_dim,
                              const float* alpha, float* out_t) {
  const int32_t tiles = tile_count(head_dim);
  for (int32_t tile = 0; tile < tiles; ++tile) {
    const int32_t begin = head_dim * tile / tiles;
    const int32_t end = head_dim * (tile + 1) / tiles;
    output_tile_of(end - begin, p_t, v + begin, v_stride, keys, alpha, out_t + int64_t{begin} * kGroupRows);
  }
}

inline bool rows_are_finite(const float* rows, int64_t stride, int32_t count, int32_t head_dim) {
  Vector::Float sum = Vector::zero();  // of 0 * x, which is not 0 for Inf and NaN
  float tail = 0.0f;
  for (int32_t row = 0; row < count; ++row, rows += stride) {
    int32_t i = 0;
    for (; i + Vector::kWidth <= head_dim; i += Vector::kWidth) {
      sum = Vector::fma(Vector::load(rows + i), Vector::zero(), sum);
    }
    for (; i < head_dim; ++i) tail += rows[i] * 0.0f;
  }
  return tail == 0.0f && !Vector::any_differs(sum, Vector::zero());
}

// As accumulate_output, but a key that the causal mask hides from a row leaves it alone, where 0 * V would make NaN of
// Inf or NaN in V. For blocks on the diagonal that hold such: slow.
inline void accumulate_visible_output(const float* p_t, const float* v, int64_t v_stride, VisibleKeys visible,
                                      int64_t diagonal, int32_t key_begin, int32_t head_dim, const float* alpha,
                                      float* out_t) {
  accumulate_output(p_t, v, v_stride, visible.full, head_dim, alpha, out_t);
  for (int32_t key = visible.full; key < visible.end; ++key) {
    const int32_t first_lane = static_cast<int32_t>(key_begin + key - diagonal);
    for (int32_t dim = 0; dim < head_dim; ++dim) {
      for (int c = 0; c < kGroupVectors; ++c) {
        float* p = out_t + int64_t{dim} * kGroupRows + c * Vector::kWidth;
        const Vector::Float weight = Vector::load(p_t + int64_t{key} * kGroupRows + c * Vector::kWidth);
        const Vector::Float before = Vector::load(p);
        const Vector::Float after = Vector::fma(weight, Vector::broadcast(v[key * v_stride + dim]), before);
        Vector::store(p, Vector::from_lane(first_lane - c * Vector::kWidth, after, before));
      }
    }
  }
}

// Turns scores_t into weights, in place, and updates the state.
template <int kDegree>
inline void softmax_in_place(float* scores_t, int32_t keys, float scale_log2, GroupState state) {
  for (int c = 0; c < kGroupVectors; ++c) {
    Vector::Float scale = Vector::broadcast(scale_log2);
    const Vector::Float minus_shift =
        Vector::sub(Vector::zero(), update_max(scores_t, keys, scale_log2, state, c));
    Vector::Float sum0 = Vector::zero(), sum1 = Vector::zero();
    float* s = scores_t + c * Vector::kWidth;
    if (any_is_far(Vector::load(state.max_log2 + c * Vector::kWidth))) {  // products rounded as the maximum's was
      for (int32_t key = 0; key < keys; ++key) {
        float* score = s + int64_t{key} * kGroupRows;
        Vector::store(score, Vector::mul(Vector::load(score), scale));
      }
      scale = Vector::broadcast(1.0f);
    }
    int32_t key = 0;
    for (; key + 1 < keys; key += 2, s += 2 * kGroupRows) {
      const Vector::Float p0 = exp2<kDegree>(Vector::fma(Vector::load(s), scale, minus_shift));
      const Vector::Float p1 = exp2<kDegree>(Vector::fma(Vector::load(s + kGroupRows), scale, minus_shift));
      sum0 = Vector::add(sum0, p0);
      sum1 = Vector::add(sum1, p1);
      Vector::store(s, p0);
      Vector::store(s + kGroupRows, p1);
    }
    if (key < keys) {
      const Vector::Float p = exp2<kDegree>(Vector::fma(Vector::load(s), scale, minus_shift));
      sum0 = Vector::add(sum0, p);
      Vector::store(s, p);
    }
    update_sum(state, c, Vector::add(sum0, sum1));
  }
}

template <class T>
struct ExpDegree {
  static constexpr int value = kExpDegree16Bit;
};
template <>
struct ExpDegree<float> {
  static constexpr int value = kExpDegreeFull;
};

// Where a task's pieces lie in its scratch memory.
struct SimdScratch {
  float* q_t;       // [groups, padded_dim, group]
  float* out_t;     // [groups, padded_dim, group]
  float* max_log2;  // [groups, group]
  float* sum;       // [groups, group]
  float* alpha;     // [group]
  float* scores_t;  // [kBlockKeys, group]
  float* buffer;    // [kGroupRows, padded_dim]
  float* k;         // [kBlockKeys, padded_dim]
  float* v;         // [kBlockKeys, padded_dim]
  size_t bytes;

  SimdScratch(void* base, int32_t groups, int32_t padded_dim) {
    Arena arena(base);
    q_t = arena.take<float>(int64_t{groups} * padded_dim * kGroupRows);
    out_t = arena.take<float>(int64_t{groups} * padded_dim * kGroupRows);
    max_log2 = arena.take<float>(int64_t{groups} * kGroupRows);
    sum = arena.take<float>(int64_t{groups} * kGroupRows);
    alpha = arena.take<float>(kGroupRows);
    scores_t = arena.take<float>(int64_t{kBlockKeys} * kGroupRows);
    buffer = arena.take<float>(int64_t{kGroupRows} * padded_dim);
    k = arena.take<float>(int64_t{kBlockKeys} * padded_dim);
    v = arena.take<float>(int64_t{kBlockKeys} * padded_dim);
    bytes = arena.used();
  }

  GroupState state(int32_t group) const {
    return {max_log2 + int64_t{group} * kGroupRows, sum + int64_t{group} * kGroupRows, alpha};
  }
};

struct Fp32Rows {
  const float* data;
  int64_t stride;
};

template <class T>
inline void convert_rows(const T* src, int64_t stride, int32_t rows, int32_t head_dim, int32_t padded_dim, float* dst) {
  for (int32_t row = 0; row < rows; ++row) {
    load_row(src + row * stride, head_dim, dst + int64_t{row} * padded_dim, Vector::broadcast(1.0f));
  }
}

// A block of K or V as fp32 rows: converted into `buffer`, or where it is.
template <class T>
inline Fp32Rows fp32_rows(const T* src, int64_t stride, int32_t rows, int32_t head_dim, int32_t padded_dim, bool,
                          float* buffer) {
  convert_rows(src, stride, rows, head_dim, padded_dim, buffer);
  return {buffer, padded_dim};
}
// Rows far apart are copied when several groups read them: each lies in a page and cache set of its own.
inline Fp32Rows fp32_rows(const float* src, int64_t stride, int32_t rows, int32_t head_dim, int32_t padded_dim,
                          bool read_often, float* buffer) {
  if (stride == head_dim || !read_often) return {src, stride};
  convert_rows(src, stride, rows, head_dim, padded_dim, buffer);
  return {buffer, padded_dim};
}

inline int32_t group_count(int32_t rows) { return (rows + kGroupRows - 1) / kGroupRows; }

// Keys that the last row of a task can see.
inline int32_t visible_end(const Task& task) {
  const attention::ForwardParams& params = *task.params;
  if (!task.causal) return params.seq_k;
  return clamp(int64_t{task.row_end} + params.seq_k - params.seq_q, 0, params.seq_k);
}

template <class T>
void forward_simd(const Task& task, void* memory) {
  const attention::ForwardParams& params = *task.params;
  const Operands<T> operands(task);
  const int32_t head_dim = params.head_dim;
  const int32_t padded_dim = round_up(head_dim, Vector::kWidth);
  const int32_t groups = group_count(task.row_end - task.row_begin);
  const SimdScratch scratch(memory, groups, padded_dim);
  const Scale scale = make_scale(params.scale);
  const int64_t group_floats = int64_t{padded_dim} * kGroupRows;

  for (int32_t group = 0; group < groups; ++group) {
    const int32_t row = task.row_begin + group * kGroupRows;
    pack_group(operands.q + row * params.q_stride.row, params.q_stride.row, clamp(task.row_end - row, 0, kGroupRows),
               head_dim, padded_dim, scale.q_factor, scratch.buffer, scratch.q_t + group * group_floats);
    clear_state(scratch.state(group));
  }
  memset(scratch.out_t, 0, static_cast<size_t>(groups * group_floats) * sizeof(float));

  const int32_t key_end = visible_end(task);
  for (int32_t key = 0; key < key_end; key += kBlockKeys) {
    const int32_t keys = clamp(int64_t{key_end} - key, 0, kBlockKeys);
    const Fp32Rows k = fp32_rows(operands.k + key * params.k_stride.row, params.k_stride.row, keys, head_dim,
                                 padded_dim, groups > 1, scratch.k);
    const Fp32Rows v = fp32_rows(operands.v + key * params.v_stride.row, params.v_stride.row, keys, head_dim,
                                 padded_dim, groups > 1, scratch.v);
    for (int32_t group = 0; group < groups; ++group) {
      const int64_t diagonal =
          int64_t{task.row_begin} + group * kGroupRows + params.seq_k - params.seq_q;
      const VisibleKeys visible = visible_keys(task.causal, diagonal, key, keys);
      if (visible.end == 0) continue;
      const GroupState state = scratch.state(group);
      compute_scores(scratch.q_t + group * group_floats, k.data, k.stride, visible.end, head_dim, scratch.scores_t);
      mask_scores(scratch.scores_t, visible, diagonal, key);
      softmax_in_place<ExpDegree<T>::value>(scratch.scores_t, visible.end, scale.log2, state);
      float* out_t = scratch.out_t + group * group_floats;
      if (visible.full == visible.end || rows_are_finite(v.data + visible.full * v.stride, v.stride,
                                                         visible.end - visible.full, head_dim)) {
        accumulate_output(scratch.scores_t, v.data, v.stride, visible.end, head_dim, state.alpha, out_t);
      } else {
        accumulate_visible_output(scratch.scores_t, v.data, v.stride, visible, diagonal, key, head_dim, state.alpha,
                                  out_t);
      }
    }
  }

  for (int32_t group = 0; group < groups; ++group) {
    const int32_t row = task.row_begin + group * kGroupRows;
    store_group(scratch.out_t + group * group_floats, scratch.state(group), clamp(task.row_end - row, 0, kGroupRows),
                head_dim, padded_dim, scratch.buffer, operands.out + row * params.out_stride.row,
                params.out_stride.row, operands.lse_row(row));
  }
}

}  // namespace
}  // namespace cpu
}  // namespace flashmoe
