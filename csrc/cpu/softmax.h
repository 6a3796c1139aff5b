// Online softmax of a group of query rows over one block of keys, in base 2. Lanes are query rows, so that maxima and
// sums need no reduction across lanes. Include after a vector_*.h. Internal linkage.
//
// Notation, shared with forward_simd.h and forward_amx.cpp: a group is kGroupRows query rows, one lane each. Arrays
// "over the group" have kGroupRows floats a row; scores_t is [keys, group], transposed.
#pragma once

#include <cstdint>

namespace flashmoe {
namespace cpu {
namespace {

constexpr int kGroupVectors = 2;
constexpr int kGroupRows = kGroupVectors * Vector::kWidth;

constexpr float kMinusInfinity = -__builtin_inff();

// Weights of the softmax need no more digits than the type they will be multiplied in.
constexpr int kExpDegreeFull = 6;  // relative error of the polynomial 2.0e-9, of the whole below 1.2e-7
constexpr int kExpDegree16Bit = 4;  // 2.9e-6; half a unit in the last place of fp16 is 2.4e-4

// t = 2^t for t <= 0 or barely above (rounding), with 2^0 = 1 exactly and 2^-inf = 0; NaN stays NaN. The polynomial is
// 1 + f q(f), minimax in relative error on [-1/2, 1/2]. Step by step over kCount vectors: one vector's chain of
// operations is longer than a processor looks ahead.
template <int kDegree, int kCount>
inline void exp2_of(Vector::Float (&t)[kCount]) {
  static_assert(kDegree == kExpDegreeFull || kDegree == kExpDegree16Bit, "there are coefficients for two degrees");
  static constexpr float kFull[] = {1.5353362e-4f, 1.3398874e-3f, 9.6184369e-3f, 5.5503324e-2f, 2.4022648e-1f,
                                    6.9314718e-1f, 1.0f};
  static constexpr float k16Bit[] = {9.5828529e-3f, 5.5906426e-2f, 2.4024099e-1f, 6.9312408e-1f, 1.0f};
  const float* coefficients = kDegree == kExpDegreeFull ? kFull : k16Bit;
  Vector::Float f[kCount], p[kCount];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) t[i] = Vector::split_exponent(t[i], &f[i]);
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) p[i] = Vector::broadcast(coefficients[0]);
#pragma GCC unroll 6
  for (int power = 1; power <= kDegree; ++power) {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) p[i] = Vector::fma(p[i], f[i], Vector::broadcast(coefficients[power]));
  }
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) t[i] = Vector::mul(p[i], t[i]);
}

template <int kDegree>
inline Vector::Float exp2(Vector::Float t) {
  Vector::Float x[1] = {t};
  exp2_of<kDegree>(x);
  return x[0];
}

// The running state of a group, over the group.
struct GroupState {
  float* max_log2;  // max of score * scale * log2(e) so far; -inf before any key
  float* sum;       // of 2^(score_log2 - max_log2)
  float* alpha;     // what the sum and the output so far must be multiplied by for the new maximum
};

// Keys below key_full are visible to the whole group, those from key_end on to none of it.
struct VisibleKeys {
  int32_t full;
  int32_t end;
};

inline int32_t clamp(int64_t x, int32_t low, int32_t high) {
  return x < low ? low : x > high ? high : static_cast<int32_t>(x);
}

// For a block of `keys` keys from key_begin on; diagonal = row + seq_k - seq_q is the last key visible to the group's
// first row (and one more each row).
inline VisibleKeys visible_keys(bool causal, int64_t diagonal, int32_t key_begin, int32_t keys) {
  if (!causal) return {keys, keys};
  const int64_t seen_by_first = diagonal + 1 - key_begin;
  return {clamp(seen_by_first, 0, keys), clamp(seen_by_first + kGroupRows - 1, 0, keys)};
}

// Writes -inf where the causal mask hides a key. scores_t: [keys, group].
inline void mask_scores(float* scores_t, VisibleKeys visible, int64_t diagonal, int32_t key_begin) {
  const Vector::Float hidden = Vector::broadcast(kMinusInfinity);
  for (int32_t key = visible.full; key < visible.end; ++key) {
    const int32_t first_lane = static_cast<int32_t>(key_begin + key - diagonal);
    for (int c = 0; c < kGroupVectors; ++c) {
      float* p = scores_t + int64_t{key} * kGroupRows + c * Vector::kWidth;
      Vector::store(p, Vector::from_lane(first_lane - c * Vector::kWidth, Vector::load(p), hidden));
    }
  }
}

// Takes the block's maxima into the state and sets alpha. scores_t: [keys, group]; scale_log2 > 0. Column c only.
// Returns the number to subtract from the scaled scores: the new maximum, or 0 while that is -inf (nothing visible
// yet), so that -inf - -inf does not arise.
inline Vector::Float update_max(const float* scores_t, int32_t keys, float scale_log2, GroupState state, int c) {
  const float* s = scores_t + c * Vector::kWidth;
  Vector::Float m0 = Vector::broadcast(kMinusInfinity), m1 = m0;
  int32_t key = 0;
  for (; key + 1 < keys; key += 2) {
    m0 = Vector::max(Vector::load(s + int64_t{key} * kGroupRows), m0);
    m1 = Vector::max(Vector::load(s + int64_t{key + 1} * kGroupRows), m1);
  }
  if (key < keys) m0 = Vector::max(Vector::load(s + int64_t{key} * kGroupRows), m0);
  float* max_log2 = state.max_log2 + c * Vector::kWidth;
  const Vector::Float before = Vector::load(max_log2);
  const Vector::Float now =
      Vector::max(Vector::mul(Vector::max(m0, m1), Vector::broadcast(scale_log2)), before);
  Vector::store(max_log2, now);
  const Vector::Float shift =
      Vector::where_equal(now, Vector::broadcast(kMinusInfinity), Vector::zero(), now);
  Vector::store(state.alpha + c * Vector::kWidth, exp2<kExpDegreeFull>(Vector::sub(before, shift)));
  return shift;
}

inline void update_sum(GroupState state, int c, Vector::Float block_sum) {
  float* sum = state.sum + c * Vector::kWidth;
  const Vector::Float alpha = Vector::load(state.alpha + c * Vector::kWidth);
  Vector::store(sum, Vector::fma(Vector::load(sum), alpha, block_sum));
}

inline bool needs_rescale(GroupState state) {
  bool any = false;
  for (int c = 0; c < kGroupVectors; ++c) {
    any |= Vector::any_differs(Vector::load(state.alpha + c * Vector::kWidth), Vector::broadcast(1.0f));
  }
  return any;
}

inline void clear_state(GroupState state) {
  for (int c = 0; c < kGroupVectors; ++c) {
    Vector::store(state.max_log2 + c * Vector::kWidth, Vector::broadcast(kMinusInfinity));
    Vector::store(state.sum + c * Vector::kWidth, Vector::zero());
  }
}

// Scaled scores from which on `score * scale - maximum` in one rounding is no longer near 0 for the maximum itself, whose
// product was rounded before: what is left of it is half a unit in its last place, 2^-4 here and 2^39 at 2^63.
constexpr float kFarLog2 = 0x1p20f;

// Whether one of these maxima lies there; -inf, of a row that has seen no key, does not.
inline bool any_is_far(Vector::Float max_log2) {
  const Vector::Float far = Vector::broadcast(kFarLog2);
  const Vector::Float x = Vector::where_equal(max_log2, Vector::broadcast(kMinusInfinity), far, max_log2);
  return Vector::any_differs(Vector::max(Vector::max(x, Vector::sub(Vector::zero(), x)), far), far);
}

// 1 / sum, or 0 for rows that saw no key (their sum is exactly 0: any key's maximum contributes 1, a NaN gives NaN).
inline Vector::Float inverse_sum(GroupState state, int c) {
  const Vector::Float sum = Vector::load(state.sum + c * Vector::kWidth);
  return Vector::where_equal(sum, Vector::zero(), Vector::zero(), Vector::div(Vector::broadcast(1.0f), sum));
}

// lse of the group's first `rows` rows, natural logarithm; none if lse is null. logf: the double function's newest version is younger than
// the oldest glibc that the wheel runs on.
inline void store_lse(GroupState state, int32_t rows, float* lse) {
  if (lse == nullptr) return;
  constexpr double kLn2 = 0.69314718055994530942;
  for (int32_t row = 0; row < rows; ++row) {
    const float sum = state.sum[row];
    lse[row] = sum == 0.0f ? kMinusInfinity
                           : static_cast<float>(state.max_log2[row] * kLn2 + static_cast<double>(__builtin_logf(sum)));
  }
}

// The factors of q k^T: Q is multiplied by q_factor when packed (exact: +1, -1, 0 or NaN), so that the scores' scale is
// positive and the maximum of the scores is the maximum of the scaled ones. For scale = 0 the scores are 0, unless Q or
// K holds Inf or NaN.
struct Scale {
  float q_factor;
  float log2;
};

inline Scale make_scale(float scale) {
  constexpr float kLog2E = 1.44269504088896340736f;
  if (scale == 0.0f) return {0.0f, 1.0f};
  return scale < 0.0f ? Scale{-1.0f, -scale * kLog2E} : Scale{1.0f, scale * kLog2E};
}

}  // namespace
}  // namespace cpu
}  // namespace flashmoe
