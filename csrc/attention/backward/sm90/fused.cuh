// dq, dk and dv in one kernel: five products per block instead of the seven of two kernels, and one exponential instead
// of two. A tile is 128 keys; Q and dO stream past it as in the dk, dv kernel, whose producer is used here. dS^T of
// both consumers passes through shared memory to a separate warpgroup, which multiplies dQ = dS K of the block; two
// more warps add it to fp32 partials in global memory with TMA reductions. The consumers never wait for another thread
// block.
//   before   fused_prepare: row_dot, zeroed semaphores     after   fused_convert: converts the partials to dq
//   params.dq   [batch, heads_q, ceil(seq_q / 64)] partials of 64 rows, ordered as by FusedQueries::publish_sums; then
//               one semaphore per partial, the number of tiles that have added to it
//   grid, maps, counter   as for the dk, dv kernel
//
// The reduction is ordered: tiles of a head add to a partial by rank, each once the semaphore has reached its rank, so
// that the bits are the same on every run. A tile waits only for tiles with smaller numbers, which running blocks have
// drawn before it, so there is no deadlock. If query heads share a key head, a block of each comes before the next
// block of the first. There are two orders, and a Tile stores which one it has (KeySchedule):
//   ascending    the tiles of the last keys come first, and queries ascend. Under a causal mask a tile begins at its
//                diagonal, so if it starts together with the others of its head, it reaches every partial after those
//                of lower rank, and need not wait. But the longest tiles come last
//   descending   the tiles of the first keys, the longest, come first, and queries descend, so that all begin at the
//                same block: each must begin a little after the previous one. Only under a causal mask: for the last
//                section of heads, whose tiles begin one by one as the longest tiles of the previous section end, so
//                that none waits and short ones fill the end; and for grouped heads
#pragma once

#include "attention/backward/sm90/varlen_producer.cuh"
#include "attention/backward/sm90/fused_wide.cuh"
#include "attention/backward/sm90/producer.cuh"
#include "ptx/bulk_reduce.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/register_control.cuh"
#include "ptx/ordered_semaphore.cuh"

namespace flashmoe::attention::backward::sm90 {

// Draws which scores of a tile's blocks are dropped, block by block, ahead of the consumers. A block has eight parts of
// 64 keys and 16 queries, two per warp.
template <typename Spec, bool kDraws = (Spec::kNumDrawers > 0)>
struct BlocksToDraw {
  __device__ __forceinline__ explicit BlocksToDraw(const BackwardParams&) {}
  template <typename Tile>
  __device__ __forceinline__ void start(const Tile&, int) {}
  __device__ __forceinline__ void draw_next(const FusedMemory<Spec>&) {}
};
template <typename Spec>
struct BlocksToDraw<Spec, true> {
  FusedDrawer<Spec> drawer;
  RingPosition<Spec::kFirstStages> to;
  int sequence = 0;
  int first_key = 0;
  int first_head = 0;
  int heads = 1;
  int head = 0;  // within the group
  int block = 0;
  int onwards = 1;
  int left = 0;

  __device__ __forceinline__ explicit BlocksToDraw(const BackwardParams& params) : drawer(params) {}
  __device__ __forceinline__ void start(const VarlenTile& tile, int heads_) {
    sequence = tile.batch;
    first_key = tile.index * Spec::kOwnRows;
    heads = heads_;
    first_head = tile.head * heads;
    head = 0;
    onwards = tile.is_descending != 0 ? -1 : 1;
    block = tile.is_descending != 0 ? tile.end_block - 1 : tile.begin_block;
    left = heads * (tile.end_block - tile.begin_block);
  }
  __device__ __forceinline__ void draw_next(const FusedMemory<Spec>& shared) {
    if (left == 0) return;
    --left;
    // Hazard: what was drawn into this stage may still be read.
    ptx::mbarrier_wait(shared.drawn_empty(to.stage), to.parity ^ 1);
    for (int part = ptx::warp_index() % Spec::kNumDrawers; part < 8; part += Spec::kNumDrawers) {
      drawer.draw(shared.drawn(to.stage, part / 4), sequence, first_head + head, first_key + part / 4 * 64, block,
                  part % 4);
    }
    release(shared.drawn_full(to.stage));
    to.advance();
    if (++head == heads) {
      head = 0;
      block += onwards;
    }
  }
};

// The dq warpgroup.
template <typename Spec, MaskKind kMask>
struct FusedQueries {
  using Element = typename Spec::Element;
  using Tile = MaskTile<kMask>;
  static constexpr int kSums = Spec::kHeadDim / 2;  // of 64 rows, per thread

  const BackwardParams& params;
  const FusedMemory<Spec> shared;
  RingPosition<Spec::kQueryBuffers> at;  // of dS^T, and of the sums

  __device__ __forceinline__ FusedQueries(const BackwardParams& params_, const FusedMemory<Spec>& shared_)
      : params(params_), shared(shared_) {}

  // sums[64 x kHeadDim] = dS[64 x 64 * kHalves] K[64 * kHalves x kHeadDim]
  template <int kHalves>
  __device__ __forceinline__ void multiply(float (&sums)[kSums]) const {
    const MnMajorOperand scores = shared.score_operand(at.stage);
    const TileKeys<Spec> keys(shared.own_first(0).smem);
    issue_product<Element, 4 * kHalves>(sums, scores, keys);
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operands(sums);
  }

  // Passes the sums to the reducing warp: [kHeadDim / 8][128 threads][4], where thread 32 w + 4 g + t has at j, for the
  // rows 16 w + g and that + 8, the columns 8 j + 2 t and the next.
  __device__ __forceinline__ void publish_sums(const float (&sums)[kSums], int partial, int rank) {
    // Hazard: the reduction of two blocks ago still reads the buffer.
    ptx::mbarrier_wait(shared.sums_empty(at.stage), at.parity ^ 1);
    unsigned char* mine = shared.query_sums(at.stage) + ptx::thread_index() % 128 * 16;
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) {
      const uint32_t words[4] = {ptx::float_bits(sums[4 * j]), ptx::float_bits(sums[4 * j + 1]),
                                 ptx::float_bits(sums[4 * j + 2]), ptx::float_bits(sums[4 * j + 3])};
      ptx::st_shared_128(mine + j * 2048, words);
    }
    // Hazard: TMA reads before all is written and visible to it.
    ptx::fence_proxy_async_shared();
    pass(partial, rank);
  }
  __device__ __forceinline__ void pass(int partial, int rank) {
    if (ptx::thread_index() % 128 == 0) {
      const uint32_t words[4] = {static_cast<uint32_t>(partial), static_cast<uint32_t>(rank), 0, 0};
      ptx::st_shared_128(shared.partial_record(at.stage), words);
    }
    release(shared.sums_full(at.stage));
    at.advance();
  }

  __device__ __forceinline__ void block(int partial, int rank, bool has_second_half) {
    float sums[kSums];
    ptx::mbarrier_wait(shared.scores_full(at.stage), at.parity);
    if (has_second_half) {
      multiply<2>(sums);
    } else {
      multiply<1>(sums);
    }
    release(shared.scores_empty(at.stage));
    publish_sums(sums, partial, rank);
  }

  // dS of the second consumer's keys.
  struct HalfOperand {
    static constexpr bool kIsTransposed = true;
    MnMajorOperand scores;
    __device__ __forceinline__ uint64_t k_step(int step) const { return scores.k_step(4 + step); }
  };
  // sums[64 x kHeadDim] = dS[64 x 64] K[64 x kHeadDim], for only the second consumer's keys.
  __device__ __forceinline__ void multiply_second(float (&sums)[kSums]) const {
    const HalfOperand scores{shared.score_operand(at.stage)};
    const MnMajorOperand keys = shared.own_first(1).mn_major();
    issue_product<Element, 4>(sums, scores, keys);
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operands(sums);
  }

  // Varlen: with a window, a block may see only the second consumer's keys, and a tile may have no block.
  __device__ __forceinline__ void run_varlen() {
    const int heads = params.heads_q / params.heads_kv;
    BlocksToDraw<Spec> to_draw(params);
    for (int parity = 0;; parity ^= 1) {
      ptx::mbarrier_wait(shared.tile_full(0), parity);
      const Tile tile = read_tile<Tile>(shared.tile(0));
      if (tile.index < 0) break;
      to_draw.start(tile, heads);
      to_draw.draw_next(shared);
      to_draw.draw_next(shared);
      ptx::mbarrier_wait(shared.own_full(0), parity);
      ptx::mbarrier_wait(shared.own_full(1), parity);
      // Hazard: the next tile is written before every warp has read this one, because the first consumer waits for
      // these warps only within blocks. Not released after the blocks: the next tile's rows would then wait for this
      // one's last reduction.
      release(shared.own_empty(0));
      const int first_key = tile.index * Spec::kOwnRows;
      const BlockRange first = query_blocks<Spec, kMask>(params, tile, first_key, first_key + 64);
      const BlockRange second = query_blocks<Spec, kMask>(params, tile, first_key + 64, first_key + 128);
      const int partials = first_partial(params, tile, 1) - first_partial(params, tile, 0);
      const int partial = first_partial(params, tile, tile.head * heads);
      // Blocks that see keys of both consumers.
      const int both_begin = maximum(first.begin, second.begin);
      const int num_both = maximum(0, minimum(first.end, second.end) - both_begin);
      const bool descends = is_descending<kMask>(tile);
      const bool has_diagonal = !descends && params.score_options.right < kUnbounded;
      const int onwards = descends ? -1 : 1;
      int at_block = descends ? tile.end_block - 1 : tile.begin_block;
      int rank = reduction_rank<Spec, kMask>(params, tile, at_block);
      for (int left = tile.end_block - tile.begin_block; left > 0; --left, at_block += onwards) {
        if (has_diagonal) rank = reduction_rank<Spec, kMask>(params, tile, at_block);
        const bool has_both = static_cast<uint32_t>(at_block - both_begin) < static_cast<uint32_t>(num_both);
        int partial_at_block = partial + at_block;
        for (int head = heads; head > 0; --head, partial_at_block += partials) {
          float sums[kSums];
          to_draw.draw_next(shared);
          ptx::mbarrier_wait(shared.scores_full(at.stage), at.parity);
          if (has_both) {
            multiply<2>(sums);
          } else if (at_block >= first.begin && at_block < first.end) {
            multiply<1>(sums);
          } else {
            multiply_second(sums);
          }
          release(shared.scores_empty(at.stage));
          publish_sums(sums, partial_at_block, rank);
        }
      }
    }
    end_sums();
  }
  __device__ __forceinline__ void end_sums() {
#pragma unroll
    for (int i = 0; i < Spec::kQueryBuffers; ++i) {
      ptx::mbarrier_wait(shared.sums_empty(at.stage), at.parity ^ 1);
      pass(-1, 0);
    }
  }

  __device__ __forceinline__ void run() {
    if constexpr (kMask == MaskKind::kRuntime) {
      run_varlen();
    } else {
      run_dense();
    }
  }
  __device__ __forceinline__ void run_dense() {
    const int heads = params.heads_q / params.heads_kv;
    const int partials = ceil_div(params.seq_q, Spec::kStreamRows);
    for (int parity = 0;; parity ^= 1) {
      ptx::mbarrier_wait(shared.tile_full(0), parity);
      const Tile tile = read_tile<Tile>(shared.tile(0));
      if (tile.index < 0) break;
      ptx::mbarrier_wait(shared.own_full(0), parity);
      const int first_key = tile.index * Spec::kOwnRows;
      const bool has_second = first_key + 64 < params.seq_k;
      if (has_second) ptx::mbarrier_wait(shared.own_full(1), parity);
      const BlockRange all = query_blocks<Spec, kMask>(params, tile, first_key, first_key + Spec::kOwnRows);
      const int second_begin =
          has_second ? query_blocks<Spec, kMask>(params, tile, first_key + 64, first_key + 128).begin : all.end;
      const int first_partial = (tile.batch * params.heads_q + tile.head * heads) * partials;
      for (int i = all.begin; i < all.end; ++i) {
        const int at_block = is_descending<kMask>(tile) ? all.begin + all.end - 1 - i : i;
        const int rank = reduction_rank<Spec, kMask>(params, tile, at_block);
        for (int head = 0; head < heads; ++head) {
          block(first_partial + head * partials + at_block, rank, at_block >= second_begin);
        }
      }
    }
    end_sums();
  }
};

// One thread per buffer: adds its content to the partial in global memory once the semaphore has reached this tile's
// rank. Rank 0 stores, so the partials need no zeroing.
template <typename Spec, typename Mask>
__device__ __forceinline__ void add_sums(const BackwardParams& params, const FusedMemory<Spec>& shared, int buffer,
                                         const Mask& mask) {
  float* sums_gmem = static_cast<float*>(params.dq);
  const int64_t num_partials =
      Spec::kIsVarlen ? static_cast<int64_t>(params.heads_q) * dq_partials(params).count()
                      : static_cast<int64_t>(params.batch) * params.heads_q * ceil_div(params.seq_q, Spec::kStreamRows);
  auto* semaphores_gmem = reinterpret_cast<int32_t*>(sums_gmem + num_partials * (Spec::kQueryBytes / 4));
  for (int parity = 0;; parity ^= 1) {
    ptx::mbarrier_wait(shared.sums_full(buffer), parity);
    uint32_t words[4];
    ptx::ld_shared_128(words, shared.partial_record(buffer));
    const int partial = static_cast<int>(words[0]);
    if (partial < 0) break;
    const int rank = mask.rank_of(params, partial, static_cast<int>(words[1]));
    float* partial_gmem = sums_gmem + partial * static_cast<int64_t>(Spec::kQueryBytes / 4);
    ptx::semaphore_wait(semaphores_gmem + partial, rank);
    if (rank == 0) {
      ptx::bulk_store(partial_gmem, shared.query_sums(buffer), Spec::kQueryBytes);
    } else {
      ptx::bulk_reduce_add(partial_gmem, shared.query_sums(buffer), Spec::kQueryBytes);
    }
    ptx::tma_store_commit();
    // Hazard: the next block's dQ overwrites this one while it is read.
    ptx::tma_store_wait_read<0>();
    ptx::mbarrier_arrive(shared.sums_empty(buffer));
    // Hazard: the next tile adds before this sum is complete.
    ptx::tma_store_wait<0>();
    ptx::semaphore_release(semaphores_gmem + partial, rank + 1);
  }
}

template <typename Spec, MaskKind kMask = MaskKind::kRuntime, typename Mask = NoMask>
__device__ __forceinline__ void fused_gradient(const BackwardParams& params, const ptx::TensorMap& q_map,
                                               const ptx::TensorMap& k_map, const ptx::TensorMap& v_map,
                                               const ptx::TensorMap& dout_map, const ptx::TensorMap& dk_map,
                                               const ptx::TensorMap& dv_map, const Mask& mask = {}) {
  const FusedMemory<Spec> shared{ptx::dynamic_shared_memory()};
  const auto init = [&] {
#pragma unroll
    for (int buffer = 0; buffer < Spec::kQueryBuffers; ++buffer) {
      ptx::mbarrier_init(shared.scores_full(buffer), 4 * Spec::kNumConsumers);
      ptx::mbarrier_init(shared.scores_empty(buffer), 4);
      ptx::mbarrier_init(shared.sums_full(buffer), Spec::kIsWide ? 8 : 4);
      ptx::mbarrier_init(shared.sums_empty(buffer), 1);
    }
    if constexpr (Spec::kNumDrawers > 0) {
#pragma unroll
      for (int stage = 0; stage < Spec::kFirstStages; ++stage) {
        ptx::mbarrier_init(shared.drawn_full(stage), Spec::kNumDrawers);
        ptx::mbarrier_init(shared.drawn_empty(stage), 4 * Spec::kNumConsumers);
      }
    }
    init_barriers(shared);
  };
  const int warp = begin_warp(init, q_map, k_map, v_map, dout_map, dk_map, dv_map);
  const int warpgroup = warp / 4;
  ptx::grid_launch_dependents();  // fused_convert waits for its partial's semaphore

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Spec::kProducerRegisters>();
    if (warp == 0) {
      if constexpr (kMask == MaskKind::kRuntime) {
        produce_varlen_queries<Spec>(params, shared, q_map, k_map, v_map, dout_map, mask);
      } else {
        produce_queries<Spec, kMask>(params, shared, q_map, k_map, v_map, dout_map);
      }
    } else if (kMask == MaskKind::kRuntime && warp == Spec::kQueryBuffers + 1) {
      if constexpr (kMask == MaskKind::kRuntime) produce_varlen_statistics<Spec>(params, shared, 0);
    } else if (warp <= Spec::kSumBuffers && ptx::elect_one()) {
      add_sums(params, shared, warp - 1, mask);
    }
  } else if constexpr (Spec::kIsWide) {
    ptx::setmaxnreg_inc<Spec::kConsumerRegisters>();
    WideFusedConsumer<Spec, kMask, Mask>(params, shared, warpgroup - 1, mask).run(dk_map, dv_map);
  } else if (warpgroup == 3) {
    ptx::setmaxnreg_dec<Spec::kQueryRegisters>();
    FusedQueries<Spec, kMask>(params, shared).run();
  } else {
    ptx::setmaxnreg_inc<Spec::kConsumerRegisters>();
    FusedConsumer<Spec, kMask, Mask>(params, shared, warpgroup - 1, mask).run(dk_map, dv_map);
  }
}

template <typename Spec>
__device__ __forceinline__ void fused_gradient_mask(const MaskBackwardParams& params, const ptx::TensorMap& q_map,
                                                    const ptx::TensorMap& k_map, const ptx::TensorMap& v_map,
                                                    const ptx::TensorMap& dout_map, const ptx::TensorMap& dk_map,
                                                    const ptx::TensorMap& dv_map, const ptx::TensorMap& mask_map,
                                                    const ptx::TensorMap& gradient_map) {
  fused_gradient<Spec>(params.backward, q_map, k_map, v_map, dout_map, dk_map, dv_map,
                       StreamedMask{params, mask_map, gradient_map});
}

template <typename Spec>
__device__ __forceinline__ void fused_gradient_dropout(const DropoutBackwardParams& params, const ptx::TensorMap& q_map,
                                                       const ptx::TensorMap& k_map, const ptx::TensorMap& v_map,
                                                       const ptx::TensorMap& dout_map, const ptx::TensorMap& dk_map,
                                                       const ptx::TensorMap& dv_map) {
  static_assert(Spec::kHasDropout, "kernels without dropout take BackwardParams");
  fused_gradient<Spec>(params.backward, q_map, k_map, v_map, dout_map, dk_map, dv_map);
}

}  // namespace flashmoe::attention::backward::sm90
