// Units of the fp32 tile kernel that take columns of weights times V to the output (amx_work.h). Include after
// vector_avx512.h. Internal linkage.
#pragma once

#include <cstdint>

#include "amx_units_f32.h"
#include "amx_work.h"

namespace flashmoe {
namespace cpu {
namespace {

// out = out * alpha + product, 32 columns of a group; both [group, padded_dim]. A block's product starts from zero,
// which rounds less than a running sum.
template <class Step>
inline void accumulate_columns(const float* product, int32_t padded_dim, const float* alpha, float* out,
                               const Step& step) {
  unrolled<kGroupRows>([&](auto i) __attribute__((always_inline)) {
    constexpr int kRow = decltype(i)::value;
    const __m512 factor = Vector::broadcast(alpha[kRow]);
#pragma GCC unroll 2
    for (int32_t part = 0; part < kPanelColumns; part += Vector::kWidth) {
      Vector::store(out + part, Vector::fma(Vector::load(out + part), factor, Vector::load(product + part)));
    }
    out += padded_dim;
    product += padded_dim;
    if constexpr (kRow % 4 != 3) step.template tick<kRow / 4 * 3 + kRow % 4>();
  });
}

// 32 columns of a group's output.
struct OutputColumns {
  const float* product;  // of the last block [group, padded_dim]
  const float* sums;     // of the blocks before, or null
  int32_t padded_dim;
  const float* alpha;    // of the sums, over the group
  const float* inverse;  // 1 / sum of the weights, over the group
  float* dst;
  int64_t stride;
  int32_t rows;
  int32_t columns;
};

inline void store_columns(__m512 low, __m512 high, int32_t columns, float* dst) {
  if (columns == kPanelColumns) {
    Vector::store(dst, low);
    Vector::store(dst + Vector::kWidth, high);
  } else {
    const auto mask = [](int32_t lanes) { return static_cast<__mmask16>((1u << clamp(lanes, 0, Vector::kWidth)) - 1); };
    _mm512_mask_storeu_ps(dst, mask(columns), low);
    _mm512_mask_storeu_ps(dst + Vector::kWidth, mask(columns - Vector::kWidth), high);
  }
}

// Returns total plus all of the sums: NaN or Inf if any of them is.
template <class Step>
inline __m512 write_columns(const OutputColumns& o, __m512 total, const Step& step) {
  const float* product = o.product;
  const float* sums = o.sums;
  float* dst = o.dst;
  unrolled<kGroupRows>([&](auto i) __attribute__((always_inline)) {
    constexpr int kRow = decltype(i)::value, kAhead = 6;
    if (kRow < o.rows) {
      if (kRow + kAhead < o.rows) {
        fetch_to_write(dst + kAhead * o.stride);
        fetch_to_write(dst + kAhead * o.stride + Vector::kWidth);
      }
      __m512 low = Vector::load(product), high = Vector::load(product + Vector::kWidth);
      if (o.sums != nullptr) {
        const __m512 alpha = Vector::broadcast(o.alpha[kRow]);
        low = Vector::fma(Vector::load(sums), alpha, low);
        high = Vector::fma(Vector::load(sums + Vector::kWidth), alpha, high);
        sums += o.padded_dim;
      }
      total = Vector::add(total, Vector::add(low, high));
      const __m512 factor = Vector::broadcast(o.inverse[kRow]);
      store_columns(Vector::mul(low, factor), Vector::mul(high, factor), o.columns, dst);
      product += o.padded_dim;
      dst += o.stride;
    }
    if constexpr (kRow % 4 != 3) step.template tick<kRow / 4 * 3 + kRow % 4>();
  });
  return total;
}

}  // namespace
}  // namespace cpu
}  // namespace flashmoe
