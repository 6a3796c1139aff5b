// Attention over two sets of keys, from the results over each (params/merge.h): every byte is read once and written once.
//
//   lse = ln(exp(lse_a) + exp(lse_b)),   out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b
//
// Grid: a warp for every 32 >> lanes_shift rows.
#pragma once

#include "attention/params/merge.h"
#include "attention/softmax.cuh"
#include "device/convert.cuh"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention {

template <typename Element_, int kNumWarps_>
struct MergeSpec {
  using Element = Element_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kSharedBytes = 0;
  static constexpr int kChunks = 2;  // of 8 columns, of a lane: fewer lanes of a row find its place and weights again
  static_assert(sizeof(Element) == 2, "a chunk is 16 bytes, or 32 of float32");
};

// 8 columns as they lie in memory: of the element type, or of float32.
template <bool kIsFloat>
struct Chunk {
  static constexpr int kBytes = kIsFloat ? 4 : 2;  // of a column
  static constexpr int kWords = kIsFloat ? 2 : 1;  // of 16 bytes
  uint32_t words[kWords][4];

  __device__ __forceinline__ void load(const void* gmem, int64_t column) {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      ptx::ld_global_128(words[i], static_cast<const unsigned char*>(gmem) + column * kBytes + 16 * i);
  }
  __device__ __forceinline__ void store(void* gmem, int64_t column) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      ptx::st_global_128(static_cast<unsigned char*>(gmem) + column * kBytes + 16 * i, words[i]);
  }
  template <typename Element>
  __device__ __forceinline__ float2 pair(int i) const {
    if constexpr (kIsFloat) {
      float2 values;
      values.x = ptx::bits_float(words[i / 2][i % 2 * 2]);
      values.y = ptx::bits_float(words[i / 2][i % 2 * 2 + 1]);
      return values;
    } else {
      return unpack<Element>(words[0][i]);
    }
  }
  template <typename Element>
  __device__ __forceinline__ void set_pair(int i, float x, float y) {
    if constexpr (kIsFloat) {
      words[i / 2][i % 2 * 2] = ptx::float_bits(x);
      words[i / 2][i % 2 * 2 + 1] = ptx::float_bits(y);
    } else {
      words[0][i] = pack<Element>(x, y);
    }
  }
};

// weight_a a + weight_b b, in a's place. What has weight 0 may hold anything.
template <typename Element, bool kIsFloat>
__device__ __forceinline__ void add_weighted(Chunk<kIsFloat>& a, float weight_a, const Chunk<false>& b,
                                             float weight_b) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 of_a = a.template pair<Element>(i), of_b = b.template pair<Element>(i);
    const float x = weight_a == 0.0f ? 0.0f : weight_a * of_a.x, y = weight_a == 0.0f ? 0.0f : weight_a * of_a.y;
    a.template set_pair<Element>(i, weight_b == 0.0f ? x : ptx::fma_rn(weight_b, of_b.x, x),
                                 weight_b == 0.0f ? y : ptx::fma_rn(weight_b, of_b.y, y));
  }
}

template <typename Spec, bool kIsFloat>
__device__ __forceinline__ void merge_rows(const MergeParams& params) {
  using Element = typename Spec::Element;
  const int lane = ptx::lane_index(), shift = params.lanes_shift;
  const uint32_t warp = ptx::block_index() * Spec::kNumWarps + ptx::warp_index();
  const uint32_t index = (warp << (5 - shift)) + (lane >> shift);  // the host's rows are fewer than 2^31
  const uint32_t head = index / params.rows, batch = head / params.heads;
  const bool is_row = batch < params.batch;
  const int64_t at[] = {batch, head - batch * params.heads, index - head * params.rows};
  const auto offset = [&](const Strides& stride) {
    return at[0] * stride.batch + at[1] * stride.head + at[2] * stride.row;
  };
  const float lse_a = is_row ? ptx::ld_global_float(params.lse_a + offset(params.lse_a_stride)) : 0.0f;
  const float lse_b = is_row ? ptx::ld_global_float(params.lse_b + offset(params.lse_b_stride)) : 0.0f;
  ptx::warp_sync();  // write after read: lse may be lse_a
  if (!is_row) return;

  const int first = (lane & ((1 << shift) - 1)) * 8, step = 8 << shift;
  Chunk<kIsFloat> a[Spec::kChunks];
  Chunk<false> b[Spec::kChunks];
#pragma unroll
  for (int i = 0; i < Spec::kChunks; ++i) {
    const int column = first + i * step;
    if (column >= params.head_dim) continue;
    a[i].load(params.out_a, offset(params.out_a_stride) + column);
    b[i].load(params.out_b, offset(params.out_b_stride) + column);
  }

  const float most = ptx::max_ftz(lse_a, lse_b);
  const bool is_empty = most == ptx::negative_infinity();  // neither saw a key
  const float of_a = is_empty ? 0.0f : ptx::exp2_approx((lse_a - most) * (1.0f / kLn2));
  const float of_b = is_empty ? 0.0f : ptx::exp2_approx((lse_b - most) * (1.0f / kLn2));
  const float sum = is_empty ? 1.0f : of_a + of_b, inverse = ptx::rcp_approx(sum);
  if (first == 0) {
    ptx::st_global_float(params.lse + offset(params.lse_stride), most + ptx::lg2_approx(sum) * kLn2);
  }
#pragma unroll
  for (int i = 0; i < Spec::kChunks; ++i) {
    const int column = first + i * step;
    if (column >= params.head_dim) continue;
    add_weighted<Element, kIsFloat>(a[i], of_a * inverse, b[i], of_b * inverse);
    a[i].store(params.out, offset(params.out_stride) + column);
  }
}

template <typename Spec>
__device__ __forceinline__ void merge(const MergeParams& params) {
  params.is_float != 0 ? merge_rows<Spec, true>(params) : merge_rows<Spec, false>(params);
}

}  // namespace flashmoe::attention
