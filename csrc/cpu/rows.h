// Rows of a tensor to fp32 and back, and the transposes between row-major and [head_dim, group]. Include after a
// vector_*.h. Internal linkage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernel.h"
#include "softmax.h"

namespace flashmoe {
namespace cpu {
namespace {

inline int32_t round_up(int32_t x, int32_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// The first `count` elements of src as fp32, zeros after them up to a whole vector. Reads nothing past src[count - 1].
template <class T>
inline void load_row(const T* src, int32_t count, float* dst, Vector::Float factor) {
  int32_t i = 0;
  for (; i + Vector::kWidth <= count; i += Vector::kWidth) {
    Vector::store(dst + i, Vector::mul(Vector::load(src + i), factor));
  }
  if (i < count) {
    T tail[Vector::kWidth] = {};
    memcpy(tail, src + i, static_cast<size_t>(count - i) * sizeof(T));
    Vector::store(dst + i, Vector::mul(Vector::load(tail), factor));
  }
}

// The first `count` elements of src, times factor, as T.
template <class T>
inline void store_row(const float* src, int32_t count, Vector::Float factor, T* dst) {
  int32_t i = 0;
  for (; i + Vector::kWidth <= count; i += Vector::kWidth) {
    Vector::store(dst + i, Vector::mul(Vector::load(src + i), factor));
  }
  if (i < count) {
    T tail[Vector::kWidth];
    Vector::store(tail, Vector::mul(Vector::load(src + i), factor));
    memcpy(dst + i, tail, static_cast<size_t>(count - i) * sizeof(T));
  }
}

// q: [rows <= kGroupRows, head_dim] -> q_t [padded_dim, group] fp32 times factor, zero in the lanes past `rows`.
// buffer: [kGroupRows, padded_dim]. padded_dim is a multiple of the vector width.
template <class T>
inline void pack_group(const T* q, int64_t row_stride, int32_t rows, int32_t head_dim, int32_t padded_dim, float factor,
                       float* buffer, float* q_t) {
  for (int32_t row = 0; row < kGroupRows; ++row) {
    float* dst = buffer + int64_t{row} * padded_dim;
    if (row < rows) {
      load_row(q + row * row_stride, head_dim, dst, Vector::broadcast(factor));
    } else {
      memset(dst, 0, static_cast<size_t>(padded_dim) * sizeof(float));
    }
  }
  for (int32_t dim = 0; dim < padded_dim; dim += Vector::kWidth) {
    for (int c = 0; c < kGroupVectors; ++c) {
      Vector::transpose(buffer + int64_t{c} * Vector::kWidth * padded_dim + dim, padded_dim,
                        q_t + int64_t{dim} * kGroupRows + c * Vector::kWidth, kGroupRows);
    }
  }
}

// out_t [padded_dim, group], times 1/sum, -> out [rows, head_dim] and lse [rows], which may be null. buffer: [kGroupRows, padded_dim].
template <class T>
inline void store_group(const float* out_t, GroupState state, int32_t rows, int32_t head_dim, int32_t padded_dim,
                        float* buffer, T* out, int64_t row_stride, float* lse) {
  float inverse[kGroupRows];
  for (int c = 0; c < kGroupVectors; ++c) {
    Vector::store(inverse + c * Vector::kWidth, inverse_sum(state, c));
    for (int32_t dim = 0; dim < padded_dim; dim += Vector::kWidth) {
      Vector::transpose(out_t + int64_t{dim} * kGroupRows + c * Vector::kWidth, kGroupRows,
                        buffer + int64_t{c} * Vector::kWidth * padded_dim + dim, padded_dim);
    }
  }
  for (int32_t row = 0; row < rows; ++row) {
    store_row(buffer + int64_t{row} * padded_dim, head_dim, Vector::broadcast(inverse[row]), out + row * row_stride);
  }
  store_lse(state, rows, lse);
}

// One head's tensors of a task, as the element type.
template <class T>
struct Operands {
  const T* q;  // row 0 of the head
  const T* k;
  const T* v;
  T* out;
  float* lse;  // row 0, or null if nobody wants it

  float* lse_row(int64_t row) const { return lse == nullptr ? nullptr : lse + row; }

  explicit Operands(const Task& task) {
    const attention::ForwardParams& params = *task.params;
    const int64_t batch = task.batch;
    const int64_t head_q = task.head_q;
    const int64_t head_kv = head_q / (params.heads_q / params.heads_kv);
    q = static_cast<const T*>(params.q) + batch * params.q_stride.batch + head_q * params.q_stride.head;
    k = static_cast<const T*>(params.k) + batch * params.k_stride.batch + head_kv * params.k_stride.head;
    v = static_cast<const T*>(params.v) + batch * params.v_stride.batch + head_kv * params.v_stride.head;
    out = static_cast<T*>(params.out) + batch * params.out_stride.batch + head_q * params.out_stride.head;
    lse = params.lse == nullptr ? nullptr : params.lse + (batch * params.heads_q + head_q) * params.seq_q;
  }
};

// Hands out 64-byte aligned pieces of the scratch memory; with a null base it only counts.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<unsigned char*>(base)) {}
  template <class T>
  T* take(int64_t count) {
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    constexpr size_t kAlignment = 64;
    used_ += (static_cast<size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return piece;
  }
  size_t used() const { return used_; }

 private:
  unsigned char* base_;
  size_t used_ = 0;
};

}  // namespace
}  // namespace cpu
}  // namespace flashmoe
