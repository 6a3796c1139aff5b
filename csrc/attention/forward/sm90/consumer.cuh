// A consumer warpgroup: S = Q K^T, softmax, O += P V for 64 rows of Q, over the key blocks of its tile from the last to
// the first (the masked ones are the last, so that the loop over full blocks ends the tile).
//
// S of the next key block and O += P V of the current one are issued together; the softmax of the next block then runs
// while the tensor cores do P V, and while they work for the other warpgroups. Nothing makes the warpgroups take turns:
// named barriers for that (FlashAttention-3's ping-pong) gained nothing here.
#pragma once

#include "attention/forward/sm90/epilogue.cuh"
#include "attention/forward/sm90/schedule.cuh"
#include "attention/forward/sm90/softmax.cuh"
#include "attention/forward/sm90/spec.cuh"
#include "attention/masks.cuh"
#include "attention/sequences.cuh"
#include "device/math.cuh"
#include "device/persistent.cuh"
#include "device/ring.cuh"
#include "device/warpgroup_product.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/wgmma.cuh"

namespace flashmoe {
namespace attention {
namespace sm90 {

template <typename Spec, MaskKind kMask>
struct Consumer {
  using Element = typename Spec::Element;
  static constexpr int kScores = Spec::kBlockN / 2;         // accumulators a thread
  static constexpr int kProbabilities = Spec::kBlockN / 4;  // packed pairs a thread
  static constexpr int kOutputs = Spec::kHeadDim / 2;
  // Wait for K and V before either product, or for V while the tensor cores work on S. With four products in S (head
  // dim 64) and three warpgroups the wait in between starves the tensor cores: 5% slower. With more products, or a fourth
  // warpgroup, it costs nothing and what it delays is hidden: 1% faster.
  static constexpr bool kWaitsForBoth = Spec::kHeadDim == 64 && Spec::kNumConsumers < 4;

  const ForwardParams& params;
  const SharedMemory<Spec> shared;
  const int consumer;  // 0 to kNumConsumers - 1
  const bool is_first_lane;
  RingPosition<Spec::kNumStages> key;
  RingPosition<Spec::kNumStages> value;
  RingPosition<Spec::kNumQueryStages> query;

  __device__ __forceinline__ Consumer(const ForwardParams& params_, const SharedMemory<Spec>& shared_, int consumer_)
      : params(params_), shared(shared_), consumer(consumer_), is_first_lane(ptx::lane_index() == 0) {}

  // One arrival a warp: its wgmma_wait says that its own part of the product has read the buffer.
  __device__ __forceinline__ void release(ptx::Mbarrier* empty) const {
    if (is_first_lane) ptx::mbarrier_arrive(empty);
  }

  __device__ __forceinline__ void wait_key() const { ptx::mbarrier_wait(shared.key_full(key.stage), key.parity); }
  __device__ __forceinline__ void wait_value() const {
    ptx::mbarrier_wait(shared.value_full(value.stage), value.parity);
  }
  __device__ __forceinline__ void release_key() {
    release(shared.key_empty(key.stage));
    key.advance();
  }
  __device__ __forceinline__ void release_value() {
    release(shared.value_empty(value.stage));
    value.advance();
  }

  __device__ __forceinline__ void release_query() {
    release(shared.query_empty(query.stage, consumer));
    query.advance();
  }

  // scores[64 x kBlockN] = Q[64 x kHeadDim] K[kBlockN x kHeadDim]^T; asynchronous.
  __device__ __forceinline__ void issue_scores(float (&scores)[kScores]) const {
    issue_product<Element, Spec::kHeadDim / 16>(scores, shared.query(query.stage, consumer).k_major(),
                                                shared.key(key.stage).k_major());
  }

  // output[64 x kHeadDim] += P[64 x kBlockN] V[kBlockN x kHeadDim]; asynchronous.
  __device__ __forceinline__ void issue_output(float (&output)[kOutputs],
                                               uint32_t (&probabilities)[kProbabilities]) const {
    issue_product<Element, true>(output, probabilities, shared.value(value.stage).mn_major());
  }

  __device__ __forceinline__ void mask_block(float (&scores)[kScores], const Tile& tile, int block) const {
    const int row = tile.m_block * Spec::kBlockM + consumer * 64 + ptx::warp_index() % 4 * 16 + ptx::lane_index() / 4;
    const int first_key = block * Spec::kBlockN + ptx::lane_index() % 4 * 2;
    const Sequence<kMask> sequence(params, tile.batch);
    const int visible[2] = {visible_keys<kMask>(sequence, row).end - first_key,
                            visible_keys<kMask>(sequence, row + 8).end - first_key};
    mask_scores<Spec::kBlockN>(scores, visible);
  }

  // In: P of key block `block` + 1. Issues S of `block` and O += P V of the block before; out: P of `block`.
  template <bool kIsMasked>
  __device__ __forceinline__ void step(float (&output)[kOutputs], uint32_t (&probabilities)[kProbabilities],
                                       RowState& rows, const Tile& tile, int block) {
    float scores[kScores];
    wait_key();
    if constexpr (kWaitsForBoth) wait_value();
    issue_scores(scores);
    if constexpr (!kWaitsForBoth) wait_value();
    issue_output(output, probabilities);

    ptx::wgmma_wait<1>();
    ptx::wgmma_fence_operands(scores);
    release_key();
    if constexpr (kIsMasked) mask_block(scores, tile, block);
    float rescale[2];
    const bool moved = online_softmax<Spec::kBlockN, kIsMasked>(scores, rows, rescale, params.scale_log2);

    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operands(output);
    release_value();
    if (moved) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) output[i] *= rescale[(i / 2) % 2];
    }
    pack_operand<Element>(probabilities, scores);
  }

  // Passes over a key block that only rows of other warpgroups see. Elsewhere a product joins the lanes of a warp
  // between the wait and the release; here nothing else would keep the first lane from releasing a buffer that others
  // still wait for.
  __device__ __forceinline__ void skip_block() {
    wait_key();
    ptx::warp_sync();
    release_key();
    wait_value();
    ptx::warp_sync();
    release_value();
  }

  // The whole tile but the epilogue: key blocks range.end - 1 down to range.begin, of which this warpgroup sees those
  // before own_end, at least one.
  __device__ __forceinline__ void attend(const Tile& tile, const KeyRange& range, int own_end,
                                         float (&output)[kOutputs], RowState& rows) {
    for (int block = range.end; block > own_end; --block) skip_block();

    const int first_row = tile.m_block * Spec::kBlockM + consumer * 64;
    const int seen_by_all = visible_keys<kMask>(Sequence<kMask>(params, tile.batch), first_row).end / Spec::kBlockN;
    const int full_end = Spec::kIsSplit ? maximum(seen_by_all, range.begin) : seen_by_all;
    int block = own_end - 1;
    uint32_t probabilities[kProbabilities];
    {
      float scores[kScores];
      float rescale[2];
      wait_key();
      issue_scores(scores);
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operands(scores);
      release_key();
      if (block >= full_end) mask_block(scores, tile, block);
      online_softmax<Spec::kBlockN, true>(scores, rows, rescale, params.scale_log2);
      pack_operand<Element>(probabilities, scores);
    }

    for (--block; block >= full_end; --block) step<true>(output, probabilities, rows, tile, block);
    for (; block >= range.begin; --block) step<false>(output, probabilities, rows, tile, block);

    release_query();
    wait_value();
    issue_output(output, probabilities);
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operands(output);
    release_value();
  }

  __device__ __forceinline__ void run(const ptx::TensorMap& out_map) {
    while (true) {
      ptx::mbarrier_wait(shared.query_full(query.stage, consumer), query.parity);
      const Tile tile = read_tile<Tile>(shared.tile(query.stage, consumer));
      ptx::warp_sync();  // all lanes have read it before the first one can release it
      if (tile.m_block < 0) break;
      const int first_row = tile.m_block * Spec::kBlockM + consumer * 64;
      const KeyRange range = key_range<Spec, kMask>(params, tile);
      if (first_row >= params.seq_q) {
        // Rows past the end: nothing to compute or to store.
        release_query();
        for (int block = range.end; block > range.begin; --block) skip_block();
        continue;
      }
      const int blocks = key_blocks<Spec, kMask>(Sequence<kMask>(params, tile.batch), first_row + 64);
      const int own_end = Spec::kIsSplit ? minimum(blocks, range.end) : blocks;
      float output[kOutputs];
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) output[i] = 0.0f;
      RowState rows = {{ptx::negative_infinity(), ptx::negative_infinity()}, {0.0f, 0.0f}};
      if constexpr (Spec::kIsSplit) {
        if (own_end > range.begin) {
          attend(tile, range, own_end, output, rows);
        } else {
          // This share has no key that the warpgroup sees: zeros, and a log-sum-exp of -inf.
          release_query();
          for (int block = range.end; block > range.begin; --block) skip_block();
        }
        store_partial<Spec, kMask>(params, tile, consumer, output, rows);
      } else {
        attend(tile, range, own_end, output, rows);
        store_tile<Spec, kMask>(params, shared, out_map, tile, consumer, output, rows);
      }
    }
    // Hazard: the last store still reads the buffer when the block, and with it its shared memory, is gone.
    if constexpr (!Spec::kIsSplit) {
      if (ptx::thread_index() % 128 == 0) ptx::tma_store_wait_read<0>();
    }
  }
};

}  // namespace sm90
}  // namespace attention
}  // namespace flashmoe
