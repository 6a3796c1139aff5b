// A consumer warpgroup: half of the output's columns. For each block one of the two also has the scores and softmax:
//
//   one     S  softmax  O += P V     P and the running maxima go to the other through shared memory
//   other   wait for P  O += P V
//
// It is always the first: a stage is in use for one block at a time, and the other stage loads meanwhile. Alternating,
// with scores of two blocks at once, took 1% to 4% longer. With an FP8 cache the two alternate and run the same code:
// always the first took 1% to 3% longer there.
#pragma once

#include "device/convert.cuh"
#include "device/exchange.cuh"
#include "device/named_barriers.cuh"
#include "device/reduce.cuh"
#include "device/warpgroup_product.cuh"
#include "mla/finish.cuh"
#include "mla/topk_indices.cuh"
#include "mla/tile_scheduler.cuh"
#include "mla/sm90/spec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/wgmma.cuh"

namespace flashmoe::mla::sm90 {

template <typename Spec>
struct Consumer {
  using Element = typename Spec::Element;
  static constexpr int kScores = Spec::kBlockN / 2;
  static constexpr int kOutputs = Spec::kOutputs;
  static constexpr int kTileOutputs = kOutputs / Spec::kValueTiles;
  static constexpr int kValueSteps = Spec::kBlockN / 16;
  static constexpr int kRotarySteps = 4;
  // Words that the lanes of a quad exchange for 16-byte stores; with FP8, where registers are scarce, no exchange.
  static constexpr int kGathered = Spec::kIsFp8 ? 1 : 4;

  const DecodeParams& params;
  const SharedMemory<Spec> shared;
  const int consumer;  // 0 or 1: its half of the columns
  const int row_tile;
  const int warp;  // in the warpgroup
  const bool is_first_lane;
  StageUses uses;
  int query_parity = 0;
  // The thread's two rows: maximum of the unscaled scores that exponentials refer to, and this thread's share of the
  // sum over the blocks whose scores this consumer computes. Even and odd blocks are summed separately, as with FP8,
  // for the same bits: row_sum has the parity of the next block.
  float row_max[2];
  float row_sum[2];
  float other_sum[2];

  __device__ __forceinline__ Consumer(const DecodeParams& params_, const SharedMemory<Spec>& shared_, int consumer_,
                                      int row_tile_)
      : params(params_),
        shared(shared_),
        consumer(consumer_),
        row_tile(row_tile_),
        warp(ptx::warp_index() % 4),
        is_first_lane(ptx::lane_index() == 0) {}

  // The first of the thread's two rows of the tile; the other is 8 rows below.
  __device__ __forceinline__ int thread_row() const { return warp * 16 + ptx::lane_index() / 4; }

  __device__ __forceinline__ int value_group() const { return consumer == 0 ? kLeft : kRight; }

  // One arrival per warp: after its wgmma_wait, its own share of the product has read the buffer.
  __device__ __forceinline__ void release(ptx::Mbarrier* empty) const {
    if (is_first_lane) ptx::mbarrier_arrive(empty);
  }
  __device__ __forceinline__ void release_value(int index) const {
    release(shared.key_empty(index % Spec::kNumStages, value_group()));
  }

  __device__ __forceinline__ void wait_key(int stage, int group, int parity) const {
    ptx::mbarrier_wait(shared.key_full(stage, group), parity);
    if constexpr (Spec::kIsSparse && !Spec::kIsFp8) ptx::fence_proxy_async_shared();  // written by cp.async
  }

  // scores[64 x 64] = Q K^T of block `index` of the work tile; asynchronous. The rotary columns of Q are in registers.
  __device__ __forceinline__ void issue_scores(float (&scores)[kScores], uint32_t (&rotary)[kRotarySteps][4],
                                               int index) const {
    const int stage = index % Spec::kNumStages;
    const int parity = uses.parity(index);
    const auto query = shared.query().k_major();
    const auto key = shared.key(stage).k_major();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      if (step % (kLatentDim / 32) == 0 && step / (kLatentDim / 32) < Spec::kNumFulls) {
        wait_key(stage, step / (kLatentDim / 32), parity);
        ptx::wgmma_fence();
      }
      if (Spec::kIsFp8 || step < kLatentDim / 16) {
        ptx::wgmma_ss<Element, Spec::kBlockN, false>(scores, query.k_step(step), key.k_step(step), step == 0 ? 0 : 1);
      } else {
        const uint32_t (&a)[4] = rotary[step - kLatentDim / 16];
        ptx::wgmma_rs<Element, Spec::kBlockN, false>(scores, a[0], a[1], a[2], a[3], key.k_step(step), 1);
      }
    }
    ptx::wgmma_commit();
  }

  // N tile `n_tile` of this consumer's half of V of block `index`.
  __device__ __forceinline__ MnMajorOperand value(int index, int n_tile) const {
    const auto tile = shared.key(index % Spec::kNumStages);
    return {ptx::make_smem_descriptor(tile.slab(consumer * 4 + n_tile * (4 / Spec::kValueTiles)),
                                      Spec::KeyTile::kSlabBytes, kSwizzleBytes)};
  }
  __device__ __forceinline__ static float (&sums_of(float (&output)[kOutputs], int n_tile))
      [kTileOutputs] { return reinterpret_cast<float (&)[kTileOutputs]>(output[n_tile * kTileOutputs]); }

  __device__ __forceinline__ static void finish(float (&output)[kOutputs]) {
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operands(output);
  }

  // Sets the rows' maxima to new_max and rescales what has been summed so far.
  __device__ __forceinline__ void advance_max(const float (&new_max)[2], float (&output)[kOutputs]) {
    float rescale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Both products are rounded, as in the exponentials: a maximum that stays gives exactly 1.
      rescale[r] = new_max[r] == row_max[r] || row_max[r] == ptx::negative_infinity()
                       ? 1.0f  // or nothing has been summed yet
                       : ptx::exp2_approx(ptx::sub_rn(row_max[r] * params.scale_log2, new_max[r] * params.scale_log2));
      row_max[r] = new_max[r];
      row_sum[r] *= rescale[r];
      if constexpr (!Spec::kIsFp8) other_sum[r] *= rescale[r];
    }
    if (!ptx::vote_any(rescale[0] != 1.0f || rescale[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) output[i] *= rescale[(i / 2) % 2];
  }

  __device__ __forceinline__ void apply_mask(float (&scores)[kScores], const WorkTile& work, int block) const {
    const int first_key = block * Spec::kBlockN + ptx::lane_index() % 4 * 2;
    const int row = row_tile * Spec::kBlockM + thread_row();
    const int end[2] = {visible_end(params, work.keys, row) - first_key,
                        visible_end(params, work.keys, row + 8) - first_key};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      if (8 * (i / 4) + i % 2 >= end[(i / 2) % 2]) scores[i] = ptx::negative_infinity();
    }
  }

  // Sparse: this lane's two indices of a block. mask_invalid masks the keys of those that select none.
  __device__ __forceinline__ void load_topk_indices(int (&found)[2], const WorkTile& work, int index) const {
    if constexpr (!Spec::kIsSparse) return;
    const int key = (work.begin_block + index) * Spec::kBlockN + ptx::lane_index();
    found[0] = topk_index(params, work, key);
    found[1] = topk_index(params, work, key + 32);
  }
  __device__ __forceinline__ static void mask_invalid(float (&scores)[kScores], const int (&found)[2]) {
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      const uint32_t of_thread = ptx::vote_ballot(found[word] >= 0) >> ptx::lane_index() % 4 * 2;
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) {
        if ((of_thread >> (8 * (i / 4) + i % 2) & 1) == 0) scores[word * (kScores / 2) + i] = ptx::negative_infinity();
      }
    }
  }

  // The row maxima including a block's scores. They only guard against overflow, so a row keeps its maximum until an
  // exponential would exceed 2^kMaxExponent: P up to 2^8 is as exact as P up to 1, and the output is rarely rescaled.
  // Each row decides for itself.
  __device__ __forceinline__ void find_max(const float (&scores)[kScores], float (&new_max)[2]) const {
    constexpr float kMaxExponent = 8.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = ptx::negative_infinity();
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) {
        largest = ptx::max_ftz(largest, ptx::max_ftz(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]));
      }
      largest = quad_max(largest);
      new_max[r] = (largest - row_max[r]) * params.scale_log2 > kMaxExponent ? largest : row_max[r];
    }
  }

  // P of a block: as this consumer's operand, and in shared memory for the other one, with the row maxima.
  __device__ __forceinline__ void publish(uint32_t (&probabilities)[kScores / 2], float (&scores)[kScores],
                                          const float (&new_max)[2], float (&sum)[2], int index) const {
    const int stage = index % Spec::kNumStages;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float shift = (new_max[r] == ptx::negative_infinity() ? 0.0f : new_max[r]) * params.scale_log2;
      sum[r] = 0.0f;
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& score = scores[4 * j + 2 * r + c];
          score = ptx::exp2_approx(ptx::fma_rn(score, params.scale_log2, -shift));
          sum[r] += score;
        }
    }
    pack_operand<Element>(probabilities, scores);
    if constexpr (!Spec::kIsFp8) {
      ptx::mbarrier_wait(shared.probability_empty(stage),
                         uses.parity(index) ^ 1);  // write after read: P two blocks before
    }
    const int lane = ptx::lane_index();
    const typename Spec::ProbabilityTile tile = shared.probability(stage);
#pragma unroll
    for (int step = 0; step < Spec::kBlockN / 16; ++step) {
      const uint32_t words[4] = {probabilities[4 * step], probabilities[4 * step + 1], probabilities[4 * step + 2],
                                 probabilities[4 * step + 3]};
      ptx::stmatrix_x4(tile.chunk(warp * 16 + lane % 16, 0, step * 2 + lane / 16), words);
    }
    if (lane % 4 == 0) {
      ptx::st_shared_float(shared.row_max(stage, thread_row()), new_max[0]);
      ptx::st_shared_float(shared.row_max(stage, thread_row() + 8), new_max[1]);
    }
    ptx::fence_proxy_async_shared();
    ptx::warp_sync();
    release(shared.probability_full(stage));
  }

  // A block whose scores the other consumer computes.
  __device__ __forceinline__ void pv_remote(float (&output)[kOutputs], int index) {
    const int stage = index % Spec::kNumStages;
    wait_key(stage, value_group(), uses.parity(index));
    ptx::mbarrier_wait(shared.probability_full(stage), uses.parity(index));
    const float new_max[2] = {ptx::ld_shared_float(shared.row_max(stage, thread_row())),
                              ptx::ld_shared_float(shared.row_max(stage, thread_row() + 8))};
    advance_max(new_max, output);
    const auto probability = shared.probability(stage).k_major();
    ptx::wgmma_fence_operands(output);
    ptx::wgmma_fence();
#pragma unroll
    for (int n_tile = 0; n_tile < Spec::kValueTiles; ++n_tile)
#pragma unroll
      for (int step = 0; step < kValueSteps; ++step) {
        ptx::wgmma_ss<Element, 2 * kTileOutputs, true>(sums_of(output, n_tile), probability.k_step(step),
                                                       value(index, n_tile).k_step(step), 1);
      }
    ptx::wgmma_commit();
    finish(output);
    ptx::warp_sync();  // the maxima have been read
    release_value(index);
    release(Spec::kIsFp8 ? shared.key_empty(stage, kRotary) : shared.probability_empty(stage));
  }

  // From the scores of a block to P.
  __device__ __forceinline__ void softmax(uint32_t (&probabilities)[kScores / 2], float (&scores)[kScores],
                                          const WorkTile& work, int index, int unmasked_end, const int (&found)[2],
                                          float (&new_max)[2], float (&sum)[2]) const {
    ptx::wgmma_fence_operands(scores);
    if constexpr (Spec::kIsFp8) {
      ptx::named_barrier_sync(barrier_id(Barrier::kScores, consumer), 128);
    } else {
      release(shared.key_empty(index % Spec::kNumStages, kRotary));
    }
    const int block = work.begin_block + index;
    if constexpr (Spec::kIsSparse) {
      mask_invalid(scores, found);
    } else if ((block + 1) * Spec::kBlockN > unmasked_end) {
      apply_mask(scores, work, block);
    }
    find_max(scores, new_max);
    publish(probabilities, scores, new_max, sum, index);
  }
  // This consumer's half of P V for a block whose scores it computed.
  __device__ __forceinline__ void pv_local(float (&output)[kOutputs], uint32_t (&probabilities)[kScores / 2],
                                           const float (&new_max)[2], const float (&sum)[2], int index) {
    advance_max(new_max, output);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float with_block = row_sum[r] + sum[r];
      row_sum[r] = Spec::kIsFp8 ? with_block : other_sum[r];
      other_sum[r] = with_block;
    }
    ptx::wgmma_fence_operands(output);
    ptx::wgmma_fence_operands(probabilities);
    ptx::wgmma_fence();
#pragma unroll
    for (int n_tile = 0; n_tile < Spec::kValueTiles; ++n_tile)
#pragma unroll
      for (int step = 0; step < kValueSteps; ++step) {
        const uint32_t* a = probabilities + 4 * step;
        ptx::wgmma_rs<Element, 2 * kTileOutputs, true>(sums_of(output, n_tile), a[0], a[1], a[2], a[3],
                                                       value(index, n_tile).k_step(step), 1);
      }
    ptx::wgmma_commit();
    finish(output);
    release_value(index);
  }

  // All key blocks of a work tile.
  __device__ __forceinline__ void mainloop(const WorkTile& work, float (&output)[kOutputs]) {
    const int blocks = work.end_block - work.begin_block;
    const int unmasked_end = visible_end(params, work.keys, row_tile * Spec::kBlockM);
    ptx::mbarrier_wait(shared.query_full(), query_parity);
    query_parity ^= 1;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) output[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_max[r] = ptx::negative_infinity();
      row_sum[r] = other_sum[r] = 0.0f;
    }
    if constexpr (!Spec::kIsFp8) {
      if (consumer == 1) {
#pragma unroll 1
        for (int index = 0; index < blocks; ++index) pv_remote(output, index);
        return;
      }
    }
    uint32_t rotary[kRotarySteps][4];
    if constexpr (!Spec::kIsFp8) {  // P is written over these columns, by each warp over its own rows
      const int lane = ptx::lane_index();
#pragma unroll
      for (int step = 0; step < kRotarySteps; ++step) {
        ptx::ldmatrix_x4(rotary[step],
                         shared.query().chunk(warp * 16 + lane % 16, Spec::kRotarySlab, step * 2 + lane / 16));
      }
    }
    float scores[kScores];
    uint32_t probabilities[kScores / 2];
    float new_max[2];
    float sum[2];
    int found[2] = {0, 0};
#pragma unroll 1
    for (int index = 0; index < blocks; ++index) {
      if (Spec::kIsFp8 && index % 2 != consumer) {
        pv_remote(output, index);
        continue;
      }
      issue_scores(scores, rotary, index);
      load_topk_indices(found, work, index);
      ptx::wgmma_wait<0>();
      softmax(probabilities, scores, work, index, unmasked_end, found, new_max, sum);
      pv_local(output, probabilities, new_max, sum, index);
    }
  }

  __device__ __forceinline__ void store_sum(int which, const float (&thread_sum)[2]) const {
    const float sum[2] = {quad_sum(thread_sum[0]), quad_sum(thread_sum[1])};
    if (ptx::lane_index() % 4 != 0) return;
    ptx::st_shared_float(shared.row_sum(query_parity, which, thread_row()), sum[0]);
    ptx::st_shared_float(shared.row_sum(query_parity, which, thread_row() + 8), sum[1]);
  }

  // Finishes the rows of a whole sequence; leaves the sums of a split one to combine.cuh.
  __device__ __forceinline__ void store(const WorkTile& work, int slot, const float (&output)[kOutputs]) const {
    const int num_rows = params.tokens * params.heads;
    const int lane = ptx::lane_index();
    if (Spec::kIsFp8 || consumer == 0) store_sum(consumer, row_sum);
    if (!Spec::kIsFp8 && consumer == 0) store_sum(1, other_sum);
    ptx::named_barrier_sync(barrier_id(Barrier::kConsumers), 256);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row_of_tile = thread_row() + 8 * r;
      const int row = row_tile * Spec::kBlockM + row_of_tile;
      const float total = ptx::ld_shared_float(shared.row_sum(query_parity, 0, row_of_tile)) +
                          ptx::ld_shared_float(shared.row_sum(query_parity, 1, row_of_tile));
      const float shift = row_max[r] * params.scale_log2;
      const bool exists = row < num_rows;
      const bool is_first = consumer == 0 && lane % 4 == 0 && exists;
      const int column = consumer * (kLatentDim / 2);
      if (work.is_whole()) {
        const FinishedRow finished = finish_row(params, row % params.heads, shift, total);
        if (is_first && params.lse != nullptr) store_lse(params, work.batch, row, finished.lse);
        Element* out_gmem = static_cast<Element*>(params.out) +
                            (static_cast<int64_t>(work.batch) * num_rows + row) * kLatentDim + column;
#pragma unroll
        for (int j = 0; j < kOutputs / 4; j += kGathered) {
          uint32_t words[kGathered];
#pragma unroll
          for (int i = 0; i < kGathered; ++i) {
            words[i] = pack<Element>(output[4 * (j + i) + 2 * r] * finished.inverse,
                                     output[4 * (j + i) + 2 * r + 1] * finished.inverse);
          }
          if constexpr (kGathered == 1) {
            if (exists) ptx::st_global_32(out_gmem + 8 * j + lane % 4 * 2, words[0]);
          } else {
            transpose_in_quad(words);
            if (exists) ptx::st_global_128(out_gmem + 8 * (j + lane % 4), words);
          }
        }
        continue;
      }
      if (!exists) continue;
      const int64_t at = partial_row(params, slot, row_tile, row_of_tile);
      if (is_first) {
        const uint32_t state[2] = {ptx::float_bits(shift), ptx::float_bits(total)};
        ptx::st_global_64(params.state_partial + at * 2, state);
      }
      float* out_gmem = params.out_partial + partial_tile(at - lane / 4, column) + lane * 2;
#pragma unroll
      for (int j = 0; j < kOutputs / 4; ++j) {
        const uint32_t words[2] = {ptx::float_bits(output[4 * j + 2 * r]), ptx::float_bits(output[4 * j + 2 * r + 1])};
        ptx::st_global_64(out_gmem + 64 * j, words);
      }
    }
  }

  __device__ __forceinline__ void run(TileScheduler& scheduler) {
    WorkTile work;
    while (scheduler.next(work)) {
      float output[kOutputs];
      mainloop(work, output);
      release(shared.query_empty());
      uses.end_work_tile(work.end_block - work.begin_block);
      store(work, scheduler.slot(work), output);
    }
  }
};

}  // namespace flashmoe::mla::sm90
