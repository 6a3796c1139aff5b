// The consumers of the fused kernel at head dim 128: each computes dk and dv of 64 keys, and half of dQ's columns,
// because there are no registers for a dq warpgroup. Per block, with dK of the previous block in flight at the start,
// and dK of this block at the end:
//
//   issue S^T;  wait for that dK, release its Q and dO;  issue dP^T
//   wait for S^T;  P^T;  wait for dP^T;  dS^T;  store it to shared memory
//   issue dV += P^T dO;  wait for the other consumer's dS^T;  issue dQ's columns = dS K;  issue dK += dS^T Q
//   wait for dV and dQ;  pass dQ to the reducing warp
//
// dV is issued after dS^T: a warp that issues a product stalls until the tensor cores have begun it, which would delay
// dS^T, and the other consumer needs that.
//
// dQ uses the registers of dP^T. ptxas serialises the products
//   - if two loops meet with products in flight (C7512): so one loop handles blocks with and without a mask
//   - if an accumulator is read whose product was issued in the previous iteration, after a wait that leaves others in
//     flight (C7514): dK is the only one, and is not read
#pragma once

#include "attention/backward/sm90/fused_consumer.cuh"
#include "ptx/barrier.cuh"

namespace flashmoe::attention::backward::sm90 {

// In addition to the consumers' own named barriers (device/named_barriers.cuh).
enum class WideBarrier : int {
  kTileEnd =
      8,  // both consumers' 256 threads. Hazard: dK and dV overwrite K and V, which dQ's products of both still read
};

template <typename Spec, MaskKind kMask, typename Mask>
struct WideFusedConsumer : MaskGradient<Spec, Mask> {
  using Element = typename Spec::Element;
  using Product = Products<Spec>;
  using Tile = MaskTile<kMask>;
  static constexpr int kSums = 32;  // of 64 rows and 64 columns of dq, per thread

  const BackwardParams& params;
  const FusedMemory<Spec> shared;
  const int consumer;  // 0 or 1
  RingPosition<Spec::kFirstStages> at;
  RingPosition<Spec::kFirstStages> used;        // the oldest that has not been released: `at`, or one behind
  RingPosition<Spec::kQueryBuffers> published;  // of dS^T, and of the sums

  // Buffer and parity of the sums. With one buffer the parity flips with every block, as the stage does with two.
  __device__ __forceinline__ int sums_stage() const { return Spec::kSumBuffers == 1 ? 0 : published.stage; }
  __device__ __forceinline__ int sums_parity() const {
    return Spec::kSumBuffers == 1 ? published.stage : published.parity;
  }

  __device__ __forceinline__ WideFusedConsumer(const BackwardParams& params_, const FusedMemory<Spec>& shared_,
                                               int consumer_, const Mask& mask)
      : MaskGradient<Spec, Mask>(mask), params(params_), shared(shared_), consumer(consumer_) {}

  __device__ __forceinline__ void release_used() {
    this->wait_read();
    release(shared.first_empty(used.stage));
    used.advance();
  }
  __device__ __forceinline__ void wait_block() const { ptx::mbarrier_wait(shared.first_full(at.stage), at.parity); }

  // Writes dS^T of this consumer's keys, for both consumers. The products that read the buffer two blocks ago are done:
  // this consumer has waited for its own, and the other one for its own before it published dS^T of the previous block,
  // which this one has waited for.
  __device__ __forceinline__ void share_scores(const uint32_t (&packed)[Product::kPacked]) {
    const int lane = ptx::recompute(ptx::lane_index());  // no address lives through the loop
    const int row = ptx::warp_index() % 4 * 16 + lane % 16;
    unsigned char* row_smem = shared.scores(published.stage).smem + (consumer * 64 + row) * kSlabRowBytes;
#pragma unroll
    for (int step = 0; step < Spec::kStreamRows / 16; ++step) {
      const uint32_t words[4] = {packed[4 * step], packed[4 * step + 1], packed[4 * step + 2], packed[4 * step + 3]};
      ptx::stmatrix_x4(row_smem + ((step * 2 + lane / 16) ^ (row % 8)) * 16, words);
    }
    // Hazard: the products of dq read dS before it is written and visible to them.
    ptx::fence_proxy_async_shared();
    release(shared.scores_full(published.stage));
  }

  // Issues sums[64 x 64] = dS[64 x 128] K[128 x 64], for this consumer's columns; asynchronous.
  __device__ __forceinline__ void issue_sums(float (&sums)[kSums]) const {
    const MnMajorOperand scores = shared.score_operand(published.stage);
    const TileKeys<Spec> keys(shared.own_first(0).slab(consumer));
    issue_product<Element, 8>(sums, scores, keys);
  }

  // Passes this consumer's half of a partial to the reducing warp, in the order of FusedQueries::publish_sums.
  __device__ __forceinline__ void publish_sums(const float (&sums)[kSums], const BlockCoordinates& coordinates) {
    // Hazard: the previous sum's reduction still reads the buffer.
    ptx::mbarrier_wait(shared.sums_empty(sums_stage()), sums_parity() ^ 1);
    const int thread = ptx::recompute(ptx::thread_index()) % 128;
    unsigned char* mine = shared.query_sums(sums_stage()) + consumer * (Spec::kQueryBytes / 2) + thread * 16;
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) {
      const uint32_t words[4] = {ptx::float_bits(sums[4 * j]), ptx::float_bits(sums[4 * j + 1]),
                                 ptx::float_bits(sums[4 * j + 2]), ptx::float_bits(sums[4 * j + 3])};
      ptx::st_shared_128(mine + j * 2048, words);
    }
    // Hazard: TMA reads before all is written and visible to it.
    ptx::fence_proxy_async_shared();
    if (consumer == 0 && thread == 0) {
      const Tile tile = read_tile<Tile>(coordinates.tile_smem);
      note_partial(first_partial(params, tile, coordinates.head) + coordinates.block,
                   reduction_rank<Spec, kMask>(params, tile, coordinates.block));
    }
    pass();
  }
  __device__ __forceinline__ void note_partial(int partial, int rank) const {
    const uint32_t words[4] = {static_cast<uint32_t>(partial), static_cast<uint32_t>(rank), 0, 0};
    ptx::st_shared_128(shared.partial_record(sums_stage()), words);
  }
  __device__ __forceinline__ void pass() {
    release(shared.sums_full(sums_stage()));
    published.advance();
  }

  __device__ __forceinline__ void step(float (&dk)[Product::kOutputs], float (&dv)[Product::kOutputs],
                                       uint32_t (&p_packed)[Product::kPacked], uint32_t (&ds_packed)[Product::kPacked],
                                       const TileDropout<Spec>& tile_dropout, const BlockCoordinates& coordinates,
                                       int head, bool is_masked) {
    float scores[Product::kScores];
    float gradients[Product::kScores];  // dP^T, then dS^T
    float lse_log2[Product::kColumns];
    float row_dot[Product::kColumns];
    const BlockAlibi<Spec> alibi(params, coordinates);
    FusedDropout<Spec> dropout(tile_dropout, coordinates, shared, at, consumer);
    const BlockMask<Spec> mask(shared, at.stage, consumer);
    wait_block();
    load_columns<Spec>(lse_log2, shared.statistics(at.stage));
    issue_product<Element, Product::kSteps>(scores, shared.own_first(consumer).k_major(),
                                            shared.first(at.stage).k_major());
    ptx::wgmma_wait<1>();  // dK of the previous block
    ptx::wgmma_fence_operands(dk);
    if (used.stage != at.stage) release_used();
    issue_product<Element, Product::kSteps>(gradients, shared.own_second(consumer).k_major(),
                                            shared.second(at.stage).k_major());

    dropout.wait();
    ptx::wgmma_wait<1>();  // S^T
    ptx::wgmma_fence_operands(scores);
    if (is_masked) {
      fused_exponentials<Spec, kMask, true>(params, scores, lse_log2, alibi, mask, coordinates);
    } else {
      fused_exponentials<Spec, kMask, false>(params, scores, lse_log2, alibi, mask, coordinates);
    }
    load_columns<Spec>(row_dot, shared.statistics(at.stage) + Spec::kStreamRows * 4);
    dropout.fetch();
    pack_operand<Element>(p_packed, scores);
    dropout.drop_weights(p_packed);

    dropout.fetch();
    ptx::wgmma_wait<0>();  // dP^T
    ptx::wgmma_fence_operands(gradients);
    dropout.score_gradients(gradients, scores, row_dot);
    pack_operand<Element>(ds_packed, gradients);
    this->put_gradient(shared, at.stage, consumer, ds_packed);
    share_scores(ds_packed);
    issue_product<Element, true>(dv, p_packed, shared.second(at.stage).mn_major());
    // Hazard: the product reads the other consumer's dS before it is written.
    ptx::mbarrier_wait(shared.scores_full(published.stage), published.parity);
    float sums[kSums];
    issue_sums(sums);
    issue_product<Element, true>(dk, ds_packed, shared.first(at.stage).mn_major());
    // The wait above ensures that all warps of both consumers have written dS.
    this->store_gradient(shared, at.stage, consumer, head, coordinates.block);
    ptx::wgmma_wait<1>();  // dV and dQ
    ptx::wgmma_fence_operands(dv);
    ptx::wgmma_fence_operands(sums);
    publish_sums(sums, coordinates);
    at.advance();
  }

  __device__ __forceinline__ void finish_products(float (&dk)[Product::kOutputs], float (&dv)[Product::kOutputs]) {
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operands(dk);
    ptx::wgmma_fence_operands(dv);
    // Every dense tile has a block: the last query sees all keys.
    if (kMask != MaskKind::kRuntime || used.stage != at.stage) release_used();
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
      const BlockRange all =
          within_tile<Spec>(query_blocks<Spec, kMask>(params, tile, tile_key, tile_key + Spec::kOwnRows), tile);
      // All blocks before full_begin need a mask: if keys are missing, all blocks. Varlen: also those from all.full_end
      // on.
      const int full_begin = has_missing_keys(params, tile, first_key) ? all.end : all.full_begin;
      const int direction = is_descending<kMask>(tile) ? -1 : 1;
      float dk[Product::kOutputs];
      float dv[Product::kOutputs];
      uint32_t p_packed[Product::kPacked];
      uint32_t ds_packed[Product::kPacked];
      Product::clear(dk);
      Product::clear(dv);
      const TileDropout<Spec> dropout(params, tile);
      int block = is_descending<kMask>(tile) ? all.end - 1 : all.begin;
      for (int left = all.end - all.begin; left > 0; --left) {
        for (int head = 0; head < heads; ++head) {
          const BlockCoordinates coordinates{shared.tile(consumer), tile.head * heads + head, first_key, block};
          step(dk, dv, p_packed, ds_packed, dropout, coordinates, head,
               block < full_begin || (kMask == MaskKind::kRuntime && block >= all.full_end));
        }
        block += direction;
      }
      finish_products(dk, dv);
      ptx::named_barrier_sync(barrier_id(WideBarrier::kTileEnd), 256);
      Product::store_shared(shared.own_second(consumer), dv, value_scale<Spec>(params));
      Product::store_shared(shared.own_first(consumer), dk, params.scale * value_scale<Spec>(params));
      // Hazard: TMA reads before all 64 rows are written and visible to it.
      ptx::fence_proxy_async_shared();
      sync_consumer(consumer);
      if (ptx::thread_index() % 128 == 0) {
        const Tile done = read_tile<Tile>(shared.tile(consumer));  // read again: no register holds it through the loop
        const int row = done.index * Spec::kOwnRows + consumer * 64;
        Product::store_global(dv_map, shared.own_second(consumer), row, keys_stored(params.sequence_rows.dv, done));
        Product::store_global(dk_map, shared.own_first(consumer), row, keys_stored(params.sequence_rows.dk, done));
        ptx::tma_store_commit();
        // Hazard: the next tile's K and V overwrite the gradients while the store still reads them.
        ptx::tma_store_wait_read<0>();
        ptx::mbarrier_arrive(shared.own_empty(consumer));
      }
    }
#pragma unroll
    for (int i = 0; i < Spec::kSumBuffers; ++i) {
      ptx::mbarrier_wait(shared.sums_empty(sums_stage()), sums_parity() ^ 1);
      if (consumer == 0 && ptx::thread_index() % 128 == 0) note_partial(-1, 0);
      pass();
    }
  }
};

}  // namespace flashmoe::attention::backward::sm90
