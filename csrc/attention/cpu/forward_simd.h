// Attention forward of one task with vector instructions. Include after a vector_*.h. Internal linkage.
//
// Everything is transposed: S^T = K Q^T and O^T += V^T P^T, with query rows in the lanes. Then the vector operand is
// Q^T (packed once per task) or P^T (as the softmax leaves it), and the elements of K and V are broadcast from where
// they are: fp32 K and V need no packing, 16-bit ones only one conversion per block. Rejected: lanes over keys, which
// needs K packed and transposed for every task, and reductions across lanes in the softmax.
#pragma once

#include <cstdint>

#include <cstring>

#include "attention/cpu/dropout.h"
#include "attention/cpu/mask.h"
#include "attention/cpu/operands.h"
#include "attention/cpu/scores.h"
#include "attention/cpu/softmax.h"
#include "cpu/rows.h"

namespace flashmoe::cpu {
namespace {

// Keys per step of the online softmax: the scores of a row block (16 KiB with AVX-512) and Q^T stay in the L1 cache.
constexpr int32_t kBlockKeys = 128;

// scores_t[r, rows] = sum_d k[r, d] q_t[d, rows] for r < kRows.
template <int kRows>
void scores_tile(const float* q_t, const float* k, int64_t k_stride, int32_t head_dim, float* scores_t) {
  Vector::Float sum[kRows][kBlockVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < kBlockVectors; ++c) sum[r][c] = Vector::zero();
  }
  // Four rows per pointer: x86 addresses p, p + stride, p + 2 stride without further registers.
  const float* rows[(kRows + 3) / 4];
#pragma GCC unroll 4
  for (int i = 0; i < (kRows + 3) / 4; ++i) rows[i] = k + 4 * i * k_stride;
  const int64_t stride3 = 3 * k_stride;
  for (int32_t d = 0; d < head_dim; ++d) {
    Vector::Float q[kBlockVectors];
#pragma GCC unroll 2
    for (int c = 0; c < kBlockVectors; ++c) q[c] = Vector::load(q_t + c * Vector::kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const float* p = rows[r / 4] + (r % 4 == 3 ? stride3 : (r % 4) * k_stride);
      const Vector::Float element = Vector::broadcast(*p);
#pragma GCC unroll 2
      for (int c = 0; c < kBlockVectors; ++c) sum[r][c] = Vector::fma(q[c], element, sum[r][c]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < (kRows + 3) / 4; ++i) ++rows[i];
    q_t += kBlockRows;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < kBlockVectors; ++c) {
      Vector::store(scores_t + r * kBlockRows + c * Vector::kWidth, sum[r][c]);
    }
  }
}

// out_t[r, rows] = out_t[r, rows] * alpha[rows] + sum_n v[n, r] p_t[n, rows] for r < kRows. The block is
// summed from zero, which rounds less than a running sum over all keys.
template <int kRows>
void output_tile(const float* p_t, const float* v, int64_t v_stride, int32_t keys, const float* alpha, float* out_t) {
  Vector::Float sum[kRows][kBlockVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < kBlockVectors; ++c) sum[r][c] = Vector::zero();
  }
  for (int32_t n = 0; n < keys; ++n) {
    Vector::Float p[kBlockVectors];
#pragma GCC unroll 2
    for (int c = 0; c < kBlockVectors; ++c) p[c] = Vector::load(p_t + c * Vector::kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vector::Float element = Vector::broadcast(v[r]);
#pragma GCC unroll 2
      for (int c = 0; c < kBlockVectors; ++c) sum[r][c] = Vector::fma(p[c], element, sum[r][c]);
    }
    v += v_stride;
    p_t += kBlockRows;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < kBlockVectors; ++c) {
      float* out = out_t + r * kBlockRows + c * Vector::kWidth;
      Vector::store(out, Vector::fma(Vector::load(out), Vector::load(alpha + c * Vector::kWidth), sum[r][c]));
    }
  }
}

// Calls the tile function of the given height, 1..kMaxTileRows. The recursion ends at kRows = 1.
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
// stall on the latency of its additions.
inline int32_t tile_count(int32_t count) { return (count + Vector::kMaxTileRows - 1) / Vector::kMaxTileRows; }

// scores_t [keys, rows] of k [keys, head_dim].
inline void compute_scores(const float* q_t, const float* k, int64_t k_stride, int32_t keys, int32_t head_dim,
                           float* scores_t) {
  const int32_t tiles = tile_count(keys);
  for (int32_t tile = 0; tile < tiles; ++tile) {
    const int32_t begin = keys * tile / tiles;
    const int32_t end = keys * (tile + 1) / tiles;
    scores_tile_of(end - begin, q_t, k + begin * k_stride, k_stride, head_dim, scores_t + int64_t{begin} * kBlockRows);
  }
}

// The same for at most kFewKeys keys, in short sums. Uses the rows of scores_t after them as scratch.
inline void compute_few_scores(const float* q_t, const float* k, int64_t k_stride, int32_t keys, int32_t head_dim,
                               float* scores_t) {
  float* part_t = scores_t + int64_t{kFewKeys} * kBlockRows;
  compute_scores(q_t, k, k_stride, keys, clamp(head_dim, 0, kShortSum), scores_t);
  for (int32_t dim = kShortSum; dim < head_dim; dim += kShortSum) {
    compute_scores(q_t + int64_t{dim} * kBlockRows, k + dim, k_stride, keys, clamp(head_dim - dim, 0, kShortSum),
                   part_t);
    for (int32_t i = 0; i < keys * kBlockRows; i += Vector::kWidth) {
      Vector::store(scores_t + i, Vector::add(Vector::load(scores_t + i), Vector::load(part_t + i)));
    }
  }
}

// out_t [head_dim, rows] = out_t * alpha + v^T p_t, v [keys, head_dim].
inline void accumulate_output(const float* p_t, const float* v, int64_t v_stride, int32_t keys, int32_t head_dim,
                              const float* alpha, float* out_t) {
  const int32_t tiles = tile_count(head_dim);
  for (int32_t tile = 0; tile < tiles; ++tile) {
    const int32_t begin = head_dim * tile / tiles;
    const int32_t end = head_dim * (tile + 1) / tiles;
    output_tile_of(end - begin, p_t, v + begin, v_stride, keys, alpha, out_t + int64_t{begin} * kBlockRows);
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

// As accumulate_output, but a key that the mask hides from a row does not change that row; 0 * V would turn Inf or NaN
// in V into NaN. For blocks on the diagonal with such values; slow.
inline void accumulate_visible_output(const float* p_t, const float* v, int64_t v_stride, BlockMask mask,
                                      int32_t head_dim, const float* alpha, float* out_t) {
  const KeyRange any = mask.keys_of_any(kBlockRows), all = mask.keys_of_all(kBlockRows);
  accumulate_output(p_t, v, v_stride, all.end, head_dim, alpha, out_t);
  for (int32_t key = all.end; key < any.end; ++key) {
    const int32_t first_lane = mask.first_row(key);
    for (int32_t dim = 0; dim < head_dim; ++dim) {
      for (int c = 0; c < kBlockVectors; ++c) {
        float* p = out_t + int64_t{dim} * kBlockRows + c * Vector::kWidth;
        const Vector::Float weight = Vector::load(p_t + int64_t{key} * kBlockRows + c * Vector::kWidth);
        const Vector::Float before = Vector::load(p);
        const Vector::Float after = Vector::fma(weight, Vector::broadcast(v[key * v_stride + dim]), before);
        Vector::store(p, Vector::from_lane(first_lane - c * Vector::kWidth, after, before));
      }
    }
  }
}

// The same for keys that a window hides: a weight of 0 does not change the row. Also slow.
inline void accumulate_weighted_output(const float* p_t, const float* v, int64_t v_stride, int32_t keys,
                                       int32_t head_dim, const float* alpha, float* out_t) {
  accumulate_output(p_t, v, v_stride, 0, head_dim, alpha, out_t);
  for (int32_t key = 0; key < keys; ++key) {
    for (int32_t dim = 0; dim < head_dim; ++dim) {
      for (int c = 0; c < kBlockVectors; ++c) {
        float* p = out_t + int64_t{dim} * kBlockRows + c * Vector::kWidth;
        const Vector::Float weight = Vector::load(p_t + int64_t{key} * kBlockRows + c * Vector::kWidth);
        const Vector::Float before = Vector::load(p);
        const Vector::Float after = Vector::fma(weight, Vector::broadcast(v[key * v_stride + dim]), before);
        Vector::store(p, Vector::where_equal(weight, Vector::zero(), before, after));
      }
    }
  }
}

// Turns scores_t into weights, in place, and updates the state.
template <int kDegree>
inline void softmax_in_place(float* scores_t, int32_t keys, float scale_log2, SoftmaxState state) {
  for (int c = 0; c < kBlockVectors; ++c) {
    const Vector::Float scale = Vector::broadcast(scale_log2);
    const Vector::Float shift = update_max(scores_t, keys, scale_log2, state, c);
    Vector::Float sum0 = Vector::zero(), sum1 = Vector::zero();
    float* s = scores_t + c * Vector::kWidth;
    int32_t key = 0;
    for (; key + 1 < keys; key += 2, s += 2 * kBlockRows) {
      const Vector::Float p0 = exp2<kDegree>(Vector::mul(Vector::sub(Vector::load(s), shift), scale));
      const Vector::Float p1 = exp2<kDegree>(Vector::mul(Vector::sub(Vector::load(s + kBlockRows), shift), scale));
      sum0 = Vector::add(sum0, p0);
      sum1 = Vector::add(sum1, p1);
      Vector::store(s, p0);
      Vector::store(s + kBlockRows, p1);
    }
    if (key < keys) {
      const Vector::Float p = exp2<kDegree>(Vector::mul(Vector::sub(Vector::load(s), shift), scale));
      sum0 = Vector::add(sum0, p);
      Vector::store(s, p);
    }
    update_sum(state, c, Vector::add(sum0, sum1));
  }
}

// Multiplies weights by their factors; dropped ones become 0, even a NaN.
inline void drop(float* weights, const float* factors, int64_t count) {
  for (int64_t i = 0; i < count; i += Vector::kWidth) {
    const Vector::Float factor = Vector::load(factors + i);
    const Vector::Float kept = Vector::mul(Vector::load(weights + i), factor);
    Vector::store(weights + i, Vector::where_equal(factor, Vector::zero(), Vector::zero(), kept));
  }
}

// q: [rows <= kBlockRows, head_dim] -> q_t [padded_dim, rows] fp32 times factor, zero in the lanes past `rows`.
// buffer: [kBlockRows, padded_dim]. padded_dim is a multiple of the vector width.
template <class T>
inline void pack_row_block(const T* q, int64_t row_stride, int32_t rows, int32_t head_dim, int32_t padded_dim,
                           float factor, float* buffer, float* q_t) {
  for (int32_t row = 0; row < kBlockRows; ++row) {
    float* dst = buffer + int64_t{row} * padded_dim;
    if (row < rows) {
      load_row(q + row * row_stride, head_dim, dst, Vector::broadcast(factor));
    } else {
      memset(dst, 0, static_cast<size_t>(padded_dim) * sizeof(float));
    }
  }
  for (int32_t dim = 0; dim < padded_dim; dim += Vector::kWidth) {
    for (int c = 0; c < kBlockVectors; ++c) {
      transpose(buffer + int64_t{c} * Vector::kWidth * padded_dim + dim, padded_dim,
                q_t + int64_t{dim} * kBlockRows + c * Vector::kWidth, kBlockRows);
    }
  }
}

// Multiplies out_t [padded_dim, rows] by 1/sum and stores it to out [rows, head_dim]; also stores lse [rows], which may
// be null. buffer: [kBlockRows, padded_dim].
template <class T>
inline void store_row_block(const float* out_t, SoftmaxState state, int32_t rows, Scale scale, int32_t head_dim,
                            int32_t padded_dim, float* buffer, T* out, int64_t row_stride, float* lse) {
  float inverse[kBlockRows];
  for (int c = 0; c < kBlockVectors; ++c) {
    Vector::store(inverse + c * Vector::kWidth, inverse_sum(state, c));
    for (int32_t dim = 0; dim < padded_dim; dim += Vector::kWidth) {
      transpose(out_t + int64_t{dim} * kBlockRows + c * Vector::kWidth, kBlockRows,
                buffer + int64_t{c} * Vector::kWidth * padded_dim + dim, padded_dim);
    }
  }
  for (int32_t row = 0; row < rows; ++row) {
    store_row(buffer + int64_t{row} * padded_dim, head_dim, Vector::broadcast(inverse[row]), out + row * row_stride);
  }
  store_lse(state, rows, scale, lse);
}

// The layout of a task's scratch memory.
struct SimdScratch {
  float* q_t;       // [row_blocks, padded_dim, rows]
  float* out_t;     // [row_blocks, padded_dim, rows]
  float* max;       // [row_blocks, rows]
  float* sum;       // [row_blocks, rows]
  float* alpha;     // [rows]
  float* scores_t;  // [kBlockKeys, rows]
  float* buffer;    // [kBlockRows, padded_dim]
  float* k;         // [kBlockKeys, padded_dim]
  float* v;         // [kBlockKeys, padded_dim]
  float* values;    // [kBlockRows, kBlockKeys], of a mask tensor, then of dropout
  size_t bytes;

  SimdScratch(void* base, int32_t row_blocks, int32_t padded_dim) {
    Arena arena(base);
    q_t = arena.take<float>(int64_t{row_blocks} * padded_dim * kBlockRows);
    out_t = arena.take<float>(int64_t{row_blocks} * padded_dim * kBlockRows);
    max = arena.take<float>(int64_t{row_blocks} * kBlockRows);
    sum = arena.take<float>(int64_t{row_blocks} * kBlockRows);
    alpha = arena.take<float>(kBlockRows);
    scores_t = arena.take<float>(int64_t{kBlockKeys} * kBlockRows);
    buffer = arena.take<float>(int64_t{kBlockRows} * padded_dim);
    k = arena.take<float>(int64_t{kBlockKeys} * padded_dim);
    v = arena.take<float>(int64_t{kBlockKeys} * padded_dim);
    values = arena.take<float>(int64_t{kBlockRows} * kBlockKeys);
    bytes = arena.used();
  }

  SoftmaxState state(int32_t row_block) const {
    return {max + int64_t{row_block} * kBlockRows, sum + int64_t{row_block} * kBlockRows, alpha};
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

// A block of K or V as fp32 rows: converted into `buffer`, or in place.
template <class T>
inline Fp32Rows fp32_rows(const T* src, int64_t stride, int32_t rows, int32_t head_dim, int32_t padded_dim, bool,
                          float* buffer) {
  convert_rows(src, stride, rows, head_dim, padded_dim, buffer);
  return {buffer, padded_dim};
}
// Rows with a large stride are copied if several row blocks read them: each is on its own page and in its own cache
// set.
inline Fp32Rows fp32_rows(const float* src, int64_t stride, int32_t rows, int32_t head_dim, int32_t padded_dim,
                          bool read_often, float* buffer) {
  if (stride == head_dim || !read_often) return {src, stride};
  convert_rows(src, stride, rows, head_dim, padded_dim, buffer);
  return {buffer, padded_dim};
}

// A block of K or V that may be paged: in place if its rows have one stride, otherwise gathered.
template <class T>
inline Fp32Rows block_rows(const T* first, const attention::Strides& stride, const attention::Batch& sequences,
                           int32_t key, int32_t keys, int32_t head_dim, int32_t padded_dim, bool read_often,
                           float* buffer) {
  const T* rows[kBlockKeys] = {};
  const bool is_whole = sequences.block_table == nullptr || key % sequences.page_size + keys <= sequences.page_size;
  find_rows(first, stride, sequences, key, is_whole ? 1 : keys, rows);
  if (is_whole) return fp32_rows(rows[0], stride.row, keys, head_dim, padded_dim, read_often, buffer);
  for (int32_t i = 0; i < keys; ++i) {
    load_row(rows[i], head_dim, buffer + int64_t{i} * padded_dim, Vector::broadcast(1.0f));
  }
  return {buffer, padded_dim};
}

// One task. MaskOf: Mask, or WindowMask, which applies all score options.
template <class T, class MaskOf>
class SimdForward {
 public:
  SimdForward(const Task& task, void* memory)
      : task_(task),
        params_(*task.params),
        operands_(task),
        mask_(task),
        score_function_(params_.score_options, task.head_q, int64_t{params_.seq_k} - params_.seq_q),
        dim_(params_.head_dim),
        dim_v_(task.head_dim_v),
        padded_dim_(round_up(dim_, Vector::kWidth)),
        padded_dim_v_(round_up(dim_v_, Vector::kWidth)),
        row_blocks_(row_block_count(task.row_end - task.row_begin)),
        s_(memory, row_blocks_, padded_dim_ > padded_dim_v_ ? padded_dim_ : padded_dim_v_),
        scale_(MaskOf::kHasOptions ? scale_of_options(params_) : make_scale(params_.scale)) {}

  void run() const {
    const RowStart start = MaskOf::kHasOptions ? start_of_row(params_.score_options, task_.head_q, scale_)
                                               : RowStart{kMinusInfinity, 0.0f};
    for (int32_t block = 0; block < row_blocks_; ++block) {
      const int32_t row = first_row(block);
      pack_row_block(operands_.q + row * params_.q_stride.row, params_.q_stride.row, height(block), dim_, padded_dim_,
                     scale_.q_factor, s_.buffer, q_t(block));
      set_state(s_.state(block), start.max, start.sum);
    }
    memset(s_.out_t, 0,
           static_cast<size_t>(row_blocks_) * static_cast<size_t>(padded_dim_v_) * kBlockRows * sizeof(float));

    const KeyRange seen = mask_.keys(task_.row_begin, task_.row_end - task_.row_begin);
    // Blocks of keys are the same for all row blocks, whatever their task.
    for (int32_t key = seen.begin / kBlockKeys * kBlockKeys; key < seen.end; key += kBlockKeys) {
      add_keys(key, clamp(int64_t{seen.end} - key, 0, kBlockKeys));
    }

    for (int32_t block = 0; block < row_blocks_; ++block) {
      const int32_t row = first_row(block);
      store_row_block(out_t(block), s_.state(block), height(block), scale_, dim_v_, padded_dim_v_, s_.buffer,
                      operands_.out + row * params_.out_stride.row, params_.out_stride.row, operands_.lse_row(row));
    }
  }

 private:
  int32_t first_row(int32_t block) const { return task_.row_begin + block * kBlockRows; }
  int32_t height(int32_t block) const { return clamp(task_.row_end - first_row(block), 0, kBlockRows); }
  float* q_t(int32_t block) const { return s_.q_t + int64_t{block} * padded_dim_ * kBlockRows; }
  float* out_t(int32_t block) const { return s_.out_t + int64_t{block} * padded_dim_v_ * kBlockRows; }

  void add_keys(int32_t key, int32_t keys) const {
    const bool read_often = row_blocks_ > 1;
    Fp32Rows k, v;
    if constexpr (MaskOf::kHasOptions) {
      k = block_rows(operands_.k, params_.k_stride, params_.sequences, key, keys, dim_, padded_dim_, read_often, s_.k);
      v = block_rows(operands_.v, params_.v_stride, params_.sequences, key, keys, dim_v_, padded_dim_v_, read_often,
                     s_.v);
    } else {
      k = fp32_rows(operands_.k + key * params_.k_stride.row, params_.k_stride.row, keys, dim_, padded_dim_, read_often,
                    s_.k);
      v = fp32_rows(operands_.v + key * params_.v_stride.row, params_.v_stride.row, keys, dim_v_, padded_dim_v_,
                    read_often, s_.v);
    }
    for (int32_t block = 0; block < row_blocks_; ++block) {
      const auto block_mask = mask_.block(first_row(block), key, keys);
      if constexpr (MaskOf::kHasOptions) {
        add_masked_block(block, key, block_mask, k, v);
      } else {
        add_block(block, block_mask, k, v);
      }
    }
  }

  void score(int32_t block, const float* k, int64_t k_stride, int32_t keys) const {
    const auto compute = has_few_keys<T>(params_.seq_k) ? compute_few_scores : compute_scores;
    compute(q_t(block), k, k_stride, keys, dim_, s_.scores_t);
  }

  void add_block(int32_t block, BlockMask mask, Fp32Rows k, Fp32Rows v) const {
    const KeyRange any = mask.keys_of_any(kBlockRows), all = mask.keys_of_all(kBlockRows);
    if (any.end == 0) return;
    const SoftmaxState state = s_.state(block);
    score(block, k.data, k.stride, any.end);
    mask_scores(s_.scores_t, mask);
    softmax_in_place<ExpDegree<T>::value>(s_.scores_t, any.end, scale_.log2, state);
    if (rows_are_finite(v.data + all.end * v.stride, v.stride, any.end - all.end, dim_v_)) {
      accumulate_output(s_.scores_t, v.data, v.stride, any.end, dim_v_, state.alpha, out_t(block));
    } else {
      accumulate_visible_output(s_.scores_t, v.data, v.stride, mask, dim_v_, state.alpha, out_t(block));
    }
  }

  void add_masked_block(int32_t block, int32_t key, WindowBlockMask whole, Fp32Rows k, Fp32Rows v) const {
    const KeyRange any = whole.keys_of_any(kBlockRows);
    if (any.end == 0) return;
    const WindowBlockMask mask = whole.restricted_to(any);
    const int32_t keys = any.end - any.begin;
    const float* v_data = v.data + any.begin * v.stride;
    const SoftmaxState state = s_.state(block);
    score(block, k.data + any.begin * k.stride, k.stride, keys);
    score_function_.apply_transposed(first_row(block), height(block), kBlockRows, key + any.begin, keys, s_.scores_t,
                                     s_.values);
    mask_scores(s_.scores_t, mask);
    softmax_in_place<ExpDegree<T>::value>(s_.scores_t, keys, scale_.log2, state);
    if (task_.dropout != nullptr) {
      DropoutFactors(*task_.dropout, task_.sequence, task_.head_q)
          .fill(first_row(block), kBlockRows, key + any.begin, keys, 1, kBlockRows, s_.values);
      drop(s_.scores_t, s_.values, int64_t{keys} * kBlockRows);
    }
    const KeyRange all = score_function_.has_mask() ? KeyRange{0, 0} : mask.keys_of_all(kBlockRows);
    if (rows_are_finite(v_data, v.stride, all.begin, dim_v_) &&
        rows_are_finite(v_data + all.end * v.stride, v.stride, keys - all.end, dim_v_)) {
      accumulate_output(s_.scores_t, v_data, v.stride, keys, dim_v_, state.alpha, out_t(block));
    } else {
      accumulate_weighted_output(s_.scores_t, v_data, v.stride, keys, dim_v_, state.alpha, out_t(block));
    }
  }

  static_assert(ScoreFunction<T>::kChunk == kBlockKeys, "the mask values of a block of keys are loaded at once");

  const Task& task_;
  const attention::ForwardParams& params_;
  const Operands<T> operands_;
  const MaskOf mask_;
  const ScoreFunction<T> score_function_;
  const int32_t dim_;
  const int32_t dim_v_;
  const int32_t padded_dim_;
  const int32_t padded_dim_v_;
  const int32_t row_blocks_;
  const SimdScratch s_;
  const Scale scale_;
};

template <class T>
void forward_simd(const Task& task, void* memory) {
  return task.has_options ? SimdForward<T, WindowMask>(task, memory).run() : SimdForward<T, Mask>(task, memory).run();
}

}  // namespace
}  // namespace flashmoe::cpu
