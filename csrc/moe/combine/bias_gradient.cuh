// The gradient of an expert's bias: the weighted sum of its rows.
//
// A block sums 64 columns of one expert. Eight lanes (an octet) read 8 columns each, 128 bytes of a row; a block has 4
// * warps octets. Each octet sums every (4 * warps)-th row of the expert, in order; then the octets' sums are added, in
// order. So the order depends only on the number of rows. If every token chooses the same k experts, k * columns / 64
// blocks still have work.
#pragma once

#include "moe/combine/combine.cuh"
#include "ptx/barrier.cuh"

namespace flashmoe::moe {

constexpr int kBlockColumns = 64;
constexpr int kOctetLanes = kBlockColumns / kLaneColumns;

template <typename Element_, int kNumWarps_>
struct BiasGradientSpec {
  using Element = Element_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kOctets = kNumThreads / kOctetLanes;
  static constexpr int kSharedBytes = kOctets * kBlockColumns * 4;  // [octet][column]
};

// sum += this octet's rows of [begin, end).
template <typename Spec>
__device__ __forceinline__ void add_rows(const BiasGradientParams& params, const typename Spec::Element* a_gmem,
                                         int begin, int end, bool has_columns, float (&sum)[kLaneColumns]) {
  constexpr int kLoads = 4;  // in flight
  if (!has_columns) return;
  const int octet = ptx::thread_index() / kOctetLanes;
  for (int64_t start = static_cast<int64_t>(begin) + octet; start < end; start += kLoads * Spec::kOctets) {
    uint32_t data[kLoads][4];
    int source[kLoads];
    float weight[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int64_t row = start + i * Spec::kOctets;
      source[i] = static_cast<int>(row);
      weight[i] = 1.0f;
      if (row >= end) continue;
      if (params.a_slots != nullptr) {
        source[i] = static_cast<int>(ptx::ld_global_32(params.a_slots + row)) / params.top_k;
      }
      if (params.row_weights != nullptr) weight[i] = ptx::ld_global_float(params.row_weights + row);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (start + i * Spec::kOctets < end) ptx::ld_global_128(data[i], a_gmem + source[i] * params.a_stride);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (start + i * Spec::kOctets < end) add_scaled<typename Spec::Element>(sum, data[i], weight[i]);
    }
  }
}

template <typename Spec>
__device__ __forceinline__ void bias_gradient(const BiasGradientParams& params) {
  using Element = typename Spec::Element;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const int thread = ptx::thread_index();
  const int column_blocks = (params.columns + kBlockColumns - 1) / kBlockColumns;
  const int expert = ptx::block_index() / column_blocks;
  const int first_column = (ptx::block_index() - expert * column_blocks) * kBlockColumns;
  const int column = first_column + thread % kOctetLanes * kLaneColumns;
  const int begin = static_cast<int>(ptx::ld_global_32(params.expert_offsets + expert));
  const int end = static_cast<int>(ptx::ld_global_32(params.expert_offsets + expert + 1));

  float sum[kLaneColumns] = {};
  add_rows<Spec>(params, static_cast<const Element*>(params.a) + column, begin, end, column < params.columns, sum);
  const ptx::SmemPointer sums_smem = ptx::dynamic_shared_memory();
  const ptx::SmemPointer thread_smem = sums_smem + 4 * kLaneColumns * thread;
  for (int i = 0; i < kLaneColumns; ++i) ptx::st_shared_float(thread_smem + 4 * i, sum[i]);
  ptx::barrier_sync_block();  // all octets' sums are written

  const int pair = first_column + 2 * thread;  // two columns per thread
  if (thread >= kBlockColumns / 2 || pair >= params.columns) return;
  float low = 0.0f, high = 0.0f;
  for (int octet = 0; octet < Spec::kOctets; ++octet) {
    const ptx::SmemPointer octet_smem = sums_smem + 4 * (kBlockColumns * octet + 2 * thread);
    low += ptx::ld_shared_float(octet_smem);
    high += ptx::ld_shared_float(octet_smem + 4);
  }
  Element* d_gmem = static_cast<Element*>(params.d) + static_cast<int64_t>(expert) * params.columns;
  ptx::st_global_32(d_gmem + pair, pack<Element>(low, high));
}

}  // namespace flashmoe::moe
