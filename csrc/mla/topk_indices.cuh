// Keys selected by indices: rows among all pages, page * page_size + offset.
#pragma once

#include "mla/tile_scheduler.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::mla {

// The row that index `key` of a work tile's sequence selects; -1 if it selects none.
__device__ __forceinline__ int topk_index(const DecodeParams& params, const WorkTile& work, int key) {
  if (key >= work.keys) return -1;
  const int index =
      static_cast<int>(ptx::ld_global_32(params.indices + static_cast<int64_t>(work.batch) * params.max_keys + key));
  return index >= 0 && index < params.num_slots ? index : -1;
}

// Offset of a row in the cache: in elements, in an FP8 cache in bytes; -1 if there is no row.
__device__ __forceinline__ int64_t row_offset(const DecodeParams& params, int row) {
  if (row < 0) return -1;
  const int page = static_cast<int>(static_cast<uint32_t>(row) / static_cast<uint32_t>(params.page_size));
  return page * params.page_stride + (row - page * params.page_size) * params.key_stride;
}

// Four warps gather the rows of a key block by cp.async, 16 keys per pass, eight threads per row of a slab. gmem: where
// this thread reads its 16-byte chunk, of one key in each pass.
template <int kBlockN, int kElementBytes>
struct GatheredRows {
  static constexpr int kPassRows = 16;
  static constexpr int kPasses = kBlockN / kPassRows;
  static_assert(kPassRows % 8 == 0, "the rows of two passes differ by the period of the swizzle");

  const unsigned char* gmem[kPasses];
  bool exists[kPasses];

  // place_of_lane: byte offset of the key that find() returned for this lane.
  __device__ __forceinline__ GatheredRows(const DecodeParams& params, int64_t lane_offset, int chunk) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const auto byte_offset = static_cast<int64_t>(
          ptx::shuffle_index(static_cast<uint64_t>(lane_offset), pass * 4 + ptx::lane_index() / 8));
      exists[pass] = byte_offset >= 0;
      gmem[pass] = static_cast<const unsigned char*>(params.cache) + (exists[pass] ? byte_offset : 0) + chunk * 16;
    }
  }

  // A warp has four keys of each pass. Returns this lane's key of a block, a row among all pages, the same in two
  // lanes.
  __device__ __forceinline__ static int load_topk_index(const DecodeParams& params, const WorkTile& work, int block,
                                                        int warp) {
    const int lane = ptx::lane_index() % 16;
    const int key = lane / 4 * kPassRows + warp * 4 + lane % 4;
    return block < work.end_block ? topk_index(params, work, block * kBlockN + key) : -1;
  }

  // Byte offset of a row; -1 if there is none.
  __device__ __forceinline__ static int64_t byte_offset(const DecodeParams& params, int row) {
    return row < 0 ? -1 : row_offset(params, row) * kElementBytes;
  }
};

}  // namespace flashmoe::mla
