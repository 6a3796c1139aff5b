// Only row_dot, for callers who need dk and dv but not dq: rowsum(dout * out) - dlse of each row, summed in the same
// order as in the dq kernels, so the bits are the same. For every family, dense and ragged. Grid: a quad of lanes per
// row.
#pragma once

#include "attention/params/row_dot.h"
#include "device/convert.cuh"
#include "device/reduce.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention::backward {

template <typename Element_, int kNumWarps_>
struct RowDotSpec {
  using Element = Element_;
  static constexpr int kNumThreads = 32 * kNumWarps_;
  static constexpr int kRows = kNumThreads / 4;  // per block
  static constexpr int kSharedBytes = 0;
  static_assert(sizeof(Element) == 2, "rows are read by 16 bytes of eight elements");
};

template <typename Spec>
__device__ __forceinline__ void row_dot(const RowDotParams& params) {
  using Element = typename Spec::Element;
  const int thread = ptx::thread_index();
  const int64_t number = static_cast<int64_t>(ptx::block_index()) * Spec::kRows + thread / 4;  // [batch, heads, rows]
  const bool is_inside = number < static_cast<int64_t>(params.batch) * params.heads * params.rows;
  const int64_t index = is_inside ? number : 0;  // the quad's sum needs all lanes of a warp
  const int64_t head = index / params.rows;      // over batch and heads
  const int64_t batch = head / params.heads;
  const auto row_of = [&](const void* tensor, const Strides& stride) {
    return static_cast<const Element*>(tensor) + batch * stride.batch + (head - batch * params.heads) * stride.head +
           (index - head * params.rows) * stride.row;
  };
  const Element* out_gmem = row_of(params.out, params.out_stride);
  const Element* dout_gmem = row_of(params.dout, params.dout_stride);
  float sum = 0.0f;
#pragma unroll 4
  for (int column = thread % 4 * 8; column < params.head_dim; column += 32) {
    uint32_t out[4], dout[4];
    ptx::ld_global_128(out, out_gmem + column);
    ptx::ld_global_128(dout, dout_gmem + column);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 a = unpack<Element>(out[w]);
      const float2 b = unpack<Element>(dout[w]);
      sum = ptx::fma_rn(a.x, b.x, sum);
      sum = ptx::fma_rn(a.y, b.y, sum);
    }
  }
  sum = quad_sum(sum);
  if (thread % 4 != 0 || !is_inside) return;
  if (params.dlse != nullptr) sum -= ptx::ld_global_float(params.dlse + index);
  const bool is_visible = ptx::ld_global_float(params.lse + index) != ptx::negative_infinity();
  ptx::st_global_float(params.row_dot + index, is_visible ? sum : 0.0f);
}

}  // namespace flashmoe::attention::backward
