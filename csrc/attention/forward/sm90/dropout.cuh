// Dropout (../../dropout.cuh) of a warpgroup's P. What a block of keys keeps depends on no score: it is drawn while the tensor cores compute these.
#pragma once

#include "attention/dropout.cuh"
#include "attention/params/forward.h"

namespace flashmoe {
namespace attention {
namespace sm90 {

// Of a thread's two rows of a tile. Empty without dropout.
template <typename Spec, bool kHasDropout = Spec::kHasDropout>
struct TileDropout {
  struct Block {};
  template <typename Tile>
  __device__ __forceinline__ TileDropout(const ForwardParams&, const Tile&, int) {}
  __device__ __forceinline__ Block draw(int) const { return {}; }
  __device__ __forceinline__ void drop(uint32_t (&)[Spec::kBlockN / 4], const Block&) const {}
};

template <typename Spec>
struct TileDropout<Spec, true> {
  using Block = KeptPairs<Spec::kBlockN>;

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

  // What is kept is scaled with the output.
  __device__ __forceinline__ void drop(uint32_t (&probabilities)[Spec::kBlockN / 4], const Block& drawn) const {
#pragma unroll
    for (int i = 0; i < Spec::kBlockN / 4; ++i) probabilities[i] &= drawn.pair(i).halves();
  }
};

}  // namespace sm90
}  // namespace attention
}  // namespace flashmoe
