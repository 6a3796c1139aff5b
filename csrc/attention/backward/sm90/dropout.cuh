// Dropout (../../dropout.cuh) of a consumer's P^T and dP^T. What a block of queries keeps depends on no score: it is drawn while the tensor cores
// compute these.
#pragma once

#include "attention/backward/sm90/products.cuh"
#include "attention/backward/sm90/schedule.cuh"
#include "attention/dropout.cuh"

namespace flashmoe::attention::backward::sm90 {

// Of a tile. Empty without dropout.
template <typename Spec, bool kHasDropout = Spec::kHasDropout>
struct TileDropout {
  template <typename Tile>
  __device__ __forceinline__ TileDropout(const BackwardParams&, const Tile&) {}
};
template <typename Spec>
struct TileDropout<Spec, true> {
  HeadDropout of_head;  // of any, until a block asks for another

  template <typename Tile>
  __device__ __forceinline__ TileDropout(const BackwardParams& params, const Tile& tile)
      : of_head(dropout_of(params), 0, tile.batch) {}
};

// Of a consumer's 64 keys and kStreamRows queries.
template <typename Spec, bool kHasDropout = Spec::kHasDropout>
struct BlockDropout {
  template <typename Coordinates>
  __device__ __forceinline__ BlockDropout(const TileDropout<Spec>&, const Coordinates&) {}
  __device__ __forceinline__ void drop_weights(uint32_t (&)[Products<Spec>::kPacked]) const {}
  __device__ __forceinline__ void mark_weights(uint32_t (&)[Products<Spec>::kPacked]) const {}
  __device__ __forceinline__ float gradient(float gradient, float row_dot, int) const { return gradient - row_dot; }
};

template <typename Spec>
struct BlockDropout<Spec, true> {
  static constexpr int kPairs = Spec::kStreamRows / 4;  // of neighbouring columns
  KeptPair kept[kPairs];
  float scale;

  template <typename Coordinates>
  __device__ __forceinline__ BlockDropout(const TileDropout<Spec>& tile, const Coordinates& coordinates)
      : scale(tile.of_head.dropout.scale) {
    HeadDropout own = tile.of_head;
    own.head = static_cast<uint32_t>(coordinates.head);
    visit_by_key<Spec::kStreamRows>(own, coordinates.block * Spec::kStreamRows,
                                    coordinates.first_key + ptx::warp_index() % 4 * 16,
                                    [&](int n, int half, KeptPair pair) { kept[2 * n + half] = pair; });
  }
  // P^T, which dv's store scales.
  __device__ __forceinline__ void drop_weights(uint32_t (&packed)[kPairs]) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) packed[i] &= kept[i].halves();
  }
  // P^T, made negative where it is dropped (-0 too): what SharedGradient takes.
  __device__ __forceinline__ void mark_weights(uint32_t (&packed)[kPairs]) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) packed[i] |= ~kept[i].halves() & 0x80008000;
  }
  // The factor of P in dS. i: of score i.
  __device__ __forceinline__ float gradient(float gradient, float row_dot, int i) const {
    return ptx::fma_rn(kept[i / 2].keep(gradient, i % 2), scale, -row_dot);
  }
};

// Of a block's dS^T in the warpgroup that gets P^T from the other one.
template <typename Spec, bool kHasDropout = Spec::kHasDropout>
struct SharedGradient {
  __device__ __forceinline__ SharedGradient(const BackwardParams&) {}
  __device__ __forceinline__ void scale_row_dots(float (&)[Products<Spec>::kColumns]) const {}
  __device__ __forceinline__ float operator()(float probability, float gradient, float row_dot) const {
    return probability * (gradient - row_dot);
  }
};
// dS^T over value_scale(), which dk's store multiplies by.
template <typename Spec>
struct SharedGradient<Spec, true> {
  float inverse_scale;

  __device__ __forceinline__ SharedGradient(const BackwardParams& params)
      : inverse_scale(ptx::rcp_approx(dropout_of(params).scale)) {}
  __device__ __forceinline__ void scale_row_dots(float (&row_dots)[Products<Spec>::kColumns]) const {
#pragma unroll
    for (float& row_dot : row_dots) row_dot *= inverse_scale;
  }
  // marked: as mark_weights has it.
  __device__ __forceinline__ float operator()(float marked, float gradient, float row_dot) const {
    return ptx::fma_rn(max(marked, 0.0f), gradient, -(fabsf(marked) * row_dot));
  }
};

// Of a tile of dq's: its two rows a thread. Empty without dropout.
template <typename Spec, bool kHasDropout = Spec::kHasDropout>
struct RowDropout {
  struct Block {};
  RowDropout() = default;
  template <typename Tile>
  __device__ __forceinline__ RowDropout(const BackwardParams&, const Tile&, int) {}
  __device__ __forceinline__ Block draw(int) const { return {}; }
  __device__ __forceinline__ float gradient(float gradient, float row_dot, const Block&, int) const {
    return gradient - row_dot;
  }
};
template <typename Spec>
struct RowDropout<Spec, true> {
  using Block = KeptPairs<Spec::kStreamRows>;

  HeadDropout of_head;
  int row;  // the first of the two

  template <typename Tile>
  __device__ __forceinline__ RowDropout(const BackwardParams& params, const Tile& tile, int warpgroup_row)
      : of_head(dropout_of(params), tile.head, tile.batch),
        row(warpgroup_row + ptx::warp_index() % 4 * 16 + ptx::lane_index() / 4) {}
  __device__ __forceinline__ Block draw(int block) const {
    Block drawn;
    drawn.draw(of_head, row, block * Spec::kStreamRows);
    return drawn;
  }
  // The factor of P in dS. i: of score i.
  __device__ __forceinline__ float gradient(float gradient, float row_dot, const Block& drawn, int i) const {
    return ptx::fma_rn(drawn.pair(i / 2).keep(gradient, i % 2), of_head.dropout.scale, -row_dot);
  }
};

// What dv is multiplied by at its end.
template <typename Spec>
__device__ __forceinline__ float value_scale(const BackwardParams& params) {
  if constexpr (Spec::kHasDropout) return dropout_of(params).scale;
  return 1.0f;
}

}  // namespace flashmoe::attention::backward::sm90
