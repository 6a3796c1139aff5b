// A consumer warpgroup: S = Q K^T, softmax, O += P V for 64 rows of Q, over the key blocks of its tile in ascending
// order: a row's bits depend neither on how many keys other rows see nor on where its tile begins.
//
// S of the next key block and O += P V of the current one are issued together; the softmax of the next block then runs
// while the tensor cores do P V, and while they work for the other warpgroups. The warpgroups are not made to
// alternate: named barriers for that (FlashAttention-3's ping-pong) gained nothing here.
//
// Dense and ragged batches share this code. What differs is a policy: the Tile (schedule.cuh, varlen/schedule.cuh)
// locates rows and keys, and an argument of the step turns a block's scores into P.
#pragma once

#include "attention/forward/sm90/alibi.cuh"
#include "attention/forward/sm90/dropout.cuh"
#include "attention/forward/sm90/epilogue.cuh"
#include "attention/forward/sm90/schedule.cuh"
#include "attention/forward/sm90/score_mod.cuh"
#include "attention/forward/sm90/softcap.cuh"
#include "attention/forward/sm90/softmax.cuh"
#include "attention/forward/sm90/spec.cuh"
#include "attention/forward/sm90/varlen/codes.cuh"
#include "attention/masks.cuh"
#include "attention/scores.cuh"
#include "attention/sequences.cuh"
#include "attention/softmax.cuh"
#include "device/math.cuh"
#include "device/persistent.cuh"
#include "device/reduce.cuh"
#include "device/ring.cuh"
#include "device/warpgroup_product.cuh"
#include "ptx/barrier.cuh"
#include "ptx/elements.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/pairs.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/wgmma.cuh"

namespace flashmoe::attention::sm90 {

// Returns whether a warp has a mask value whose product with log2(e) may leave the range of float: finite and at most
// -2^127, in bfloat16 0xff00 to 0xff7f. With 0x80 added these are the largest 16-bit numbers, because infinity and NaN
// wrap around. In float16 these bits are NaN.
template <int kSteps>
__device__ __forceinline__ bool has_huge_values(const uint32_t (&values)[kSteps][4]) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 4 * kSteps; ++i) most = ptx::max_of_sum_u16x2(values[i / 4][i % 4], 0x00800080u, most);
  return ptx::vote_any((most & 0xffffu) >= 0xff80u || most >= 0xff800000u);
}

template <typename Spec, MaskKind kMask>
struct Consumer {
  using Element = typename Spec::Element;
  static constexpr int kScores = Spec::kBlockN / 2;         // accumulators per thread
  static constexpr int kProbabilities = Spec::kBlockN / 4;  // packed pairs per thread
  static constexpr int kOutputs = Spec::kValueDim / 2;
  // true: wait for K and V before either product; false: wait for V while the tensor cores work on S. With four
  // products in S (head dim 64) and three warpgroups the wait in between starves the tensor cores: 5% slower. With more
  // products, or a fourth warpgroup, it costs nothing and its delay is hidden: 1% faster.
  static constexpr bool kWaitsForBoth = Spec::kHeadDim == 64 && Spec::kNumConsumers < 4;
  static constexpr bool kIsRuntime = kMask == MaskKind::kRuntime;
  // A softcap without a mask tensor is part of the softmax, except in chunks: its loops would make the kernel 1.6 times
  // as long and spill, and with few rows the kernel waits for keys anyway.
  static constexpr bool kCapsInSoftmax = Spec::kHasScoreMod && !Spec::kIsFolded;
  static_assert(!kCapsInSoftmax || !ptx::kIsEither<Element>, "it depends on the type's range (softcap.cuh)");

  const ForwardParams& params;
  const SharedMemory<Spec> shared;
  const int consumer;  // 0 to kNumConsumers - 1
  const bool is_first_lane;
  RingPosition<Spec::kNumStages> key;
  RingPosition<Spec::kNumStages> value;
  RingPosition<Spec::kNumQueryStages> query;
  const bool is_capped;      // the call has only a softcap, which is part of the softmax
  bool has_output = false;   // there was a tile before this one (release_output)
  int part = 0;              // which part of the output's columns, if kValueParts > 1
  float scale_log2;          // of the softmax's input: with an additive mask the scores are scaled already
  float value_scale = 1.0f;  // scale of the tile's values, if they are codes
  float key_factor = 1.0f;   // the same for keys, before a softcap or a mask tensor; otherwise it is in scale_log2
  float slope = 0.0f;        // of the tile's head: read once, because every block would wait for it

  __device__ __forceinline__ Consumer(const ForwardParams& params_, const SharedMemory<Spec>& shared_, int consumer_)
      : params(params_),
        shared(shared_),
        consumer(consumer_),
        is_first_lane(ptx::lane_index() == 0),
        is_capped(kCapsInSoftmax && params_.score_options.mask_type == MaskTensor::kNone && params_.is_consistent == 0),
        scale_log2(Spec::kStreamsMask ||
                           (Spec::kHasScoreMod && params_.score_options.mask_type == MaskTensor::kAdditive)
                       ? 1.0f
                       : params_.scale_log2) {}

  // Dense kernels read it at each use, which costs no register.
  __device__ __forceinline__ float softmax_scale() const { return kIsRuntime ? scale_log2 : params.scale_log2; }

  // One arrival per warp: after its wgmma_wait the warp's share of the product has read the buffer.
  __device__ __forceinline__ void release(ptx::Mbarrier* empty) const {
    if (is_first_lane) ptx::mbarrier_arrive(empty);
  }

  __device__ __forceinline__ void wait_key() const {
    if constexpr (Spec::kKeyParts == 1) ptx::mbarrier_wait(shared.key_full(key.stage), key.parity);
  }
  __device__ __forceinline__ void wait_value() const {
    ptx::mbarrier_wait(shared.value_full(value.stage), value.parity);
  }
  __device__ __forceinline__ void release_key() {
    release(shared.key_empty(key.stage, Spec::kKeyParts - 1));
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
  // If the output overwrites Q: releases the buffer of the previous tile once its store has read it.
  __device__ __forceinline__ void release_output() {
    if constexpr (Spec::kHasOutputInQuery && Spec::kNumQueryStages == 2) {
      if (ptx::thread_index() % 128 == 0) ptx::tma_store_wait_read<0>();
      if (has_output) release(shared.query_empty(query.stage ^ 1, consumer));
      has_output = true;
    }
  }

  // The same with one stage of Q: releases the buffer once the store of this tile has read it.
  __device__ __forceinline__ void release_stored_query() {
    if (ptx::thread_index() % 128 == 0) ptx::tma_store_wait_read<0>();
    ptx::warp_sync();  // all lanes have read it before the first one can release it
    release_query();
  }

  // scores[64 x kBlockN] = Q[64 x kHeadDim] K[kBlockN x kHeadDim]^T; asynchronous. With K in parts it waits for each
  // part and releases all but the last.
  __device__ __forceinline__ void issue_scores(float (&scores)[kScores]) const {
    if constexpr (Spec::kKeyParts > 1) {
      constexpr int kSteps = Spec::kHeadDim / 16 / Spec::kKeyParts;
      const auto of_query = shared.query(query.stage, consumer).k_major();
      const auto of_key = shared.key(key.stage).k_major();
#pragma unroll
      for (int step = 0; step < Spec::kHeadDim / 16; ++step) {
        if (step % kSteps == 0) {
          ptx::mbarrier_wait(shared.key_full(key.stage, step / kSteps), key.parity);
          ptx::wgmma_fence();
        }
        ptx::wgmma_ss<Element, Spec::kBlockN, false>(scores, of_query.k_step(step), of_key.k_step(step),
                                                     step == 0 ? 0 : 1);
        if (step % kSteps != kSteps - 1) continue;
        ptx::wgmma_commit();
        if (step < kSteps) continue;
        ptx::wgmma_wait<1>();
        release(shared.key_empty(key.stage, step / kSteps - 1));
      }
      return;
    }
    issue_product<Element, Spec::kHeadDim / 16>(scores, shared.query(query.stage, consumer).k_major(),
                                                shared.key(key.stage).k_major());
  }

  // output[64 x kValueDim] += P[64 x kBlockN] V[kBlockN x kValueDim]; asynchronous.
  __device__ __forceinline__ void issue_output(float (&output)[kOutputs],
                                               uint32_t (&probabilities)[kProbabilities]) const {
    const auto tile = shared.value(value.stage);
    if constexpr (Spec::kNumWarps > 12 && Spec::kValueDim == 256) {
      // 512 threads start with 128 registers each, and an instruction with 128 accumulators needs more: two
      // instructions of 128 columns.
      const auto upper = SharedTile<Spec::kBlockN, 128>{tile.slab(2)}.mn_major();
      auto& halves = reinterpret_cast<float (&)[2][kOutputs / 2]>(output);
      ptx::wgmma_fence_operands(output);
      ptx::wgmma_fence_operands(probabilities);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kProbabilities / 4; ++step) {
        uint32_t* const p = &probabilities[4 * step];
        ptx::wgmma_rs<Element, 128, true>(halves[0], p[0], p[1], p[2], p[3], tile.mn_major().k_step(step), 1);
        ptx::wgmma_rs<Element, 128, true>(halves[1], p[0], p[1], p[2], p[3], upper.k_step(step), 1);
      }
      ptx::wgmma_commit();
      return;
    }
    issue_product<Element, true>(output, probabilities, tile.mn_major());
  }

  // The first of a thread's two rows in the tile's sequence; the other is 8 further on.
  __device__ __forceinline__ int thread_row(const Tile<kMask>& tile) const {
    return row_of_thread<Spec>(tile, consumer);
  }

  // Masks keys that a row does not see. After the score modification, so that -inf stays -inf.
  __device__ __forceinline__ void mask_block(float (&scores)[kScores], const Tile<kMask>& tile, int block) const {
    const int row = thread_row(tile);
    const int first_key = block * Spec::kBlockN + ptx::lane_index() % 4 * 2;
    const Sequence<kMask> sequence = tile.sequence(params);
    if constexpr (!kIsRuntime) {  // every row sees the first key
      const int visible[2] = {visible_keys<kMask>(sequence, row).end - first_key,
                              visible_keys<kMask>(sequence, row + 8).end - first_key};
      mask_scores<Spec::kBlockN>(scores, visible);
    } else {
      const KeyRange keys[2] = {visible_keys(sequence, position_of<Spec>(tile, row)),
                                visible_keys(sequence, position_of<Spec>(tile, row + 8))};
      const int visible[2] = {keys[0].end - first_key, keys[1].end - first_key};
      mask_scores<Spec::kBlockN>(scores, visible);
      if (params.score_options.left >= kUnbounded) return;
      const int hidden[2] = {keys[0].begin - first_key, keys[1].begin - first_key};
      mask_scores_before<Spec::kBlockN>(scores, hidden);
    }
  }

  __device__ __forceinline__ void scale_scores(float (&scores)[kScores]) const {
    if constexpr (Spec::kConvertsCodes && Spec::kHasScoreMod) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) scores[i] *= key_factor;
    }
  }

  __device__ __forceinline__ void cap_scores(float (&scores)[kScores]) const {
    if (params.score_options.score_factor <= 0.0f) return;
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] = capped_score(params.score_options, scores[i]);
  }

  // Per score: the softcap, if the call is consistent or has a mask tensor, then the mask tensor.
  __device__ __forceinline__ void modify_scores(float (&scores)[kScores], const Tile<kMask>& tile, int block) const {
    const ScoreOptions& options = params.score_options;
    cap_scores(scores);
    if (options.mask_type == MaskTensor::kNone) return;
    const int first_key = block * Spec::kBlockN + ptx::lane_index() % 4 * 2;
    const MaskReader<Element, Spec::kIsFolded> reader(options, tile, first_key, (block + 1) * Spec::kBlockN);
    const int row = thread_row(tile);
    if (options.mask_type == MaskTensor::kBool) {
      reader.template hide<Spec::kBlockN>(scores, row);
    } else {
      reader.template add<Spec::kBlockN>(scores, row, params.scale_log2, options.mask_factor * params.scale_log2);
    }
  }

  // Adds the mask tile that shares a stage with K, then releases the stage.
  __device__ __forceinline__ void add_streamed_mask(float (&scores)[kScores]) {
    if constexpr (Spec::kStreamsMask) {
      const ScoreOptions& options = params.score_options;
      const float value_factor = options.mask_factor * params.scale_log2;
      const auto tile = shared.mask(key.stage, consumer);
      const int lane = ptx::lane_index();
      const int row = ptx::warp_index() % 4 * 16 + lane % 16;
      constexpr int kSteps = 2;  // steps of 16 keys at a time; all four of a block would spill at D=128
#pragma unroll
      for (int first_step = 0; first_step < Spec::kBlockN / 16; first_step += kSteps) {
        uint32_t values[kSteps][4];  // 8 keys of the first 8 rows, and of the other 8; then the next 8 keys
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          const int step = first_step + i;
          ptx::ldmatrix_x4(values[i], tile.chunk(row, step / 4, step % 4 * 2 + lane / 16));
        }
        const auto add = [&](const auto& sum) {
#pragma unroll
          for (int i = 0; i < 4 * kSteps; ++i) {
            const float2 both = unpack<Element>(values[i / 4][i % 4]);
            float* first = &scores[8 * (first_step + i / 4) + i % 4 / 2 * 4 + i % 2 * 2];
            sum(first[0], both.x);
            sum(first[1], both.y);
          }
        };
        if (has_huge_values(values)) {
          add([&](float& score, float value) { add_mask_value(score, value, params.scale_log2, value_factor); });
        } else {  // the same bits
          add([&](float& score, float value) { score = ptx::fma_rn(score, params.scale_log2, value * value_factor); });
        }
      }
      // Hazard: the compiler schedules uses of the last values after the arrival, which waits for no load, and TMA
      // writes the next mask over them.
      ptx::fence_proxy_async_shared();
      ptx::warp_sync();  // all lanes have read it before the first one can release it
      release_key();
    }
  }

  // Applies the softcap, then ALiBi.
  __device__ __forceinline__ RisingRows apply_alibi(float (&scores)[kScores], const Tile<kMask>& tile,
                                                    int block) const {
    cap_scores(scores);
    return add_alibi<typename Spec::Element, Spec::kBlockN>(
        scores, params, slope, diagonal_key(tile.sequence(params), thread_row(tile)), block);
  }

  __device__ __forceinline__ Softcap softcap() const {
    return Softcap{params.score_options.score_factor, params.scale_log2};
  }

  // Policies of a step: how a block's scores become P. They return whether the maximum moved; the output must then be
  // multiplied by `rescale`. (Functors instead of lambdas over a step's variables, which would stay in memory while the
  // compiler orders sums.)
  template <bool kIsMasked>
  struct Plain {
    static __device__ __forceinline__ bool apply(const Consumer& to, float (&scores)[kScores], RowState& rows,
                                                 float (&rescale)[2], const Tile<kMask>& tile, int block, bool) {
      if constexpr (kIsMasked) to.mask_block(scores, tile, block);
      return online_softmax<Spec::kBlockN, kIsMasked>(scores, rows, rescale, to.softmax_scale());
    }
  };
  template <bool kIsMasked>
  struct Softcapped {
    static __device__ __forceinline__ bool apply(const Consumer& to, float (&scores)[kScores], RowState& rows,
                                                 float (&rescale)[2], const Tile<kMask>& tile, int block, bool) {
      if constexpr (kIsMasked) to.mask_block(scores, tile, block);
      return capped_softmax<Element, Spec::kBlockN, kIsMasked>(scores, rows, rescale, to.softcap());
    }
  };
  struct Modified {
    static __device__ __forceinline__ bool apply(const Consumer& to, float (&scores)[kScores], RowState& rows,
                                                 float (&rescale)[2], const Tile<kMask>& tile, int block,
                                                 bool is_masked) {
      to.scale_scores(scores);
      to.modify_scores(scores, tile, block);
      if (is_masked) to.mask_block(scores, tile, block);
      return online_softmax<Spec::kBlockN, true>(scores, rows, rescale, to.scale_log2);
    }
  };

  struct Streamed {
    static __device__ __forceinline__ bool apply(Consumer& to, float (&scores)[kScores], RowState& rows,
                                                 float (&rescale)[2], const Tile<kMask>& tile, int block,
                                                 bool is_masked) {
      to.add_streamed_mask(scores);
      if (is_masked) to.mask_block(scores, tile, block);
      return online_softmax<Spec::kBlockN, true>(scores, rows, rescale, to.scale_log2);
    }
  };

  template <bool kIsMasked>
  struct WithAlibi {
    static __device__ __forceinline__ bool apply(const Consumer& to, float (&scores)[kScores], RowState& rows,
                                                 float (&rescale)[2], const Tile<kMask>& tile, int block, bool) {
      const RisingRows rising = to.apply_alibi(scores, tile, block);
      if constexpr (kIsMasked) to.mask_block(scores, tile, block);
      return rising_softmax<Spec::kBlockN, kIsMasked>(scores, rows, rescale, to.scale_log2, rising);
    }
  };

  // In: P of key block `block` - 1. Issues S of `block` and O += P V of the previous block. Out: P of `block`.
  template <typename Policy>
  __device__ __forceinline__ void step(float (&output)[kOutputs], uint32_t (&probabilities)[kProbabilities],
                                       RowState& rows, const TileDropout<Spec>& dropout, const Tile<kMask>& tile,
                                       int block, bool is_masked = true) {
    float scores[kScores];
    wait_key();
    if constexpr (kWaitsForBoth) wait_value();
    issue_scores(scores);
    if constexpr (!kWaitsForBoth) wait_value();
    issue_output(output, probabilities);

    ptx::wgmma_wait<1>();
    ptx::wgmma_fence_operands(scores);
    if constexpr (!Spec::kStreamsMask) release_key();
    float rescale[2];
    const bool moved = Policy::apply(*this, scores, rows, rescale, tile, block, is_masked);
    const auto drawn = dropout.draw_early(block);

    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operands(output);
    release_value();
    if (moved) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) output[i] *= rescale[(i / 2) % 2];
    }
    pack_operand<Element>(probabilities, scores);
    dropout.drop(probabilities, block, drawn);
  }

  // Skips a key block that only rows of other warpgroups see. Elsewhere a product synchronises the lanes of a warp
  // between the wait and the release; here nothing else would keep the first lane from releasing a buffer that others
  // still wait for.
  __device__ __forceinline__ void skip_block() {
#pragma unroll
    for (int of_key = 0; of_key < Spec::kKeyParts; ++of_key) {
      ptx::mbarrier_wait(shared.key_full(key.stage, of_key), key.parity);
      ptx::warp_sync();
      if (of_key < Spec::kKeyParts - 1) release(shared.key_empty(key.stage, of_key));
    }
    release_key();
    wait_value();
    ptx::warp_sync();
    release_value();
  }

  __device__ __forceinline__ void skip_blocks(int begin, int end) {
    for (int block = begin; block < end; ++block) skip_block();
  }

  // Blocks of the tile that this warpgroup's rows see: at least one of the range, except with splits.
  __device__ __forceinline__ KeyRange own_blocks(const Sequence<kMask>& sequence, int first_row, const KeyRange& range,
                                                 int rows = 64) const {
    const KeyRange seen = seen_blocks<Spec, kMask>(sequence, first_row, first_row + rows);
    if constexpr (Spec::kIsSplit) return KeyRange{range.begin, maximum(range.begin, minimum(seen.end, range.end))};
    if constexpr (!kIsRuntime) return KeyRange{range.begin, seen.end};
    const int begin = maximum(range.begin, minimum(seen.begin, range.end - 1));
    return KeyRange{begin, maximum(begin + 1, minimum(seen.end, range.end))};
  }

  // full: blocks of which every row of the warpgroup sees all keys.
  static __device__ __forceinline__ bool needs_mask(const KeyRange& full, int block) {
    return block >= full.end || (kIsRuntime && block < full.begin);
  }

  // Everything but the epilogue of a tile: skips the key blocks of `range` before `own`, then computes this warpgroup's
  // blocks `own`.
  __device__ __forceinline__ void attend(const Tile<kMask>& tile, const KeyRange& range, const KeyRange& own,
                                         int first_row, float (&output)[kOutputs], RowState& rows,
                                         float (&sink_log2)[2]) {
    const Sequence<kMask> sequence = tile.sequence(params);
    skip_blocks(range.begin, own.begin);

    const int last_row = minimum(first_row + position_of<Spec>(tile, 64), tile.num_rows(params)) - 1;
    const KeyRange full{ceil_div(visible_keys<kMask>(sequence, last_row).begin, Spec::kBlockN),
                        visible_keys<kMask>(sequence, first_row).end / Spec::kBlockN};
    int block = own.begin;
    const TileDropout<Spec> dropout(params, tile, thread_row(tile));
    if constexpr (Spec::kHasAlibi) {
      slope = alibi_slope(params.score_options, params.score_options.mask_factor, tile.batch, tile.head, 0);
    }
    uint32_t probabilities[kProbabilities];
    {
      float scores[kScores];
      float rescale[2];
      wait_key();
      issue_scores(scores);
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operands(scores);
      if constexpr (!Spec::kStreamsMask) release_key();
      release_output();
      add_streamed_mask(scores);
      if constexpr (Spec::kHasScoreMod) {
        scale_scores(scores);
        if (!is_capped) modify_scores(scores, tile, block);
      }
      RisingRows rising{};
      if constexpr (Spec::kHasAlibi) rising = apply_alibi(scores, tile, block);
      if (needs_mask(full, block)) mask_block(scores, tile, block);
      if constexpr (Spec::kHasAlibi) {
        rising_softmax<Spec::kBlockN, true>(scores, rows, rescale, scale_log2, rising);
      } else if (is_capped) {
        if constexpr (kCapsInSoftmax) capped_softmax<Element, Spec::kBlockN, true>(scores, rows, rescale, softcap());
      } else {
        online_softmax<Spec::kBlockN, true>(scores, rows, rescale, softmax_scale());
      }
      pack_operand<Element>(probabilities, scores);
      dropout.drop(probabilities, block);
    }

    // Blocks that need no mask have their own loop: in a common loop they would be an eighth slower.
    if constexpr (!kIsRuntime) {
      const int plain_end = minimum(own.end, full.end);
      for (++block; block < plain_end; ++block) step<Plain<false>>(output, probabilities, rows, dropout, tile, block);
      for (; block < own.end; ++block) step<Plain<true>>(output, probabilities, rows, dropout, tile, block);
    } else {
      ++block;
      // A window has masked blocks at both ends.
      const int plain_end = minimum(own.end, full.end);
      const auto steps = [&](auto masked, auto plain) {
        while (block < own.end) {
          if (needs_mask(full, block)) {
            masked();
            ++block;
            continue;
          }
          do plain();
          while (++block < plain_end);
        }
      };
      if constexpr (Spec::kHasAlibi) {
        steps([&] { step<WithAlibi<true>>(output, probabilities, rows, dropout, tile, block); },
              [&] { step<WithAlibi<false>>(output, probabilities, rows, dropout, tile, block); });
      } else if constexpr (Spec::kStreamsMask) {
        for (; block < own.end; ++block) {
          step<Streamed>(output, probabilities, rows, dropout, tile, block, needs_mask(full, block));
        }
      } else if constexpr (!Spec::kHasScoreMod) {
        steps([&] { step<Plain<true>>(output, probabilities, rows, dropout, tile, block); },
              [&] { step<Plain<false>>(output, probabilities, rows, dropout, tile, block); });
      } else if (is_capped) {
        if constexpr (kCapsInSoftmax) {
          steps([&] { step<Softcapped<true>>(output, probabilities, rows, dropout, tile, block); },
                [&] { step<Softcapped<false>>(output, probabilities, rows, dropout, tile, block); });
        }
      } else {
        for (; block < own.end; ++block) {
          step<Modified>(output, probabilities, rows, dropout, tile, block, needs_mask(full, block));
        }
      }
    }
    // Loaded before the last product, which hides the latency.
    if constexpr (Spec::kIsFolded) {
      load_folded_sinks(params, tile, thread_row(tile), sink_log2);
    } else if constexpr (kIsRuntime) {
      load_sinks(params, tile, thread_row(tile), sink_log2);
    }
    if constexpr (!Spec::kHasOutputInQuery) release_query();
    wait_value();
    issue_output(output, probabilities);
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operands(output);
    release_value();
  }

  // Rows of Q past the end of a ragged sequence belong to the next one. With a softcap, whose form a warp chooses for
  // all its rows, they are set to zero, so that no result depends on them.
  __device__ __forceinline__ void clear_query_tail(const Tile<kMask>& tile, int first_row) const {
    const int rows = tile.rows - first_row;
    if (rows >= 64 || params.sequences.cu_seqlens_q == nullptr) return;
    const auto query_rows = shared.query(query.stage, consumer);
    const uint32_t zeros[4] = {0, 0, 0, 0};
    const int thread = ptx::thread_index() % 128;
    for (int row = rows + thread / 8; row < 64; row += 16) {
#pragma unroll
      for (int slab = 0; slab < Spec::kNumSlabs; ++slab) {
        ptx::st_shared_128(query_rows.row(row, slab) + thread % 8 * 16, zeros);
      }
    }
    // Hazard: the tensor cores read Q before all of it is cleared and visible to them.
    ptx::fence_proxy_async_shared();
    sync_consumer(consumer);
  }

  // For a cache of codes.
  __device__ __forceinline__ void read_scales(const Tile<kMask>& tile) {
    const int kv_head = folding_of(tile).kv_head;
    const float factor = score_factor(scale_of(of_codes(params).k_scale, tile.batch, kv_head));
    if constexpr (Spec::kHasScoreMod) {
      key_factor = factor;
    } else {
      scale_log2 = params.scale_log2 * factor;
    }
    value_scale = scale_of(of_codes(params).v_scale, tile.batch, kv_head);
  }

  __device__ __forceinline__ void run(const ptx::TensorMap& out_map) {
    while (true) {
      ptx::mbarrier_wait(shared.query_full(query.stage, consumer), query.parity);
      auto tile = read_tile<Tile<kMask>>(shared.tile(query.stage, consumer));
      ptx::warp_sync();  // all lanes have read it before the first one can release it
      if (tile.m_block < 0) break;
      if constexpr (Spec::kValueParts > 1) {
        part = tile.head % Spec::kValueParts;
        tile.head /= Spec::kValueParts;
      }
      if constexpr (Spec::kConvertsCodes) read_scales(tile);
      const int first_row = position_of<Spec>(tile, tile.m_block * Spec::kBlockM + consumer * 64);
      const KeyRange range = tile.template key_blocks<Spec>(params);
      if (first_row >= tile.num_rows(params)) {
        // Rows past the end: nothing to compute or to store.
        if constexpr (Spec::kHasOutputInQuery && Spec::kNumQueryStages == 2) {
          release_output();
          query.advance();
        } else {
          release_query();
        }
        skip_blocks(range.begin, range.end);
        continue;
      }
      if constexpr (kCapsInSoftmax) {
        if (is_capped) clear_query_tail(tile, first_row);
      }
      float output[kOutputs];
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) output[i] = 0.0f;
      RowState rows = {{ptx::negative_infinity(), ptx::negative_infinity()}, {0.0f, 0.0f}};
      float sink_log2[2];
      const KeyRange own = own_blocks(tile.sequence(params), first_row, range, position_of<Spec>(tile, 64));
      if (!Spec::kIsSplit || own.end > range.begin) {
        attend(tile, range, own, first_row, output, rows, sink_log2);
      } else {
        // No row of the warpgroup sees a key of this split: zeros, and a log-sum-exp of -inf.
        release_query();
      }
      float inverse_sum[2];
      float lse[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float sum = quad_sum(rows.sum[r]);
        const float shift = is_capped ? softcap().exponent_of_max(rows.max[r]) : rows.max[r] * softmax_scale();
        const FinishedRow finished = kIsRuntime ? finish_row(shift, sum, sink_log2[r]) : finish_row(shift, sum);
        inverse_sum[r] = finished.inverse;
        if constexpr (kCapsInSoftmax && kHasRangeOfFloat<Element>) {
          // With a single key, P need not be a power of two: correct the factor by the error with which P is rounded.
          const KeyRange seen = visible_keys(tile.sequence(params), position_of<Spec>(tile, thread_row(tile) + 8 * r));
          if (is_capped && seen.end - seen.begin == 1) {
            inverse_sum[r] *= sum * ptx::rcp_approx(unpack<Element>(pack<Element>(sum, sum)).x);
          }
        }
        if constexpr (Spec::kHasDropout) inverse_sum[r] *= dropout_of(params).scale;
        if constexpr (Spec::kConvertsCodes) inverse_sum[r] *= value_scale;
        lse[r] = finished.lse;
      }
      if constexpr (Spec::kIsFolded) {
        store_folded_lse<Spec>(params, tile, consumer, lse);
      } else if (Spec::kValueParts == 1 || part == 0) {
        store_lse<Spec>(params, tile, consumer, lse);
      }
      if (Spec::kIsFolded && params.num_splits > 1) {
        if constexpr (Spec::kIsFolded) store_folded_partial<Spec>(params, tile, consumer, output, inverse_sum);
      } else if constexpr (Spec::kIsSplit) {
        store_partial<Spec>(params, tile, consumer, output, inverse_sum);
      } else {
        store_tile<Spec>(params, shared, out_map, tile, query.stage, consumer, output, inverse_sum,
                         Spec::kValueParts == 1 ? 0 : part * Spec::kValueDim);
      }
      if constexpr (Spec::kHasOutputInQuery && Spec::kNumQueryStages == 2) query.advance();
      if constexpr (Spec::kHasOutputInQuery && Spec::kNumQueryStages == 1) release_stored_query();
      skip_blocks(own.end, range.end);
    }
    // Hazard: the last store still reads the buffer when the block exits and its shared memory is freed.
    if constexpr (!Spec::kIsSplit) {
      if (ptx::thread_index() % 128 == 0) ptx::tma_store_wait_read<0>();
    }
  }
};

}  // namespace flashmoe::attention::sm90
