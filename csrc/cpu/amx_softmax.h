// Online softmax of rows of scores, keys in the lanes, into weights for the tile unit. Include after vector_avx512.h.
// Internal linkage.
#pragma once

#include <cstdint>

#include "amx_tiles.h"
#include "softmax.h"

namespace flashmoe {
namespace cpu {
namespace {

struct MaxOf {
  static __m512 of(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
};
struct SumOf {
  static __m512 of(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
};

// Lane i: the maximum or sum of rows[i]'s lanes. Halves the vectors' number four times, folding two into one.
template <class Op>
inline __m512 reduce_rows(__m512 (&rows)[16]) {
  __m512 t[8], u[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {  // 128-bit lanes 0, 1: of row `first`; 2, 3: of row first + 4
    const int first = i % 4 + i / 4 * 8;
    t[i] = Op::of(_mm512_shuffle_f32x4(rows[first], rows[first + 4], 0x44),
                  _mm512_shuffle_f32x4(rows[first], rows[first + 4], 0xee));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // 128-bit lanes: rows i, i + 4, i + 8, i + 12
    u[i] = Op::of(_mm512_shuffle_f32x4(t[i], t[i + 4], 0x88), _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd));
  }
  const __m512 a = Op::of(_mm512_unpacklo_ps(u[0], u[1]), _mm512_unpackhi_ps(u[0], u[1]));  // rows 0 1 0 1
  const __m512 b = Op::of(_mm512_unpacklo_ps(u[2], u[3]), _mm512_unpackhi_ps(u[2], u[3]));  // rows 2 3 2 3
  return Op::of(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
}

// Takes the maxima of 16 rows into the state, sets alpha; returns what to add to the scaled scores: minus the maximum,
// or 0 while that is -inf (nothing visible yet), so that -inf - -inf does not arise.
inline __m512 take_max(__m512 largest, float scale_log2, float* max_log2, float* alpha) {
  const __m512 before = Vector::load(max_log2);
  const __m512 now = Vector::max(Vector::mul(largest, Vector::broadcast(scale_log2)), before);
  Vector::store(max_log2, now);
  const __m512 shift = Vector::where_equal(now, Vector::broadcast(kMinusInfinity), Vector::zero(), now);
  Vector::store(alpha, exp2<kExpDegreeFull>(Vector::sub(before, shift)));
  return Vector::sub(Vector::zero(), shift);
}

// A group's scores [kGroupRows, kBlockKeys]. The weights of a row take its scores' place, plane after plane, so that the
// working set is small; three planes need half a row more.
template <int kPlanes>
struct ScoresLayout {
  static constexpr int64_t kPlaneBytes = kBlockKeys * sizeof(uint16_t);
  static constexpr int64_t kRowFloats = (kPlanes > 2 ? kPlanes : 2) * kPlaneBytes / static_cast<int64_t>(sizeof(float));
  static constexpr int64_t kFloats = kGroupRows * kRowFloats;
};

// Turns scores of 16 rows and 32 kSteps keys into weights, paired as V is (amx_pack.h), and updates
// the state.
template <class T, int kSteps>
inline void softmax_of_tile(float* scores, float scale_log2, GroupState state) {
  constexpr int kPlanes = Planes<T>::value;
  constexpr int kDegree = ExpDegree<T>::value;
  constexpr int kVectors = 2 * kSteps;
  using Layout = ScoresLayout<kPlanes>;
  const __m512 scale = Vector::broadcast(scale_log2);
  __m512 of_row[kTileRows];
  for (int32_t row = 0; row < kTileRows; ++row) {
    const float* s = scores + row * Layout::kRowFloats;
    __m512 m0 = Vector::load(s), m1 = Vector::load(s + Vector::kWidth);
#pragma GCC unroll 4
    for (int i = 2; i < kVectors; i += 2) {
      m0 = Vector::max(Vector::load(s + i * Vector::kWidth), m0);
      m1 = Vector::max(Vector::load(s + (i + 1) * Vector::kWidth), m1);
    }
    of_row[row] = Vector::max(m0, m1);
  }
  alignas(64) float minus_shift[kTileRows];
  Vector::store(minus_shift, take_max(reduce_rows<MaxOf>(of_row), scale_log2, state.max_log2, state.alpha));
  for (int32_t row = 0; row < kTileRows; ++row) {
    float* s = scores + row * Layout::kRowFloats;
    const __m512 shift = Vector::broadcast(minus_shift[row]);
    __m512 scaled[kVectors];  // all of them before the first weight takes a score's place
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) scaled[i] = Vector::fma(Vector::load(s + i * Vector::kWidth), scale, shift);
    __m512 sum0 = Vector::zero(), sum1 = Vector::zero();
#pragma GCC unroll 4
    for (int step = 0; step < kSteps; ++step) {
      __m512 p[2] = {scaled[2 * step], scaled[2 * step + 1]};
      exp2_of<kDegree>(p);
      sum0 = Vector::add(sum0, p[0]);
      sum1 = Vector::add(sum1, p[1]);
      __m512i words[kPlanes];
      split_pair<kPlanes>(p[0], p[1], words);
#pragma GCC unroll 3
      for (int plane = 0; plane < kPlanes; ++plane) {
        _mm512_store_si512(reinterpret_cast<char*>(s) + plane * Layout::kPlaneBytes + step * kTileBytesPerRow,
                           words[plane]);
      }
    }
    of_row[row] = Vector::add(sum0, sum1);
  }
  Vector::store(state.sum, Vector::fma(Vector::load(state.sum), Vector::load(state.alpha), reduce_rows<SumOf>(of_row)));
}

// The same of a group and `keys` keys, a multiple of 32.
template <class T>
inline void softmax_to_weights(float* scores, int32_t keys, float scale_log2, GroupState state) {
  static_assert(kBlockKeys == 4 * kStep, "the cases below");
  for (int tile = 0; tile < 2; ++tile) {
    keep_awake();
    switch (keys / kStep) {
      case 1: softmax_of_tile<T, 1>(scores, scale_log2, state); break;
      case 2: softmax_of_tile<T, 2>(scores, scale_log2, state); break;
      case 3: softmax_of_tile<T, 3>(scores, scale_log2, state); break;
      default: softmax_of_tile<T, 4>(scores, scale_log2, state); break;
    }
    scores += kTileRows * ScoresLayout<Planes<T>::value>::kRowFloats;
    state = {state.max_log2 + kTileRows, state.sum + kTileRows, state.alpha + kTileRows};
  }
}

}  // namespace
}  // namespace cpu
}  // namespace flashmoe
