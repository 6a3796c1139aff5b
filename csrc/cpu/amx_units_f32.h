// Units of the vector work of the fp32 tile kernel: packing of Q, K and V, softmax. Each is about as long as the
// products of a step, 24 ticks, which are distributed over it (amx_work.h). Beside products the core looks ahead over
// few instructions, so a unit does a few rows step by step, fetches what the next one reads, and makes lines ready that
// it will write soon. Include after vector_avx512.h. Internal linkage.
#pragma once

#include <cstdint>

#include "amx_pack.h"
#include "amx_softmax.h"
#include "amx_work.h"

namespace flashmoe {
namespace cpu {
namespace {

constexpr int kF32Planes = Planes<float>::value;
using F32Right = RightLayout<kF32Planes>;
static_assert(PlanePairs<kF32Planes, Product::kScores>::kCount == 6, "units have 24 ticks");
// A step of a row of a left operand: planes side by side. The scores of a step lie where its weights will.
constexpr int64_t kF32StepBytes = kF32Planes * kTileBytesPerRow;
constexpr int64_t kStepFloats = kF32StepBytes / static_cast<int64_t>(sizeof(float));

// What the first plane leaves.
inline __m512i rest_of(__m512i x, __m512i upper) {
  return _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(_mm512_and_si512(x, upper))));
}

// kPairs pairs of values, low[i] and high[i], as planes to dst(i) + plane * plane_bytes. Step by step over the pairs:
// beside tile products the core looks ahead over less than one pair's chain of operations.
template <int kPairs, class Place>
__attribute__((always_inline)) inline void store_planes(const __m512 (&low)[kPairs], const __m512 (&high)[kPairs],
                                                        int64_t plane_bytes, const Place& place) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
  __m512i x[kPairs], y[kPairs];
#pragma GCC unroll 4
  for (int i = 0; i < kPairs; ++i) {
    x[i] = _mm512_castps_si512(low[i]);
    y[i] = _mm512_castps_si512(high[i]);
  }
#pragma GCC unroll 3
  for (int plane = 0; plane < kF32Planes; ++plane) {
#pragma GCC unroll 4
    for (int i = 0; i < kPairs; ++i) {
      constexpr int kSelect = 0xca;  // first ? second : third, bit by bit
      _mm512_store_si512(reinterpret_cast<char*>(place(i)) + plane * plane_bytes,
                         _mm512_ternarylogic_epi32(upper, y[i], _mm512_srli_epi32(x[i], 16), kSelect));
    }
    if (plane == kF32Planes - 1) break;
#pragma GCC unroll 4
    for (int i = 0; i < kPairs; ++i) {
      x[i] = rest_of(x[i], upper);
      y[i] = rest_of(y[i], upper);
    }
  }
}

inline void fetch(const float* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

// Makes a line ready to be written.
inline void fetch_to_write(const void* p) { __asm__ volatile("prefetchw %0" ::"m"(*static_cast<const char*>(p))); }

// Two vectors of each of four rows.
inline void fetch_rows(const float* p, int64_t stride) {
#pragma GCC unroll 4
  for (int row = 0; row < 4; ++row) {
    fetch(p + row * stride);
    fetch(p + row * stride + Vector::kWidth);
  }
}

// 32 elements of each row of Q -> their place in a left operand. next, also below: what the next unit will read.
template <class Step>
inline void pack_q_step(const float* q, const float* next, int64_t stride, float* dst, int64_t dst_row,
                        const Step& step) {
  unrolled<8>([&](auto i) __attribute__((always_inline)) {
    constexpr int kTick = decltype(i)::value * 3;
    __m512 low[4], high[4];
#pragma GCC unroll 4
    for (int row = 0; row < 4; ++row) {
      low[row] = Vector::load(q + row * stride);
      high[row] = Vector::load(q + row * stride + Vector::kWidth);
    }
    step.template tick<kTick>();
    q += 4 * stride;
    fetch_rows(next, stride);
    next += 4 * stride;
    step.template tick<kTick + 1>();
    if constexpr (kTick < 21) {
#pragma GCC unroll 12
      for (int line = 0; line < 12; ++line) fetch_to_write(dst + (4 + line % 4) * dst_row + line / 4 * Vector::kWidth);
    }
    store_planes<4>(low, high, kTileBytesPerRow, [&](int row) { return dst + row * dst_row; });
    dst += 4 * dst_row;
    step.template tick<kTick + 2>();
  });
}

// columns[j], lane i: p[i * stride + j]. A 128-bit lane takes four rows of four elements: loads put them there, which
// leaves half the shuffles of a transpose of 16 x 16.
inline void load_four_columns(const float* p, int64_t stride, __m512 (&columns)[4]) {
  __m512 rows[4];  // 128-bit lane i: row 4 i + j
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const float* row = p + j * stride;
    __m512 x = _mm512_castps128_ps512(_mm_loadu_ps(row));
    x = _mm512_mask_broadcast_f32x4(x, 0x00f0, _mm_loadu_ps(row + 4 * stride));
    x = _mm512_mask_broadcast_f32x4(x, 0x0f00, _mm_loadu_ps(row + 8 * stride));
    rows[j] = _mm512_mask_broadcast_f32x4(x, 0xf000, _mm_loadu_ps(row + 12 * stride));
  }
  const __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(rows[0], rows[1]));
  const __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(rows[2], rows[3]));
  const __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(rows[0], rows[1]));
  const __m512d high23 = _mm512_castps_pd(_mm512_unpackhi_ps(rows[2], rows[3]));
  columns[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(low01, low23));
  columns[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low01, low23));
  columns[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high01, high23));
  columns[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high01, high23));
}

// 32 elements of each of 32 keys -> the pairs of a step of a panel.
template <class Step>
inline void pack_k_step(const float* k, const float* next, int64_t stride, char* dst, const Step& step) {
  unrolled<8>([&](auto i) __attribute__((always_inline)) {
    constexpr int kTile = decltype(i)::value / 4, kQuarter = decltype(i)::value % 4, kTick = decltype(i)::value * 3;
    const float* src = k + kTile * kTileRows * stride + kQuarter * 4;
    __m512 low[4], high[4];
    load_four_columns(src, stride, low);
    step.template tick<kTick>();
    load_four_columns(src + Vector::kWidth, stride, high);
    fetch_rows(next, stride);
    next += 4 * stride;
    step.template tick<kTick + 1>();
    // Pairs of both tiles; past them those of the next unit.
    const auto place = [&](int pair) {
      return dst + pair / 32 * F32Right::kF32StepBytes + pair / 16 % 2 * F32Right::kTile + pair % 16 * kRightRow;
    };
#pragma GCC unroll 12
    for (int line = 0; line < 12; ++line) {
      fetch_to_write(place(kTile * 16 + kQuarter * 4 + 8 + line % 4) + line / 4 * F32Right::kPlane);
    }
    store_planes<4>(low, high, F32Right::kPlane, [&](int pair) { return place(kTile * 16 + kQuarter * 4 + pair); });
    step.template tick<kTick + 2>();
  });
}

// 32 columns of 32 rows of V -> a step of a panel.
template <class Step>
inline void pack_v_step(const float* v, const float* next, int64_t stride, char* dst, const Step& step) {
  unrolled<8>([&](auto i) __attribute__((always_inline)) {
    constexpr int kTick = decltype(i)::value * 3;
    __m512 low[4], high[4];  // two pairs of rows, two tiles
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      const float* p = v + part / 2 * stride + part % 2 * Vector::kWidth;
      low[part] = Vector::load(p);
      high[part] = Vector::load(p + kTileRows * stride);
    }
    step.template tick<kTick>();
    v += 2 * stride;
    fetch_rows(next, stride);
    next += 4 * stride;
    step.template tick<kTick + 1>();
    const auto place = [&](int part) { return dst + part % 2 * F32Right::kTile + part / 2 * kRightRow; };
    // Two pieces ahead; past the last ones of a unit those of the next.
    const char* ahead = kTick < 18 ? place(8) : dst + F32Right::kF32StepBytes - 12 * kRightRow;
#pragma GCC unroll 12
    for (int line = 0; line < 12; ++line) {
      fetch_to_write(ahead + (line % 2) * F32Right::kTile + line / 2 % 2 * kRightRow + line / 4 * F32Right::kPlane);
    }
    store_planes<4>(low, high, F32Right::kPlane, place);
    dst += 2 * kRightRow;
    step.template tick<kTick + 2>();
  });
}

// The rows' maxima over the first step of their scores into the state, and what to add to the scaled scores.
template <class Step>
inline void take_maxima(const float* s, int64_t row_floats, float scale_log2, GroupState state, float* minus_shift,
                        const Step& step) {
  unrolled<2>([&](auto t) __attribute__((always_inline)) {
    constexpr int kTick = decltype(t)::value * 12, kFirst = decltype(t)::value * kTileRows;
    __m512 rows[kTileRows];
    unrolled<kTileRows>([&](auto i) __attribute__((always_inline)) {
      constexpr int kRow = decltype(i)::value;
      rows[kRow] = Vector::max(Vector::load(s), Vector::load(s + Vector::kWidth));
      s += row_floats;
      if constexpr (kRow % 4 == 3) step.template tick<kTick + kRow / 4>();
    });
    const __m512 largest = reduce_rows<MaxOf>(rows);
    unrolled<4>([&](auto i) __attribute__((always_inline)) { step.template tick<kTick + 4 + decltype(i)::value>(); });
    Vector::store(minus_shift + kFirst, take_max(largest, scale_log2, state.max_log2 + kFirst, state.alpha + kFirst));
    unrolled<4>([&](auto i) __attribute__((always_inline)) { step.template tick<kTick + 8 + decltype(i)::value>(); });
  });
}

// 2^(j / 16) as bits, less j at the place of the sixteenths in a sum with 16 t: see weights_of_step.
alignas(64) constexpr uint32_t kSixteenths[16] = {
    0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532, 0x3f75fed7, 0x3f75583f,
    0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c, 0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d};

// Scores of 16 rows and one step, rows row_floats apart, become weights in place, and are added to of_row
// [kTileRows] vectors, or replace it if is_first. Returns whether no score is NaN or further above the maximum so far
// than 2^kMaxLog2.
//
// 2^t = 2^n 2^(j / 16) 2^r: t + magic has 16 n + j in its low bits, and 2^r on [-1/32, 1/32] is
// 1 + r (c1 + r (c2 + r c3)), relative error 2e-9. Multiplications, maxima and shifts find one port beside tile
// products, permutations and comparisons the other: so a table rather than a polynomial of degree 6, and masks
// rather than a maximum. Weights below 2^-125 count as 0: no subnormal arises.
constexpr float kMaxLog2 = 90.0f, kMinLog2 = -125.0f;
template <class Step>
inline bool weights_of_step(float* s, int64_t row_floats, float scale_log2, const float* minus_shift, float* of_row,
                            bool is_first, const Step& step) {
  constexpr int kRows = 4, kVectors = 2 * kRows;
  const __m512 scale = Vector::broadcast(scale_log2), magic = Vector::broadcast(0x1.8p19f);
  const __m512i table = _mm512_load_si512(kSixteenths);
  const __mmask16 adds = is_first ? 0 : 0xffff;
  __mmask16 in_range = 0xffff;
  unrolled<kTileRows / kRows>([&](auto index) __attribute__((always_inline)) {
    constexpr int kRow = decltype(index)::value * kRows, kTick = decltype(index)::value * 6;
    __m512 t[kVectors], shifted[kVectors], p[kVectors];
    __mmask16 counts[kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      t[i] = Vector::fma(Vector::load(s + i / 2 * row_floats + i % 2 * Vector::kWidth), scale,
                         Vector::broadcast(minus_shift[kRow + i / 2]));
    }
    step.template tick<kTick>();
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      shifted[i] = Vector::add(t[i], magic);
      in_range = _mm512_mask_cmp_ps_mask(in_range, t[i], Vector::broadcast(kMaxLog2), _CMP_LE_OQ);
      counts[i] = _mm512_cmp_ps_mask(t[i], Vector::broadcast(kMinLog2), _CMP_GE_OQ);
      constexpr int kSixteenth = 0x48;  // t less the nearest sixteenth, no exceptions
      t[i] = _mm512_reduce_ps(t[i], kSixteenth);
    }
    step.template tick<kTick + 1>();
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      const __m512i bits = _mm512_castps_si512(shifted[i]);
      shifted[i] = _mm512_castsi512_ps(
          _mm512_add_epi32(_mm512_permutexvar_epi32(bits, table), _mm512_slli_epi32(bits, 19)));
      p[i] = Vector::fma(Vector::broadcast(5.550595e-2f), t[i], Vector::broadcast(2.4023429e-1f));
    }
    step.template tick<kTick + 2>();
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      p[i] = Vector::fma(p[i], t[i], Vector::broadcast(6.931472e-1f));
      t[i] = Vector::mul(t[i], shifted[i]);
    }
    step.template tick<kTick + 3>();
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) p[i] = _mm512_maskz_fmadd_ps(counts[i], p[i], t[i], shifted[i]);
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const __m512 sum = Vector::add(p[2 * i], p[2 * i + 1]);
      float* total = of_row + (kRow + i) * Vector::kWidth;
      Vector::store(total, _mm512_mask_add_ps(sum, adds, sum, Vector::load(total)));
    }
    step.template tick<kTick + 4>();
    const __m512 low[kRows] = {p[0], p[2], p[4], p[6]}, high[kRows] = {p[1], p[3], p[5], p[7]};
    store_planes<kRows>(low, high, kTileBytesPerRow, [&](int row) { return s + row * row_floats; });
    s += kRows * row_floats;
    step.template tick<kTick + 5>();
  });
  return in_range == 0xffff;
}

// Adds the sums of 16 rows' weights, of_row [16] vectors, to the state's from `row` on. Returns whether the maxima are of use:
// not too far from 0, and not -inf over scores that are not all -inf.
inline bool add_sums(const float* of_row, GroupState state, int32_t row) {
  __m512 rows[kTileRows];
#pragma GCC unroll 16
  for (int k = 0; k < kTileRows; ++k) rows[k] = Vector::load(of_row + k * Vector::kWidth);
  const __m512 sum = reduce_rows<SumOf>(rows);
  Vector::store(state.sum + row, Vector::fma(Vector::load(state.sum + row), Vector::load(state.alpha + row), sum));
  const __mmask16 sees_keys = _mm512_cmp_ps_mask(sum, Vector::zero(), _CMP_NEQ_UQ);
  const __m512 max_log2 = Vector::load(state.max_log2 + row);
  return !any_is_far(max_log2) &&
         _mm512_mask_cmp_ps_mask(sees_keys, max_log2, Vector::broadcast(kMinusInfinity), _CMP_EQ_OQ) == 0;
}

}  // namespace
}  // namespace cpu
}  // namespace flashmoe
