// A warp's products of one stage: its fragments of weights, [16, kBlockK] each, with the groups of 8 rows of a.
#pragma once

#include "device/swizzle.cuh"
#include "moe/grouped_gemm/weights.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::moe::few_rows {

// Per fragment and group a lane holds weight rows lane / 4 and, in [2] and [3], lane / 4 + 8; rows 2 * (lane % 4) and
// the next.
template <typename Spec>
using Accumulator = float[Spec::kFragments][Spec::kGroups][4];

// Loads a fragment's 16 columns of k as the A operand. Matrices 0 to 3: (rows 0-7, k 0-7), (rows 8-15, k 0-7), (rows
// 0-7, k 8-15), (rows 8-15, k 8-15); in kn, where k runs down shared memory, the load transposes each.
template <typename Spec, Weights kWeights>
__device__ __forceinline__ void load_fragment(uint32_t (&a)[4], ptx::SmemPointer weights_smem, int fragment, int step) {
  const int lane = ptx::lane_index();
  if constexpr (kWeights == Weights::kNk) {
    ptx::ldmatrix_x4(a, weights_smem + swizzled_offset<Spec::kBlockK>(16 * fragment + lane % 16, 2 * step + lane / 16));
  } else {
    const int k = 16 * step + lane / 16 * 8 + lane % 8;
    ptx::ldmatrix_x4_trans(a, weights_smem + swizzled_offset<Spec::kBlockN>(k, 2 * fragment + lane / 8 % 2));
  }
}

// Multiplies the first kGroups groups of rows. Sums run up k in steps of 16, whatever the tile.
template <typename Spec, Weights kWeights, int kGroups>
__device__ __forceinline__ void multiply_groups(Accumulator<Spec>& accumulator, ptx::SmemPointer stage_smem) {
  const int lane = ptx::lane_index();
  const ptx::SmemPointer rows_smem = stage_smem + Spec::kWeightBytes;
#pragma unroll
  for (int pair = 0; pair < Spec::kBlockK / 32; ++pair) {
    uint32_t a[Spec::kFragments][2][4];
#pragma unroll
    for (int i = 0; i < Spec::kFragments; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        load_fragment<Spec, kWeights>(a[i][half], stage_smem, ptx::warp_index() * Spec::kFragments + i,
                                      2 * pair + half);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      uint32_t b[4];  // matrix i: the group's rows, k 8 * i to 8 * i + 7 of the pair
      ptx::ldmatrix_x4(b, rows_smem + swizzled_offset<Spec::kBlockK>(8 * group + lane % 8, 4 * pair + lane / 8));
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < Spec::kFragments; ++i)
          ptx::mma_m16n8k16<typename Spec::Element>(accumulator[i][group], a[i][half], b[2 * half], b[2 * half + 1]);
    }
  }
}

// The products of a stage, without a branch between them: products of one group wait for each other, and there are few
// warps. So there is one copy of this code per number of groups, up to kGroups in steps of kGroupStep.
template <typename Spec, Weights kWeights, int kGroups = Spec::kGroups>
__device__ __forceinline__ void multiply_stage(Accumulator<Spec>& accumulator, ptx::SmemPointer stage_smem, int rows) {
  constexpr int kFewer = kGroups - Spec::kGroupStep;
  if constexpr (kFewer > 0) {
    if (rows <= 8 * kFewer) return multiply_stage<Spec, kWeights, kFewer>(accumulator, stage_smem, rows);
  }
  multiply_groups<Spec, kWeights, kGroups>(accumulator, stage_smem);
}

}  // namespace flashmoe::moe::few_rows
