// Keys that indices name: rows of all pages, page * page_size + offset.
#pragma once

#include "mla/plan.cuh"
#include "ptx/memory.cuh"

namespace flashmoe::mla {

// The row that index `key` of a segment's sequence names; -1 where it names none.
__device__ __forceinline__ int index_of(const DecodeParams& params, const Segment& segment, int key) {
  if (key >= segment.keys) return -1;
  const int index =
      static_cast<int>(ptx::ld_global_32(params.indices + static_cast<int64_t>(segment.batch) * params.max_keys + key));
  return index >= 0 && index < params.num_slots ? index : -1;
}

// Where a row lies in the cache: elements, of codes bytes.
__device__ __forceinline__ int64_t row_offset(const DecodeParams& params, int row) {
  const int page = static_cast<int>(static_cast<uint32_t>(row) / static_cast<uint32_t>(params.page_size));
  return page * params.page_stride + (row - page * params.page_size) * params.key_stride;
}

}  // namespace flashmoe::mla
