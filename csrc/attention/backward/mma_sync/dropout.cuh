// Dropout (../../dropout.cuh) of a warp's P and dP, in both kernels.
#pragma once

#include "attention/backward/mma_sync/products.cuh"
#include "attention/backward/mma_sync/tile.cuh"
#include "attention/dropout.cuh"

namespace flashmoe {
namespace attention {
namespace backward {
namespace mma_sync {

// Empty without dropout.
template <typename Spec, bool kHasDropout = Spec::kHasDropout>
struct TileDropout {
  template <typename Tile>
  __device__ __forceinline__ TileDropout(const BackwardParams&, const Tile&) {}
};

template <typename Spec>
struct TileDropout<Spec, true> {
  HeadDropout of_head;  // dk and dv: of any, until they ask for another

  __device__ __forceinline__ TileDropout(const BackwardParams& params, const VarlenTile& tile)
      : of_head(dropout_of(params), tile.head, tile.batch) {}

  // dq: dP times its factors. row, first_key: of the warp's first.
  __device__ __forceinline__ void drop(Scores<Spec>& gradients, int row, int first_key) const {
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m) {
      visit_by_query<Spec::kMmaN * 8>(of_head, row + m * 16, first_key, [&](int n, int i, bool keeps) {
        gradients[m][n][i] = keeps ? gradients[m][n][i] * of_head.scale : 0.0f;
      });
    }
  }

  // dk and dv: visit(m, n, i, keeps) of S^T.
  template <typename Visit>
  __device__ __forceinline__ void visit_keys(int head, int key, int first_row, Visit visit) const {
    HeadDropout own = of_head;
    own.head = static_cast<uint32_t>(head);
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m) {
      visit_by_key<Spec::kMmaN * 8>(own, first_row, key + m * 16,
                                    [&](int n, int i, bool keeps) { visit(m, n, i, keeps); });
    }
  }
  __device__ __forceinline__ void drop_gradient(float& gradient, bool keeps) const {
    gradient = keeps ? gradient * of_head.scale : 0.0f;
  }
  // P, which dv's store scales.
  static __device__ __forceinline__ void drop_weight(Operand<Spec>& operand, int m, int n, int i, bool keeps) {
    uint32_t& pair = operand[n / 2][m][n % 2 * 2 + i / 2];
    pair &= keeps ? 0xFFFFFFFFu : i % 2 == 0 ? 0xFFFF0000u : 0x0000FFFFu;
  }
};

}  // namespace mma_sync
}  // namespace backward
}  // namespace attention
}  // namespace flashmoe
