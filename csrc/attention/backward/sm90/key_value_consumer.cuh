// A consumer warpgroup of the dk, dv kernel that computes both gradients for 64 keys.
//
// Per block: issue S^T = K Q^T and dP^T = V dO^T; compute P^T while dP^T runs; issue dV += P^T dO; compute dS^T while
// that runs; issue dK += dS^T Q, which the next block's S^T and dP^T follow without a wait. P^T and dS^T are never
// stored: the accumulator layout is the operand layout.
#pragma once

#include "attention/backward/score_mod.cuh"
#include "attention/backward/sm90/products.cuh"

namespace flashmoe::attention::backward::sm90 {

// The log-sum-exp, or row_dot, of a thread's columns: 8j + 2 * (lane % 4) and the next. Loads queue behind products
// that the warp has issued and the tensor cores have not begun, so they are placed one product before their use.
template <typename Spec>
__device__ __forceinline__ void load_columns(float (&columns)[Spec::kStreamRows / 4], const unsigned char* smem) {
  const unsigned char* mine = smem + ptx::lane_index() % 4 * 16;
#pragma unroll
  for (int j = 0; j < Spec::kStreamRows / 16; ++j) {
    const float4 four = ptx::ld_shared_float4(mine + j * 64);
    columns[4 * j] = four.x;
    columns[4 * j + 1] = four.y;
    columns[4 * j + 2] = four.z;
    columns[4 * j + 3] = four.w;
  }
}

// The initial value of dP^T: -row_dot of each column.
template <typename Spec>
__device__ __forceinline__ void load_negative_row_dots(float (&gradients)[Spec::kStreamRows / 2],
                                                       const unsigned char* row_dot_smem) {
  float columns[Spec::kStreamRows / 4];
  load_columns<Spec>(columns, row_dot_smem);
#pragma unroll
  for (int i = 0; i < Spec::kStreamRows / 2; ++i) gradients[i] = columns[i / 4 * 2 + i % 2];
  ptx::wgmma_fence_operands(gradients);
}

// What the scores of a thread's two keys need in addition to the statistics: the tile in shared memory, the query head,
// and the block's coordinates.
struct BlockCoordinates {
  const unsigned char* tile_smem;
  int head;
  int first_key;  // of the warpgroup
  int block;
};

// Columns that see the keys of a thread's two rows, counted from its first column.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void visible_columns(KeyRange (&visible)[2], const BackwardParams& params,
                                                const BlockCoordinates& coordinates) {
  const auto lengths = lengths_in<kMask>(params, coordinates.tile_smem);
  const int lane = ptx::lane_index();
  const int key = coordinates.first_key + ptx::warp_index() % 4 * 16 + lane / 4;
  const int column = coordinates.block * Spec::kStreamRows + lane % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    visible[r] = visible_rows<kMask>(params, lengths, key + 8 * r);
    visible[r] = KeyRange{visible[r].begin - column, visible[r].end - column};
  }
}

// Turns scores (S^T) into P^T. The log-sum-exp of a column is +inf if the row of Q is past the end or sees no key.
template <typename Spec, MaskKind kMask, bool kIsMasked>
__device__ __forceinline__ void exponentials(const BackwardParams& params, float (&scores)[Spec::kStreamRows / 2],
                                             const float (&lse_log2)[Spec::kStreamRows / 4],
                                             const BlockCoordinates& coordinates) {
  KeyRange visible[2] = {{0, 0}, {0, 0}};
  if constexpr (kIsMasked) visible_columns<Spec, kMask>(visible, params, coordinates);
#pragma unroll
  for (int i = 0; i < Spec::kStreamRows / 2; ++i) {
    scores[i] = ptx::exp2_approx(ptx::fma_rn(scores[i], params.scale_log2, -lse_log2[i / 4 * 2 + i % 2]));
    if constexpr (kIsMasked) {
      const int column = 8 * (i / 4) + i % 2;
      const KeyRange& range = visible[i / 2 % 2];
      if (column < range.begin || (kMask == MaskKind::kRuntime && column >= range.end)) scores[i] = 0.0f;
    }
  }
}

// With score modification: turns scores into P^T, packed, and the scores themselves into the factor of dP - row_dot in
// dS^T.
template <typename Spec>
__device__ __forceinline__ void weigh_varlen(const BackwardParams& params, float (&scores)[Spec::kStreamRows / 2],
                                             uint32_t (&packed)[Spec::kStreamRows / 4], const MaskValues<Spec>& values,
                                             const float (&lse_log2)[Spec::kStreamRows / 4],
                                             const BlockCoordinates& coordinates, bool is_plain) {
  weigh_with_score_mod<Spec, true>(
      params, scores, packed, values, is_plain && has_plain_blocks<Spec>(params.score_options),
      [&lse_log2](int i) { return lse_log2[i / 4 * 2 + i % 2]; },
      [&](KeyRange(&visible)[2]) { visible_columns<Spec, MaskKind::kRuntime>(visible, params, coordinates); });
}

template <typename Spec>
__device__ __forceinline__ MaskSource<Spec> mask_pointer(const BackwardParams& params,
                                                         const BlockCoordinates& coordinates) {
  const ScoreOptions& options = params.score_options;
  const auto lengths = lengths_in<MaskKind::kRuntime>(params, coordinates.tile_smem);
  const int lane = ptx::lane_index();
  const auto sequence = static_cast<int>(ptx::ld_shared_32(coordinates.tile_smem + 8));
  return MaskSource<Spec>(options, sequence, coordinates.head, options.mask_stride_key, options.mask_stride_row,
                          coordinates.first_key + ptx::warp_index() % 4 * 16 + lane / 4, lengths.keys(),
                          coordinates.block * Spec::kStreamRows + lane % 4 * 2, lengths.rows());
}

template <typename Spec, MaskKind kMask>
struct KeyValueGradientConsumer {
  static_assert(Spec::kIsPaired, "Q, dO and their statistics have one barrier");
  using Product = Products<Spec>;
  using Element = typename Spec::Element;
  using Tile = MaskTile<kMask>;
  using Coordinates = BlockCoordinates;
  static constexpr bool kIsVarlen = kMask == MaskKind::kRuntime;

  const BackwardParams& params;
  const SharedMemory<Spec> shared;
  const int consumer;  // 0 to kNumConsumers - 1
  RingPosition<Spec::kFirstStages> at;
  RingPosition<Spec::kFirstStages> used;  // the oldest that has not been released: `at`, or one behind

  __device__ __forceinline__ KeyValueGradientConsumer(const BackwardParams& params_, const SharedMemory<Spec>& shared_,
                                                      int consumer_)
      : params(params_), shared(shared_), consumer(consumer_) {}

  __device__ __forceinline__ void release_used() {
    release(shared.first_empty(used.stage));
    used.advance();
  }

  __device__ __forceinline__ void wait_block() const { ptx::mbarrier_wait(shared.first_full(at.stage), at.parity); }
  __device__ __forceinline__ void begin_scores(float (&scores)[Product::kScores]) {
    issue_product<Element, Product::kSteps>(scores, shared.own_first(consumer).k_major(),
                                            shared.first(at.stage).k_major());
  }
  __device__ __forceinline__ void begin_gradients(float (&gradients)[Product::kScores]) {
    issue_product<Element, Product::kValueSteps, Spec::kStartsFromRowDot>(
        gradients, shared.own_second(consumer).k_major(), shared.second(at.stage).k_major());
  }

  // Like step(), without registers for both S^T and dP^T: dS^T uses P^T as it is packed for dV. Nothing is in flight at
  // either end.
  template <Scores kScores>
  __device__ __forceinline__ void step_tight(float (&dk)[Product::kOutputs], float (&dv)[Product::kValueOutputs],
                                             uint32_t (&p_packed)[Product::kPacked],
                                             uint32_t (&ds_packed)[Product::kPacked], const Coordinates& coordinates) {
    wait_block();
    {
      float scores[Product::kScores];
      float lse_log2[Product::kColumns];
      begin_scores(scores);
      load_columns<Spec>(lse_log2, shared.statistics(at.stage));
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operands(scores);
      exponentials<Spec, kMask, kScores == Scores::kMasked>(params, scores, lse_log2, coordinates);
      pack_operand<Element>(p_packed, scores);
    }
    float gradients[Product::kScores];  // dP^T, then dS^T
    load_negative_row_dots<Spec>(gradients, shared.statistics(at.stage) + Spec::kStreamRows * 4);
    begin_gradients(gradients);
    issue_product<Element, true>(dv, p_packed, shared.second(at.stage).mn_major());
    ptx::wgmma_wait<1>();  // dP^T
    ptx::wgmma_fence_operands(gradients);
#pragma unroll
    for (int i = 0; i < Product::kPacked; ++i) {
      const float2 probability = unpack<Element>(p_packed[i]);
      ds_packed[i] = pack<Element>(probability.x * gradients[2 * i], probability.y * gradients[2 * i + 1]);
    }
    issue_product<Element, true>(dk, ds_packed, shared.first(at.stage).mn_major());
    at.advance();
    finish_products(dk, dv);  // with a product in flight where loops meet, ptxas runs out of registers
  }

  template <Scores kScores>
  __device__ __forceinline__ void step(float (&dk)[Product::kOutputs], float (&dv)[Product::kValueOutputs],
                                       uint32_t (&p_packed)[Product::kPacked], uint32_t (&ds_packed)[Product::kPacked],
                                       const Coordinates& coordinates) {
    if constexpr (Spec::kIsTight) return step_tight<kScores>(dk, dv, p_packed, ds_packed, coordinates);
    float scores[Product::kScores];
    float gradients[Product::kScores];  // dP^T, then dS^T
    float lse_log2[Product::kColumns];
    float row_dot[Product::kColumns];
    wait_block();
    load_columns<Spec>(lse_log2, shared.statistics(at.stage));
    begin_scores(scores);
    // dV and dK of the previous block, before S^T: dP^T can then use the registers of their P^T and dS^T.
    ptx::wgmma_wait<1>();
    ptx::wgmma_fence_operands(dv);
    ptx::wgmma_fence_operands(dk);
    if (used.stage != at.stage) release_used();
    const unsigned char* row_dot_smem = shared.statistics(at.stage) + Spec::kStreamRows * 4;
    if constexpr (Spec::kStartsFromRowDot) load_negative_row_dots<Spec>(gradients, row_dot_smem);
    begin_gradients(gradients);

    ptx::wgmma_wait<1>();  // S^T
    ptx::wgmma_fence_operands(scores);
    if constexpr (Spec::kHasScoreMod) {
      MaskValues<Spec> values;
      load_mask<Spec>(values, params.score_options, [&] { return mask_pointer<Spec>(params, coordinates); });
      weigh_varlen<Spec>(params, scores, p_packed, values, lse_log2, coordinates, kScores == Scores::kPlain);
    } else {
      exponentials<Spec, kMask, kScores == Scores::kMasked>(params, scores, lse_log2, coordinates);
    }
    if constexpr (!Spec::kStartsFromRowDot) load_columns<Spec>(row_dot, row_dot_smem);
    if constexpr (!Spec::kHasScoreMod) pack_operand<Element>(p_packed, scores);
    issue_product<Element, true>(dv, p_packed, shared.second(at.stage).mn_major());

    ptx::wgmma_wait<1>();  // dP^T
    ptx::wgmma_fence_operands(gradients);
#pragma unroll
    for (int i = 0; i < Product::kScores; ++i) {
      if constexpr (!Spec::kStartsFromRowDot) gradients[i] -= row_dot[i / 4 * 2 + i % 2];
      gradients[i] *= scores[i];
    }
    pack_operand<Element>(ds_packed, gradients);
    issue_product<Element, true>(dk, ds_packed, shared.first(at.stage).mn_major());
    at.advance();
  }

  // A block with lookahead. In flight at the start, in this order: dV of the previous block, S^T of this block, dK of
  // the previous block, dP^T of this block (no dV and dK for the first); at the end the same, one block further, or
  // nothing.
  template <bool kIsMasked, bool kIsFirst, bool kIsLast>
  __device__ __forceinline__ void step_ahead(float (&dk)[Product::kOutputs], float (&dv)[Product::kValueOutputs],
                                             float (&scores)[Product::kScores], float (&next_scores)[Product::kScores],
                                             float (&gradients)[Product::kScores], float (&lse_log2)[Product::kColumns],
                                             uint32_t (&p_packed)[Product::kPacked],
                                             uint32_t (&ds_packed)[Product::kPacked], const Coordinates& coordinates) {
    const typename Spec::StreamTile q = shared.first(at.stage);
    const unsigned char* row_dot_smem = shared.statistics(at.stage) + Spec::kStreamRows * 4;
    ptx::wgmma_wait<kIsFirst ? 1 : 2>();  // S^T, and dV of the previous block
    ptx::wgmma_fence_operands(scores);
    exponentials<Spec, kMask, kIsMasked>(params, scores, lse_log2, coordinates);
    float row_dot[Product::kColumns];
    load_columns<Spec>(row_dot, row_dot_smem);
    pack_operand<Element>(p_packed, scores);
    issue_product<Element, true>(dv, p_packed, shared.second(at.stage).mn_major());
    at.advance();
    if constexpr (!kIsLast) {
      wait_block();
      begin_scores(next_scores);
    }

    ptx::wgmma_wait<1>();  // dP^T, and dK of the previous block. With 2 (dV in flight) there are too few registers
    ptx::wgmma_fence_operands(gradients);
    if constexpr (!kIsFirst) release_used();
#pragma unroll
    for (int i = 0; i < Product::kScores; ++i) {
      gradients[i] = scores[i] * (gradients[i] - row_dot[i / 4 * 2 + i % 2]);
    }
    if constexpr (!kIsLast) load_columns<Spec>(lse_log2, shared.statistics(at.stage));  // of the next block
    pack_operand<Element>(ds_packed, gradients);
    issue_product<Element, true>(dk, ds_packed, q.mn_major());
    if constexpr (kIsLast) {
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operands(dk);
      ptx::wgmma_fence_operands(dv);
      release_used();
    } else {
      begin_gradients(gradients);
    }
  }

  // The blocks of one head with lookahead; the compiler knows which of two register sets holds the scores.
  __device__ __forceinline__ void compute_ahead(const BlockRange& range, float (&dk)[Product::kOutputs],
                                                float (&dv)[Product::kValueOutputs],
                                                uint32_t (&p_packed)[Product::kPacked],
                                                uint32_t (&ds_packed)[Product::kPacked], Coordinates coordinates) {
    float even[Product::kScores];
    float odd[Product::kScores];
    float gradients[Product::kScores];
    float lse_log2[Product::kColumns];
    int& block = coordinates.block;
    const int last = range.end - 1;
    const auto step = [&](auto masked, auto first, auto is_last, float (&scores)[Product::kScores],
                          float (&next_scores)[Product::kScores]) {
      step_ahead<decltype(masked)::value && kMask == MaskKind::kCausal, decltype(first)::value,
                 decltype(is_last)::value>(dk, dv, scores, next_scores, gradients, lse_log2, p_packed, ds_packed,
                                           coordinates);
      ++block;
    };
    wait_block();
    begin_scores(even);
    load_columns<Spec>(lse_log2, shared.statistics(at.stage));
    begin_gradients(gradients);
    if (block == last) return step(Yes{}, Yes{}, Yes{}, even, odd);
    step(Yes{}, Yes{}, No{}, even, odd);
    if (block == last) return step(Yes{}, No{}, Yes{}, odd, even);
    step(Yes{}, No{}, No{}, odd, even);
    while (block <= last - 2) {
      step(No{}, No{}, No{}, even, odd);
      step(No{}, No{}, No{}, odd, even);
    }
    if (block == last) return step(No{}, No{}, Yes{}, even, odd);
    step(No{}, No{}, No{}, even, odd);
    step(No{}, No{}, Yes{}, odd, even);
  }

  // Varlen: the blocks [coordinates.block, end), none of which needs a mask, with lookahead: two or more.
  __device__ __forceinline__ void compute_varlen_ahead(int end, float (&dk)[Product::kOutputs],
                                                       float (&dv)[Product::kValueOutputs],
                                                       uint32_t (&p_packed)[Product::kPacked],
                                                       uint32_t (&ds_packed)[Product::kPacked],
                                                       Coordinates& coordinates) {
    float even[Product::kScores];
    float odd[Product::kScores];
    float gradients[Product::kScores];
    float lse_log2[Product::kColumns];
    int& block = coordinates.block;
    const int last = end - 1;
    const auto step = [&](auto first, auto is_last, float (&scores)[Product::kScores],
                          float (&next_scores)[Product::kScores]) {
      step_ahead<false, decltype(first)::value, decltype(is_last)::value>(dk, dv, scores, next_scores, gradients,
                                                                          lse_log2, p_packed, ds_packed, coordinates);
      ++block;
    };
    wait_block();
    begin_scores(even);
    load_columns<Spec>(lse_log2, shared.statistics(at.stage));
    begin_gradients(gradients);
    step(Yes{}, No{}, even, odd);
    while (block <= last - 2) {
      step(No{}, No{}, odd, even);
      step(No{}, No{}, even, odd);
    }
    if (block == last) return step(No{}, Yes{}, odd, even);
    step(No{}, No{}, odd, even);
    step(No{}, Yes{}, even, odd);
  }

  // The blocks of one head.
  __device__ __forceinline__ void compute(const BlockRange& range, float (&dk)[Product::kOutputs],
                                          float (&dv)[Product::kValueOutputs], uint32_t (&p_packed)[Product::kPacked],
                                          uint32_t (&ds_packed)[Product::kPacked], Coordinates coordinates) {
    int& block = coordinates.block;
    if constexpr (kIsVarlen && Spec::kLookahead) {
      for (;; ++block) {
        if (block == range.full_begin && block + 1 < range.full_end) {
          finish_products(dk, dv);
          compute_varlen_ahead(range.full_end, dk, dv, p_packed, ds_packed, coordinates);
        }
        if (block >= range.end) return;
        step<Scores::kMasked>(dk, dv, p_packed, ds_packed, coordinates);
        finish_products(dk, dv);
      }
    } else if constexpr (Spec::kLookahead) {
      compute_ahead(range, dk, dv, p_packed, ds_packed, coordinates);
    } else if constexpr (kIsVarlen) {
      while (block < range.end) {
        for (; block >= range.full_begin && block < range.full_end; ++block) {
          step<Scores::kPlain>(dk, dv, p_packed, ds_packed, coordinates);
        }
        if (block < range.end) {
          step<Scores::kMasked>(dk, dv, p_packed, ds_packed, coordinates);
          ++block;
        }
      }
    } else {
      for (; block < range.full_begin; ++block) step<Scores::kMasked>(dk, dv, p_packed, ds_packed, coordinates);
      for (; block < range.end; ++block) step<Scores::kPlain>(dk, dv, p_packed, ds_packed, coordinates);
    }
  }

  // Skips a block that sees only keys of other warpgroups.
  __device__ __forceinline__ void skip_block() {
    wait_block();
    at.advance();
    release_used();
  }

  __device__ __forceinline__ void finish_products(float (&dk)[Product::kOutputs], float (&dv)[Product::kValueOutputs]) {
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operands(dk);
    ptx::wgmma_fence_operands(dv);
    if (used.stage != at.stage) release_used();
  }

  // Varlen: query head `head` of the group. The tile is read for each head, and again after it: no register holds it
  // through the loop.
  __device__ __forceinline__ void compute_varlen_head(float (&dk)[Product::kOutputs],
                                                      float (&dv)[Product::kValueOutputs],
                                                      uint32_t (&p_packed)[Product::kPacked],
                                                      uint32_t (&ds_packed)[Product::kPacked], int head) {
    const Tile tile = read_tile<Tile>(shared.tile(consumer));
    const int first_key = tile.index * Spec::kOwnRows + consumer * 64;
    const BlockRange range = query_blocks<Spec, kMask>(params, tile, first_key, first_key + 64);
    if (tile.begin_block < range.begin) {
      finish_products(dk, dv);
      for (int block = tile.begin_block; block < range.begin; ++block) skip_block();
    }
    compute(range, dk, dv, p_packed, ds_packed,
            Coordinates{shared.tile(consumer), tile.head * (params.heads_q / params.heads_kv) + head, first_key,
                        range.begin});
    const Tile again = read_tile<Tile>(shared.tile(consumer));
    const int end = maximum(again.begin_block, range.end);
    if (end < again.end_block) finish_products(dk, dv);
    for (int block = end; block < again.end_block; ++block) skip_block();
  }

  __device__ __forceinline__ void run(const ptx::TensorMap& dk_map, const ptx::TensorMap& dv_map) {
    const int heads = params.heads_q / params.heads_kv;
    for (int parity = 0;; parity ^= 1) {
      ptx::mbarrier_wait(shared.tile_full(consumer), parity);
      const Tile tile = read_tile<Tile>(shared.tile(consumer));
      if (tile.index < 0) break;
      ptx::mbarrier_wait(shared.own_full(consumer), parity);
      const int first_key = tile.index * Spec::kOwnRows + consumer * 64;
      const BlockRange range = query_blocks<Spec, kMask>(params, tile, first_key, first_key + 64);
      const int tile_key = tile.index * Spec::kOwnRows;
      const BlockRange all = tile_blocks(
          tile, [&] { return query_blocks<Spec, kMask>(params, tile, tile_key, tile_key + Spec::kOwnRows); });
      if (first_key < key_room(params, tile)) {
        float dk[Product::kOutputs];
        float dv[Product::kValueOutputs];
        uint32_t p_packed[Product::kPacked];
        uint32_t ds_packed[Product::kPacked];
        Product::clear(dk);
        Product::clear(dv);
        for (int head = 0; head < heads; ++head) {
          if constexpr (kIsVarlen) {
            compute_varlen_head(dk, dv, p_packed, ds_packed, head);
          } else {
            if (all.begin < range.begin) {
              finish_products(dk, dv);
              for (int block = all.begin; block < range.begin; ++block) skip_block();
            }
            compute(range, dk, dv, p_packed, ds_packed,
                    Coordinates{shared.tile(consumer), tile.head * heads + head, first_key, range.begin});
          }
        }
        finish_products(dk, dv);
        // Hazard: dK and dV overwrite K and V while another warp of the warpgroup still multiplies with them.
        sync_consumer(consumer);
        Product::store_shared(shared.own_second(consumer), dv, 1.0f);
        Product::store_shared(shared.own_first(consumer), dk, params.scale);
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
        for (int head = 0; head < heads; ++head) {
          for (int block = all.begin; block < all.end; ++block) skip_block();
        }
        sync_consumer(consumer);  // every warp has read the tile's record
      }
      if (ptx::thread_index() % 128 == 0) ptx::mbarrier_arrive(shared.own_empty(consumer));
    }
  }
};

}  // namespace flashmoe::attention::backward::sm90
