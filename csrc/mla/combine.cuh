// Puts together the sequences that several parts share, in an order that the parts alone decide.
//
// A warp adds up 128 columns of a row. Where a sequence may be in many parts, warps_per_sum warps share that: each takes every so many-th part,
// and their sums meet in shared memory. Grid: for each sequence, or each part where there are fewer (a part begins at most one sequence that
// others share), equally many blocks, together about as many as the GPU holds at once: each makes the plan, which takes longer than its sums.
#pragma once

#include "device/convert.cuh"
#include "device/reduce.cuh"
#include "mla/finish.cuh"
#include "mla/params/decode.h"
#include "mla/plan.cuh"
#include "ptx/barrier.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe {
namespace mla {

// kBlockM: the units of work of a thread block, a warp for each: 128 columns of a row, or a share of their sum.
template <typename Element_, int kBlockM_, int kNumWarps_>
struct CombineSpec {
  using Element = Element_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kColumns = 128;  // of a warp: 4 of a lane
  static constexpr int kColumnUnits = kLatentDim / kColumns;
  static constexpr int kSumBytes = 32 * 16 + 16;  // of a warp: the columns, and the sum of exponentials
  static constexpr int kSharedBytes = kNumWarps * kSumBytes;
  static_assert(kBlockM_ == kNumWarps, "a warp for each unit");
  static_assert(kNumWarps % kColumnUnits == 0, "a block has whole rows, or shares of them");
};

// Four columns of a row, and its sum of exponentials.
struct ColumnSum {
  float out[4];
  float sum;

  __device__ __forceinline__ void add(float weight, const float4& part, float sum_of) {
    sum = ptx::fma_rn(weight, sum_of, sum);
    out[0] = ptx::fma_rn(weight, part.x, out[0]);
    out[1] = ptx::fma_rn(weight, part.y, out[1]);
    out[2] = ptx::fma_rn(weight, part.z, out[2]);
    out[3] = ptx::fma_rn(weight, part.w, out[3]);
  }
};

// The sequence that a block puts together: it begins in first_part and ends in last_part. False where it lies in one part alone.
__device__ __forceinline__ bool find_split(const DecodeParams& params, int index, Segment& found, int& first_part,
                                           int& last_part, int& share) {
  if (params.batch <= params.parts) {
    Plan plan(params, 0);
    plan.find(index, found);
    first_part = found.position / plan.share;
    share = plan.share;
  } else {
    Plan plan(params, index);
    Segment segment;
    segment.begin_block = 1;
    segment.position = segment.end_block = segment.num_blocks = segment.batch = segment.keys = 0;
    found = segment;
    while (plan.next(segment)) found = segment;
    if (found.begin_block != 0) return false;
    first_part = index;
    share = plan.share;
  }
  last_part = (found.position + found.num_blocks - 1) / share;
  return last_part > first_part;
}

// What the units of a sequence have in common: its parts, and where their results are.
struct SplitSequence {
  int batch;
  int first_part;
  int last_part;
  int first_slot;
};

// One unit: 128 columns of a row, or a share of their sum. Past the last unit a warp only meets the others.
template <typename Spec>
__device__ __forceinline__ void combine_unit(const DecodeParams& params, const SplitSequence& split, int unit,
                                             int member) {
  using Element = typename Spec::Element;
  constexpr int kAtOnce = 8;  // parts whose loads are in flight
  const int num_rows = params.tokens * params.heads;
  const int lane = ptx::lane_index();
  const int row = min(num_rows - 1, unit / Spec::kColumnUnits);
  const int column = unit % Spec::kColumnUnits * Spec::kColumns + lane * 4;
  const int64_t slot_rows = static_cast<int64_t>(params.row_tiles) * params.block_m;
  const int first_part = split.first_part;
  const int last_part = split.last_part;
  const auto row_of = [&](int part) {
    return (part == first_part ? split.first_slot : slot_of(part, false)) * slot_rows + row;
  };
  float largest = ptx::negative_infinity();
  for (int part = first_part + lane; part <= last_part; part += 32) {
    largest = ptx::max_ftz(largest, ptx::ld_global_float(params.state_partial + row_of(part) * 2));
  }
  largest = warp_max(largest);
  ColumnSum total{};
  for (int part = first_part + member; part <= last_part; part += kAtOnce * params.warps_per_sum) {
    float4 out[kAtOnce];
    uint32_t state[kAtOnce][2];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int own = part + i * params.warps_per_sum;
      if (own > last_part) continue;
      const int64_t at = row_of(own);
      ptx::ld_global_64(state[i], params.state_partial + at * 2);
      out[i] = ptx::ld_global_float4(params.out_partial + at * kLatentDim + column);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (part + i * params.warps_per_sum > last_part) continue;
      // -inf: no key seen by any; or NaN alone, which the sums carry.
      const float shift = ptx::bits_float(state[i][0]);
      const float weight = largest == ptx::negative_infinity() ? 1.0f : ptx::exp2_approx(ptx::sub_rn(shift, largest));
      total.add(weight, out[i], ptx::bits_float(state[i][1]));
    }
  }
  if (params.warps_per_sum > 1) {
    const ptx::SmemPointer block_smem = ptx::dynamic_shared_memory();
    const auto sum_smem = [&](int warp) { return block_smem + warp * Spec::kSumBytes; };
    ptx::barrier_sync_block();  // write after read: the sums of the unit before
    const uint32_t words[4] = {ptx::float_bits(total.out[0]), ptx::float_bits(total.out[1]),
                               ptx::float_bits(total.out[2]), ptx::float_bits(total.out[3])};
    ptx::st_shared_128(sum_smem(ptx::warp_index()) + lane * 16, words);
    if (lane == 0) ptx::st_shared_float(sum_smem(ptx::warp_index()) + 512, total.sum);
    ptx::barrier_sync_block();  // read after write: the warps' sums
    if (member != 0) return;
    for (int other = 1; other < params.warps_per_sum; ++other) {
      const ptx::SmemPointer other_smem = sum_smem(ptx::warp_index() + other);
      total.add(1.0f, ptx::ld_shared_float4(other_smem + lane * 16), ptx::ld_shared_float(other_smem + 512));
    }
  }
  if (unit >= num_rows * Spec::kColumnUnits) return;
  const FinishedRow finished = finish_row(params, row % params.heads, largest, total.sum);
  if (column == 0 && params.lse != nullptr) store_lse(params, split.batch, row, finished.lse);
  Element* out_gmem =
      static_cast<Element*>(params.out) + (static_cast<int64_t>(split.batch) * num_rows + row) * kLatentDim + column;
  const uint32_t packed[2] = {pack<Element>(total.out[0] * finished.inverse, total.out[1] * finished.inverse),
                              pack<Element>(total.out[2] * finished.inverse, total.out[3] * finished.inverse)};
  ptx::st_global_64(out_gmem, packed);
}

// A block has the units of one sequence, from its own on every so many-th: the plan is made once for all.
template <typename Spec>
__device__ __forceinline__ void combine(const DecodeParams& params) {
  const int sums = Spec::kNumWarps / params.warps_per_sum;  // of a block at once
  const int units = params.tokens * params.heads * Spec::kColumnUnits;
  const int blocks = ptx::grid_size() / min(params.batch, params.parts);  // of a sequence
  const int index = ptx::block_index() / blocks;
  const int member = ptx::warp_index() % params.warps_per_sum;
  Segment found;
  SplitSequence split;
  int share;
  // The lengths are older than the kernel in front, which has waited for them.
  if (!find_split(params, index, found, split.first_part, split.last_part, share)) return;
  split.batch = found.batch;
  split.first_slot = slot_of(split.first_part, found.position > split.first_part * share);
  ptx::grid_dependency_wait();
#pragma unroll 1
  for (int first = (ptx::block_index() - index * blocks) * sums; first < units; first += blocks * sums) {
    combine_unit<Spec>(params, split, first + ptx::warp_index() / params.warps_per_sum, member);
  }
}

}  // namespace mla
}  // namespace flashmoe
