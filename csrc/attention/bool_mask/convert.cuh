// Converts a bool mask to an additive one of 0 and -inf, which the sm90 kernels can stream, and notes which blocks of
// 64 rows and 64 keys it hides as a whole, so that they can be skipped.
// Grid: a thread block converts 64 rows of 256 keys of one matrix; matrices, row blocks and words of VisibleBlocks in
// this order. A warp converts rows, and a lane of it eight keys of each.
#pragma once

#include "attention/params/bool_mask.h"
#include "device/convert.cuh"
#include "device/math.cuh"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention {

template <typename Element_, int kNumWarps_>
struct BoolMaskSpec {
  using Element = Element_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kSharedBytes = 4 * kNumWarps;  // a word per warp
  static_assert(kMaskBlock % kNumWarps == 0 && kNumWarps <= 32, "every warp has the same number of rows");
};

// Eight bytes of a row, for the keys from first_key on. Bytes past the last key remain as they are.
__device__ __forceinline__ void load_mask_bytes(uint32_t (&bytes)[2], const BoolMaskParams& params,
                                                const unsigned char* row_gmem, int first_key, bool is_vector) {
  if (is_vector) {
    ptx::ld_global_64(bytes, row_gmem + first_key);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (first_key + i >= params.keys) continue;
    bytes[i / 4] |= ptx::ld_global_8(row_gmem + (first_key + i) * params.stride_key) << i % 4 * 8;
  }
}

template <typename Spec>
__device__ __forceinline__ void bool_mask(const BoolMaskParams& params) {
  using Element = typename Spec::Element;
  constexpr int kRows = kMaskBlock / Spec::kNumWarps;
  constexpr int kWordKeys = kMaskBlock * kMaskWordBlocks;
  const int key_words = ceil_div(params.keys, kWordKeys);
  const int row_blocks = ceil_div(params.rows, kMaskBlock);
  const int in_row = ptx::block_index() / key_words;
  const int word = ptx::block_index() - in_row * key_words;
  const int matrix = in_row / row_blocks;
  const int row_block = in_row - matrix * row_blocks;
  const int batch = matrix / params.heads;
  const int lane = ptx::lane_index();
  const int warp = ptx::warp_index();
  const int first_key = word * kWordKeys + lane * 8;
  const int first_row = row_block * kMaskBlock + warp * kRows;
  const unsigned char* matrix_gmem = static_cast<const unsigned char*>(params.mask) + batch * params.stride_batch +
                                     (matrix - batch * params.heads) * params.stride_head;
  const bool is_aligned =
      params.stride_key == 1 && ((reinterpret_cast<int64_t>(matrix_gmem) | params.stride_row) & 7) == 0;
  const bool is_vector = is_aligned && first_key + 8 <= params.keys;

  uint32_t bytes[kRows][2];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    bytes[i][0] = bytes[i][1] = 0;
    if (first_row + i >= params.rows) continue;
    load_mask_bytes(bytes[i], params, matrix_gmem + (first_row + i) * params.stride_row, first_key, is_vector);
  }
  const uint32_t hidden = pack<Element>(ptx::negative_infinity(), 0.0f);  // the lower half: an element of -inf
  Element* out_gmem = static_cast<Element*>(params.additive) + first_key;
  uint32_t seen = 0;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    seen |= bytes[i][0] | bytes[i][1];
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t pair = bytes[i][w / 2] >> w % 2 * 16;
      words[w] = ((pair & 0xff) == 0 ? hidden : 0) | ((pair & 0xff00) == 0 ? hidden << 16 : 0);
    }
    const int row = first_row + i;
    const bool is_inside = row < params.rows && first_key < params.additive_row;
    if (is_inside) ptx::st_global_128(out_gmem + (matrix * params.rows + row) * params.additive_row, words);
  }

  // Eight lanes have a block of 64 keys.
  const uint32_t lanes = ptx::vote_ballot(seen != 0);
  uint32_t blocks = 0;
#pragma unroll
  for (int i = 0; i < kMaskWordBlocks; ++i) blocks |= (lanes >> 8 * i & 0xff) != 0 ? 1u << 8 * i : 0;
  unsigned char* shared = ptx::dynamic_shared_memory();
  if (lane == 0) ptx::st_shared_32(shared + 4 * warp, blocks);
  // Hazard: the words are read before every warp has written its own.
  ptx::barrier_sync_block();
  if (warp > 0) return;
  uint32_t all = lane < Spec::kNumWarps ? ptx::ld_shared_32(shared + 4 * lane) : 0;
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) all |= ptx::shuffle_xor(all, mask);
  if (lane == 0) ptx::st_global_32(params.words + ptx::block_index(), all);
}

}  // namespace flashmoe::attention
