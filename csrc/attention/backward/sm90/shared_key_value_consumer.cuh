// The two consumer warpgroups of the dk, dv kernel if 64 x kHeadDim accumulators of both gradients are too many for one
// warpgroup: both own the same 64 keys. One computes P^T = exp(K Q^T - lse) and dV += P^T dO, and passes P^T on, as
// 16-bit elements through shared memory; the other computes dP^T = V dO^T, dS^T and dK += dS^T Q.
#pragma once

#include "attention/backward/sm90/dropout.cuh"
#include "attention/backward/sm90/key_value_consumer.cuh"
#include "attention/backward/sm90/products.cuh"

namespace flashmoe::attention::backward::sm90 {

// Named barriers of both warpgroups, 256 threads, in addition to their own (device/named_barriers.cuh).
enum class SharedBarrier : int {
  kProbabilitiesFull = 8,   // hazard: P^T is read before the other warpgroup has written it
  kProbabilitiesEmpty = 9,  // hazard: P^T is overwritten while the other warpgroup still reads the previous block's
};

// Common to both warpgroups: the order of tiles, heads and blocks, and the epilogue. `Derived` computes the gradient:
//   step<kScores>(output, packed, dropout, coordinates)   one block; may leave its last product in flight; dropout: a
//                                                         Derived::OfTile
//   finish(output)                                    waits for that, and releases what it reads
template <typename Spec, MaskKind kMask, typename Derived>
struct SharedConsumer {
  using Product = Products<Spec>;
  using Element = typename Spec::Element;
  using Tile = MaskTile<kMask>;
  using Coordinates = BlockCoordinates;
  static constexpr bool kIsVarlen = kMask == MaskKind::kRuntime;

  const BackwardParams& params;
  const SharedMemory<Spec> shared;
  RingPosition<Spec::kFirstStages> at;
  RingPosition<Spec::kFirstStages> used;  // the oldest whose last product is in flight, if has_used
  bool has_used = false;

  __device__ __forceinline__ SharedConsumer(const BackwardParams& params_, const SharedMemory<Spec>& shared_)
      : params(params_), shared(shared_) {}

  // sequence_rows: that of the gradient.
  template <typename OutputTile>
  __device__ __forceinline__ void run_tiles(const ptx::TensorMap& map, int sequence_rows, const OutputTile& output_tile,
                                            int consumer, float factor) {
    Derived& derived = static_cast<Derived&>(*this);
    const bool is_storing_thread = ptx::thread_index() % 128 == 0;
    const int heads = params.heads_q / params.heads_kv;
    for (int parity = 0;; parity ^= 1) {
      ptx::mbarrier_wait(shared.tile_full(0), parity);
      const Tile tile = read_tile<Tile>(shared.tile(0));
      if (tile.index < 0) break;
      ptx::mbarrier_wait(shared.own_full(0), parity);
      const int first_key = tile.index * Spec::kOwnRows;
      const BlockRange range = query_blocks<Spec, kMask>(params, tile, first_key, first_key + Spec::kOwnRows);
      float output[Derived::kOutputs];
      uint32_t packed[Product::kPacked];
      Product::clear(output);
      const typename Derived::OfTile dropout(params, tile);
      for (int head = 0; head < heads; ++head) {
        Coordinates coordinates{shared.tile(0), tile.head * heads + head, first_key, range.begin};
        int& block = coordinates.block;
        if constexpr (kIsVarlen) {
          while (block < range.end) {
            for (; block >= range.full_begin && block < range.full_end; ++block) {
              derived.template step<Scores::kPlain>(output, packed, dropout, coordinates);
            }
            if (block < range.end) {
              derived.template step<Scores::kMasked>(output, packed, dropout, coordinates);
              ++block;
            }
          }
        } else {
          for (; block < range.full_begin; ++block) {
            derived.template step<Scores::kMasked>(output, packed, dropout, coordinates);
          }
          for (; block < range.end; ++block) {
            derived.template step<Scores::kPlain>(output, packed, dropout, coordinates);
          }
        }
      }
      derived.finish(output);
      // Hazard: the gradient overwrites K or V while another warp of the warpgroup still multiplies with it.
      sync_consumer(consumer);
      Product::store_shared(output_tile, output, factor);
      // Hazard: TMA reads before all 64 rows are written and visible to it.
      ptx::fence_proxy_async_shared();
      sync_consumer(consumer);
      if (is_storing_thread) {
        Product::store_global(map, output_tile, first_key, keys_stored(sequence_rows, tile));
        ptx::tma_store_commit();
        // Hazard: the next tile's K or V overwrites the gradient while the store still reads it.
        ptx::tma_store_wait_read<0>();
        ptx::mbarrier_arrive(shared.own_empty(0));
      }
    }
  }
};

template <typename Spec, MaskKind kMask>
struct ValueGradientConsumer : SharedConsumer<Spec, kMask, ValueGradientConsumer<Spec, kMask>> {
  using Base = SharedConsumer<Spec, kMask, ValueGradientConsumer>;
  using Product = Products<Spec>;
  using Element = typename Spec::Element;
  using Base::at, Base::used, Base::has_used, Base::params, Base::shared;
  using typename Base::Coordinates;
  using OfTile = TileDropout<Spec>;
  static constexpr int kOutputs = Product::kValueOutputs;

  __device__ __forceinline__ ValueGradientConsumer(const BackwardParams& params_, const SharedMemory<Spec>& shared_)
      : Base(params_, shared_) {}

  __device__ __forceinline__ void release_used() {
    if (has_used) {
      release(shared.second_empty(used.stage));
      used.advance();
    }
  }

  // With score modification the other warpgroup gets P^T times the derivative, which is all it needs. With dropout it
  // gets P^T with marks.
  template <Scores kScores>
  __device__ __forceinline__ void step(float (&dv)[kOutputs], uint32_t (&packed)[Product::kPacked],
                                       const OfTile& tile_dropout, const Coordinates& coordinates) {
    float scores[Product::kScores];
    // Drawn while dV of the previous block runs: ptxas moves nothing across the wait.
    const BlockDropout<Spec> dropout(tile_dropout, coordinates);
    ptx::mbarrier_wait(shared.first_full(at.stage), at.parity);
    float lse_log2[Product::kColumns];
    load_columns<Spec>(lse_log2, shared.statistics(at.stage));
    issue_product<Element, Product::kSteps>(scores, shared.own_first(0).k_major(), shared.first(at.stage).k_major());
    ptx::wgmma_wait<0>();  // S^T; and dV of the previous block
    ptx::wgmma_fence_operands(scores);
    release_used();
    has_used = true;
    uint32_t handed_on[Product::kPacked];
    if constexpr (Spec::kHasScoreMod) {
      MaskValues<Spec> values;
      load_mask<Spec>(values, params.score_options, [&] { return mask_pointer<Spec>(params, coordinates); });
      weigh_varlen<Spec>(params, scores, packed, values, lse_log2, coordinates, kScores == Scores::kPlain);
    } else {
      exponentials<Spec, kMask, kScores == Scores::kMasked>(params, scores, lse_log2, coordinates);
    }
    release(shared.first_empty(at.stage));
    if constexpr (Spec::kHasScoreMod) {
      pack_operand<Element>(handed_on, scores);
    } else {
      pack_operand<Element>(packed, scores);
#pragma unroll
      for (int i = 0; i < Product::kPacked; ++i) handed_on[i] = packed[i];
      dropout.mark_weights(handed_on);
      dropout.drop_weights(packed);
    }

    ptx::named_barrier_sync(barrier_id(SharedBarrier::kProbabilitiesEmpty), 256);
    unsigned char* mine = shared.probabilities() + ptx::thread_index() % 128 * 16;
#pragma unroll
    for (int i = 0; i < Product::kPacked / 4; ++i) {
      const uint32_t words[4] = {handed_on[4 * i], handed_on[4 * i + 1], handed_on[4 * i + 2], handed_on[4 * i + 3]};
      ptx::st_shared_128(mine + i * 2048, words);
    }
    ptx::named_barrier_arrive(barrier_id(SharedBarrier::kProbabilitiesFull), 256);

    ptx::mbarrier_wait(shared.second_full(at.stage), at.parity);
    issue_product<Element, true>(dv, packed, shared.second(at.stage).mn_major());
    at.advance();
  }

  __device__ __forceinline__ void finish(float (&dv)[kOutputs]) {
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operands(dv);
    release_used();
    has_used = false;
  }

  __device__ __forceinline__ void run(const ptx::TensorMap& dv_map) {
    // dV overwrites K, dK overwrites V: only the storing warpgroup has read it.
    const typename Spec::OwnSecondTile output{shared.own_first(0).smem};
    Base::run_tiles(dv_map, params.sequence_rows.dv, output, 0, value_scale<Spec>(params));
    ptx::named_barrier_sync(barrier_id(SharedBarrier::kProbabilitiesEmpty), 256);  // pairs with the last arrival
  }
};

template <typename Spec, MaskKind kMask>
struct KeyGradientConsumer : SharedConsumer<Spec, kMask, KeyGradientConsumer<Spec, kMask>> {
  using Base = SharedConsumer<Spec, kMask, KeyGradientConsumer>;
  using Product = Products<Spec>;
  using Element = typename Spec::Element;
  using Base::at, Base::used, Base::has_used, Base::params, Base::shared;
  using typename Base::Coordinates;
  using OfTile = TileDropout<Spec, false>;  // which scores are dropped comes with P^T
  static constexpr int kOutputs = Product::kOutputs;

  __device__ __forceinline__ KeyGradientConsumer(const BackwardParams& params_, const SharedMemory<Spec>& shared_)
      : Base(params_, shared_) {}

  __device__ __forceinline__ void release_used() {
    if (has_used) {
      release(shared.first_empty(used.stage));
      used.advance();
    }
  }

  template <Scores kScores>
  __device__ __forceinline__ void step(float (&dk)[kOutputs], uint32_t (&packed)[Product::kPacked], const OfTile&,
                                       const Coordinates&) {
    float gradients[Product::kScores];                           // dP^T, then dS^T
    ptx::mbarrier_wait(shared.first_full(at.stage), at.parity);  // for row_dot, and Q below
    float row_dot[Product::kColumns];
    load_columns<Spec>(row_dot, shared.statistics(at.stage) + Spec::kStreamRows * 4);
    const SharedGradient<Spec> gradient(params);
    gradient.scale_row_dots(row_dot);
    ptx::mbarrier_wait(shared.second_full(at.stage), at.parity);
    issue_product<Element, Product::kValueSteps>(gradients, shared.own_second(0).k_major(),
                                                 shared.second(at.stage).k_major());
    ptx::wgmma_wait<0>();  // dP^T; and dK of the previous block
    ptx::wgmma_fence_operands(gradients);
    release_used();
    has_used = true;
    release(shared.second_empty(at.stage));

    ptx::named_barrier_sync(barrier_id(SharedBarrier::kProbabilitiesFull), 256);
    const unsigned char* mine = shared.probabilities() + ptx::thread_index() % 128 * 16;
    uint32_t p[Product::kPacked / 4][4];
#pragma unroll
    for (int i = 0; i < Product::kPacked / 4; ++i) ptx::ld_shared_128(p[i], mine + i * 2048);
#pragma unroll
    for (int i = 0; i < Product::kPacked; ++i) {
      const float2 probability = unpack<Element>(p[i / 4][i % 4]);
      const int column = i / 2 * 2;
      packed[i] = pack<Element>(gradient(probability.x, gradients[2 * i], row_dot[column]),
                                gradient(probability.y, gradients[2 * i + 1], row_dot[column + 1]));
    }
    ptx::named_barrier_arrive(barrier_id(SharedBarrier::kProbabilitiesEmpty), 256);
    issue_product<Element, true>(dk, packed, shared.first(at.stage).mn_major());
    at.advance();
  }

  __device__ __forceinline__ void finish(float (&dk)[kOutputs]) {
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operands(dk);
    release_used();
    has_used = false;
  }

  __device__ __forceinline__ void run(const ptx::TensorMap& dk_map) {
    ptx::named_barrier_arrive(barrier_id(SharedBarrier::kProbabilitiesEmpty), 256);  // nothing to read yet
    const typename Spec::OwnTile output{shared.own_second(0).smem};
    Base::run_tiles(dk_map, params.sequence_rows.dk, output, 1, params.scale * value_scale<Spec>(params));
  }
};

}  // namespace flashmoe::attention::backward::sm90
