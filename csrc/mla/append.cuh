// Writes latents into an FP8 cache (params/fp8.h). Grid: one warp per token.
//
// A scale is the smallest power of two that is at least 1e-4 and keeps its 128 values within 448: a reader's products
// by it are exact.
#pragma once

#include "device/convert.cuh"
#include "mla/params/append.h"
#include "ptx/e4m3.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::mla {

template <typename Element_, int kNumWarps_>
struct AppendSpec {
  using Element = Element_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kSharedBytes = 0;
  static constexpr int kLaneColumns = 512 / 32;
  static constexpr int kScaleLanes = kScaleColumns / kLaneColumns;  // lanes that share a scale
  static_assert(sizeof(Element) == 2, "rotary columns are copied as 16 bits");
};

// Byte offset from the start of the cache to a token's row; negative if there is no such row.
__device__ __forceinline__ int64_t fp8_row_offset(const AppendParams& params, int batch, int token) {
  if (params.slots != nullptr) {
    uint32_t words[2];
    ptx::ld_global_64(words, params.slots + static_cast<int64_t>(batch) * params.tokens + token);
    const int64_t slot = static_cast<int64_t>(static_cast<uint64_t>(words[1]) << 32 | words[0]);
    const int64_t page = slot / params.page_size;
    if (slot < 0 || page >= params.num_pages) return -1;
    return page * params.page_stride + (slot - page * params.page_size) * params.key_stride;
  }
  const int cache_length = static_cast<int>(ptx::ld_global_32(params.cache_seqlens + batch));
  if (cache_length > params.capacity) return -1;  // also keeps cache_length + token from overflowing
  const int key = cache_length + token;
  if (key < 0 || key >= params.capacity) return -1;
  if (params.block_table == nullptr) return batch * params.page_stride + key * params.key_stride;
  const int index = key / params.page_size;
  const int page = static_cast<int>(ptx::ld_global_32(params.block_table + batch * params.block_table_stride + index));
  if (page < 0 || page >= params.num_pages) return -1;
  return page * params.page_stride + (key - index * params.page_size) * params.key_stride;
}

// abs_max: the largest magnitude of the values. An infinity keeps the scale finite, and becomes the largest e4m3 value.
__device__ __forceinline__ float power_of_two_scale(float abs_max) {
  constexpr int kFraction = 0x7fffff, kLargest = 254 << 23;
  const uint32_t wanted = ptx::float_bits(ptx::max_ftz(abs_max / 448.0f, 1e-4f));
  return ptx::bits_float(min(static_cast<int>((wanted + kFraction) & ~kFraction), kLargest));
}

template <typename Spec>
__device__ __forceinline__ void append(const AppendParams& params) {
  using Element = typename Spec::Element;
  const int64_t index = static_cast<int64_t>(ptx::block_index()) * Spec::kNumWarps + ptx::warp_index();
  if (index >= static_cast<int64_t>(params.batch) * params.tokens) return;
  const int batch = static_cast<int>(index / params.tokens);
  const int token = static_cast<int>(index - static_cast<int64_t>(batch) * params.tokens);
  const int64_t offset = fp8_row_offset(params, batch, token);
  if (offset < 0) return;
  const int lane = ptx::lane_index();
  const Element* latent_gmem = static_cast<const Element*>(params.latents) + batch * params.latents_stride_batch +
                               token * params.latents_stride_token;
  unsigned char* row_gmem = static_cast<unsigned char*>(params.cache) + offset;

  float values[Spec::kLaneColumns];
  float abs_max = 0.0f;
#pragma unroll
  for (int chunk = 0; chunk < Spec::kLaneColumns / 8; ++chunk) {
    uint32_t pairs[4];
    ptx::ld_global_128(pairs, latent_gmem + lane * Spec::kLaneColumns + chunk * 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack<Element>(pairs[i]);
      values[chunk * 8 + 2 * i] = pair.x;
      values[chunk * 8 + 2 * i + 1] = pair.y;
      abs_max = ptx::max_ftz(abs_max, ptx::max_ftz(ptx::max_ftz(pair.x, -pair.x), ptx::max_ftz(pair.y, -pair.y)));
    }
  }
#pragma unroll
  for (int mask = 1; mask < Spec::kScaleLanes; mask *= 2)
    abs_max = ptx::max_ftz(abs_max, ptx::shuffle_xor(abs_max, mask));
  const float scale = power_of_two_scale(abs_max);
  uint32_t fp8[Spec::kLaneColumns / 4];
#pragma unroll
  for (int i = 0; i < Spec::kLaneColumns / 4; ++i) {
    fp8[i] = ptx::pack_e4m3(values[4 * i] / scale, values[4 * i + 1] / scale) |
             ptx::pack_e4m3(values[4 * i + 2] / scale, values[4 * i + 3] / scale) << 16;
  }
  ptx::st_global_128(row_gmem + lane * Spec::kLaneColumns, fp8);
  if (lane % Spec::kScaleLanes == 0) {
    ptx::st_global_32(row_gmem + kScaleBytesOffset + lane / Spec::kScaleLanes * 4, ptx::float_bits(scale));
  }
  ptx::st_global_32(row_gmem + kRotaryBytesOffset + lane * 4, ptx::ld_global_32(latent_gmem + 512 + lane * 2));
}

}  // namespace flashmoe::mla
