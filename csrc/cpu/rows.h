// Converts rows of a tensor to fp32 and back; hands out scratch memory. Include after a vector_*.h. Internal linkage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace flashmoe::cpu {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();

inline int32_t clamp(int64_t x, int32_t low, int32_t high) {
  return x < low ? low : x > high ? high : static_cast<int32_t>(x);
}

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

// dst[j][i] = src[i][j], a square of the vector's width.
inline void transpose(const float* src, int64_t src_stride, float* dst, int64_t dst_stride) {
  Vector::transpose([=](int i) { return Vector::load(src + i * src_stride); }, dst, dst_stride);
}

// Hands out 64-byte aligned buffers in the scratch memory; with a null base it only counts.
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
}  // namespace flashmoe::cpu
