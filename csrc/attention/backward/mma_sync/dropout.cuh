// Dropout (../../dropout.cuh) of a warp's P and dP, in the dq kernel and the dk, dv kernel.
#pragma once

#include "attention/backward/mma_sync/products.cuh"
#include "attention/backward/mma_sync/tile.cuh"
#include "attention/dropout.cuh"

namespace flashmoe::attention::backward::mma_sync {

// Empty without dropout.
template <typename Spec, bool kHasDropout = Spec::kHasDropout>
struct TileDropout {
  template <typename Tile>
  __device__ __forceinline__ TileDropout(const BackwardParams&, const Tile&) {}
};

template <typename Spec>
struct TileDropout<Spec, true> {
  HeadDropout of_head;  // dk and dv: visit_keys() replaces its head

  __device__ __forceinline__ TileDropout(const BackwardParams& params, const VarlenTile& tile)
      : of_head(dropout_of(params), tile.head, tile.batch) {}

  // dq: multiplies dP by its factors. row, first_key: the warp's first.
  __device__ __forceinline__ void drop(Scores<Spec>& gradients, int row, int first_key) const {
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m) {
      for_each_pair<Spec::kMmaN * 8>(of_head, row + m * 16, first_key, [&](int n, int half, KeptPair pair) {
        drop_gradient(gradients[m][n], half, pair);
      });
    }
  }

  // dk and dv: calls visit(m, n, half, pair) for S^T.
  template <typename Visit>
  __device__ __forceinline__ void visit_keys(int head, int key, int first_row, Visit visit) const {
    HeadDropout own = of_head;
    own.head = static_cast<uint32_t>(head);
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m) {
      for_each_pair_transposed<Spec::kMmaN * 8>(own, first_row, key + m * 16,
                                                [&](int n, int half, KeptPair pair) { visit(m, n, half, pair); });
    }
  }
  __device__ __forceinline__ void drop_gradient(float (&gradients)[4], int half, KeptPair pair) const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float& gradient = gradients[2 * half + c];
      gradient = pair.keep(gradient, c) * of_head.dropout.scale;
    }
  }
  // P; the store of dv applies the scale.
  static __device__ __forceinline__ void drop_weights(Operand<Spec>& operand, int m, int n, int half, KeptPair pair) {
    operand[n / 2][m][n % 2 * 2 + half] &= pair.halves();
  }
};

}  // namespace flashmoe::attention::backward::mma_sync
