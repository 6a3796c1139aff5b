// Puts new keys and values behind those that a cache holds, dense or paged. Grid: a warp for every row of K, and of V.
#pragma once

#include "attention/params/append.h"
#include "attention/sequences.cuh"
#include "device/convert.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention {

template <typename Element_, int kNumWarps_>
struct AppendSpec {
  using Element = Element_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kSharedBytes = 0;
  static_assert(sizeof(Element) == 2, "rows are copied by 16 bytes or by 2");
};

// Elements from a head's first row, or page, to the row of key `key`, and the page; negative where the cache has no such row.
__device__ __forceinline__ int64_t cache_row_offset(const AppendParams& params, const Strides& stride, int batch,
                                                    int key, int& page) {
  if (key < 0 || key >= params.room) return -1;
  if (params.block_table == nullptr) return batch * stride.batch + key * stride.row;
  const int index = key / params.page_size;  // within the table: the host's `room` is what its row has pages for
  page = load_length(params.block_table + batch * params.block_table_stride + index);
  if (page < 0 || page >= params.num_pages) return -1;
  return page * stride.batch + (key - index * params.page_size) * stride.row;
}

template <typename Element>
__device__ __forceinline__ void copy_row(Element* to_gmem, const Element* from_gmem, int columns, bool is_aligned) {
  const int lane = ptx::lane_index();
  if (is_aligned) {
    for (int column = lane * 8; column < columns; column += 32 * 8) {
      uint32_t chunk[4];
      ptx::ld_global_128(chunk, from_gmem + column);
      ptx::st_global_128(to_gmem + column, chunk);
    }
    return;
  }
  for (int column = lane; column < columns; column += 32) {
    ptx::st_global_16(to_gmem + column, ptx::ld_global_16(from_gmem + column));
  }
}

// A row to append: what it is, and where it goes and comes from, in elements.
struct NewRow {
  bool is_value;
  int batch;
  int head;
  int page;
  int64_t to;
  int64_t from;
};

// This warp's row; false where it has none, or the cache no room.
template <typename Spec>
__device__ __forceinline__ bool find_new_row(const AppendParams& params, NewRow& row) {
  int64_t index = static_cast<int64_t>(ptx::block_index()) * Spec::kNumWarps + ptx::warp_index();
  if (index >= 2 * static_cast<int64_t>(params.batch) * params.new_keys * params.heads_kv) return false;
  const bool is_value = index % 2 != 0;
  index /= 2;
  const int head = static_cast<int>(index % params.heads_kv);
  index /= params.heads_kv;
  const int key = static_cast<int>(index % params.new_keys);
  const int batch = static_cast<int>(index / params.new_keys);
  const Strides& to = is_value ? params.v_cache_stride : params.k_cache_stride;
  const Strides& from = is_value ? params.v_new_stride : params.k_new_stride;
  const int held = load_length(params.cache_seqlens + batch);
  if (held > params.room) return false;  // and no sum that overflows
  int page = 0;
  const int64_t offset = cache_row_offset(params, to, batch, held + key, page);
  row = NewRow{
      is_value, batch, head, page, offset + head * to.head, batch * from.batch + head * from.head + key * from.row};
  return offset >= 0;
}

template <typename Spec>
__device__ __forceinline__ void append(const AppendParams& params) {
  using Element = typename Spec::Element;
  NewRow row;
  if (!find_new_row<Spec>(params, row)) return;
  Element* to_gmem = static_cast<Element*>(row.is_value ? params.v_cache : params.k_cache) + row.to;
  const Element* from_gmem = static_cast<const Element*>(row.is_value ? params.v_new : params.k_new) + row.from;
  copy_row(to_gmem, from_gmem, row.is_value ? params.head_dim_v : params.head_dim, params.is_aligned != 0);
}

}  // namespace flashmoe::attention
