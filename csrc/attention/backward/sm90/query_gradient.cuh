// The kernel of dq and row_dot. A tile is kBlockM rows of Q and dO; K and V stream past it, from the last block that a
// row sees to the first (masked blocks come first, so that the loop over full blocks ends the tile).
//   grid     min(tiles, multiprocessors) blocks; tiles = ceil(seq_q / kBlockM) * heads_q * batch
//   maps     built by the host with tensor_map.h
//   counter  params.tile_counter is 0 at launch, and 0 again at the end
//
// Per block a warpgroup issues S = Q K^T and dP = dO V^T; computes P while dP runs; computes dS; issues dQ += dS K,
// which the next block's S and dP follow without a wait. With lookahead, S of the next block is issued before dS, so
// that the tensor cores always have work from this warpgroup. dS is never stored: the accumulator layout is the operand
// layout.
#pragma once

#include "attention/backward/score_mod.cuh"
#include "attention/backward/sm90/dropout.cuh"
#include "attention/backward/sm90/varlen_producer.cuh"
#include "attention/backward/sm90/producer.cuh"
#include "attention/backward/sm90/products.cuh"
#include "ptx/register_control.cuh"

namespace flashmoe::attention::backward::sm90 {

// A thread's loads for its two rows, issued before the first product.
template <typename Spec>
struct RowLoads {
  static constexpr int kChunks = Spec::kValueDim / 32;  // of 16 bytes, per lane and row
  float lse[2];
  float dlse[2];
  uint32_t out[2][kChunks][4];
  uint32_t dout[2][kChunks][4];
};

template <typename Spec, MaskKind kMask>
struct QueryGradientConsumer {
  using Product = Products<Spec>;
  using Element = typename Spec::Element;
  using RowLoads = sm90::RowLoads<Spec>;
  using Tile = MaskTile<kMask>;
  using OfTile = RowDropout<Spec>;
  static constexpr bool kIsVarlen = kMask == MaskKind::kRuntime;

  const BackwardParams& params;
  const SharedMemory<Spec> shared;
  const int consumer;  // 0 to kNumConsumers - 1
  RingPosition<Spec::kFirstStages> key;
  RingPosition<Spec::kFirstStages> used_key;  // the oldest that has not been released
  RingPosition<Spec::kSecondStages> value;
  float lse_log2[2];  // of this thread's rows; +inf if P is to be zero
  float row_dot[2];

  __device__ __forceinline__ QueryGradientConsumer(const BackwardParams& params_, const SharedMemory<Spec>& shared_,
                                                   int consumer_)
      : params(params_), shared(shared_), consumer(consumer_) {}

  __device__ __forceinline__ void release_key() {
    release(shared.first_empty(used_key.stage));
    used_key.advance();
  }
  __device__ __forceinline__ void wait_value() const {
    if constexpr (!Spec::kIsPaired) ptx::mbarrier_wait(shared.second_full(value.stage), value.parity);
  }
  __device__ __forceinline__ void release_value() {
    if constexpr (!Spec::kIsPaired) release(shared.second_empty(value.stage));
    value.advance();
  }

  __device__ __forceinline__ int first_row(const Tile& tile) const {
    return tile.index * Spec::kOwnRows + consumer * 64;
  }

  // Starts the loads of this thread's two rows: the log-sum-exp, and 16-byte chunks of dO and O; a quad holds the
  // chunks of one row. Rows past the end read nothing.
  __device__ __forceinline__ void fetch_rows(RowLoads& loads, const Tile& tile) const {
    const int lane = ptx::lane_index();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row(tile) + ptx::warp_index() % 4 * 16 + lane / 4 + 8 * r;
      const bool is_inside = row < lengths_of(params, tile).rows();
      const char* out_gmem = static_cast<const char*>(params.out) +
                             2 * (row_offset(params.out_stride, tile, tile.head) + row * params.out_stride.row);
      const char* dout_gmem = static_cast<const char*>(params.dout) +
                              2 * (row_offset(params.dout_stride, tile, tile.head) + row * params.dout_stride.row);
      const int64_t at = row_of_statistics(tile, row);
      loads.lse[r] = ptx::negative_infinity();
      loads.dlse[r] = 0.0f;
      if (is_inside) loads.lse[r] = ptx::ld_global_float(params.lse + at);
      if (is_inside && params.dlse != nullptr) loads.dlse[r] = ptx::ld_global_float(params.dlse + at);
#pragma unroll
      for (int i = 0; i < RowLoads::kChunks; ++i) {
        const int column = 32 * i + lane % 4 * 8;
#pragma unroll
        for (int w = 0; w < 4; ++w) loads.out[r][i][w] = loads.dout[r][i][w] = 0;
        if (is_inside && column < (kIsVarlen ? params.head_dim_v : params.head_dim)) {
          ptx::ld_global_128(loads.out[r][i], out_gmem + 2 * column);
          ptx::ld_global_128(loads.dout[r][i], dout_gmem + 2 * column);
        }
      }
    }
  }

  __device__ __forceinline__ int64_t row_of_statistics(const Tile& tile, int row) const {
    return first_statistic(params, tile, tile.head) + row;
  }

  __device__ __forceinline__ void finish_rows(const RowLoads& loads, const Tile& tile) {
    const int lane = ptx::lane_index();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < RowLoads::kChunks; ++i) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float2 a = unpack<Element>(loads.out[r][i][w]);
          const float2 b = unpack<Element>(loads.dout[r][i][w]);
          sum = ptx::fma_rn(a.x, b.x, sum);
          sum = ptx::fma_rn(a.y, b.y, sum);
        }
      }
      const bool is_visible = loads.lse[r] != ptx::negative_infinity();
      sum = quad_sum(sum);
      row_dot[r] = is_visible ? sum - loads.dlse[r] : 0.0f;
      lse_log2[r] = is_visible ? loads.lse[r] * kLog2E : -ptx::negative_infinity();
      const int row = first_row(tile) + ptx::warp_index() % 4 * 16 + lane / 4 + 8 * r;
      if (lane % 4 == 0 && row < row_room(params, tile)) {
        ptx::st_global_float(params.row_dot + row_of_statistics(tile, row), row_dot[r]);
      }
    }
  }

  // The keys that this thread's two rows see, as columns counted from its first column in the block.
  __device__ __forceinline__ void visible_columns(KeyRange (&visible)[2], const Tile& tile, int block) const {
    const int row = first_row(tile) + ptx::warp_index() % 4 * 16 + ptx::lane_index() / 4;
    const int first_key = block * Spec::kStreamRows + ptx::lane_index() % 4 * 2;
    const auto lengths = lengths_in<kMask>(params, shared.tile(consumer));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      visible[r] = visible_keys<kMask>(params, lengths, row + 8 * r);
      visible[r] = KeyRange{visible[r].begin - first_key, visible[r].end - first_key};
    }
  }

  // Turns scores into P. Masked ones are set to zero after the exponential: a key past the end scores 0, and
  // exp2(0 - lse) may be anything up to inf.
  template <Scores kScores>
  __device__ __forceinline__ void exponentials(float (&scores)[Product::kScores], const Tile& tile, int block) const {
    KeyRange visible[2] = {{0, 0}, {0, 0}};
    if constexpr (kScores == Scores::kMasked) visible_columns(visible, tile, block);
#pragma unroll
    for (int i = 0; i < Product::kScores; ++i) {
      const int r = (i / 2) % 2;
      const int column = 8 * (i / 4) + i % 2;
      scores[i] = ptx::exp2_approx(ptx::fma_rn(scores[i], params.scale_log2, -lse_log2[r]));
      if constexpr (kScores == Scores::kMasked) {
        const bool is_visible = column < visible[r].end && (!kIsVarlen || column >= visible[r].begin);
        if (!is_visible) scores[i] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ MaskSource<Spec> mask_pointer(const Tile& tile, int block) const {
    const ScoreOptions& options = params.score_options;
    return MaskSource<Spec>(options, tile.batch, tile.head, options.mask_stride_row, options.mask_stride_key,
                            first_row(tile) + ptx::warp_index() % 4 * 16 + ptx::lane_index() / 4, tile.extents.rows(),
                            block * Spec::kStreamRows + ptx::lane_index() % 4 * 2, tile.extents.keys());
  }

  __device__ __forceinline__ void begin_scores(float (&scores)[Product::kScores]) {
    ptx::mbarrier_wait(shared.first_full(key.stage), key.parity);
    issue_product<Element, Product::kSteps>(scores, shared.own_first(consumer).k_major(),
                                            shared.first(key.stage).k_major());
  }
  __device__ __forceinline__ void begin_gradients(float (&gradients)[Product::kScores]) {
    wait_value();
    issue_product<Element, Product::kValueSteps>(gradients, shared.own_second(consumer).k_major(),
                                                 shared.second(value.stage).k_major());
  }

  // Turns gradients from dP into dS.
  template <typename Dropped = RowDropout<Spec, false>>
  __device__ __forceinline__ void multiply(float (&gradients)[Product::kScores],
                                           const float (&probabilities)[Product::kScores], const Dropped& dropout = {},
                                           const typename Dropped::Block& drawn = {}) const {
#pragma unroll
    for (int i = 0; i < Product::kScores; ++i) {
      gradients[i] = probabilities[i] * dropout.gradient(gradients[i], row_dot[(i / 2) % 2], drawn, i);
    }
  }

  // A block without lookahead. In flight at the start: dQ of the previous block, if there is one; at the end: dQ.
  template <Scores kScores, bool kIsFirst>
  __device__ __forceinline__ void step(float (&dq)[Product::kOutputs], uint32_t (&packed)[Product::kPacked],
                                       const RowLoads& loads, const OfTile& dropout, const Tile& tile, int block) {
    float scores[Product::kScores];
    float gradients[Product::kScores];  // dP, then dS
    begin_scores(scores);
    begin_gradients(gradients);
    if constexpr (kIsFirst) finish_rows(loads, tile);

    const typename OfTile::Block drawn = dropout.draw(block);
    ptx::wgmma_wait<1>();  // S; and dQ of the previous block
    ptx::wgmma_fence_operands(scores);
    if constexpr (!kIsFirst) release_key();
    exponentials<kScores>(scores, tile, block);
    // This phase has already completed, but ptxas does not move exponentials across the branch. Without it ptxas moves
    // them all after the wait for dP, with which they should overlap.
    ptx::mbarrier_wait(shared.first_full(key.stage), key.parity);

    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operands(gradients);
    release_value();
    multiply(gradients, scores, dropout, drawn);
    pack_operand<Element>(packed, gradients);
    if constexpr (kIsFirst) Product::clear(dq);
    issue_product<Element, true>(dq, packed, shared.first(key.stage).mn_major());
    key.advance();
  }

  // A block with lookahead. In flight at the start, in this order: S of this block, dQ of the previous block
  // (if there is one), dP of this block; at the end: S of the next block, dQ, dP of the next block.
  template <bool kIsMasked, bool kIsFirst, bool kIsLast>
  __device__ __forceinline__ void step_ahead(float (&dq)[Product::kOutputs], float (&scores)[Product::kScores],
                                             float (&next_scores)[Product::kScores],
                                             float (&gradients)[Product::kScores], uint32_t (&packed)[Product::kPacked],
                                             const Tile& tile, int block) {
    ptx::wgmma_wait<kIsFirst ? 1 : 2>();
    ptx::wgmma_fence_operands(scores);
    exponentials<kIsMasked ? Scores::kMasked : Scores::kPlain>(scores, tile, block);
    const typename Spec::StreamTile key_block = shared.first(key.stage);
    key.advance();
    if constexpr (!kIsLast) begin_scores(next_scores);
    ptx::wgmma_wait<kIsLast ? 0 : 1>();
    ptx::wgmma_fence_operands(gradients);
    if constexpr (!kIsFirst) release_key();
    release_value();
    multiply(gradients, scores);
    pack_operand<Element>(packed, gradients);
    if constexpr (kIsFirst && !kIsVarlen) Product::clear(dq);
    issue_product<Element, true>(dq, packed, key_block.mn_major());
    if constexpr (kIsLast) {
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operands(dq);
    } else {
      begin_gradients(gradients);
    }
  }

  // Skips a key block that only rows of other warpgroups see.
  __device__ __forceinline__ void skip_block() {
    ptx::mbarrier_wait(shared.first_full(key.stage), key.parity);
    key.advance();
    wait_value();
    release_key();
    release_value();
  }

  // The blocks own_end - 1 down to 0 with lookahead; the compiler knows which of two register sets holds the scores.
  __device__ __forceinline__ void compute_ahead(const Tile& tile, int own_end, const RowLoads& loads,
                                                float (&dq)[Product::kOutputs], uint32_t (&packed)[Product::kPacked]) {
    float even[Product::kScores];
    float odd[Product::kScores];
    float gradients[Product::kScores];
    int block = own_end - 1;
    begin_scores(even);
    begin_gradients(gradients);
    finish_rows(loads, tile);
    if (block == 0) return step_ahead<true, true, true>(dq, even, odd, gradients, packed, tile, block);
    step_ahead<true, true, false>(dq, even, odd, gradients, packed, tile, block--);
    if (block == 0) return step_ahead<true, false, true>(dq, odd, even, gradients, packed, tile, block);
    step_ahead<true, false, false>(dq, odd, even, gradients, packed, tile, block--);
    for (; block >= 2; block -= 2) {
      step_ahead<false, false, false>(dq, even, odd, gradients, packed, tile, block);
      step_ahead<false, false, false>(dq, odd, even, gradients, packed, tile, block - 1);
    }
    if (block == 0) return step_ahead<false, false, true>(dq, even, odd, gradients, packed, tile, block);
    step_ahead<false, false, false>(dq, even, odd, gradients, packed, tile, block--);
    step_ahead<false, false, true>(dq, odd, even, gradients, packed, tile, block);
  }

  // Varlen: the blocks from `block` down to `begin`, none of which needs a mask, with lookahead: two or more, and not
  // the tile's first. Nothing is in flight at either end; the last key block is not released.
  __device__ __forceinline__ void compute_varlen_ahead(const Tile& tile, int& block, int begin,
                                                       float (&dq)[Product::kOutputs],
                                                       uint32_t (&packed)[Product::kPacked]) {
    float even[Product::kScores];
    float odd[Product::kScores];
    float gradients[Product::kScores];
    const auto step = [&](auto first, auto last, float (&scores)[Product::kScores],
                          float (&next_scores)[Product::kScores]) {
      step_ahead<false, decltype(first)::value, decltype(last)::value>(dq, scores, next_scores, gradients, packed, tile,
                                                                       block--);
    };
    release_key();
    begin_scores(even);
    begin_gradients(gradients);
    step(Yes{}, No{}, even, odd);
    while (block >= begin + 2) {
      step(No{}, No{}, odd, even);
      step(No{}, No{}, even, odd);
    }
    if (block == begin) return step(No{}, Yes{}, odd, even);
    step(No{}, No{}, odd, even);
    step(No{}, Yes{}, even, odd);
  }

  // Varlen, with lookahead for blocks that need no mask. A masked block ends with a wait: with its product in flight
  // where loops meet, ptxas runs out of registers.
  __device__ __forceinline__ void compute_varlen_blocks(const Tile& tile, const BlockRange& range,
                                                        const RowLoads& loads, float (&dq)[Product::kOutputs],
                                                        uint32_t (&packed)[Product::kPacked]) {
    const auto finish = [&dq] {
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operands(dq);
    };
    int block = range.end - 1;
    step<Scores::kMasked, true>(dq, packed, loads, {}, tile, block);
    for (;;) {
      finish();
      --block;
      if (block < range.full_end && block > range.full_begin) {
        compute_varlen_ahead(tile, block, range.full_begin, dq, packed);
      }
      if (block < range.begin) return;
      step<Scores::kMasked, false>(dq, packed, loads, {}, tile, block);
    }
  }

  // Varlen, block by block. Blocks without a mask have a separate loop: in a common loop the compiler merges the ends
  // of both, and moves exponentials after the wait for dP.
  __device__ __forceinline__ void compute_varlen(const Tile& tile, const BlockRange& range, const RowLoads& loads,
                                                 const OfTile& dropout, float (&dq)[Product::kOutputs],
                                                 uint32_t (&packed)[Product::kPacked]) {
    int block = range.end - 1;
    step<Scores::kMasked, true>(dq, packed, loads, dropout, tile, block--);
    while (block >= range.begin) {
      for (; block < range.full_end && block >= range.full_begin; --block) {
        step<Scores::kPlain, false>(dq, packed, loads, dropout, tile, block);
      }
      if (block >= range.begin) step<Scores::kMasked, false>(dq, packed, loads, dropout, tile, block--);
    }
  }

  // With score modification.
  __device__ __forceinline__ void compute_with_score_mod(const Tile& tile, const BlockRange& range,
                                                         const RowLoads& loads, float (&dq)[Product::kOutputs],
                                                         uint32_t (&packed)[Product::kPacked]) {
    finish_rows(loads, tile);
    Product::clear(dq);
    for (int block = range.end - 1; block >= range.begin; --block) {
      float scores[Product::kScores];
      float gradients[Product::kScores];  // dP, then dS
      MaskValues<Spec> values;
      load_mask<Spec>(values, params.score_options, [&] { return mask_pointer(tile, block); });
      begin_scores(scores);
      begin_gradients(gradients);
      ptx::wgmma_wait<1>();  // S; and dQ of the previous block
      ptx::wgmma_fence_operands(scores);
      if (block != range.end - 1) release_key();
      const bool is_plain =
          block < range.full_end && block >= range.full_begin && has_plain_blocks<Spec>(params.score_options);
      weigh_with_score_mod<Spec, false>(
          params, scores, packed, values, is_plain, [this](int i) { return lse_log2[i / 2 % 2]; },
          [&](KeyRange(&visible)[2]) { visible_columns(visible, tile, block); });
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operands(gradients);
      release_value();
      multiply(gradients, scores);
      pack_operand<Element>(packed, gradients);
      issue_product<Element, true>(dq, packed, shared.first(key.stage).mn_major());
      key.advance();
    }
  }

  __device__ __forceinline__ void compute_blocks(const Tile& tile, const BlockRange& range, const RowLoads& loads,
                                                 float (&dq)[Product::kOutputs], uint32_t (&packed)[Product::kPacked]) {
    int block = range.end - 1;
    step<Scores::kMasked, true>(dq, packed, loads, {}, tile, block);
    for (--block; block >= range.full_end; --block) step<Scores::kMasked, false>(dq, packed, loads, {}, tile, block);
    for (; block >= 0; --block) step<Scores::kPlain, false>(dq, packed, loads, {}, tile, block);
  }

  __device__ __forceinline__ void compute(const Tile& tile, const BlockRange& range, const RowLoads& loads,
                                          float (&dq)[Product::kOutputs]) {
    uint32_t packed[Product::kPacked];
    const OfTile dropout(params, tile, first_row(tile));
    if constexpr (kIsVarlen) {
      if constexpr (Spec::kHasScoreMod) {
        compute_with_score_mod(tile, range, loads, dq, packed);
      } else if constexpr (Spec::kLookahead) {
        compute_varlen_blocks(tile, range, loads, dq, packed);
      } else {
        compute_varlen(tile, range, loads, dropout, dq, packed);
      }
    } else if constexpr (Spec::kLookahead) {
      compute_ahead(tile, range.end, loads, dq, packed);
    } else {
      compute_blocks(tile, range, loads, dq, packed);
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operands(dq);
    release_key();
  }

  __device__ __forceinline__ void run(const ptx::TensorMap& dq_map) {
    const bool is_storing_thread = ptx::thread_index() % 128 == 0;
    for (int parity = 0;; parity ^= 1) {
      ptx::mbarrier_wait(shared.tile_full(consumer), parity);
      const Tile tile = read_tile<Tile>(shared.tile(consumer));
      if (tile.index < 0) break;
      const int tile_row = tile.index * Spec::kOwnRows;
      const BlockRange all =
          tile_blocks(tile, [&] { return key_blocks<Spec, kMask>(params, tile, tile_row, tile_row + Spec::kOwnRows); });
      int end = all.end;
      if (first_row(tile) < row_room(params, tile)) {
        const BlockRange range = key_blocks<Spec, kMask>(params, tile, first_row(tile), first_row(tile) + 64);
        RowLoads loads;
        fetch_rows(loads, tile);
        for (; end > range.end; --end) skip_block();
        ptx::mbarrier_wait(shared.own_full(consumer), parity);
        float dq[Product::kOutputs];
        compute(tile, range, loads, dq);
        if constexpr (kIsVarlen) {
          const int begin =
              read_tile<Tile>(shared.tile(consumer)).begin_block;  // read again: no register holds it through the loop
          for (end = range.begin; end > begin; --end) skip_block();
        }
        // Hazard: dQ overwrites Q while another warp of the warpgroup still multiplies with it.
        sync_consumer(consumer);
        Product::store_shared(shared.own_first(consumer), dq, params.scale);
        // Hazard: TMA reads before all 64 rows are written and visible to it.
        ptx::fence_proxy_async_shared();
        sync_consumer(consumer);
        if (is_storing_thread) {
          const Tile done = kIsVarlen ? read_tile<Tile>(shared.tile(consumer)) : tile;
          Product::store_global(dq_map, shared.own_first(consumer), first_row(done),
                                rows_stored(params.sequence_rows.dq, done));
          ptx::tma_store_commit();
          // Hazard: the next tile's Q overwrites dQ while the store still reads it.
          ptx::tma_store_wait_read<0>();
        }
      } else {
        // Rows past the end: nothing to compute or to store.
        for (; end > all.begin; --end) skip_block();
        ptx::mbarrier_wait(shared.own_full(consumer), parity);
        sync_consumer(consumer);  // every warp has read the tile's record
      }
      if (is_storing_thread) ptx::mbarrier_arrive(shared.own_empty(consumer));
    }
  }
};

template <typename Spec, MaskKind kMask = MaskKind::kRuntime>
__device__ __forceinline__ void query_gradient(const BackwardParams& params, const ptx::TensorMap& q_map,
                                               const ptx::TensorMap& k_map, const ptx::TensorMap& v_map,
                                               const ptx::TensorMap& dout_map, const ptx::TensorMap& dq_map) {
  const SharedMemory<Spec> shared{ptx::dynamic_shared_memory()};
  const int warp = begin_warp([&] { init_barriers(shared); }, q_map, k_map, v_map, dout_map, dq_map);
  const int warpgroup = warp / 4;

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Spec::kProducerRegisters>();
    if constexpr (kMask == MaskKind::kRuntime) {
      if (warp == 0) produce_varlen_keys<Spec>(params, shared, q_map, k_map, v_map, dout_map);
    } else {
      if (warp == 0 && ptx::elect_one()) produce_keys<Spec, kMask>(params, shared, q_map, k_map, v_map, dout_map);
    }
  } else {
    ptx::setmaxnreg_inc<Spec::kConsumerRegisters>();
    QueryGradientConsumer<Spec, kMask>(params, shared, warpgroup - 1).run(dq_map);
  }
}

template <typename Spec>
__device__ __forceinline__ void query_gradient_dropout(const DropoutBackwardParams& params, const ptx::TensorMap& q_map,
                                                       const ptx::TensorMap& k_map, const ptx::TensorMap& v_map,
                                                       const ptx::TensorMap& dout_map, const ptx::TensorMap& dq_map) {
  static_assert(Spec::kHasDropout, "kernels without dropout take BackwardParams");
  query_gradient<Spec>(params.backward, q_map, k_map, v_map, dout_map, dq_map);
}

}  // namespace flashmoe::attention::backward::sm90
