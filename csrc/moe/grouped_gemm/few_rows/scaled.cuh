// Products of e4m3 operands with scales, for few rows per expert. Loads and layouts treat two values as one 16-bit
// element, so only a stage's products, its scales and the gated result differ from 16-bit operands.
#pragma once

#include "moe/grouped_gemm/few_rows/stream.cuh"
#include "moe/params/scaled.h"
#include "ptx/e4m3.cuh"

namespace flashmoe::moe::few_rows {

template <typename Element, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kBlockK>
struct ScaledSpec : Spec<Element, kBlockM, kBlockN, kNumStages, kNumWarps, kBlockK> {
  using Tiles = Spec<Element, kBlockM, kBlockN, kNumStages, kNumWarps, kBlockK>;
  static constexpr int kSharedBytes = Tiles::kSharedBytes + kNumWarps * WarpSums<Tiles>::kBytes;
};

// The scales that a lane needs, one stage at a time: those of its two neighbouring rows of a, and those of weight rows
// lane / 4 and lane / 4 + 8, which are gate and up in the gated product.
template <typename Spec, bool kIsGated>
struct StageScales {
  static constexpr int kBlocks = 2 * Spec::kBlockK / kScaleBlock;  // per stage
  static_assert(Spec::kGroups == 1, "two rows per lane");
  static_assert(kScaleBlock % Spec::kBlockN == 0,
                "a tile's weight rows are of one block, or one of gate and one of up");

  const float* row_gmem[2];
  const float* weight_gmem[2];
  int blocks;  // of k
  float row[kBlocks][2];
  float weight[kBlocks][2];

  __device__ __forceinline__ StageScales(const ScaledGemmParams& params, const Tile& tile)
      : blocks(2 * params.gemm.k / kScaleBlock) {
    const GemmParams& gemm = params.gemm;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int within = ptx::lane_index() % 4 * 2 + r;
      int source_row = tile.row + (within < tile.rows ? within : 0);
      if constexpr (kIsGated) source_row = static_cast<int>(ptx::ld_global_32(gemm.a_slots + source_row)) / gemm.top_k;
      row_gmem[r] = params.a_scale + static_cast<int64_t>(source_row) * blocks;
    }
    const int count = ceil_div(gemm.n, kScaleBlock);
    const int first = (kIsGated ? tile.column / 2 : tile.column) / kScaleBlock;
    const float* of_expert = params.b_scale + static_cast<int64_t>(tile.expert) * count * blocks;
    weight_gmem[0] = of_expert + static_cast<int64_t>(first) * blocks;
    weight_gmem[1] = weight_gmem[0] + (kIsGated ? static_cast<int64_t>(count / 2) * blocks : 0);
  }

  // Past the last block of k, where the operands are zeros, loads the last block's scales.
  __device__ __forceinline__ void load(int stage) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int k_block = minimum(stage * kBlocks + block, blocks - 1);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        row[block][i] = ptx::ld_global_float(row_gmem[i] + k_block);
        weight[block][i] = kIsGated || i == 0 ? ptx::ld_global_float(weight_gmem[i] + k_block) : weight[block][0];
      }
    }
  }
};

// One block of k: 128 values of each operand, as two runs of 64 values, from number `first` on. Sums start from zero
// and run up k in steps of 32.
template <typename Spec>
__device__ __forceinline__ void multiply_block(Accumulator<Spec>& partial, ptx::SmemPointer stage_smem, int first) {
  const int lane = ptx::lane_index();
  const ptx::SmemPointer rows_smem = stage_smem + Spec::kWeightBytes;
#pragma unroll
  for (int pair = first; pair < first + 2; ++pair) {
    uint32_t b[4];  // as in multiply_groups
    ptx::ldmatrix_x4(b, rows_smem + swizzled_offset<Spec::kBlockK>(lane % 8, 4 * pair + lane / 8));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < Spec::kFragments; ++i) {
        uint32_t a[4];
        load_fragment<Spec, Weights::kNk>(a, stage_smem, ptx::warp_index() * Spec::kFragments + i, 2 * pair + half);
        ptx::mma_m16n8k32_e4m3(partial[i][0], a, b[2 * half], b[2 * half + 1]);
      }
    }
  }
}

// Stores eight columns of h in float32: their scale needs all 128 columns of a block, which several tiles compute.
template <typename Spec, typename Act>
__device__ __forceinline__ void store_activation(const GemmParams& params, const Tile& tile,
                                                 const WarpSums<Spec>& warp_sums, Act) {
  for (int item = ptx::lane_index(); item < tile.rows * Spec::kFragments; item += 32) {
    const int fragment = item % Spec::kFragments, row = item / Spec::kFragments;
    const int column = tile.column / 2 + (ptx::warp_index() * Spec::kFragments + fragment) * 8;
    if (column >= params.n / 2) continue;
    float gate[8], up[8];
    warp_sums.get(gate, row, 16 * fragment);
    warp_sums.get(up, row, 16 * fragment + 8);
    float* h_gmem = static_cast<float*>(params.d) + (tile.row + row) * params.d_stride + column;
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) words[j] = ptx::float_bits(Act::forward(gate[i + j], up[i + j]));
      ptx::st_global_128(h_gmem + i, words);
    }
  }
}

// A tile in progress: what is still to be loaded, and its scales.
template <typename Spec, bool kIsGated>
struct ScaledWork {
  using Params = ScaledGemmParams;
  using WeightLoads = WeightLoader<Spec, Weights::kNk, kIsGated>;
  struct Pending {
    __device__ __forceinline__ void store() const {}
  };

  Tile tile;
  WeightLoads weights;
  RowLoader<Spec> rows;
  StageScales<Spec, kIsGated> scales;
  int issued = 0;  // stages

  __device__ __forceinline__ ScaledWork(const ScaledGemmParams& params, const Tile& tile_)
      : tile(tile_), weights(params.gemm, tile_), rows(params.gemm, tile_), scales(params, tile_) {}

  static __device__ __forceinline__ WeightLoads weight_loads(const GemmParams& params, const Tile& tile) {
    return WeightLoads(params, tile);
  }

  __device__ __forceinline__ void load(ptx::SmemPointer stage_smem, Pending&) {
    weights.load(stage_smem);
    rows.load(stage_smem + Spec::kWeightBytes);
    ++issued;
  }

  __device__ __forceinline__ void multiply(Accumulator<Spec>& accumulator, ptx::SmemPointer stage_smem, int step,
                                           int stages) {
    const StageScales<Spec, kIsGated> now = scales;
    if (step + 1 < stages) scales.load(step + 1);
#pragma unroll
    for (int block = 0; block < scales.kBlocks; ++block) {
      Accumulator<Spec> partial = {};
      multiply_block<Spec>(partial, stage_smem, 2 * block);
#pragma unroll
      for (int i = 0; i < Spec::kFragments; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float factor = now.row[block][j % 2] * now.weight[block][j / 2];
          accumulator[i][0][j] = ptx::fma_rn(partial[i][0][j], factor, accumulator[i][0][j]);
        }
    }
  }

  __device__ __forceinline__ void store(const GemmParams& params, const WarpSums<Spec>& sums) const {
    if constexpr (kIsGated) {
      with_activation(params.activation,
                      [&](auto activation) { store_activation<Spec>(params, tile, sums, activation); });
    } else {
      store_plain<Spec>(params, tile, sums);
    }
  }
};

template <typename Spec>
__device__ __forceinline__ void grouped_gemm_scaled(const ScaledGemmParams& params) {
  stream_tiles<Spec, false, ScaledWork<Spec, false>>(params);
}

template <typename Spec>
__device__ __forceinline__ void grouped_gemm_gated_scaled(const ScaledGemmParams& params) {
  stream_tiles<Spec, true, ScaledWork<Spec, true>>(params);
}

}  // namespace flashmoe::moe::few_rows
