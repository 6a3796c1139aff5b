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
  static constexpr int kDraws = Spec::kBlockN / 32;
  static_assert(Spec::kBlockN % 32 == 0, "a draw serves eight of 32 keys");
  struct Block {
    uint32_t kept[kDraws][4];
  };

  HeadDropout of_head;
  int row;  // the first of the two; the other is 8 further on

  template <typename Tile>
  __device__ __forceinline__ TileDropout(const ForwardParams& params, const Tile& tile, int row_)
      : of_head(dropout_of(params), tile.head, tile.batch), row(row_) {}

  __device__ __forceinline__ Block draw(int block) const {
    Block drawn;
    const int key = block * Spec::kBlockN + ptx::lane_index() % 4 * 2;
#pragma unroll
    for (int i = 0; i < kDraws; ++i) {
      const uint32_t addend = of_head.draw(drawn.kept[i], row, key + 32 * i);
#pragma unroll
      for (int w = 0; w < 4; ++w) drawn.kept[i][w] = of_head.kept(drawn.kept[i][w], addend);
    }
    return drawn;
  }

  // What is kept is scaled with the output.
  __device__ __forceinline__ void drop(uint32_t (&probabilities)[Spec::kBlockN / 4], const Block& drawn) const {
#pragma unroll
    for (int i = 0; i < Spec::kBlockN / 4; ++i) {
      const int b = i / 2 % 4;  // of eight keys
      const auto& kept = drawn.kept[i / 8];
      probabilities[i] &= KeptPair{kept[b / 2 * 2], kept[b / 2 * 2 + 1], b % 2 * 2 + i % 2}.halves();
    }
  }
};

}  // namespace sm90
}  // namespace attention
}  // namespace flashmoe
