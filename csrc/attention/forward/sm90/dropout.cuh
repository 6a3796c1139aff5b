// Dropout (../../dropout.cuh) of a warpgroup's P.
#pragma once

#include "attention/dropout.cuh"
#include "attention/params/forward.h"

namespace flashmoe::attention::sm90 {

struct NotDrawn {};

// Dropout of a thread's two rows of a tile. Empty without dropout.
template <typename Spec, bool kHasDropout = Spec::kHasDropout>
struct TileDropout {
  template <typename Tile>
  __device__ __forceinline__ TileDropout(const ForwardParams&, const Tile&, int) {}
  __device__ __forceinline__ NotDrawn draw_early(int) const { return {}; }
  __device__ __forceinline__ void drop(uint32_t (&)[Spec::kBlockN / 4], int, NotDrawn = {}) const {}
};

template <typename Spec>
struct TileDropout<Spec, true> {
  using Block = KeptPairs<Spec::kBlockN>;
  // Which keys of a block are kept does not depend on the scores. Drawing between the issue of the products and the
  // wait for S takes up to 15% longer, whether it delays O += P V or not. Among the exponentials it fills their stalls;
  // at D=128 it takes 3% less after P has been packed.
  static constexpr bool kDrawsLast = Spec::kHeadDim == 128;

  HeadDropout of_head;
  int row;  // the first of the two; the other is 8 further on

  template <typename Tile>
  __device__ __forceinline__ TileDropout(const ForwardParams& params, const Tile& tile, int row_)
      : of_head(dropout_of(params), tile.head, tile.batch), row(row_) {}

  __device__ __forceinline__ Block draw(int block) const {
    Block drawn;
    drawn.draw(of_head, row, block * Spec::kBlockN);
    return drawn;
  }
  __device__ __forceinline__ auto draw_early(int block) const {
    if constexpr (kDrawsLast) {
      return NotDrawn{};
    } else {
      return draw(block);
    }
  }

  // The scale of the kept weights is applied to the output.
  __device__ __forceinline__ void drop(uint32_t (&probabilities)[Spec::kBlockN / 4], int, const Block& drawn) const {
#pragma unroll
    for (int i = 0; i < Spec::kBlockN / 4; ++i) probabilities[i] &= drawn.pair(i).halves();
  }
  __device__ __forceinline__ void drop(uint32_t (&probabilities)[Spec::kBlockN / 4], int block, NotDrawn = {}) const {
    drop(probabilities, block, draw(block));
  }
};

}  // namespace flashmoe::attention::sm90
