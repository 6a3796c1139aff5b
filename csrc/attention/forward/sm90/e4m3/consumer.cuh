// A consumer warpgroup of the e4m3 kernels: the 16-bit one (../consumer.cuh) with products of 8-bit floats.
//
// P is rounded to e4m3 when it becomes the operand of P V (softmax.cuh). Row sums add unrounded values, so the
// log-sum-exp is that of the scores.
//
// The tensor cores accumulate products of 8-bit floats with about 14 bits. So P V of each block has its own
// accumulators, which are added to the output in float32.
#pragma once

#include "attention/forward/sm90/consumer.cuh"
#include "attention/forward/sm90/e4m3/softmax.cuh"
#include "attention/forward/sm90/e4m3/spec.cuh"
#include "attention/params/e4m3.h"
#include "ptx/wgmma_e4m3.cuh"

namespace flashmoe::attention::sm90 {

// Loads the scale of a row of a head, times its factor.
__device__ __forceinline__ float load_scale(const BlockScale& scale, int batch, int head, int row) {
  if (scale.values == nullptr) return scale.factor;
  const float* head_gmem = scale.values + batch * scale.stride + head * scale.head_stride;
  return scale.factor * ptx::ld_global_float(head_gmem + (row >> scale.block_shift) * scale.block_stride);
}

template <typename Spec, MaskKind kMask>
struct E4m3Consumer : Consumer<Spec, kMask> {
  using Base = Consumer<Spec, kMask>;
  static constexpr int kScores = Spec::kBlockN / 2;
  static constexpr int kProbabilities = Spec::kBlockN / 8;  // words of four
  static constexpr int kOutputs = Spec::kHeadDim / 2;
  static constexpr int kPartials = Spec::kPartialColumns / 2;

  const E4m3AttentionParams& codes;

  __device__ __forceinline__ E4m3Consumer(const E4m3AttentionParams& params_, const SharedMemory<Spec>& shared_,
                                          int consumer_)
      : Base(params_.forward, shared_, consumer_), codes(params_) {}

  // scores[64 x kBlockN] = Q K^T; asynchronous.
  __device__ __forceinline__ void issue_scores(float (&scores)[kScores]) const {
    const auto q = this->shared.query(this->query.stage, this->consumer).k_major();
    const auto k = this->shared.key(this->key.stage).k_major();
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Spec::kHeadDim / 32; ++step) {
      ptx::wgmma_e4m3_n128(scores, q.k_step(step), k.k_step(step), step == 0 ? 0 : 1);
    }
    ptx::wgmma_commit();
  }

  // partial = P V of one block, columns from `column` on; asynchronous.
  __device__ __forceinline__ void issue_partial(float (&partial)[kPartials], uint32_t (&probabilities)[kProbabilities],
                                                int column) {
    const auto v = this->shared.value(this->key.stage).k_major();
    ptx::wgmma_fence_operands(probabilities);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Spec::kBlockN / 32; ++step) {
      const uint32_t* p = &probabilities[4 * step];
      ptx::wgmma_e4m3_rs<Spec::kPartialColumns>(partial, p[0], p[1], p[2], p[3], v.k_step(step, column),
                                                step == 0 ? 0 : 1);
    }
    ptx::wgmma_commit();
  }

  static __device__ __forceinline__ void add_partial(float (&output)[kOutputs], const float (&partial)[kPartials],
                                                     const float (&factor)[2], int column) {
#pragma unroll
    for (int i = 0; i < kPartials; ++i) {
      float& sum = output[column / 2 + i];
      sum = ptx::fma_rn(partial[i], factor[i / 2 % 2], sum);
    }
  }

  // The accumulator layout of 32 keys is the operand layout of a k step that counts keys in the order of transposed V
  // (transpose.cuh).
  static __device__ __forceinline__ void pack_probabilities(uint32_t (&probabilities)[kProbabilities],
                                                            const float (&scores)[kScores]) {
#pragma unroll
    for (int i = 0; i < kProbabilities; ++i) {
      const float* d = &scores[i / 2 * 8 + i % 2 * 2];  // two blocks of 8 keys; rows g and g + 8 alternate
      probabilities[i] = ptx::pack_four_e4m3(d[0], d[1], d[4], d[5]);
    }
  }

  // Each block of keys is finished before the next, V after K, so one position is enough for both rings; the warpgroups
  // hide each other's waits.
  __device__ __forceinline__ void wait_value() const {
    ptx::mbarrier_wait(this->shared.value_full(this->key.stage), this->key.parity);
  }
  __device__ __forceinline__ void release_key() const { this->release(this->shared.key_empty(this->key.stage)); }
  __device__ __forceinline__ void release_value() {
    this->release(this->shared.value_empty(this->key.stage));
    this->key.advance();
  }
  // As in the 16-bit kernels.
  __device__ __forceinline__ void skip_blocks(int begin, int end) {
    for (int block = begin; block < end; ++block) {
      this->wait_key();
      ptx::warp_sync();
      release_key();
      wait_value();
      ptx::warp_sync();
      release_value();
    }
  }

  __device__ __forceinline__ void compute_scores(float (&scores)[kScores]) {
    this->wait_key();
    issue_scores(scores);
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operands(scores);
    release_key();
  }

  __device__ __forceinline__ void add_values(float (&output)[kOutputs], uint32_t (&probabilities)[kProbabilities],
                                             const float (&factor)[2]) {
    wait_value();
#pragma unroll
    for (int column = 0; column < Spec::kHeadDim; column += Spec::kPartialColumns) {
      float partial[kPartials];
      issue_partial(partial, probabilities, column);
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operands(partial);
      add_partial(output, partial, factor, column);
      // The accumulators of the next columns reuse these registers.
      if constexpr (Spec::kPartialColumns < Spec::kHeadDim) ptx::wgmma_fence_operands(output);
    }
    release_value();
  }

  static __device__ __forceinline__ void rescale_output(float (&output)[kOutputs], const float (&rescale)[2]) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) output[i] *= rescale[i / 2 % 2];
  }

  // From here to attend_blocks: loops for scales of blocks, in kernels that no call with such scales runs
  // (kKeepsLoops). They stay because ptxas makes the loops without scales 2 to 9% slower if they are missing (H200,
  // D=128 and 256).
  //
  // The scale of a block's keys or values. The tile is read from shared memory again, so that it occupies no register.
  __device__ __forceinline__ float load_block_scale(const BlockScale& scale, int key) const {
    const auto tile = read_tile<Tile<kMask>>(this->shared.tile(this->query.stage, this->consumer));
    return load_scale(scale, tile.batch, tile.head / heads_per_key_head(this->params),
                      minimum(key, this->params.seq_k - 1));
  }

  // If keys have scales of blocks: loads the scale of each 64 keys while registers are free. The scores are multiplied
  // by them later.
  static constexpr int kKeyScales = Spec::kBlockN / 64;
  __device__ __forceinline__ void load_key_scales(float (&scales)[kKeyScales], int block) const {
#pragma unroll
    for (int i = 0; i < kKeyScales; ++i) {
      scales[i] =
          codes.k_scale.block_shift == 0 ? 1.0f : load_block_scale(codes.k_scale, block * Spec::kBlockN + i * 64);
    }
  }
  // A negative scale gives NaN.
  static __device__ __forceinline__ void scale_keys(float (&scores)[kScores], const float (&scales)[kKeyScales]) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const float scale = scales[i / 32];
      scores[i] *= scale < 0.0f ? ptx::bits_float(0x7fffffffu) : scale;
    }
  }

  // kHasBlocks: keys or values have a scale for each block of rows. Such calls have their own loops.
  template <bool kIsMasked, bool kHasBlocks>
  __device__ __forceinline__ void attend_block(float (&output)[kOutputs], RowState& rows, float scale_log2,
                                               const Tile<kMask>& tile, int block) {
    uint32_t probabilities[kProbabilities];
    float factor[2];
    {
      float scores[kScores];
      float key_scales[kKeyScales];
      if constexpr (kHasBlocks) load_key_scales(key_scales, block);
      compute_scores(scores);
      if constexpr (kHasBlocks) scale_keys(scores, key_scales);
      if constexpr (kIsMasked) this->mask_block(scores, Spec::kIsTight ? read_own_tile() : tile, block);
      float rescale[2];
      if (block_softmax<Spec::kBlockN, kIsMasked>(scores, rows, factor, rescale, scale_log2)) {
        rescale_output(output, rescale);
      }
      pack_probabilities(probabilities, scores);
    }
    if (kHasBlocks && codes.v_scale.block_shift != 0) {
      const float scale = load_block_scale(codes.v_scale, block * Spec::kBlockN);
      factor[0] *= scale;
      factor[1] *= scale;
    }
    add_values(output, probabilities, factor);
  }

  template <bool kHasBlocks>
  __device__ __forceinline__ void attend_blocks(float (&output)[kOutputs], RowState& rows, float scale_log2,
                                                const Tile<kMask>& tile, int block, int plain_end, int end) {
    for (; block < plain_end; ++block) attend_block<false, kHasBlocks>(output, rows, scale_log2, tile, block);
    for (; block < end; ++block) attend_block<true, kHasBlocks>(output, rows, scale_log2, tile, block);
  }

  // The scales of kScaleBlocks key blocks of a tile's key head, without their factors: each lane has the scale of 64
  // keys and that of one block's values.
  static constexpr int kScaleBlocks = 16;
  struct BlockScales {
    const float* k_gmem;
    const float* v_gmem;
    int end;  // end of the blocks that the tile sees
    int first;
    float of_keys;
    float of_values;
    float least;  // smallest scale of keys: if it is negative the tile becomes NaN
  };
  static __device__ __forceinline__ const float* scales_of_head(const BlockScale& scale, int batch, int kv_head) {
    return scale.block_shift == 0 ? nullptr : scale.values + (batch * scale.stride + kv_head * scale.head_stride);
  }
  // Issued before the scores are computed, because they are used after that.
  __device__ __forceinline__ void load_scales(BlockScales& of, int block) const {
    const BlockScale &k = codes.k_scale, &v = codes.v_scale;
    const int lane = ptx::lane_index();
    const int end = minimum(of.end * Spec::kBlockN, this->params.seq_k);
    const int key = block * Spec::kBlockN + lane * 64, value = (block + lane) * Spec::kBlockN;
    of.first = block;
    of.of_keys = of.of_values = 1.0f;
    if (of.k_gmem != nullptr && key < end) {
      of.of_keys = ptx::ld_global_float(of.k_gmem + (key >> k.block_shift) * k.block_stride);
    }
    if (of.v_gmem != nullptr && value < end) {
      of.of_values = ptx::ld_global_float(of.v_gmem + (value >> v.block_shift) * v.block_stride);
    }
  }
  // The factor that the loops leave to the tile's end. In kernels without such loops 1, as when they were timed.
  static __device__ __forceinline__ float factor_of_blocks(const BlockScale& scale) {
    return Spec::kHasBlockScales ? scale.factor : 1.0f;
  }

  template <bool kIsMasked>
  __device__ __forceinline__ void attend_scaled_block(float (&output)[kOutputs], RowState& rows, float scale_log2,
                                                      const Tile<kMask>& tile, BlockScales& of, int block) {
    uint32_t probabilities[kProbabilities];
    float factor[2];
    {
      float scores[kScores];
      if (block == of.first + kScaleBlocks) load_scales(of, block);
      compute_scores(scores);
      constexpr float kLeastFactor = 1e-37f;  // for a scale of zero: hidden scores stay -inf
      of.least = ptx::min_nan(of.least, of.of_keys);
      const float own_factor = ptx::max_ftz(of.of_keys * scale_log2, kLeastFactor);
      float factors[kKeyScales];  // from scores to exponents
#pragma unroll
      for (int i = 0; i < kKeyScales; ++i) {
        factors[i] = ptx::shuffle_index(own_factor, (block - of.first) * kKeyScales + i);
      }
      if constexpr (kIsMasked) this->mask_block(scores, Spec::kIsTight ? read_own_tile() : tile, block);
      float rescale[2];
      if (scaled_block_softmax<Spec::kBlockN, kIsMasked>(scores, rows, factor, rescale, factors)) {
        rescale_output(output, rescale);
      }
      pack_probabilities(probabilities, scores);
    }
    const float of_values = ptx::shuffle_index(of.of_values, block - of.first);
    factor[0] *= of_values;
    factor[1] *= of_values;
    add_values(output, probabilities, factor);
  }

  __device__ __forceinline__ Tile<kMask> read_own_tile() const {
    return read_tile<Tile<kMask>>(this->shared.tile(this->query.stage, this->consumer));
  }

  __device__ __forceinline__ void run(const ptx::TensorMap& out_map) {
    const ForwardParams& params = this->params;
    while (true) {
      ptx::mbarrier_wait(this->shared.query_full(this->query.stage, this->consumer), this->query.parity);
      auto tile = read_own_tile();
      ptx::warp_sync();  // all lanes have read it before the first one can release it
      if (tile.m_block < 0) break;
      const int first_row = tile.m_block * Spec::kBlockM + this->consumer * 64;
      KeyRange range = tile.template key_blocks<Spec>(params);
      if (first_row >= tile.num_rows(params)) {
        this->release_query();
        skip_blocks(range.begin, range.end);
        continue;
      }
      int kv_head = tile.head / heads_per_key_head(params);
      // With a positive scale the maximum of the products is that of the scores. A scale of zero is replaced by
      // kLeastScale, so that scores of hidden keys stay -inf.
      const float key_scale = codes.k_scale.block_shift == 0 ? load_scale(codes.k_scale, tile.batch, kv_head, 0)
                                                             : factor_of_blocks(codes.k_scale);
      const float scale = load_scale(codes.q_scale, tile.batch, tile.head, first_row) * key_scale * params.scale_log2;
      const float scale_log2 = scale == 0.0f ? kLeastScale : scale < 0.0f ? ptx::bits_float(0x7fffffffu) : scale;
      float output[kOutputs];
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) output[i] = 0.0f;
      RowState rows = {{ptx::negative_infinity(), ptx::negative_infinity()}, {0.0f, 0.0f}};
      const KeyRange own = this->own_blocks(tile.sequence(params), first_row, range);
      const int plain_end = minimum(own.end, visible_keys<kMask>(tile.sequence(params), first_row).end / Spec::kBlockN);
      if constexpr (Spec::kHasBlockScales) {
        BlockScales of;
        of.k_gmem = scales_of_head(codes.k_scale, tile.batch, kv_head);
        of.v_gmem = scales_of_head(codes.v_scale, tile.batch, kv_head);
        of.end = own.end;
        of.least = 0.0f;
        load_scales(of, own.begin);
        int block = own.begin;
        for (; block < plain_end; ++block) attend_scaled_block<false>(output, rows, scale_log2, tile, of, block);
        for (; block < own.end; ++block) attend_scaled_block<true>(output, rows, scale_log2, tile, of, block);
        if (ptx::vote_any(!(of.least * scale_log2 >= 0.0f))) rows.sum[0] = rows.sum[1] = ptx::bits_float(0x7fffffffu);
      } else if (!Spec::kKeepsLoops || (codes.k_scale.block_shift | codes.v_scale.block_shift) == 0) {
        attend_blocks<false>(output, rows, scale_log2, tile, own.begin, plain_end, own.end);
      } else {
        attend_blocks<true>(output, rows, scale_log2, tile, own.begin, plain_end, own.end);
        ptx::warp_sync();  // lanes may still read the tile (load_block_scale)
      }
      if constexpr (Spec::kIsTight) {
        tile = read_own_tile();
        ptx::warp_sync();
        range = tile.template key_blocks<Spec>(params);
        kv_head = tile.head / heads_per_key_head(params);
      }
      this->release_query();

      const float v_scale = codes.v_scale.block_shift == 0 ? load_scale(codes.v_scale, tile.batch, kv_head, 0)
                                                           : factor_of_blocks(codes.v_scale);
      float inverse_sum[2];
      float lse[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const FinishedRow finished =
            finish_row(ptx::sub_rn(rows.max[r] * (Spec::kHasBlockScales ? 1.0f : scale_log2), kTopExponent),
                       quad_sum(rows.sum[r]));
        inverse_sum[r] = finished.inverse * v_scale;
        lse[r] = finished.lse;
      }
      store_lse<Spec>(params, tile, this->consumer, lse);
      store_tile<Spec>(params, this->shared, out_map, tile, this->query.stage, this->consumer, output, inverse_sum);
      skip_blocks(own.end, range.end);
    }
    // Hazard: the last store still reads the buffer when the block exits and its shared memory is freed.
    if (ptx::thread_index() % 128 == 0) ptx::tma_store_wait_read<0>();
  }
  static constexpr float kLeastScale = 1e-30f;
};

}  // namespace flashmoe::attention::sm90
