// Applies the mask tensor of ScoreOptions to the scores of one key block, before the softmax, in the accumulator layout
// of wgmma (softmax.cuh). (A softcap without a mask tensor is part of the softmax, unless the call is consistent:
// softcap.cuh.)
#pragma once

#include "attention/params/forward.h"
#include "device/convert.cuh"
#include "device/math.cuh"
#include "device/reduce.cuh"
#include "attention/forward/sm90/softmax.cuh"
#include "attention/forward/sm90/varlen/folded.cuh"
#include "attention/forward/sm90/varlen/schedule.cuh"
#include "attention/forward/sm90/softcap.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"

namespace flashmoe::attention::sm90 {

// Sets score to score * factor + value * value_factor. The product of the value is at least -3e38, unless the value is
// -inf.
__device__ __forceinline__ void add_mask_value(float& score, float value, float factor, float value_factor) {
  constexpr float kLargest = 3.0e38f;
  const float held = ptx::max_ftz(value * value_factor, -kLargest);
  score = ptx::fma_rn(score, factor, value == ptx::negative_infinity() ? value : held);
}

// Reads the mask tensor for the scores of this thread: two rows, and two adjacent keys of every eight from first_key
// on. Works row by row, so that the loads of only one row occupy registers.
template <typename Element, bool kIsFolded>
struct MaskReader {
  const ScoreOptions& options;
  const VarlenTile& tile;
  const int first_key;
  const bool is_paired;  // two adjacent keys per load

  // end_key: end of the block's keys.
  __device__ __forceinline__ MaskReader(const ScoreOptions& options_, const VarlenTile& tile_, int first_key_,
                                        int end_key)
      : options(options_),
        tile(tile_),
        first_key(first_key_),
        is_paired(has_pairs(options_) && end_key <= tile_.keys) {}

  // Whether two adjacent keys of an additive mask can be loaded at once.
  static __device__ __forceinline__ bool has_pairs(const ScoreOptions& options) {
    const auto strides =
        static_cast<int>(options.mask_stride_batch | options.mask_stride_head | options.mask_stride_row);
    const auto address = static_cast<int>(reinterpret_cast<uint64_t>(options.mask) >> 1);
    return options.mask_stride_key == 1 && ((strides | address) & 1) == 0;
  }

  __device__ __forceinline__ FoldedRow find(int row) const {
    if constexpr (kIsFolded) return folded_row(tile, row);
    return FoldedRow{tile.head, row, row < tile.rows};
  }
  // The same, with heads and rows that do not exist replaced by the last ones.
  __device__ __forceinline__ FoldedRow find_last(int row) const {
    if constexpr (!kIsFolded) return find(minimum(row, tile.rows - 1));
    const Folding folding = folding_of(tile);
    FoldedRow at = find(minimum(row, (tile.rows << folding.shift) - 1));
    at.head = minimum(at.head, (folding.kv_head + 1) * folding.group - 1);
    return at;
  }
  template <int kBytes>
  __device__ __forceinline__ const unsigned char* row_of(const FoldedRow& at) const {
    const int64_t offset = tile.batch * options.mask_stride_batch + at.head * options.mask_stride_head +
                           at.position * options.mask_stride_row + first_key * options.mask_stride_key;
    return static_cast<const unsigned char*>(options.mask) + ptx::recompute(offset) * kBytes;
  }

  // Advances from a pair's first key to its second, or from there to the next pair's first.
  template <int kBytes>
  __device__ __forceinline__ const unsigned char* next_key(const unsigned char* gmem, int c) const {
    return ptx::advance_pointer(gmem, (c == 0 ? 1 : 7) * options.mask_stride_key * kBytes);
  }

  template <int kN>
  __device__ __forceinline__ void hide(float (&scores)[kN / 2], int first_row) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const FoldedRow at = find(first_row + 8 * r);
      if (!at.is_there) continue;
      const unsigned char* gmem = row_of<1>(at);
#pragma unroll
      for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (first_key + 8 * j + c < tile.keys && ptx::ld_global_8(gmem) == 0) {
            scores[4 * j + 2 * r + c] = ptx::negative_infinity();
          }
          gmem = next_key<1>(gmem, c);
        }
      }
    }
  }

  template <int kN>
  __device__ __forceinline__ void add(float (&scores)[kN / 2], int first_row, float factor, float value_factor) const {
    const auto sum = [&](float& score, float value) { add_mask_value(score, value, factor, value_factor); };
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const unsigned char* gmem = row_of<2>(find_last(first_row + 8 * r));
      if (is_paired) {
        uint32_t pairs[kN / 8];
#pragma unroll
        for (int j = 0; j < kN / 8; ++j) pairs[j] = ptx::ld_global_32(gmem + 16 * j);
#pragma unroll
        for (int j = 0; j < kN / 8; ++j) {
          const float2 values = unpack<Element>(pairs[j]);
          sum(scores[4 * j + 2 * r], values.x);
          sum(scores[4 * j + 2 * r + 1], values.y);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float value = 0.0f;
            if (first_key + 8 * j + c < tile.keys) {
              value = unpack<Element>(ptx::ld_global_16(gmem)).x;
            }
            sum(scores[4 * j + 2 * r + c], value);
            gmem = next_key<2>(gmem, c);
          }
        }
      }
    }
  }
};

}  // namespace flashmoe::attention::sm90
