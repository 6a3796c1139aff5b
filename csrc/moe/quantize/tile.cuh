// A tile of 128 rows by 128 columns of 16-bit elements in the registers of 256 threads, and its conversion to e4m3, by
// rows and transposed.
//
// Thread t holds rows 8 (t / 16) to 8 (t / 16) + 7 of columns 8 (t % 16) to 8 (t % 16) + 7. Its eight rows of a column
// are eight neighbouring bytes of the transpose, which passes through shared memory [128 columns][128 bytes]: the
// eight-byte unit u of column c is stored at u ^ (c / 8), so that neither writes nor reads have bank conflicts.
#pragma once

#include "device/convert.cuh"
#include "moe/params/training.h"
#include "moe/quantize/scale.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bf16x2.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/permute.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/wgmma_e4m3.cuh"

namespace flashmoe::moe {

template <typename Element_, int kNumWarps_>
struct TileQuantizeSpec {
  using Element = Element_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kMaximaOffset = kScaleBlock * kScaleBlock;  // [warps][128] of 16 bits
  static constexpr int kSharedBytes = kMaximaOffset + kNumWarps * kScaleBlock * 2;
  static_assert(kNumThreads == 256, "a thread has eight rows of eight columns");
};

// A tile's position among the rows of an expert.
struct TileRows {
  int first;  // first row
  int count;  // 128 or fewer; 0: nothing to do
  int block;  // padded block
};

// Finds the expert that owns padded block `block`. Called by a whole warp: a 32-way search over at most 1024 experts.
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

  // The larger magnitudes of two pairs; their signs are meaningless.
  static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
    return ptx::larger_magnitudes<Element>(a, b);
  }

  // The largest magnitudes among the thread's even and odd columns of the row.
  __device__ __forceinline__ uint32_t largest_of_row(int row) const {
    return larger(larger(words[row][0], words[row][1]), larger(words[row][2], words[row][3]));
  }

  // The largest magnitude of the whole tile. Contains a barrier; the next use of the maxima needs another.
  __device__ __forceinline__ float largest_of_tile() const {
    uint32_t largest = largest_of_row(0);
#pragma unroll
    for (int row = 1; row < 8; ++row) largest = larger(largest, largest_of_row(row));
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) largest = larger(largest, ptx::shuffle_xor(largest, lanes));
    unsigned char* maxima = smem + Spec::kMaximaOffset;
    if (ptx::lane_index() == 0) ptx::st_shared_32(maxima + ptx::warp_index() * 4, largest);
    ptx::barrier_sync_block();
#pragma unroll
    for (int warp = 0; warp < Spec::kNumWarps; warp += 4) {
      uint32_t found[4];
      ptx::ld_shared_128(found, maxima + warp * 4);
      largest = larger(larger(largest, found[0]), larger(found[1], larger(found[2], found[3])));
    }
    const float2 pair = unpack<Element>(largest);
    return fmaxf(fabsf(pair.x), fabsf(pair.y));
  }

  // The largest magnitude of each of the thread's columns over all 128 rows. Barriers as in largest_of_tile.
  __device__ __forceinline__ void largest_of_columns(uint32_t (&largest)[4]) const {
    unsigned char* maxima = smem + Spec::kMaximaOffset + chunk * 16;
    const auto with_other_group = [&] {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) largest[pair] = larger(largest[pair], ptx::shuffle_xor(largest[pair], 16));
    };
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      largest[pair] = larger(words[0][pair], words[1][pair]);
#pragma unroll
      for (int row = 2; row < 8; ++row) largest[pair] = larger(largest[pair], words[row][pair]);
    }
    with_other_group();
    if (ptx::lane_index() < 16) ptx::st_shared_128(maxima + ptx::warp_index() * kScaleBlock * 2, largest);
    ptx::barrier_sync_block();
#pragma unroll
    for (int two = 0; two < Spec::kNumWarps; two += 2) {  // one for each half of the warp
      uint32_t found[4];
      ptx::ld_shared_128(found, maxima + (two + ptx::lane_index() / 16) * kScaleBlock * 2);
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) largest[pair] = larger(largest[pair], found[pair]);
    }
    with_other_group();
  }

  // row_of_lane: the row, among its group's eight, whose scale the lane computes. lane_of_row: the first of the group's
  // lanes that compute a row's scale.
  static __device__ __forceinline__ int row_of_lane(int lane) { return lane / 8 % 2 * 4 + lane / 4 % 2 * 2 + lane % 2; }
  static __device__ __forceinline__ int lane_of_row(int row) { return row / 4 * 8 + row / 2 % 2 * 4 + row % 2; }

  // With each exchange a lane gives away half of its rows, until two are left.
  __device__ __forceinline__ BlockScale scale_of_row() const {
    uint32_t largest[4];  // rows 2 i and 2 i + 1
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t even = largest_of_row(2 * i), odd = largest_of_row(2 * i + 1);
      largest[i] = larger(ptx::permute_bytes(even, odd, 0x5410), ptx::permute_bytes(even, odd, 0x7632));
    }
    const int lane = ptx::lane_index();
#pragma unroll
    for (int count = 2; count > 0; count /= 2) {
      const bool keeps_upper = (lane & count * 4) != 0;
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const uint32_t sent = keeps_upper ? largest[i] : largest[i + count];
        const uint32_t kept = keeps_upper ? largest[i + count] : largest[i];
        largest[i] = larger(kept, ptx::shuffle_xor(sent, count * 4));
      }
    }
    largest[0] = larger(largest[0], ptx::shuffle_xor(largest[0], 2));
    largest[0] = larger(largest[0], ptx::shuffle_xor(largest[0], 1));
    const float2 pair = unpack<Element>(largest[0]);
    return BlockScale(fabsf(lane % 2 == 0 ? pair.x : pair.y));
  }

  __device__ __forceinline__ void quantize_row(uint32_t (&codes)[2], int row, float inverse) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      codes[i] = ptx::pack_four_e4m3(value(row, 4 * i) * inverse, value(row, 4 * i + 1) * inverse,
                                     value(row, 4 * i + 2) * inverse, value(row, 4 * i + 3) * inverse);
    }
  }

  __device__ __forceinline__ void quantize_column(uint32_t (&codes)[2], int column, float inverse) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      codes[i] = ptx::pack_four_e4m3(value(4 * i, column) * inverse, value(4 * i + 1, column) * inverse,
                                     value(4 * i + 2, column) * inverse, value(4 * i + 3, column) * inverse);
    }
  }

  // Stores the tile's first `rows` rows with one scale per row. values, scales: those of the tile's first row and
  // column.
  __device__ __forceinline__ void store_rows(unsigned char* values, int64_t stride, float* scales, int64_t scale_stride,
                                             int rows) const {
    const BlockScale row_scale = scale_of_row();
    const int lane = ptx::lane_index(), lane_row = group * 8 + row_of_lane(lane);
    if ((lane & 2) == 0 && lane_row < rows) ptx::st_global_float(scales + lane_row * scale_stride, row_scale.scale);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float inverse = ptx::shuffle_index(row_scale.inverse, (lane & 16) + lane_of_row(i));
      const int row = group * 8 + i;
      if (row >= rows) continue;
      uint32_t codes[2];
      quantize_row(codes, i, inverse);
      ptx::st_global_64(values + row * stride + chunk * 8, codes);
    }
  }

  // codes_of(codes, column): converts the eight rows of one of the thread's columns. gmem: the first row of the tile's
  // first column. Contains a barrier, and needs one since the previous call.
  template <typename CodesOf>
  __device__ __forceinline__ void store_transposed(unsigned char* gmem, int64_t stride, CodesOf codes_of) const {
#pragma unroll
    for (int column = 0; column < 8; ++column) {
      uint32_t codes[2];
      codes_of(codes, column);
      ptx::st_shared_64(smem + (chunk * 8 + column) * kScaleBlock + (group ^ chunk) * 8, codes);
    }
    ptx::barrier_sync_block();
    const int line_chunk = ptx::thread_index() % 8;  // 16 bytes
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = ptx::thread_index() / 8 + 32 * i;
      const int swizzle = column / 8;
      uint32_t found[4];
      ptx::ld_shared_128(found, smem + column * kScaleBlock + (line_chunk ^ swizzle / 2) * 16);
      const bool is_swapped = swizzle % 2 != 0;
      const uint32_t in_order[4] = {is_swapped ? found[2] : found[0], is_swapped ? found[3] : found[1],
                                    is_swapped ? found[0] : found[2], is_swapped ? found[1] : found[3]};
      ptx::st_global_128(gmem + column * stride + line_chunk * 16, in_order);
    }
  }

  // Stores the transpose with one scale for the tile.
  __device__ __forceinline__ BlockScale store_transposed_tile(unsigned char* gmem, int64_t stride) const {
    const BlockScale scale(largest_of_tile());
    store_transposed(gmem, stride, [&](auto& codes, int column) { quantize_column(codes, column, scale.inverse); });
    return scale;
  }

  // The same, and stores the tile itself: values are converted once, and their bytes are transposed.
  __device__ __forceinline__ BlockScale store_tile(unsigned char* values, int64_t values_stride, unsigned char* gmem,
                                                   int64_t stride) const {
    const BlockScale scale(largest_of_tile());
    uint32_t columns[8][2];
#pragma unroll
    for (int four = 0; four < 2; ++four) {
      uint32_t rows[4][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 4 * four + i;
        quantize_row(rows[i], row, scale.inverse);
        ptx::st_global_64(values + (group * 8 + row) * values_stride + chunk * 8, rows[i]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // four columns of four rows
#pragma unroll
        for (int two = 0; two < 2; ++two) {
          const uint32_t selector = two == 0 ? 0x5140 : 0x7362;
          const uint32_t upper = ptx::permute_bytes(rows[0][half], rows[1][half], selector);
          const uint32_t lower = ptx::permute_bytes(rows[2][half], rows[3][half], selector);
          columns[4 * half + 2 * two][four] = ptx::permute_bytes(upper, lower, 0x5410);
          columns[4 * half + 2 * two + 1][four] = ptx::permute_bytes(upper, lower, 0x7632);
        }
      }
    }
    store_transposed(gmem, stride, [&](auto& codes, int column) {
      codes[0] = columns[column][0];
      codes[1] = columns[column][1];
    });
    return scale;
  }

  // Stores the transpose with one scale per column; scales: that of the tile's first column.
  __device__ __forceinline__ void store_transposed_columns(unsigned char* gmem, int64_t stride, float* scales) const {
    uint32_t largest[4];
    largest_of_columns(largest);
    float inverses[8];
#pragma unroll
    for (int column = 0; column < 8; ++column) {
      const float2 pair = unpack<Element>(largest[column / 2]);
      const BlockScale scale(fabsf(column % 2 == 0 ? pair.x : pair.y));
      if (group == 0) ptx::st_global_float(scales + chunk * 8 + column, scale.scale);
      inverses[column] = scale.inverse;
    }
    store_transposed(gmem, stride, [&](auto& codes, int column) { quantize_column(codes, column, inverses[column]); });
  }
};

}  // namespace flashmoe::moe
