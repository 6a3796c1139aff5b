// Dropout (../../dropout.cuh) of a consumer's P^T and dP^T. Which scores of a block are kept does not depend on them:
// it is drawn while the tensor cores compute the scores.
#pragma once

#include "attention/backward/sm90/products.cuh"
#include "attention/backward/sm90/schedule.cuh"
#include "attention/dropout.cuh"
#include "device/warpgroup_product.cuh"

namespace flashmoe::attention::backward::sm90 {

// Dropout of a tile. Empty without dropout, or if other warps draw.
template <typename Spec, bool kHasDropout = (Spec::kHasDropout && Spec::kNumDrawers == 0)>
struct TileDropout {
  template <typename Tile>
  __device__ __forceinline__ TileDropout(const BackwardParams&, const Tile&) {}
};
template <typename Spec>
struct TileDropout<Spec, true> {
  HeadDropout of_head;  // its head is replaced for each block

  template <typename Tile>
  __device__ __forceinline__ TileDropout(const BackwardParams& params, const Tile& tile)
      : of_head(dropout_of(params), 0, tile.batch) {}
};

// Dropout of a block, a consumer's 64 keys and kStreamRows queries, drawn by the consumer.
template <typename Spec, bool kHasDropout = Spec::kHasDropout>
struct BlockDropout {
  template <typename Coordinates>
  __device__ __forceinline__ BlockDropout(const TileDropout<Spec>&, const Coordinates&) {}
  __device__ __forceinline__ void drop_weights(uint32_t (&)[Products<Spec>::kPacked]) const {}
  __device__ __forceinline__ void mark_weights(uint32_t (&)[Products<Spec>::kPacked]) const {}
};

template <typename Spec>
struct BlockDropout<Spec, true> {
  static constexpr int kPairs = Spec::kStreamRows / 4;  // of neighbouring columns
  KeptPair kept[kPairs];

  template <typename Coordinates>
  __device__ __forceinline__ BlockDropout(const TileDropout<Spec>& tile, const Coordinates& coordinates) {
    HeadDropout own = tile.of_head;
    own.head = static_cast<uint32_t>(coordinates.head);
    for_each_pair_transposed<Spec::kStreamRows>(own, coordinates.block * Spec::kStreamRows,
                                                coordinates.first_key + ptx::warp_index() % 4 * 16,
                                                [&](int n, int half, KeptPair pair) { kept[2 * n + half] = pair; });
  }
  // P^T; the store of dv applies the scale.
  __device__ __forceinline__ void drop_weights(uint32_t (&packed)[kPairs]) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) packed[i] &= kept[i].halves();
  }
  // Makes P^T negative where it is dropped (-0 too), as SharedGradient expects.
  __device__ __forceinline__ void mark_weights(uint32_t (&packed)[kPairs]) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) packed[i] |= ~kept[i].halves() & 0x80008000;
  }
};

// Computes dS^T of a block in the warpgroup that receives P^T from the other one.
template <typename Spec, bool kHasDropout = Spec::kHasDropout>
struct SharedGradient {
  __device__ __forceinline__ SharedGradient(const BackwardParams&) {}
  __device__ __forceinline__ void scale_row_dots(float (&)[Products<Spec>::kColumns]) const {}
  __device__ __forceinline__ float operator()(float probability, float gradient, float row_dot) const {
    return probability * (gradient - row_dot);
  }
};
// dS^T divided by value_scale(); the store of dk multiplies by it.
template <typename Spec>
struct SharedGradient<Spec, true> {
  float inverse_scale;

  __device__ __forceinline__ SharedGradient(const BackwardParams& params)
      : inverse_scale(ptx::rcp_approx(dropout_of(params).scale)) {}
  __device__ __forceinline__ void scale_row_dots(float (&row_dots)[Products<Spec>::kColumns]) const {
#pragma unroll
    for (float& row_dot : row_dots) row_dot *= inverse_scale;
  }
  // marked: as written by mark_weights.
  __device__ __forceinline__ float operator()(float marked, float gradient, float row_dot) const {
    return ptx::fma_rn(max(marked, 0.0f), gradient, -(fabsf(marked) * row_dot));
  }
};

// Dropout of a dq tile, for a thread's two rows. Empty without dropout.
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
  // Returns the factor of P in dS. i: the index of the score.
  __device__ __forceinline__ float gradient(float gradient, float row_dot, const Block& drawn, int i) const {
    return ptx::fma_rn(drawn.pair(i / 2).keep(gradient, i % 2), of_head.dropout.scale, -row_dot);
  }
};

template <typename Spec>
struct FusedMemory;  // fused_spec.cuh

// Dropout of a block in a fused kernel. dS^T is divided by value_scale(), by which the store of dk and the conversion
// of dq multiply; row_dot has already been divided by it. Empty without dropout.
template <typename Spec, bool kHasDropout = Spec::kHasDropout, bool kIsDrawn = (Spec::kNumDrawers > 0)>
struct FusedDropout {
  using Product = Products<Spec>;
  template <typename Coordinates>
  __device__ __forceinline__ FusedDropout(const TileDropout<Spec>&, const Coordinates&, const FusedMemory<Spec>&,
                                          const RingPosition<Spec::kFirstStages>&, int) {}
  __device__ __forceinline__ void wait() const {}
  __device__ __forceinline__ void fetch() {}
  __device__ __forceinline__ void drop_weights(uint32_t (&)[Product::kPacked]) const {}
  // Turns dP^T into dS^T.
  __device__ __forceinline__ void score_gradients(float (&gradients)[Product::kScores],
                                                  const float (&weights)[Product::kScores],
                                                  const float (&row_dot)[Product::kColumns]) const {
#pragma unroll
    for (int i = 0; i < Product::kScores; ++i) {
      gradients[i] = weights[i] * (gradients[i] - row_dot[i / 4 * 2 + i % 2]);
    }
  }
};

// A consumer draws, while the tensor cores compute the previous block.
template <typename Spec>
struct FusedDropout<Spec, true, false> {
  using Product = Products<Spec>;
  BlockDropout<Spec> block;

  template <typename Coordinates>
  __device__ __forceinline__ FusedDropout(const TileDropout<Spec>& tile, const Coordinates& coordinates,
                                          const FusedMemory<Spec>&, const RingPosition<Spec::kFirstStages>&, int)
      : block(tile, coordinates) {}
  __device__ __forceinline__ void wait() const {}
  __device__ __forceinline__ void fetch() {}
  __device__ __forceinline__ void drop_weights(uint32_t (&packed)[Product::kPacked]) const {
    block.drop_weights(packed);
  }
  __device__ __forceinline__ void score_gradients(float (&gradients)[Product::kScores],
                                                  const float (&weights)[Product::kScores],
                                                  const float (&row_dot)[Product::kColumns]) const {
#pragma unroll
    for (int i = 0; i < Product::kScores; ++i) {
      gradients[i] = weights[i] * (block.kept[i / 2].keep(gradients[i], i % 2) - row_dot[i / 4 * 2 + i % 2]);
    }
  }
};

// The dq warpgroup has drawn (FusedDrawer): selectors for permute_bytes. A thread's selectors for queries 0 to 31 of
// the block are at `mine`, those for the others 4 * 512 bytes further: a word for each 16 queries and each of the
// thread's keys (k, k + 8), with 16 bits for two pairs of neighbouring queries, 8 apart. The digits of a kept score
// select the bytes of its packed P, those of a dropped one replicate its sign: P is not negative. The top digit of a
// byte tells which it is.
template <typename Spec>
struct FusedDropout<Spec, true, true> {
  using Product = Products<Spec>;
  const FusedMemory<Spec>& shared;
  const RingPosition<Spec::kFirstStages>& at;
  const unsigned char* mine;
  uint32_t selectors[2][4];

  template <typename Coordinates>
  __device__ __forceinline__ FusedDropout(const TileDropout<Spec>&, const Coordinates&,
                                          const FusedMemory<Spec>& shared_, const RingPosition<Spec::kFirstStages>& at_,
                                          int consumer)
      : shared(shared_),
        at(at_),
        mine(shared.drawn(at.stage, consumer) + ptx::recompute(ptx::thread_index()) % 128 * 16) {}
  __device__ __forceinline__ void wait() const { ptx::mbarrier_wait(shared.drawn_full(at.stage), at.parity); }
  // Called before each use, so that no registers hold the selectors in between.
  __device__ __forceinline__ void fetch() {
#pragma unroll
    for (int half = 0; half < 2; ++half) ptx::ld_shared_128(selectors[half], mine + half * 2048);
  }
  __device__ __forceinline__ void drop_weights(uint32_t (&packed)[Product::kPacked]) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      packed[i] = ptx::permute_bytes(packed[i], packed[i], selectors[i / 8][i / 4 % 2 * 2 + i % 2] >> (i / 2 % 2 * 16));
    }
  }
  __device__ __forceinline__ void score_gradients(float (&gradients)[Product::kScores],
                                                  const float (&weights)[Product::kScores],
                                                  const float (&row_dot)[Product::kColumns]) const {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float dropped = weights[i] * -row_dot[i / 4 * 2 + i % 2];
      const uint32_t own = selectors[i / 16][i / 8 % 2 * 2 + i / 2 % 2];
      const bool is_kept = (own & 0x80u << (i / 4 % 2 * 16 + i % 2 * 8)) == 0;
      gradients[i] = is_kept ? ptx::fma_rn(weights[i], gradients[i], dropped) : dropped;
    }
    release(shared.drawn_empty(at.stage));
  }
};
// For a block that a consumer skips.
template <typename Spec>
__device__ __forceinline__ void skip_drawn(const FusedMemory<Spec>& shared,
                                           const RingPosition<Spec::kFirstStages>& at) {
  if constexpr (Spec::kNumDrawers > 0) {
    ptx::mbarrier_wait(shared.drawn_full(at.stage), at.parity);
    release(shared.drawn_empty(at.stage));
  }
}

// A warp that draws those words: lane 16 h + 4 m + t draws for four threads, lanes 8 m + t and 8 m + t + 4 of warps 2 h
// and 2 h + 1.
template <typename Spec>
struct FusedDrawer {
  HeadDropout of_head;
  uint32_t either;  // of HeadDropout::kept, as a register

  __device__ __forceinline__ explicit FusedDrawer(const BackwardParams& params)
      : of_head(dropout_of(params), 0, 0),
        either(ptx::recompute(dropout_of(params).threshold < 128 << 8 ? 0xFFFFFFFFu : 0u)) {}

  // Draws for 16 queries of a block; smem: the words for the 64 keys from first_key on.
  __device__ __forceinline__ void draw(unsigned char* smem, int sequence, int head, int first_key, int block,
                                       int queries) const {
    HeadDropout own = of_head;
    own.head = static_cast<uint32_t>(head);
    own.sequence = static_cast<uint32_t>(sequence);
    const int lane = ptx::lane_index();
    const uint32_t keys = first_key / 8 + lane / 4;
    const uint32_t rows = block * (Spec::kStreamRows / 2) + queries * 8 + lane % 4 * 2;
    const uint32_t point = own.draw(0, 0).point + rows * kRowStep + keys * kKeyStep;
    uint32_t kept[2][4];  // of queries 2 t and 2 t + 1
#pragma unroll
    for (int d = 0; d < 2; ++d) {
      const uint32_t addend = own.words_of(Draw{keys, rows + d, point + d * kRowStep}, kept[d]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t low = (kept[d][i] & 0x7F7F7F7F) + addend;
        kept[d][i] = (kept[d][i] & low) | ((kept[d][i] | low) & either);
      }
    }
    unsigned char* first =
        smem + queries / 2 * 2048 + queries % 2 * 8 + (lane / 16 * 64 + lane % 16 / 4 * 8 + lane % 4) * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t selectors[2];
#pragma unroll
      for (int key = 0; key < 2; ++key) {
        const uint32_t bytes = ptx::permute_bytes(kept[0][i], kept[1][i], key == 0 ? 0xD9C8 : 0xFBEA);
        selectors[key] = (bytes & 0x89898989) ^ 0xBB99BB99;
      }
      ptx::st_shared_64(first + (i / 2 * 32 + i % 2 * 4) * 16, selectors);
    }
  }
};

// The factor that dv is multiplied by when it is stored.
template <typename Spec>
__device__ __forceinline__ float value_scale(const BackwardParams& params) {
  if constexpr (Spec::kHasDropout) return dropout_of(params).scale;
  return 1.0f;
}

}  // namespace flashmoe::attention::backward::sm90
