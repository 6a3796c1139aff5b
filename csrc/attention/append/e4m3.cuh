// Puts new keys and values into a cache of 8-bit floats (e4m3), divided by its scales. Grid: a warp for every row of K, and of V.
#pragma once

#include "attention/append/append.cuh"
#include "attention/params/e4m3.h"
#include "ptx/e4m3.cuh"

namespace flashmoe::attention {

// Divided in float32, rounded to nearest even; beyond 448 to 448, and NaN stays NaN. One code after the other: any alignment will do.
template <typename Element>
__device__ __forceinline__ void quantize_row(unsigned char* to_gmem, const Element* from_gmem, int columns,
                                             float scale) {
  for (int column = ptx::lane_index(); column < columns; column += 32) {
    const float value = unpack<Element>(ptx::ld_global_16(from_gmem + column)).x / scale;
    ptx::st_global_e4m3(to_gmem + column, ptx::pack_e4m3(value, 0.0f));
  }
}

template <typename Spec>
__device__ __forceinline__ void append_e4m3(const E4m3AppendParams& cache) {
  using Element = typename Spec::Element;
  const AppendParams& params = cache.append;
  NewRow row;
  if (!find_new_row<Spec>(params, row)) return;
  const CacheScale& of = row.is_value ? cache.v_scale : cache.k_scale;
  float scale = of.factor;
  if (of.values != nullptr) {
    const int64_t index = of.is_of_pages ? row.page : row.batch;
    scale *= ptx::ld_global_float(of.values + index * of.stride + row.head * of.head_stride);
  }
  auto* to_gmem = static_cast<unsigned char*>(row.is_value ? params.v_cache : params.k_cache) + row.to;
  const auto* from_gmem = static_cast<const Element*>(row.is_value ? params.v_new : params.k_new) + row.from;
  quantize_row(to_gmem, from_gmem, row.is_value ? params.head_dim_v : params.head_dim, scale);
}

}  // namespace flashmoe::attention
