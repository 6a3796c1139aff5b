// Merges the partial results of sequences that span several SM parts (tile_scheduler.cuh), in an order that depends
// only on the parts.
//
// A warp sums 16 or 32 columns of 8 rows. If a sequence can span many parts, warps_per_sum warps share that sum: each
// takes every warps_per_sum-th part, and their sums are added through shared memory. Grid: equally many blocks per
// sequence, or per part if there are fewer parts (a part begins at most one sequence that continues in others); in
// total about as many as the GPU holds at once, because making the schedule takes each block longer than its sums.
#pragma once

#include "device/convert.cuh"
#include "device/reduce.cuh"
#include "mla/finish.cuh"
#include "mla/params/decode.h"
#include "mla/tile_scheduler.cuh"
#include "ptx/barrier.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::mla {

// kBlockM: units of work per thread block, one warp each. A unit is a sum, or one warp's share of it.
template <typename Element_, int kBlockM_, int kNumWarps_>
struct CombineSpec {
  using Element = Element_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kMaxTilePairs = 2;                          // per lane, four columns each; one per pair of tiles
  static constexpr int kSumBytes = 32 * (16 * kMaxTilePairs + 4);  // per warp: the columns and the sums of exponentials
  static constexpr int kMaxOffset = kNumWarps * kSumBytes;         // [warp][8]: the largest exponent of its parts
  static constexpr int kSharedBytes = kMaxOffset + kNumWarps * kSumRows * 4;
  static_assert(kBlockM_ == kNumWarps, "a warp for each unit");
};

// A lane's columns of a row, and the row's sum of exponentials.
template <int kTilePairs>
struct ColumnSum {
  float out[kTilePairs][4];
  float sum;

  __device__ __forceinline__ void add(float weight, const float4 (&partial)[kTilePairs]) {
#pragma unroll
    for (int pair = 0; pair < kTilePairs; ++pair) {
      out[pair][0] = ptx::fma_rn(weight, partial[pair].x, out[pair][0]);
      out[pair][1] = ptx::fma_rn(weight, partial[pair].y, out[pair][1]);
      out[pair][2] = ptx::fma_rn(weight, partial[pair].z, out[pair][2]);
      out[pair][3] = ptx::fma_rn(weight, partial[pair].w, out[pair][3]);
    }
  }
};

// Finds the sequence that a block merges, from first_part to last_part. Returns false if one part holds it.
__device__ __forceinline__ bool find_split(const DecodeParams& params, int index, WorkTile& found, int& first_part,
                                           int& last_part, int& blocks_per_part) {
  if (params.batch <= params.num_sm_parts) {
    TileScheduler scheduler(params, 0);
    scheduler.find_sequence(index, found);
    first_part = found.offset / scheduler.blocks_per_part;
    blocks_per_part = scheduler.blocks_per_part;
  } else {
    TileScheduler scheduler(params, index);
    WorkTile work;
    work.begin_block = 1;
    work.offset = work.end_block = work.num_blocks = work.batch = work.keys = 0;
    found = work;
    while (scheduler.next(work)) found = work;
    if (found.begin_block != 0) return false;
    first_part = index;
    blocks_per_part = scheduler.blocks_per_part;
  }
  last_part = (found.offset + found.num_blocks - 1) / blocks_per_part;
  return last_part > first_part;
}

// What the units of a sequence have in common: its parts, and where their results are.
struct SplitSequence {
  int batch;
  int first_part;
  int last_part;
  int first_slot;
};

// One unit: 8 rows of 16 columns per pair of tiles, or one warp's share of their sum. In each pair a lane has half a
// row of one tile. Warps past the last unit only take part in the barriers.
template <typename Spec, int kTilePairs>
__device__ __forceinline__ void combine_unit(const DecodeParams& params, const SplitSequence& split, int unit,
                                             int member) {
  using Element = typename Spec::Element;
  constexpr int kColumns = kTilePairs * kSumColumns;
  constexpr int kColumnUnits = kLatentDim / kColumns;
  constexpr int kPartsInFlight = 16 / kTilePairs;
  constexpr int kRowLanes = 4;
  const int num_rows = params.tokens * params.heads;
  // Recomputed for each number of columns: values common to both instantiations would stay in registers, and spill.
  const int lane = ptx::recompute(ptx::lane_index());
  const int row = unit / kColumnUnits * kSumRows + lane % 16 / 2;
  const bool exists = row < num_rows;
  const int first_column = unit % kColumnUnits * kColumns;
  const int64_t slot_rows = static_cast<int64_t>(params.row_tiles) * params.block_m;
  const int first_part = split.first_part;
  const int last_part = split.last_part;
  const int warps = params.warps_per_sum;
  // This lane's row in a part's partial results. Only the sequence's first part can have the later of its slots.
  const auto row_of = [&](int sm_part) {
    return (sm_part == first_part ? split.first_slot : slot_of(sm_part, false)) * slot_rows + row;
  };
  // Four lanes share a row: each loads the exponents and sums of every fourth part.
  const int lane_of_row = lane % 2 + lane / 16 * 2;
  float shift[kPartsInFlight / kRowLanes];
  float sum[kPartsInFlight / kRowLanes];
  const auto load_states = [&](int sm_part) {
#pragma unroll
    for (int i = 0; i < kPartsInFlight / kRowLanes; ++i) {
      const int lane_part = sm_part + (i * kRowLanes + lane_of_row) * warps;
      uint32_t state[2] = {ptx::float_bits(ptx::negative_infinity()), 0};
      if (exists && lane_part <= last_part) ptx::ld_global_64(state, params.state_partial + row_of(lane_part) * 2);
      shift[i] = ptx::bits_float(state[0]);
      sum[i] = ptx::bits_float(state[1]);
    }
  };
  float4 out[kPartsInFlight][kTilePairs];
  const int64_t part_bytes = 2 * slot_rows * warps * (kLatentDim * 4);
  const auto load_columns = [&](int sm_part) {
    const float* out_gmem = params.out_partial + partial_tile(row_of(sm_part) - lane % 16 / 2, first_column) + lane * 4;
#pragma unroll
    for (int i = 0; i < kPartsInFlight; ++i) {
      if (exists && sm_part + i * warps <= last_part) {
#pragma unroll
        for (int pair = 0; pair < kTilePairs; ++pair) out[i][pair] = ptx::ld_global_float4(out_gmem + pair * 128);
      }
      if (i == 0) out_gmem -= (row_of(sm_part) - slot_of(sm_part, false) * slot_rows - row) * kLatentDim;
      out_gmem = ptx::advance_pointer(out_gmem, part_bytes);
    }
  };
  const int first = first_part + member;
  load_states(first);
  load_columns(first);  // in flight together with the exponents that weight them
  const ptx::SmemPointer block_smem = ptx::dynamic_shared_memory();
  float largest = ptx::negative_infinity();
  for (int sm_part = first;;) {
#pragma unroll
    for (int i = 0; i < kPartsInFlight / kRowLanes; ++i) largest = ptx::max_ftz(largest, shift[i]);
    sm_part += kPartsInFlight * warps;
    if (sm_part > last_part) break;
    load_states(sm_part);
  }
  largest = ptx::max_ftz(largest, ptx::shuffle_xor(largest, 1));
  largest = ptx::max_ftz(largest, ptx::shuffle_xor(largest, 16));
  if (warps > 1) {
    const auto max_smem = [&](int warp) {
      return block_smem + Spec::kMaxOffset + (warp * kSumRows + lane % 16 / 2) * 4;
    };
    if (lane < 16 && lane % 2 == 0) ptx::st_shared_float(max_smem(ptx::warp_index()), largest);
    ptx::barrier_sync_block();  // read after write: the warps' maxima; write after read: the previous unit's sums
    const int first_warp = ptx::warp_index() - member;
    for (int other = 0; other < warps; ++other) {
      largest = ptx::max_ftz(largest, ptx::ld_shared_float(max_smem(first_warp + other)));
    }
  }
  ColumnSum<kTilePairs> total{};
  if (last_part - first_part >= kPartsInFlight * warps)
    load_states(first);  // the loop left a later batch in the registers
  for (int sm_part = first;;) {
    float weight[kPartsInFlight / kRowLanes];
#pragma unroll
    for (int i = 0; i < kPartsInFlight / kRowLanes; ++i) {
      // -inf: no part has seen a key; or only NaN, which the sums carry.
      weight[i] = largest == ptx::negative_infinity() ? 1.0f : ptx::exp2_approx(ptx::sub_rn(shift[i], largest));
      total.sum = ptx::fma_rn(weight[i], sum[i], total.sum);
    }
#pragma unroll
    for (int i = 0; i < kPartsInFlight; ++i) {
      const int other = lane % 16 / 2 * 2 + i % 2 + i / 2 % 2 * 16;  // the lane of this row that has the part's weight
      const float part_weight = ptx::shuffle_index(weight[i / kRowLanes], other);
      if (exists && sm_part + i * warps <= last_part) total.add(part_weight, out[i]);
    }
    sm_part += kPartsInFlight * warps;
    if (sm_part > last_part) break;
    load_states(sm_part);
    load_columns(sm_part);
  }
  total.sum += ptx::shuffle_xor(total.sum, 1);
  total.sum += ptx::shuffle_xor(total.sum, 16);
  if (warps > 1) {
    const auto sum_smem = [&](int warp, int pair) {  // the sums of exponentials follow the columns
      return block_smem + warp * Spec::kSumBytes + pair * 512 + lane * (pair < kTilePairs ? 16 : 4);
    };
#pragma unroll
    for (int pair = 0; pair < kTilePairs; ++pair) {
      const uint32_t words[4] = {ptx::float_bits(total.out[pair][0]), ptx::float_bits(total.out[pair][1]),
                                 ptx::float_bits(total.out[pair][2]), ptx::float_bits(total.out[pair][3])};
      ptx::st_shared_128(sum_smem(ptx::warp_index(), pair), words);
    }
    ptx::st_shared_float(sum_smem(ptx::warp_index(), kTilePairs), total.sum);
    ptx::barrier_sync_block();  // read after write: the warps' sums
    if (member != 0) return;
    for (int other = ptx::warp_index() + 1; other < ptx::warp_index() + params.warps_per_sum; ++other) {
      float4 out[kTilePairs];
#pragma unroll
      for (int pair = 0; pair < kTilePairs; ++pair) out[pair] = ptx::ld_shared_float4(sum_smem(other, pair));
      total.add(1.0f, out);
      total.sum += ptx::ld_shared_float(sum_smem(other, kTilePairs));
    }
  }
  if (!exists) return;
  const FinishedRow finished = finish_row(params, row % params.heads, largest, total.sum);
  const int column = first_column + lane / 16 * 8 + lane % 2 * 4;
  if (column == 0 && params.lse != nullptr) store_lse(params, split.batch, row, finished.lse);
  Element* out_gmem =
      static_cast<Element*>(params.out) + (static_cast<int64_t>(split.batch) * num_rows + row) * kLatentDim + column;
#pragma unroll
  for (int pair = 0; pair < kTilePairs; ++pair) {
    const float (&out)[4] = total.out[pair];
    const uint32_t packed[2] = {pack<Element>(out[0] * finished.inverse, out[1] * finished.inverse),
                                pack<Element>(out[2] * finished.inverse, out[3] * finished.inverse)};
    ptx::st_global_64(out_gmem + pair * 16, packed);
  }
}

// The blocks of a sequence take its units in strides, so that each block makes the schedule only once.
template <typename Spec, int kTilePairs>
__device__ __forceinline__ void combine_units(const DecodeParams& params, const SplitSequence& split, int first_block,
                                              int blocks) {
  const int sums = Spec::kNumWarps / params.warps_per_sum;  // per block at once
  const int member = ptx::warp_index() % params.warps_per_sum;
  const int units =
      (params.tokens * params.heads + kSumRows - 1) / kSumRows * (kLatentDim / (kTilePairs * kSumColumns));
#pragma unroll 1
  for (int first = first_block * sums; first < units; first += blocks * sums) {
    combine_unit<Spec, kTilePairs>(params, split, first + ptx::warp_index() / params.warps_per_sum, member);
  }
}

template <typename Spec>
__device__ __forceinline__ void combine(const DecodeParams& params) {
  ptx::grid_launch_dependents();
  const int blocks = ptx::grid_size() / min(params.batch, params.num_sm_parts);  // per sequence
  const int index = ptx::block_index() / blocks;
  WorkTile found;
  SplitSequence split;
  int blocks_per_part;
  // The lengths can be read before the wait: the preceding kernel waited for them before it let this one start.
  const bool is_split = find_split(params, index, found, split.first_part, split.last_part, blocks_per_part);
  ptx::grid_dependency_wait();  // in every block: a kernel that waits for this one thereby waits for the preceding one
  if (!is_split) return;
  split.batch = found.batch;
  split.first_slot = slot_of(split.first_part, found.offset > split.first_part * blocks_per_part);
  const int first_block = ptx::block_index() - index * blocks;
  if (params.tile_pairs_per_warp == 1) {
    combine_units<Spec, 1>(params, split, first_block, blocks);
  } else {
    combine_units<Spec, Spec::kMaxTilePairs>(params, split, first_block, blocks);
  }
}

}  // namespace flashmoe::mla
