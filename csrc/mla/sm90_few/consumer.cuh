// The multiplying warpgroup: S^T = K Q^T, softmax over a block's keys, O^T += V^T P^T.
//
// A thread's accumulators are heads 8j + 2t and 8j + 2t + 1, t = lane % 4, of rows 16 * warp + lane / 4 and 8 below.
// The rows are keys in S^T, and columns of a slab in O^T. A head's maximum is that of four warps, which exchange theirs
// through shared memory.
#pragma once

#include "device/convert.cuh"
#include "device/exchange.cuh"
#include "device/named_barriers.cuh"
#include "device/ring.cuh"
#include "mla/finish.cuh"
#include "mla/topk_indices.cuh"
#include "mla/tile_scheduler.cuh"
#include "mla/sm90_few/spec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/wgmma.cuh"

namespace flashmoe::mla::sm90_few {

template <typename Spec>
struct Consumer {
  using Element = typename Spec::Element;
  using Ring = RingPosition<Spec::kNumStages>;
  static constexpr int kHeads = Spec::kHeadsOfThread;
  static constexpr int kSums = Spec::kSums;

  const DecodeParams& params;
  const SharedMemory<Spec> shared;
  const int warp;  // in the warpgroup
  Ring ring;
  int query_parity = 0;
  // Per head of the thread: maximum of the unscaled scores that exponentials refer to, and the thread's share of the
  // sum.
  float head_max[kHeads];
  float head_sum[kHeads];
  float output[Spec::kValueSlabs][kSums];

  __device__ __forceinline__ Consumer(const DecodeParams& params_, const SharedMemory<Spec>& shared_)
      : params(params_), shared(shared_), warp(ptx::warp_index()) {}

  // Accumulator i belongs to head_of(of_head(i)).
  __device__ __forceinline__ static constexpr int of_head(int i) { return i / 4 * 2 + i % 2; }
  __device__ __forceinline__ static int head_of(int h) { return h / 2 * 8 + ptx::lane_index() % 4 * 2 + h % 2; }
  // The row of accumulators 0 and 1 of each four; that of 2 and 3 is 8 rows below.
  __device__ __forceinline__ int thread_row() const { return warp * 16 + ptx::lane_index() / 4; }

  __device__ __forceinline__ void sync() const {
    ptx::named_barrier_sync(barrier_id(Barrier::kConsumers), Spec::kConsumerThreads);
  }
  __device__ __forceinline__ void release(ptx::Mbarrier* empty) const {
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(empty);
  }

  // Rows after the sequence's last key become zeros, whatever was loaded: 0 * NaN is NaN.
  __device__ __forceinline__ void zero_oob_rows(const Ring (&at)[Spec::kNumGroups], int keys) const {
    constexpr int kRowChunks = Spec::kGroupSlabs * 8;
    const uint32_t zeros[4] = {0, 0, 0, 0};
#pragma unroll
    for (int group = 0; group < Spec::kNumGroups; ++group) {
      const typename Spec::GroupTile tile = shared.group(at[group].stage);
      ptx::mbarrier_wait(shared.key_full(at[group].stage), at[group].parity);
      for (int index = ptx::thread_index(); index < (Spec::kBlockN - keys) * kRowChunks;
           index += Spec::kConsumerThreads) {
        const int chunk = index % kRowChunks;
        ptx::st_shared_128(tile.chunk(keys + index / kRowChunks, chunk / 8, chunk % 8), zeros);
      }
    }
    ptx::fence_proxy_async_shared();
    sync();  // read after write: the zeros
  }

  // Three accumulators, for the slabs in turn: a product that adds to the one before would wait for it.
  __device__ __forceinline__ void compute_scores(float (&scores)[kSums], const Ring (&at)[Spec::kNumGroups]) const {
    const auto query = shared.query().k_major();
    float sums[Spec::kGroupSlabs][kSums];
#pragma unroll
    for (int group = 0; group < Spec::kNumGroups; ++group) {
      ptx::mbarrier_wait(shared.key_full(at[group].stage), at[group].parity);
      if constexpr (Spec::kIsSparse && !Spec::kIsFp8) ptx::fence_proxy_async_shared();  // written by cp.async
      ptx::wgmma_fence();
      const auto key = shared.group(at[group].stage).k_major();
#pragma unroll
      for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int slab = 0; slab < Spec::kGroupSlabs; ++slab) {
          ptx::wgmma_ss<Element, Spec::kBlockM, false>(sums[slab], key.k_step(slab * 4 + step),
                                                       query.k_step((group * Spec::kGroupSlabs + slab) * 4 + step),
                                                       group == 0 && step == 0 ? 0 : 1);
        }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int slab = 0; slab < Spec::kGroupSlabs; ++slab) ptx::wgmma_fence_operands(sums[slab]);
#pragma unroll
    for (int i = 0; i < kSums; ++i) scores[i] = sums[0][i] + sums[1][i] + sums[2][i];
  }

  __device__ __forceinline__ void apply_mask(float (&scores)[kSums], const WorkTile& work, int block) const {
    const int first_key = block * Spec::kBlockN + thread_row();
    const int first_row = row_tile_of<Spec>(params) * Spec::kBlockM;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int end = visible_end(params, work.keys, first_row + head_of(of_head(i)));
      if (first_key + i / 2 % 2 * 8 >= end) scores[i] = ptx::negative_infinity();
    }
  }

  // Sparse: this thread's two indices of a block; an index that selects no key masks its score.
  __device__ __forceinline__ void load_topk_indices(int (&found)[2], const WorkTile& work, int block) const {
    if constexpr (!Spec::kIsSparse) return;
    const int key = block * Spec::kBlockN + thread_row();
    found[0] = topk_index(params, work, key);
    found[1] = topk_index(params, work, key + 8);
  }
  __device__ __forceinline__ static void mask_invalid(float (&scores)[kSums], const int (&found)[2]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      if (found[i / 2 % 2] < 0) scores[i] = ptx::negative_infinity();
    }
  }

  // The largest score of each head among the block's keys.
  __device__ __forceinline__ void find_largest(float (&largest)[kHeads], const float (&scores)[kSums]) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int i = h / 2 * 4 + h % 2;
      largest[h] = ptx::max_ftz(scores[i], scores[i + 2]);
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        largest[h] = ptx::max_ftz(largest[h], ptx::shuffle_xor(largest[h], lanes));
      }
      if (ptx::lane_index() < 4) ptx::st_shared_float(shared.head_max(warp, head_of(h)), largest[h]);
    }
    sync();  // read after write: the warps' maxima; write after read: P of the block before
#pragma unroll
    for (int h = 0; h < kHeads; h += 2) {
#pragma unroll
      for (int other = 0; other < Spec::kConsumerWarps; ++other) {
        uint32_t pair[2];
        ptx::ld_shared_64(pair, shared.head_max(other, head_of(h)));
        largest[h] = other == 0 ? ptx::bits_float(pair[0]) : ptx::max_ftz(largest[h], ptx::bits_float(pair[0]));
        largest[h + 1] = other == 0 ? ptx::bits_float(pair[1]) : ptx::max_ftz(largest[h + 1], ptx::bits_float(pair[1]));
      }
    }
  }

  // The maxima only guard against overflow, so a head keeps its maximum until an exponential would exceed
  // 2^kMaxExponent. Each head decides for itself; what has been summed so far is rescaled to the new maximum.
  __device__ __forceinline__ void advance_max(const float (&largest)[kHeads]) {
    constexpr float kMaxExponent = 8.0f;
    float rescale[kHeads];
    bool changes = false;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const bool stays = !((largest[h] - head_max[h]) * params.scale_log2 > kMaxExponent);
      const float now = stays ? head_max[h] : largest[h];
      // Both products are rounded, as in the exponentials. Before the first key there is nothing to rescale.
      rescale[h] = stays || head_max[h] == ptx::negative_infinity()
                       ? 1.0f
                       : ptx::exp2_approx(ptx::sub_rn(head_max[h] * params.scale_log2, now * params.scale_log2));
      head_max[h] = now;
      head_sum[h] *= rescale[h];
      changes = changes || rescale[h] != 1.0f;
    }
    if (!ptx::vote_any(changes)) return;
#pragma unroll
    for (int slab = 0; slab < Spec::kValueSlabs; ++slab)
#pragma unroll
      for (int i = 0; i < kSums; ++i) output[slab][i] *= rescale[of_head(i)];
  }

  // P, [heads][keys] in shared memory: lanes of adjacent keys exchange, so that each stores both keys of one head.
  __device__ __forceinline__ void store_probabilities(float (&scores)[kSums]) {
    const bool is_odd = ptx::lane_index() / 4 % 2 != 0;
    const typename Spec::ProbabilityTile tile = shared.probability();
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const float now = head_max[of_head(i)];
      const float shift = (now == ptx::negative_infinity() ? 0.0f : now) * params.scale_log2;
      scores[i] = ptx::exp2_approx(ptx::fma_rn(scores[i], params.scale_log2, -shift));
      head_sum[of_head(i)] += scores[i];
    }
#pragma unroll
    for (int i = 0; i < kSums; i += 2) {
      uint32_t low = ptx::float_bits(scores[i]);
      uint32_t high = ptx::float_bits(scores[i + 1]);
      exchange(low, high, 4);
      const int head = head_of(of_head(i)) + (is_odd ? 1 : 0);
      const int key = thread_row() - (is_odd ? 1 : 0) + i / 2 % 2 * 8;
      ptx::st_shared_32(ptx::SmemPointer(tile.chunk(head, 0, key / 8)) + key % 8 * 2,
                        pack<Element>(ptx::bits_float(low), ptx::bits_float(high)));
    }
    ptx::fence_proxy_async_shared();
    sync();  // read after write: P
  }

  // O^T += V^T P^T, slab by slab; a group is released once its slabs have been multiplied.
  __device__ __forceinline__ void multiply_value(const Ring (&at)[Spec::kNumGroups]) {
    const auto probability = shared.probability().k_major();
#pragma unroll
    for (int slab = 0; slab < Spec::kValueSlabs; ++slab) ptx::wgmma_fence_operands(output[slab]);
#pragma unroll
    for (int group = 0; group < Spec::kNumGroups; ++group) {
      ptx::wgmma_fence();
      const auto tile = shared.group(at[group].stage);
#pragma unroll
      for (int step = 0; step < Spec::kBlockN / 16; ++step)
#pragma unroll
        for (int slab = 0; slab < Spec::kGroupSlabs; ++slab) {
          if (group * Spec::kGroupSlabs + slab >= Spec::kValueSlabs) continue;
          const MnMajorOperand value{
              ptx::make_smem_descriptor(tile.slab(slab), Spec::GroupTile::kSlabBytes, kSwizzleBytes)};
          ptx::wgmma_ss<Element, Spec::kBlockM, false, true>(output[group * Spec::kGroupSlabs + slab],
                                                             value.k_step(step), probability.k_step(step), 1);
        }
      ptx::wgmma_commit();
    }
    ptx::wgmma_wait<2>();
    release(shared.key_empty(at[0].stage));
    ptx::wgmma_wait<1>();
    release(shared.key_empty(at[1].stage));
    ptx::wgmma_wait<0>();
    release(shared.key_empty(at[2].stage));
#pragma unroll
    for (int slab = 0; slab < Spec::kValueSlabs; ++slab) ptx::wgmma_fence_operands(output[slab]);
  }

  __device__ __forceinline__ void mainloop(const WorkTile& work) {
#pragma unroll
    for (int slab = 0; slab < Spec::kValueSlabs; ++slab)
#pragma unroll
      for (int i = 0; i < kSums; ++i) output[slab][i] = 0.0f;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      head_max[h] = ptx::negative_infinity();
      head_sum[h] = 0.0f;
    }
    const int unmasked_end = visible_end(params, work.keys, 0);
    ptx::mbarrier_wait(shared.query_full(), query_parity);
    query_parity ^= 1;
    int indices[2];
    load_topk_indices(indices, work, work.begin_block);
#pragma unroll 1
    for (int block = work.begin_block; block < work.end_block; ++block) {
      Ring at[Spec::kNumGroups];
#pragma unroll
      for (int group = 0; group < Spec::kNumGroups; ++group) {
        at[group] = ring;
        ring.advance();
      }
      const int keys = work.keys - block * Spec::kBlockN;
      if (Spec::kHelperWarps == 0 && keys < Spec::kBlockN) zero_oob_rows(at, keys);
      float scores[kSums];
      compute_scores(scores, at);
      if constexpr (Spec::kIsSparse) {
        mask_invalid(scores, indices);
        load_topk_indices(indices, work, block + 1);  // read while this block is multiplied
      } else if ((block + 1) * Spec::kBlockN > unmasked_end) {
        apply_mask(scores, work, block);
      }
      float largest[kHeads];
      find_largest(largest, scores);
      advance_max(largest);
      store_probabilities(scores);
      multiply_value(at);
    }
    release(shared.query_empty());
  }

  // Adds up the warps' sums of exponentials.
  __device__ __forceinline__ void add_sums() {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) head_sum[h] += ptx::shuffle_xor(head_sum[h], lanes);
      if (ptx::lane_index() < 4) ptx::st_shared_float(shared.head_sum(warp, head_of(h)), head_sum[h]);
    }
    sync();  // read after write: the sums
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      head_sum[h] = 0.0f;
#pragma unroll
      for (int other = 0; other < Spec::kConsumerWarps; ++other) {
        head_sum[h] += ptx::ld_shared_float(shared.head_sum(other, head_of(h)));
      }
    }
  }

  // Finishes the heads of a whole sequence; leaves the sums of a split one to combine.cuh. Short, as it runs once per
  // work tile.
  __device__ __forceinline__ void store(const WorkTile& work, int slot) {
    add_sums();
    const int num_rows = params.tokens * params.heads;
    const int row_tile = row_tile_of<Spec>(params);
    const int first_row = row_tile * Spec::kBlockM;
    const bool is_first = warp == 0 && ptx::lane_index() < 4;
    if (!work.is_whole()) {
      float* out_gmem = params.out_partial +
                        partial_tile(partial_row(params, slot, row_tile, 0), thread_row() / 8 * 8) +
                        ptx::lane_index() % 4 * 2 * 8 + thread_row() % 8;
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const int head = head_of(h);
        if (first_row + head >= num_rows) continue;
        if (is_first) {
          const uint32_t state[2] = {ptx::float_bits(head_max[h] * params.scale_log2), ptx::float_bits(head_sum[h])};
          ptx::st_global_64(params.state_partial + partial_row(params, slot, row_tile, head) * 2, state);
        }
#pragma unroll
        for (int slab = 0; slab < Spec::kValueSlabs; ++slab)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            ptx::st_global_float(out_gmem + h / 2 * (8 * kLatentDim) + h % 2 * 8 + slab * 512 + half * 64,
                                 output[slab][h / 2 * 4 + half * 2 + h % 2]);
          }
      }
      return;
    }
    Element* out_gmem =
        static_cast<Element*>(params.out) + static_cast<int64_t>(work.batch) * num_rows * kLatentDim + thread_row();
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int row = first_row + head_of(h);
      if (row >= num_rows) continue;
      const FinishedRow finished = finish_row(params, row % params.heads, head_max[h] * params.scale_log2, head_sum[h]);
      if (is_first && params.lse != nullptr) store_lse(params, work.batch, row, finished.lse);
#pragma unroll
      for (int slab = 0; slab < Spec::kValueSlabs; ++slab)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float value = output[slab][h / 2 * 4 + half * 2 + h % 2] * finished.inverse;
          ptx::st_global_16(out_gmem + row * kLatentDim + slab * kSlabColumns + half * 8,
                            static_cast<uint16_t>(pack<Element>(value, value)));
        }
    }
  }

  __device__ __forceinline__ void run(TileScheduler& scheduler) {
    WorkTile work;
    while (scheduler.next(work)) {
      mainloop(work);
      store(work, scheduler.slot(work));
    }
  }
};

}  // namespace flashmoe::mla::sm90_few
