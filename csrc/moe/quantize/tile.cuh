// A tile of 128 rows by 128 columns of 16-bit elements in the registers of 256 threads, and its way to e4m3: by rows, and transposed.
//
// Thread t has rows 8 (t / 16) to 8 (t / 16) + 7 of columns 8 (t % 16) to 8 (t % 16) + 7. Its eight rows of a column are eight
// neighbouring bytes of the transpose, which passes through shared memory [128 columns][128 bytes]: unit u of eight bytes of column c
// lies at u ^ (c / 8), so that neither side's accesses meet in a bank.
#pragma once

#include "device/convert.cuh"
#include "moe/params/training.h"
#include "moe/quantize/scale.cuh"
#include "ptx/barrier.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe {
namespace moe {

template <typename Element_, int kNumWarps_>
struct TileQuantizeSpec {
  using Element = Element_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kMaximaOffset = kScaleBlock * kScaleBlock;  // [warps][128] float32
  static constexpr int kSharedBytes = kMaximaOffset + kNumWarps * kScaleBlock * 4;
  static_assert(kNumThreads == 256, "a thread has eight rows of eight columns");
};

// The tile's place among an expert's rows.
struct TileRows {
  int first;  // row
  int count;  // 128 or fewer; 0: nothing to do
  int block;  // padded
};

// By a whole warp: the expert whose padded blocks `block` is among, by 32 of at most 1024 experts at a time.
__device__ __forceinline__ TileRows rows_of_block(const int32_t* expert_offsets, int experts, int block) {
  int first = 0;
#pragma unroll 1
  for (int step = (experts + 31) / 32;; step = 1) {
    const int expert = first + step * ptx::lane_index();
    const bool is_before =
        expert < experts && padded_block(static_cast<int>(ptx::ld_global_32(expert_offsets + expert)), expert) <= block;
    first += (ptx::population_count(ptx::vote_ballot(is_before)) - 1) * step;
    if (step == 1) break;
  }
  const int begin = static_cast<int>(ptx::ld_global_32(expert_offsets + first));
  const int end = static_cast<int>(ptx::ld_global_32(expert_offsets + first + 1));
  const int row = begin + (block - padded_block(begin, first)) * kScaleBlock;
  return TileRows{row, end - row < kScaleBlock ? (end > row ? end - row : 0) : kScaleBlock, block};
}

template <typename Spec>
struct QuantizedTile {
  using Element = typename Spec::Element;

  unsigned char* smem;
  int chunk;  // of 8 columns
  int group;  // of 8 rows
  uint32_t words[8][4];

  __device__ __forceinline__ QuantizedTile()
      : smem(ptx::dynamic_shared_memory()), chunk(ptx::thread_index() % 16), group(ptx::thread_index() / 16) {}

  __device__ __forceinline__ float value(int row, int column) const {
    const float2 pair = unpack<Element>(words[row][column / 2]);
    return column % 2 == 0 ? pair.x : pair.y;
  }

  __device__ __forceinline__ float largest_of_row(int row) const {
    float largest = 0.0f;
#pragma unroll
    for (int column = 0; column < 8; ++column) largest = fmaxf(largest, fabsf(value(row, column)));
    return largest;
  }

  // Of all 128 by 128. Contains a barrier; the next use of the maxima needs another.
  __device__ __forceinline__ float largest_of_tile() const {
    float largest = 0.0f;
#pragma unroll
    for (int row = 0; row < 8; ++row) largest = fmaxf(largest, largest_of_row(row));
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) largest = fmaxf(largest, ptx::shuffle_xor(largest, lanes));
    float* maxima = reinterpret_cast<float*>(smem + Spec::kMaximaOffset);
    if (ptx::lane_index() == 0) ptx::st_shared_float(maxima + ptx::warp_index(), largest);
    ptx::barrier_sync_block();
#pragma unroll
    for (int warp = 0; warp < Spec::kNumWarps; ++warp) largest = fmaxf(largest, ptx::ld_shared_float(maxima + warp));
    return largest;
  }

  // Of each of the thread's columns over all 128 rows; likewise.
  __device__ __forceinline__ void largest_of_columns(float (&largest)[8]) const {
    float* maxima = reinterpret_cast<float*>(smem + Spec::kMaximaOffset) + chunk * 8;
#pragma unroll
    for (int column = 0; column < 8; ++column) {
      largest[column] = 0.0f;
#pragma unroll
      for (int row = 0; row < 8; ++row) largest[column] = fmaxf(largest[column], fabsf(value(row, column)));
      largest[column] = fmaxf(largest[column], ptx::shuffle_xor(largest[column], 16));  // the warp's other group
      if (ptx::lane_index() < 16) {
        ptx::st_shared_float(maxima + ptx::warp_index() * kScaleBlock + column, largest[column]);
      }
    }
    ptx::barrier_sync_block();
#pragma unroll
    for (int warp = 0; warp < Spec::kNumWarps; ++warp) {
#pragma unroll
      for (int four = 0; four < 8; four += 4) {
        const float4 found = ptx::ld_shared_float4(maxima + warp * kScaleBlock + four);
        largest[four] = fmaxf(largest[four], found.x);
        largest[four + 1] = fmaxf(largest[four + 1], found.y);
        largest[four + 2] = fmaxf(largest[four + 2], found.z);
        largest[four + 3] = fmaxf(largest[four + 3], found.w);
      }
    }
  }

  __device__ __forceinline__ void store_row(unsigned char* gmem, int row, float inverse) const {
    uint32_t packed[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      packed[i] = ptx::pack_e4m3(value(row, 4 * i) * inverse, value(row, 4 * i + 1) * inverse) |
                  ptx::pack_e4m3(value(row, 4 * i + 2) * inverse, value(row, 4 * i + 3) * inverse) << 16;
    }
    ptx::st_global_64(gmem, packed);
  }

  // The tile's first `rows` rows, each with a scale of its own. values, scales: of the tile's first row and column.
  __device__ __forceinline__ void store_rows(unsigned char* values, int64_t stride, float* scales, int64_t scale_stride,
                                             int rows) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float largest = largest_of_row(i);
#pragma unroll
      for (int lanes = 8; lanes > 0; lanes /= 2) largest = fmaxf(largest, ptx::shuffle_xor(largest, lanes));
      const BlockScale scale(largest);
      const int row = group * 8 + i;
      if (row >= rows) continue;
      store_row(values + row * stride + chunk * 8, i, scale.inverse);
      if (chunk == 0) ptx::st_global_float(scales + row * scale_stride, scale.scale);
    }
  }

  // inverse(column): of one of the thread's columns. gmem: the first row of the tile's first column. Contains a barrier, and relies on
  // one since the last call.
  template <typename Inverse>
  __device__ __forceinline__ void store_transposed(unsigned char* gmem, int64_t stride, Inverse inverse) const {
#pragma unroll
    for (int column = 0; column < 8; ++column) {
      const float factor = inverse(column);
      uint32_t packed[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        packed[i] = ptx::pack_e4m3(value(4 * i, column) * factor, value(4 * i + 1, column) * factor) |
                    ptx::pack_e4m3(value(4 * i + 2, column) * factor, value(4 * i + 3, column) * factor) << 16;
      }
      ptx::st_shared_64(smem + (chunk * 8 + column) * kScaleBlock + (group ^ chunk) * 8, packed);
    }
    ptx::barrier_sync_block();
    const int piece = ptx::thread_index() % 8;  // 16 bytes
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = ptx::thread_index() / 8 + 32 * i;
      const int swizzle = column / 8;
      uint32_t found[4];
      ptx::ld_shared_128(found, smem + column * kScaleBlock + (piece ^ swizzle / 2) * 16);
      const bool is_swapped = swizzle % 2 != 0;
      const uint32_t in_order[4] = {is_swapped ? found[2] : found[0], is_swapped ? found[3] : found[1],
                                    is_swapped ? found[0] : found[2], is_swapped ? found[1] : found[3]};
      ptx::st_global_128(gmem + column * stride + piece * 16, in_order);
    }
  }

  // One scale for the tile.
  __device__ __forceinline__ BlockScale store_transposed_tile(unsigned char* gmem, int64_t stride) const {
    const BlockScale scale(largest_of_tile());
    store_transposed(gmem, stride, [&](int) { return scale.inverse; });
    return scale;
  }

  // A scale for each column; scales: of the tile's first column.
  __device__ __forceinline__ void store_transposed_columns(unsigned char* gmem, int64_t stride, float* scales) const {
    float largest[8];
    largest_of_columns(largest);
#pragma unroll
    for (int column = 0; column < 8; ++column) {
      const BlockScale scale(largest[column]);
      if (group == 0) ptx::st_global_float(scales + chunk * 8 + column, scale.scale);
      largest[column] = scale.inverse;
    }
    store_transposed(gmem, stride, [&](int column) { return largest[column]; });
  }
};

}  // namespace moe
}  // namespace flashmoe
