// The four products: their tiles, and the operands and the epilogue of a tile.
#pragma once

#include "device/math.cuh"
#include "moe/grouped_gemm/mma_sync/epilogue.cuh"
#include "moe/grouped_gemm/mma_sync/operands.cuh"
#include "moe/grouped_gemm/mma_sync/schedule.cuh"
#include "moe/grouped_gemm/weights.cuh"
#include "moe/params/gemm.h"

namespace flashmoe::moe::mma_sync {

enum class Result { kPlain, kActivation, kGradient };

// The operands of one tile, and how many tiles of kBlockK the sum takes.
template <typename A, typename B>
struct Operands {
  A a;
  B b;
  int steps;
};

// The weights' column (row of [n, k] weights) for column `column` of a gated product's tiles, which interleave eight of
// gate and eight of up. Past the end: the last eight of each.
__device__ __forceinline__ int gated_column(const GemmParams& params, int column) {
  const int width = params.n / 2;
  const int half_column = minimum(column / 16 * 8, width - 8) + column % 8;
  const int is_up = column / 8 % 2;
  return params.is_interleaved != 0 ? 2 * half_column + is_up : is_up * width + half_column;
}

template <typename Spec, Weights kWeights, Result kResult>
class RowProduct {
  using Element = typename Spec::Element;
  static constexpr bool kSplitsGate = kResult == Result::kActivation && kWeights != Weights::kKnPairs;

 public:
  using A = RowsOperand<Spec, Spec::kBlockM>;
  static constexpr bool kBIsMn = kWeights != Weights::kNk;

  __device__ __forceinline__ RowProduct(const GemmParams& params, ptx::SmemPointer table_smem)
      : params_(params), row_tiles_(params, table_smem), column_tiles_(ceil_div(params.n, Spec::kBlockN)) {}

  __device__ __forceinline__ int num_tiles() const { return row_tiles_.count() * column_tiles_; }
  __device__ __forceinline__ Tile locate(int index) const { return row_tiles_.locate(index, column_tiles_); }

  __device__ __forceinline__ auto operands(const Tile& tile) const {
    const Element* a_gmem = static_cast<const Element*>(params_.a);
    const A a(params_.k, [&](int r) {
      const int row = tile.row + minimum(r, tile.rows - 1);
      const int source =
          params_.a_slots == nullptr ? row : static_cast<int>(ptx::ld_global_32(params_.a_slots + row)) / params_.top_k;
      return a_gmem + source * params_.a_stride;
    });
    const Element* expert_gmem = static_cast<const Element*>(params_.b) + tile.expert * params_.b_expert_stride;
    const int first_column = tile.column_tile * Spec::kBlockN;
    const int steps = ceil_div(params_.k, kBlockK);
    if constexpr (kBIsMn) {
      using B = ColumnsOperand<Spec, Spec::kBlockN>;
      const int column = first_column + B::column();
      const int weight_column = kSplitsGate ? gated_column(params_, column) : column;
      const B b(params_.k, expert_gmem + weight_column, params_.b_stride, column < params_.n);
      return Operands<A, B>{a, b, steps};
    } else {
      using B = RowsOperand<Spec, Spec::kBlockN>;
      const B b(params_.k, [&](int r) {
        const int column = first_column + r;
        const int weight_column = kSplitsGate ? gated_column(params_, column) : minimum(column, params_.n - 1);
        return expert_gmem + weight_column * params_.b_stride;
      });
      return Operands<A, B>{a, b, steps};
    }
  }

  __device__ __forceinline__ void finish(const Tile& tile, const Accumulator<Spec>& accum,
                                         ptx::SmemPointer staging_smem) const {
    if constexpr (kResult == Result::kActivation) {
      store_activation<Spec, kWeights == Weights::kKnPairs>(params_, tile, accum, staging_smem);
    } else if constexpr (kResult == Result::kGradient) {
      store_gradient(params_, tile, accum, staging_smem);
    } else {
      const Element* bias = static_cast<const Element*>(params_.bias);
      if (bias != nullptr) bias += static_cast<int64_t>(tile.expert) * params_.n;
      store_plain(params_, tile, tile.row, params_.n, bias, accum, staging_smem);
    }
  }

 private:
  const GemmParams& params_;
  RowTiles<Spec::kBlockM> row_tiles_;
  int column_tiles_;
};

template <typename Spec>
class WeightGradient {
  using Element = typename Spec::Element;

 public:
  using A = SummedRowsOperand<Spec, Spec::kBlockM>;
  using B = SummedRowsOperand<Spec, Spec::kBlockN>;
  static constexpr bool kBIsMn = true;

  __device__ __forceinline__ WeightGradient(const GemmParams& params, ptx::SmemPointer)
      : params_(params),
        row_tiles_(ceil_div(params.n, Spec::kBlockM)),
        column_tiles_(ceil_div(params.k, Spec::kBlockN)) {}

  __device__ __forceinline__ int num_tiles() const { return params_.experts * row_tiles_ * column_tiles_; }

  __device__ __forceinline__ Tile locate(int index) const {
    Tile tile;
    tile.expert = index / (row_tiles_ * column_tiles_);
    int row_tile;
    locate_in_expert(index - tile.expert * (row_tiles_ * column_tiles_), row_tiles_, column_tiles_, row_tile,
                     tile.column_tile);
    tile.row = row_tile * Spec::kBlockM;
    tile.rows = minimum(Spec::kBlockM, params_.n - tile.row);
    return tile;
  }

  // An expert without rows has no steps: its sums are zeros.
  __device__ __forceinline__ auto operands(const Tile& tile) const {
    const int first_row = static_cast<int>(ptx::ld_global_32(params_.expert_offsets + tile.expert));
    const int rows = static_cast<int>(ptx::ld_global_32(params_.expert_offsets + tile.expert + 1)) - first_row;
    const int a_column = tile.row + A::column();
    const int b_column = tile.column_tile * Spec::kBlockN + B::column();
    const A a(static_cast<const Element*>(params_.a) + a_column, params_.a_stride, a_column < params_.n,
              params_.a_slots, params_.top_k, first_row, rows);
    const B b(static_cast<const Element*>(params_.b) + b_column, params_.b_stride, b_column < params_.k,
              params_.b_slots, params_.top_k, first_row, rows);
    return Operands<A, B>{a, b, ceil_div(rows, kBlockK)};
  }

  __device__ __forceinline__ void finish(const Tile& tile, const Accumulator<Spec>& accum,
                                         ptx::SmemPointer staging_smem) const {
    const int64_t d_row = static_cast<int64_t>(tile.expert) * params_.n + tile.row;
    store_plain(params_, tile, d_row, params_.k, nullptr, accum, staging_smem);
  }

 private:
  const GemmParams& params_;
  int row_tiles_;
  int column_tiles_;
};

}  // namespace flashmoe::moe::mma_sync
