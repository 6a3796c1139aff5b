// Attention's backward pass of a small fp32 problem, entirely in double: one (batch, key head). Include after a
// vector_*.h. Internal linkage.
//
// If a gradient has few elements, or comes from one row of large scores, its error is that of one or two fp32
// roundings, and plain PyTorch may by luck have none. Here S, P and the P-weighted mean of dP are recomputed, so that
// lse and out, both rounded to fp32, do not matter. Rows are those of all query heads that read the key head, one head
// after the other.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "attention/cpu/backward_kernel.h"
#include "attention/cpu/mask.h"
#include "cpu/double_lanes.h"

namespace flashmoe::cpu {
namespace {

struct ExactScratch {
  int32_t rows;   // rounded up to whole tiles
  int64_t keys;   // rounded up to whole tiles
  int64_t dim;    // the larger head_dim, rounded up to whole tiles
  double* q;      // [rows, dim]
  double* dout;   // the same
  double* dq;     // the same
  double* p;      // [rows, keys]: S, then P
  double* ds;     // the same: dP, then dS
  double* block;  // K, then V, as [dim, kBackwardKeys]; then K as [kBackwardKeys, dim]; then their gradients
  size_t bytes;

  ExactScratch(void* base, const BackwardTask& task) {
    const attention::BackwardParams& params = *task.params;
    Arena arena(base);
    rows = round_up(params.heads_q / params.heads_kv * params.seq_q, kDoubleTileRows);
    keys = round_up(params.seq_k, kDoubleTileColumns);
    dim = round_up(params.head_dim > task.head_dim_v ? params.head_dim : task.head_dim_v, kDoubleTileColumns);
    q = arena.take<double>(rows * dim);
    dout = arena.take<double>(rows * dim);
    dq = arena.take<double>(rows * dim);
    p = arena.take<double>(rows * keys);
    ds = arena.take<double>(rows * keys);
    block = arena.take<double>(kBackwardKeys * dim);
    bytes = arena.used();
  }
};

class ExactBackward {
 public:
  ExactBackward(const BackwardTask& task, void* memory)
      : task_(task),
        params_(*task.params),
        mask_(task),
        s_(memory, task),
        rows_((task.head_end - task.head_begin) * params_.seq_q),
        scale_(scale_of(params_)) {}

  // Returns false and stores nothing if a number is not finite, because hidden keys are multiplied by zero here.
  bool run() {
    if (!load_rows(params_.q, params_.q_stride, params_.head_dim, s_.q)) return false;
    if (!load_rows(params_.dout, params_.dout_stride, task_.head_dim_v, s_.dout)) return false;
    for (int32_t key = 0; key < params_.seq_k; key += kBackwardKeys) {
      if (!score(key)) return false;
    }
    for (int32_t row = 0; row < s_.rows; ++row) {
      if (!apply_softmax(row)) return false;
    }
    for (int32_t key = 0; key < params_.seq_k; key += kBackwardKeys) add_keys(key);
    for (int32_t row = 0; task_.with_dq && row < rows_; ++row) {
      store_row(s_.dq + row * s_.dim, params_.head_dim, scale_, row_of(params_.dq, params_.dq_stride, row));
    }
    return true;
  }

 private:
  // The scale in double: 1 / sqrt(head_dim) in full precision if the parameters hold the float of that.
  static double scale_of(const attention::BackwardParams& params) {
    const double usual = 1.0 / std::sqrt(static_cast<double>(params.head_dim));
    return static_cast<float>(usual) == params.scale ? usual : static_cast<double>(params.scale);
  }

  int32_t head_of(int32_t row) const { return task_.head_begin + row / params_.seq_q; }
  int64_t statistic(int32_t row) const {
    return (int64_t{task_.batch} * params_.heads_q + head_of(row)) * task_.lse_stride + row % params_.seq_q;
  }
  float* row_of(const void* tensor, attention::Strides stride, int32_t row) const {
    return at(tensor, stride, head_of(row), row % params_.seq_q);
  }
  float* key_of(const void* tensor, attention::Strides stride, int32_t key) const {
    return at(tensor, stride, task_.head_kv, key);
  }
  float* at(const void* tensor, attention::Strides stride, int32_t head, int32_t row) const {
    const float* first = static_cast<const float*>(tensor);
    return const_cast<float*>(first) + task_.batch * stride.batch + head * stride.head + row * stride.row;
  }

  static DoubleMatrix tile(double* data, int64_t stride, int32_t row) { return {data + row * stride, stride, 1}; }
  // The number of leading keys that the row sees; that any row of a tile sees.
  int32_t seen_by(int32_t row) const {
    return row < rows_ ? mask_.block(row % params_.seq_q, 0, params_.seq_k).keys_of(0).end : 0;
  }
  int64_t seen_by_tile(int32_t row) const {
    int32_t seen = 0;
    for (int i = 0; i < kDoubleTileRows; ++i) seen = std::max(seen, seen_by(row + i));
    return seen;
  }
  int32_t dim_columns(int32_t dim) const { return round_up(dim, kDoubleTileColumns); }
  int32_t block_keys(int32_t key) const { return clamp(int64_t{params_.seq_k} - key, 0, kBackwardKeys); }

  // Loads all rows as doubles, padded with zeros. Returns whether they are finite.
  bool load_rows(const void* tensor, attention::Strides stride, int32_t dim, double* to) const {
    double check = 0.0;  // a sum of 0 * x, which is not 0 for NaN and Inf
    for (int32_t row = 0; row < s_.rows; ++row, to += s_.dim) {
      const float* from = row < rows_ ? row_of(tensor, stride, row) : nullptr;
      check += load_row(from, dim, s_.dim, 1, to);
    }
    return check == 0.0;
  }
  static double load_row(const float* from, int32_t count, int64_t padded, int64_t stride, double* to) {
    double check = 0.0;
    for (int32_t i = 0; i < padded; ++i) {
      const double x = from != nullptr && i < count ? static_cast<double>(from[i]) : 0.0;
      check += 0.0 * x;
      to[i * stride] = x;
    }
    return check;
  }
  static void store_row(const double* from, int32_t count, double factor, float* to) {
    for (int32_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i] * factor);
  }

  // S and dP of all rows and a block of keys. Returns whether K and V are finite.
  bool score(int32_t key) {
    const int32_t keys = round_up(block_keys(key), kDoubleTileColumns);
    const DoubleMatrix block_t = {s_.block, kBackwardKeys, 1};
    if (!load_keys_t(params_.k, params_.k_stride, key, keys, params_.head_dim)) return false;
    for (int32_t i = 0; i < keys; ++i) {
      double square = 0.0;
      for (int32_t dim = 0; dim < params_.head_dim; ++dim) {
        square += s_.block[dim * kBackwardKeys + i] * s_.block[dim * kBackwardKeys + i];
      }
      largest_key_ = square > largest_key_ ? square : largest_key_;
    }
    multiply_rows(s_.q, block_t, params_.head_dim, key, keys, s_.p);
    if (!load_keys_t(params_.v, params_.v_stride, key, keys, task_.head_dim_v)) return false;
    multiply_rows(s_.dout, block_t, task_.head_dim_v, key, keys, s_.ds);
    return true;
  }
  // Skips keys that no row of a tile sees.
  void multiply_rows(double* left, DoubleMatrix block_t, int32_t dim, int32_t key, int32_t keys, double* to) const {
    for (int32_t row = 0; row < s_.rows; row += kDoubleTileRows) {
      const int32_t seen = clamp(seen_by_tile(row) - key, 0, keys);
      multiply_tiles(tile(left, s_.dim, row), block_t, dim, round_up(seen, kDoubleTileColumns), false,
                     tile(to + key, s_.keys, row));
    }
  }
  bool load_keys_t(const void* tensor, attention::Strides stride, int32_t key, int32_t keys, int32_t dim) const {
    double check = 0.0;
    for (int32_t i = 0; i < keys; ++i) {
      const float* from = key + i < params_.seq_k ? key_of(tensor, stride, key + i) : nullptr;
      check += load_row(from, dim, dim, kBackwardKeys, s_.block + i);
    }
    return check == 0.0;
  }

  // Turns S and dP of a row into P and dS. If the sum of P computed from lse is not 1, within the forward pass's
  // rounding, lse and out cover more keys than these (this is a part of a split sequence) and are used. Returns false
  // if lse is NaN or +inf.
  bool apply_softmax(int32_t row) const {
    double* p = s_.p + row * s_.keys;
    double* ds = s_.ds + row * s_.keys;
    const int32_t end = seen_by(row);
    const double lse = row < rows_ ? static_cast<double>(params_.lse[statistic(row)]) : -HUGE_VAL;
    if (!(lse < HUGE_VAL)) return false;
    const int32_t count = lse == -HUGE_VAL ? 0 : round_up(end, kDoubles);
    for (int32_t key = 0; key < count; key += kDoubles) {
      constexpr double kDoubleLog2E = 1.44269504088896340736;
      store(p + key, exp2((load(p + key) * scale_ - lse) * kDoubleLog2E));
    }
    for (int64_t key = count == 0 ? 0 : end; key < s_.keys; ++key) p[key] = 0.0;
    for (int64_t key = count; key < s_.keys; ++key) ds[key] = 0.0;
    if (count == 0) return true;
    // dP is taken relative to that of the heaviest key: if one key has nearly all of the weight, its dS is then not a
    // difference of large sums.
    const double pivot = ds[std::max_element(p, p + end) - p];
    Double weights = {}, products = {};
    for (int32_t key = 0; key < count; key += kDoubles) {
      weights += load(p + key);
      products += load(p + key) * (load(ds + key) - pivot);
    }
    const double sum = sum_of(weights);
    const bool is_whole = std::fabs(sum - 1.0) <= rounding_of(row, lse);
    const double factor = is_whole ? 1.0 / sum : 1.0;
    double term = is_whole ? sum_of(products) * factor : product_with_out(row) - pivot;
    if (params_.dlse != nullptr) term -= static_cast<double>(params_.dlse[statistic(row)]);
    for (int32_t key = 0; key < count; key += kDoubles) {
      const Double weight = load(p + key) * factor;
      store(p + key, weight);
      store(ds + key, weight * (load(ds + key) - pivot - term));
    }
    return true;
  }

  static double sum_of(Double x) {
    double sum = 0.0;
    for (int i = 0; i < kDoubles; ++i) sum += x[i];
    return sum;
  }
  // How far from 1 the sum of P may be because of the forward pass's rounding: of lse, and of the scores, whose terms
  // may cancel.
  double rounding_of(int32_t row, double lse) const {
    const double* q = s_.q + row * s_.dim;
    double square = 0.0;
    for (int32_t dim = 0; dim < params_.head_dim; ++dim) square += q[dim] * q[dim];
    return 8e-6 + 1e-6 * (std::fabs(lse) + std::fabs(scale_) * std::sqrt(square * largest_key_));
  }
  double product_with_out(int32_t row) const {
    const float* out = row_of(params_.out, params_.out_stride, row);
    const double* dout = s_.dout + row * s_.dim;
    double sum = 0.0;
    for (int32_t dim = 0; dim < task_.head_dim_v; ++dim) sum += dout[dim] * static_cast<double>(out[dim]);
    return sum;
  }

  // Adds a block of keys to dQ, and computes its dK and dV.
  void add_keys(int32_t key) const {
    const int32_t keys = block_keys(key);
    if (task_.with_dq) {
      for (int32_t i = 0; i < keys; ++i) {
        load_row(key_of(params_.k, params_.k_stride, key + i), params_.head_dim, s_.dim, 1, s_.block + i * s_.dim);
      }
      for (int32_t row = 0; row < s_.rows; row += kDoubleTileRows) {
        multiply_tiles(tile(s_.ds + key, s_.keys, row), {s_.block, s_.dim, 1}, clamp(seen_by_tile(row) - key, 0, keys),
                       dim_columns(params_.head_dim), key > 0, tile(s_.dq, s_.dim, row));
      }
    }
    if (params_.dk != nullptr) {
      multiply_keys(s_.ds, s_.q, key, keys, params_.head_dim);
      store_keys(key, keys, params_.head_dim, scale_, params_.dk, params_.dk_stride);
    }
    if (params_.dv != nullptr) {
      multiply_keys(s_.p, s_.dout, key, keys, task_.head_dim_v);
      store_keys(key, keys, task_.head_dim_v, 1.0, params_.dv, params_.dv_stride);
    }
  }
  // block = scores^T * rows; per head, only the rows that see the tile's first key or a later one.
  void multiply_keys(double* scores, double* rows, int32_t key, int32_t keys, int32_t dim) const {
    for (int32_t i = 0; i < keys; i += kDoubleTileRows) {
      const int32_t first = clamp(mask_.block(0, 0, params_.seq_k).first_row(key + i), 0, params_.seq_q);
      for (int32_t head = 0; head < task_.head_end - task_.head_begin; ++head) {
        const int32_t row = head * params_.seq_q + first;
        multiply_tiles({scores + row * s_.keys + key + i, 1, s_.keys}, {rows + row * s_.dim, s_.dim, 1},
                       params_.seq_q - first, dim_columns(dim), head > 0, tile(s_.block, s_.dim, i));
      }
    }
  }
  void store_keys(int32_t key, int32_t keys, int32_t dim, double factor, void* tensor,
                  attention::Strides stride) const {
    for (int32_t i = 0; i < keys; ++i) {
      store_row(s_.block + i * s_.dim, dim, factor, key_of(tensor, stride, key + i));
    }
  }

  const BackwardTask& task_;
  const attention::BackwardParams& params_;
  const Mask mask_;
  const ExactScratch s_;
  const int32_t rows_;
  const double scale_;
  double largest_key_ = 0.0;  // the squared norm of the longest key
};

}  // namespace
}  // namespace flashmoe::cpu
