// The fused kernel's (fused.cuh) consumers: each computes dk and dv of 64 keys, and passes dS^T on.
#pragma once

#include "attention/backward/sm90/dropout.cuh"
#include "attention/backward/sm90/fused_spec.cuh"
#include "attention/backward/sm90/streamed_mask.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"

namespace flashmoe::attention::backward::sm90 {

// A block's ALiBi, read before its scores. Empty without ALiBi.
template <typename Spec, bool kHasAlibi = Spec::kHasAlibi>
struct BlockAlibi {
  __device__ __forceinline__ BlockAlibi(const BackwardParams&, const BlockCoordinates&) {}
};
template <typename Spec>
struct BlockAlibi<Spec, true> : Alibi {
  __device__ __forceinline__ BlockAlibi(const BackwardParams& params, const BlockCoordinates& coordinates)
      : Alibi(mask_pointer<Spec>(params, coordinates)) {
    slope *= params.score_options.mask_factor / kLog2E;  // in units of the scores, which exponentials() scales
  }
};

// Turns scores (S^T) into P^T. Unlike in the dk, dv kernel, a key past the last must have P = 0, because its dS is a
// factor of dQ.
template <typename Spec, MaskKind kMask, bool kIsMasked>
__device__ __forceinline__ void fused_exponentials(const BackwardParams& params, float (&scores)[Spec::kStreamRows / 2],
                                                   const float (&lse_log2)[Spec::kStreamRows / 4],
                                                   const BlockAlibi<Spec>& alibi, const BlockMask<Spec>& mask,
                                                   const BlockCoordinates& coordinates) {
  if constexpr (Spec::kHasAlibi) {
#pragma unroll
    for (int i = 0; i < Spec::kStreamRows / 2; ++i) {
      scores[i] = alibi.add(scores[i], i / 2 % 2, 8 * (i / 4) + i % 2);
    }
  }
  if constexpr (Spec::kMaskBytes > 0) {
    mask.apply_softmax(params, scores, lse_log2);
    if constexpr (kIsMasked) {
      KeyRange visible[2] = {{0, 0}, {0, 0}};
      visible_columns<Spec, kMask>(visible, params, coordinates);
#pragma unroll
      for (int i = 0; i < Spec::kStreamRows / 2; ++i) {
        const int column = 8 * (i / 4) + i % 2;
        if (column < visible[i / 2 % 2].begin || column >= visible[i / 2 % 2].end) scores[i] = 0.0f;
      }
    }
    return;
  }
  if constexpr (kMask == MaskKind::kRuntime)
    return exponentials<Spec, kMask, kIsMasked>(params, scores, lse_log2, coordinates);
  constexpr int kNever = 1 << 30;
  int begin[2] = {0, 0};
  if constexpr (kIsMasked) {
    const int lane = ptx::lane_index();
    const int key = coordinates.first_key + ptx::warp_index() % 4 * 16 + lane / 4;
    const int column = coordinates.block * Spec::kStreamRows + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int first = kMask == MaskKind::kCausal ? diagonal_row(Lengths{params}, key + 8 * r) - column : 0;
      begin[r] = key + 8 * r < params.seq_k ? first : kNever;
    }
  }
#pragma unroll
  for (int i = 0; i < Spec::kStreamRows / 2; ++i) {
    scores[i] = ptx::exp2_approx(ptx::fma_rn(scores[i], params.scale_log2, -lse_log2[i / 4 * 2 + i % 2]));
    if constexpr (kIsMasked) {
      if (8 * (i / 4) + i % 2 < begin[i / 2 % 2]) scores[i] = 0.0f;
    }
  }
}

template <typename Spec, MaskKind kMask, typename Mask>
struct FusedConsumer : MaskGradient<Spec, Mask> {
  using Product = Products<Spec>;
  using Element = typename Spec::Element;
  using Tile = MaskTile<kMask>;
  static constexpr bool kIsVarlen = kMask == MaskKind::kRuntime;
  static constexpr int kOwn = Spec::kHeadDim / 4;  // registers per thread for 64 rows of K, or V

  const BackwardParams& params;
  const FusedMemory<Spec> shared;
  const int consumer;  // 0 or 1
  RingPosition<Spec::kFirstStages> at;
  RingPosition<Spec::kFirstStages> used;  // the oldest that has not been released: `at`, or one behind
  RingPosition<Spec::kQueryBuffers> published;

  __device__ __forceinline__ FusedConsumer(const BackwardParams& params_, const FusedMemory<Spec>& shared_,
                                           int consumer_, const Mask& mask)
      : MaskGradient<Spec, Mask>(mask), params(params_), shared(shared_), consumer(consumer_) {}

  __device__ __forceinline__ void release_used() {
    this->wait_read();
    release(shared.first_empty(used.stage));
    used.advance();
  }
  __device__ __forceinline__ void wait_block() const { ptx::mbarrier_wait(shared.first_full(at.stage), at.parity); }

  // The current block of Q, or of dO, as a right operand. Varlen: its descriptor is computed in the constructor; dense:
  // at each use.
  template <bool kIsSecond>
  struct StreamBlock {
    const FusedConsumer& owner;
    uint64_t descriptor = 0;

    __device__ __forceinline__ explicit StreamBlock(const FusedConsumer& owner_) : owner(owner_) {
      if constexpr (kIsVarlen) {
        descriptor = static_cast<uint64_t>(ptx::recompute(static_cast<int64_t>(tile().k_major().descriptor)));
      }
    }
    __device__ __forceinline__ typename Spec::StreamTile tile() const {
      return kIsSecond ? owner.shared.second(owner.at.stage) : owner.shared.first(owner.at.stage);
    }
    __device__ __forceinline__ KMajorOperand<Spec::kStreamRows> k_major() const {
      if constexpr (kIsVarlen) return {descriptor};
      return tile().k_major();
    }
    __device__ __forceinline__ MnMajorOperand mn_major() const {
      if constexpr (kIsVarlen) return {descriptor | static_cast<uint64_t>(Spec::StreamTile::kSlabBytes >> 4) << 16};
      return tile().mn_major();
    }
  };

  // The own rows in registers, as the left operand of S^T and dP^T: the products' shared-memory reads limit this
  // kernel.
  static __device__ __forceinline__ void load_own(uint32_t (&own)[kOwn], const typename Spec::OwnTile& tile) {
    const int lane = ptx::lane_index();
    const int row = ptx::warp_index() % 4 * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < Product::kSteps; ++step) {
      uint32_t words[4];
      ptx::ldmatrix_x4(words, tile.smem + row * kSlabRowBytes + ((step * 2 + lane / 16) ^ (row % 8)) * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) own[4 * step + i] = words[i];
    }
  }

  // Passes dS^T to the dq warpgroup, once that has finished with the buffer's previous content.
  __device__ __forceinline__ void publish_scores(const uint32_t (&packed)[Product::kPacked]) {
    ptx::mbarrier_wait(shared.scores_empty(published.stage), published.parity ^ 1);
    const int lane = ptx::lane_index();
    const int row = ptx::warp_index() % 4 * 16 + lane % 16;
    unsigned char* row_smem = shared.scores(published.stage).smem + (consumer * 64 + row) * kSlabRowBytes;
#pragma unroll
    for (int step = 0; step < Spec::kStreamRows / 16; ++step) {
      const uint32_t words[4] = {packed[4 * step], packed[4 * step + 1], packed[4 * step + 2], packed[4 * step + 3]};
      ptx::stmatrix_x4(row_smem + ((step * 2 + lane / 16) ^ (row % 8)) * 16, words);
    }
    // Hazard: the product of dq reads dS before it is written and visible to it.
    ptx::fence_proxy_async_shared();
    pass_scores();
  }
  __device__ __forceinline__ void pass_scores() {
    release(shared.scores_full(published.stage));
    published.advance();
  }

  __device__ __forceinline__ void step(float (&dk)[Product::kOutputs], float (&dv)[Product::kOutputs],
                                       uint32_t (&p_packed)[Product::kPacked], uint32_t (&ds_packed)[Product::kPacked],
                                       uint32_t (&own_k)[kOwn], uint32_t (&own_v)[kOwn],
                                       const TileDropout<Spec>& tile_dropout, const BlockCoordinates& coordinates,
                                       bool is_masked) {
    float scores[Product::kScores];
    float gradients[Product::kScores];  // dP^T, then dS^T
    float lse_log2[Product::kColumns];
    float row_dot[Product::kColumns];
    // Varlen: computed before the wait, across which ptxas moves nothing: otherwise the first product would be issued
    // later.
    const StreamBlock<false> q(*this);
    const StreamBlock<true> dout(*this);
    const int statistics =
        kIsVarlen ? ptx::recompute(at.stage * Spec::kStatisticsBytes) : at.stage * Spec::kStatisticsBytes;
    const BlockAlibi<Spec> alibi(params, coordinates);
    FusedDropout<Spec> dropout(tile_dropout, coordinates, shared, at, consumer);
    const BlockMask<Spec> mask(shared, at.stage, consumer);
    wait_block();
    load_columns<Spec>(lse_log2, shared.statistics(0) + statistics);
    issue_product<Element>(scores, own_k, q.k_major());
    // dV and dK of the previous block, before S^T: dP^T can then use the registers of their P^T and dS^T.
    ptx::wgmma_wait<1>();
    ptx::wgmma_fence_operands(dv);
    ptx::wgmma_fence_operands(dk);
    if (used.stage != at.stage) release_used();
    issue_product<Element>(gradients, own_v, dout.k_major());

    dropout.wait();
    ptx::wgmma_wait<1>();  // S^T
    ptx::wgmma_fence_operands(scores);
    if (is_masked) {
      // Varlen: values that depend on the block are computed here, not before the branch for every block.
      const int block = kIsVarlen ? ptx::recompute(coordinates.block) : coordinates.block;
      fused_exponentials<Spec, kMask, true>(
          params, scores, lse_log2, alibi, mask,
          BlockCoordinates{coordinates.tile_smem, coordinates.head, coordinates.first_key, block});
    } else {
      fused_exponentials<Spec, kMask, false>(params, scores, lse_log2, alibi, mask, coordinates);
    }
    load_columns<Spec>(row_dot, shared.statistics(at.stage) + Spec::kStreamRows * 4);
    dropout.fetch();
    pack_operand<Element>(p_packed, scores);
    dropout.drop_weights(p_packed);
    issue_product<Element, true>(dv, p_packed, dout.mn_major());

    dropout.fetch();
    ptx::wgmma_wait<1>();  // dP^T
    ptx::wgmma_fence_operands(gradients);
    dropout.score_gradients(gradients, scores, row_dot);
    pack_operand<Element>(ds_packed, gradients);
    this->put_gradient(shared, at.stage, consumer, ds_packed);
    publish_scores(ds_packed);
    issue_product<Element, true>(dk, ds_packed, q.mn_major());
    this->sync_gradient(consumer);
    this->store_gradient(shared, at.stage, consumer, coordinates.head, coordinates.block);
    at.advance();
  }

  // Skips a block that sees only keys of the other warpgroup. It passes on nothing, but advances the ring.
  __device__ __forceinline__ void skip_block() {
    wait_block();
    skip_drawn<Spec>(shared, at);
    at.advance();
    release_used();
    ptx::mbarrier_wait(shared.scores_empty(published.stage), published.parity ^ 1);
    pass_scores();
  }

  __device__ __forceinline__ void finish_products(float (&dk)[Product::kOutputs], float (&dv)[Product::kOutputs]) {
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operands(dk);
    ptx::wgmma_fence_operands(dv);
    if (used.stage != at.stage) release_used();
  }

  // Hazard: dK overwrites K while the dq warpgroup still multiplies with it.
  __device__ __forceinline__ void wait_for_query_products() const {
    RingPosition<Spec::kQueryBuffers> buffer = published;  // the oldest of all of them
#pragma unroll
    for (int i = 0; i < Spec::kQueryBuffers; ++i) {
      ptx::mbarrier_wait(shared.scores_empty(buffer.stage), buffer.parity ^ 1);
      buffer.advance();
    }
  }

  __device__ __forceinline__ void run(const ptx::TensorMap& dk_map, const ptx::TensorMap& dv_map) {
    const int heads = params.heads_q / params.heads_kv;
    for (int parity = 0;; parity ^= 1) {
      ptx::mbarrier_wait(shared.tile_full(consumer), parity);
      const Tile tile = read_tile<Tile>(shared.tile(consumer));
      if (tile.index < 0) break;
      ptx::mbarrier_wait(shared.own_full(consumer), parity);
      const int tile_key = tile.index * Spec::kOwnRows;
      const int first_key = tile_key + consumer * 64;
      const BlockRange range =
          within_tile<Spec>(query_blocks<Spec, kMask>(params, tile, first_key, first_key + 64), tile);
      const BlockRange all = tile_blocks(
          tile, [&] { return query_blocks<Spec, kMask>(params, tile, tile_key, tile_key + Spec::kOwnRows); });
      if (first_key < key_room(params, tile)) {
        const bool is_masked = has_missing_keys(params, tile, first_key);
        float dk[Product::kOutputs];
        float dv[Product::kOutputs];
        uint32_t p_packed[Product::kPacked];
        uint32_t ds_packed[Product::kPacked];
        uint32_t own_k[kOwn], own_v[kOwn];
        load_own(own_k, shared.own_first(consumer));
        load_own(own_v, shared.own_second(consumer));
        Product::clear(dk);
        Product::clear(dv);
        const TileDropout<Spec> dropout(params, tile);
        const SkippedBlocks skipped = skipped_blocks(tile, range, all, heads);
        for (int left = is_descending<kMask>(tile) ? skipped.behind : skipped.before; left > 0; --left) skip_block();
        if constexpr (kMask == MaskKind::kRuntime) {
          // Keep as little code between two blocks as in the dense kernel: nothing overlaps it.
          const int onwards = is_descending<kMask>(tile) ? -1 : 1;
          const int num_full = is_masked ? 0 : maximum(0, range.full_end - range.full_begin);
          int block = is_descending<kMask>(tile) ? range.end - 1 : range.begin;
          for (int left = range.end - range.begin; left > 0; --left, block += onwards) {
            const BlockCoordinates coordinates{shared.tile(consumer), 0, first_key, block};
            const bool is_full = static_cast<uint32_t>(block - range.full_begin) < static_cast<uint32_t>(num_full);
            const int needs_mask = ptx::recompute(is_full ? 0 : 1);
            int head = heads;
            do {
              if constexpr (Spec::kStoresGradient) {
                step(dk, dv, p_packed, ds_packed, own_k, own_v, dropout,
                     BlockCoordinates{shared.tile(consumer), heads - head, first_key, block}, needs_mask != 0);
              } else if constexpr (Spec::kHasAlibi) {  // the others do not use the head
                const int query_head = (tile.head + 1) * heads - head;
                step(dk, dv, p_packed, ds_packed, own_k, own_v, dropout,
                     BlockCoordinates{shared.tile(consumer), query_head, first_key, block}, needs_mask != 0);
              } else {
                step(dk, dv, p_packed, ds_packed, own_k, own_v, dropout, coordinates, needs_mask != 0);
              }
            } while (--head > 0);
          }
        } else {
          for (int i = range.begin; i < range.end; ++i) {
            const int block = is_descending<kMask>(tile) ? range.begin + range.end - 1 - i : i;
            const BlockCoordinates coordinates{shared.tile(consumer), 0, first_key, block};
            for (int head = 0; head < heads; ++head) {
              step(dk, dv, p_packed, ds_packed, own_k, own_v, dropout, coordinates,
                   is_masked || block < range.full_begin);
            }
          }
        }
        finish_products(dk, dv);
        for (int left = is_descending<kMask>(tile) ? skipped.before : skipped.behind; left > 0; --left) skip_block();
        wait_for_query_products();
        // Hazard: dK and dV overwrite K and V while another warp of the warpgroup still multiplies with them.
        sync_consumer(consumer);
        Product::store_shared(shared.own_second(consumer), dv, value_scale<Spec>(params));
        Product::store_shared(shared.own_first(consumer), dk, params.scale * value_scale<Spec>(params));
        // Hazard: TMA reads before all 64 rows are written and visible to it.
        ptx::fence_proxy_async_shared();
        sync_consumer(consumer);
        if (ptx::thread_index() % 128 == 0) {
          const Tile done =
              read_tile<Tile>(shared.tile(consumer));  // read again: no register holds it through the loop
          const int row = done.index * Spec::kOwnRows + consumer * 64;
          Product::store_global(dv_map, shared.own_second(consumer), row, keys_stored(params.sequence_rows.dv, done));
          Product::store_global(dk_map, shared.own_first(consumer), row, keys_stored(params.sequence_rows.dk, done));
          ptx::tma_store_commit();
          // Hazard: the next tile's K and V overwrite the gradients while the store still reads them.
          ptx::tma_store_wait_read<0>();
        }
      } else {
        // Keys past the end: nothing to compute or to store.
        for (int left = heads * (all.end - all.begin); left > 0; --left) skip_block();
        sync_consumer(consumer);  // every warp has read the tile's record
      }
      if (ptx::thread_index() % 128 == 0) ptx::mbarrier_arrive(shared.own_empty(consumer));
    }
  }
};

}  // namespace flashmoe::attention::backward::sm90
