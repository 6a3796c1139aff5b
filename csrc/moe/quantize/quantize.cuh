// Converts rows of 16-bit or float32 numbers to e4m3 values and scales: 16 lanes per block of 128 values, eight values
// each.
#pragma once

#include "moe/eight_elements.cuh"
#include "moe/params/scaled.h"
#include "moe/quantize/scale.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::moe {

template <typename Element_, int kNumWarps_>
struct QuantizeSpec {
  using Element = Element_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kSharedBytes = 0;
};

template <>
__device__ __forceinline__ void load_eight(float* values, const float* gmem) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 four = ptx::ld_global_float4(gmem + 4 * half);
    values[4 * half] = four.x;
    values[4 * half + 1] = four.y;
    values[4 * half + 2] = four.z;
    values[4 * half + 3] = four.w;
  }
}

template <typename Spec>
__device__ __forceinline__ void quantize(const QuantizeParams& params) {
  using Element = typename Spec::Element;
  ptx::grid_launch_dependents();
  // Hazard: the previous grid may still write x.
  if (params.overlaps_previous_grid == 0) ptx::grid_dependency_wait();
  const int blocks = params.columns / kScaleBlock;  // per row
  const int64_t count = static_cast<int64_t>(params.rows) * blocks;
  const int lane = ptx::lane_index();
  const int64_t block =
      (static_cast<int64_t>(ptx::block_index()) * Spec::kNumWarps + ptx::warp_index()) * 2 + lane / 16;
  const bool is_valid = block < count;  // no return: the warp's other half may have a block; shuffles need all lanes
  const int64_t row = is_valid ? block / blocks : 0;
  const int column = (is_valid ? static_cast<int>(block - row * blocks) : 0) * kScaleBlock + lane % 16 * 8;
  float values[8];
  load_eight(values, static_cast<const Element*>(params.x) + row * params.x_stride + column);
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(values[i]));
#pragma unroll
  for (int lanes = 8; lanes > 0; lanes /= 2) largest = fmaxf(largest, ptx::shuffle_xor(largest, lanes));
  const BlockScale scale(largest);
  if (is_valid) {
    uint32_t packed[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* v = values + 4 * i;
      packed[i] = ptx::pack_e4m3(v[0] * scale.inverse, v[1] * scale.inverse) |
                  ptx::pack_e4m3(v[2] * scale.inverse, v[3] * scale.inverse) << 16;
    }
    ptx::st_global_64(static_cast<unsigned char*>(params.values) + row * params.columns + column, packed);
    if (lane % 16 == 0) ptx::st_global_float(params.scales + block, scale.scale);
  }
  // The next kernel also relies on the end of the previous grid. One block waits for it; the others exit to make room
  // for later blocks.
  if (params.overlaps_previous_grid != 0 && ptx::block_index() == 0) ptx::grid_dependency_wait();
}

}  // namespace flashmoe::moe
