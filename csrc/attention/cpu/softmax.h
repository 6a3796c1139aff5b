// Online softmax of a row block over one block of keys, in base 2. Lanes are query rows, so that maxima and sums need
// no reduction across lanes. Include after a vector_*.h. Internal linkage.
//
// Notation, shared with forward_simd.h: a row block is kBlockRows query rows, one lane each. Arrays "over the row
// block" have kBlockRows floats per row; scores_t is [keys, rows], transposed.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/cpu/mask.h"
#include "cpu/exp2.h"
#include "cpu/rows.h"

namespace flashmoe::cpu {
namespace {

constexpr int kBlockVectors = 2;
constexpr int kBlockRows = kBlockVectors * Vector::kWidth;
inline int32_t row_block_count(int32_t rows) { return (rows + kBlockRows - 1) / kBlockRows; }

// With few keys a score's rounding is most of an fp32 gradient's error, and only one row of the problem may have any
// gradient. So q . k is summed in groups of kShortSum products: the error of one single sum was up to 5 times that of
// torch's product.
constexpr int32_t kFewKeys = 16;
constexpr int32_t kShortSum = 16;
template <class T>
constexpr bool has_few_keys(int32_t seq_k) {
  return std::is_same_v<T, float> && seq_k <= kFewKeys;
}

constexpr float kLog2E = 1.44269504088896340736f;

// The factors of q k^T: Q is multiplied by q_factor when packed (exact: +1, -1, 0 or NaN), so that the scores' scale is
// positive and the maximum of the scores is the maximum of the scaled ones. For scale = 0 the scores are 0, unless Q or
// K holds Inf or NaN.
struct Scale {
  float q_factor;
  float natural;  // > 0
  float log2;     // natural * log2(e)
};

inline Scale make_scale(float scale) {
  if (scale == 0.0f) return {0.0f, 1.0f, kLog2E};
  return scale < 0.0f ? Scale{-1.0f, -scale, -scale * kLog2E} : Scale{1.0f, scale, scale * kLog2E};
}

// The running state of a row block; the arrays are over the row block.
struct SoftmaxState {
  float* max;    // of the scores so far, unscaled; -inf before any key
  float* sum;    // of 2^((score - max) * scale_log2)
  float* alpha;  // factor of the sum and the output so far, for the new maximum
};

// Writes -inf to the masked keys of keys_of_any(). scores_t: [keys, rows].
inline void mask_scores(float* scores_t, BlockMask mask) {
  const Vector::Float hidden = Vector::broadcast(kMinusInfinity);
  const int32_t end = mask.keys_of_any(kBlockRows).end;
  for (int32_t key = mask.keys_of_all(kBlockRows).end; key < end; ++key) {
    const int32_t first_lane = mask.first_row(key);
    for (int c = 0; c < kBlockVectors; ++c) {
      float* p = scores_t + int64_t{key} * kBlockRows + c * Vector::kWidth;
      Vector::store(p, Vector::from_lane(first_lane - c * Vector::kWidth, Vector::load(p), hidden));
    }
  }
}

// The same for a block with a window, reduced to the keys of keys_of_any().
inline void mask_scores(float* scores_t, WindowBlockMask mask) {
  const Vector::Float hidden = Vector::broadcast(kMinusInfinity);
  const KeyRange any = mask.keys_of_any(kBlockRows), all = mask.keys_of_all(kBlockRows);
  for (int32_t key = any.begin; key < any.end; ++key) {
    if (key == all.begin && all.begin < all.end) key = all.end;
    if (key == any.end) return;
    const int32_t first_lane = mask.first_row(key), end_lane = mask.end_row(key);
    for (int c = 0; c < kBlockVectors; ++c) {
      float* p = scores_t + int64_t{key} * kBlockRows + c * Vector::kWidth;
      const Vector::Float from_first = Vector::from_lane(first_lane - c * Vector::kWidth, Vector::load(p), hidden);
      Vector::store(p, Vector::from_lane(end_lane - c * Vector::kWidth, hidden, from_first));
    }
  }
}

// Updates the running maximum with the block's and sets alpha, for vector column c only. scores_t: [keys, rows];
// scale_log2 > 0.
// Returns the number to subtract from the scores: the new maximum, or 0 while that is -inf (nothing visible yet), so
// that -inf - -inf does not occur. It is subtracted before the multiplication, so that the maximum itself gives exactly
// 0 at any magnitude.
inline Vector::Float update_max(const float* scores_t, int32_t keys, float scale_log2, SoftmaxState state, int c) {
  const float* s = scores_t + c * Vector::kWidth;
  Vector::Float m0 = Vector::broadcast(kMinusInfinity), m1 = m0;
  int32_t key = 0;
  for (; key + 1 < keys; key += 2) {
    m0 = Vector::max(Vector::load(s + int64_t{key} * kBlockRows), m0);
    m1 = Vector::max(Vector::load(s + int64_t{key + 1} * kBlockRows), m1);
  }
  if (key < keys) m0 = Vector::max(Vector::load(s + int64_t{key} * kBlockRows), m0);
  float* max = state.max + c * Vector::kWidth;
  const Vector::Float before = Vector::load(max);
  const Vector::Float now = Vector::max(Vector::max(m0, m1), before);
  Vector::store(max, now);
  const Vector::Float shift = Vector::where_equal(now, Vector::broadcast(kMinusInfinity), Vector::zero(), now);
  const Vector::Float growth = Vector::mul(Vector::sub(before, shift), Vector::broadcast(scale_log2));
  Vector::store(state.alpha + c * Vector::kWidth, exp2<kExpDegreeFull>(growth));
  return shift;
}

inline void update_sum(SoftmaxState state, int c, Vector::Float block_sum) {
  float* sum = state.sum + c * Vector::kWidth;
  const Vector::Float alpha = Vector::load(state.alpha + c * Vector::kWidth);
  Vector::store(sum, Vector::fma(Vector::load(sum), alpha, block_sum));
}

inline void set_state(SoftmaxState state, float max, float sum) {
  for (int c = 0; c < kBlockVectors; ++c) {
    Vector::store(state.max + c * Vector::kWidth, Vector::broadcast(max));
    Vector::store(state.sum + c * Vector::kWidth, Vector::broadcast(sum));
  }
}

// 1 / sum, or 0 for rows that saw no key (their sum is exactly 0: the maximum of any key contributes 1, a NaN gives
// NaN).
inline Vector::Float inverse_sum(SoftmaxState state, int c) {
  const Vector::Float sum = Vector::load(state.sum + c * Vector::kWidth);
  return Vector::where_equal(sum, Vector::zero(), Vector::zero(), Vector::div(Vector::broadcast(1.0f), sum));
}

// x, a float or a vector. The compiler may not fuse it with what follows into one operation with one rounding.
template <class F>
inline F rounded(F x) {
#if defined(__x86_64__)
  __asm__("" : "+v"(x));
#else
  __asm__("" : "+w"(x));
#endif
  return x;
}

// lse of the block's first `rows` rows, natural logarithm; nothing if lse is null. The scaled maximum is rounded first,
// as the backward pass rounds it: the rounding errors cancel, and a key that has all of the weight gets exactly 1.
// logf: the newest version of the double function needs a newer glibc than the oldest that the wheel runs on.
inline void store_lse(SoftmaxState state, int32_t rows, Scale scale, float* lse) {
  if (lse == nullptr) return;
  for (int32_t row = 0; row < rows; ++row) {
    const float sum = state.sum[row];
    lse[row] = sum == 0.0f ? kMinusInfinity : rounded(state.max[row] * scale.natural) + __builtin_logf(sum);
  }
}

}  // namespace
}  // namespace flashmoe::cpu
