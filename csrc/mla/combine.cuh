// Merges the partial results of sequences that span several parts, in an order that depends only on the parts.
//
// A warp sums 16 or 32 columns of 8 rows. If a sequence can span many parts, warps_per_sum warps share that sum: each
// takes every warps_per_sum-th part, and their sums are added through shared memory. Grid: equally many blocks per
// sequence, or per part if there are fewer parts (a part begins at most one sequence that continues in others); in
// total about as many as the GPU holds at once, because each block makes the plan, which takes longer than its sums.
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

namespace flashmoe::mla {

// kBlockM: units of work per thread block, one warp each. A unit is a sum, or one warp's share of it.
template <typename Element_, int kBlockM_, int kNumWarps_>
struct CombineSpec {
  using Element = Element_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kMostPieces = 2;                          // per lane, four columns each; one per pair of tiles
  static constexpr int kSumBytes = 32 * (16 * kMostPieces + 4);  // per warp: the columns and the sums of exponentials
  static constexpr int kMaxOffset = kNumWarps * kSumBytes;       // [warp][8]: the largest exponent of its parts
  static constexpr int kSharedBytes = kMaxOffset + kNumWarps * kSumRows * 4;
  static_assert(kBlockM_ == kNumWarps, "a warp for each unit");
};

// A lane's columns of a row, and the row's sum of exponentials.
template <int kPieces>
struct ColumnSum {
  float out[kPieces][4];
  float sum;

  __device__ __forceinline__ void add(float weight, const float4 (&part)[kPieces]) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      out[piece][0] = ptx::fma_rn(weight, part[piece].x, out[piece][0]);
      out[piece][1] = ptx::fma_rn(weight, part[piece].y, out[piece][1]);
      out[piece][2] = ptx::fma_rn(weight, part[piece].z, out[piece][2]);
      out[piece][3] = ptx::fma_rn(weight, part[piece].w, out[piece][3]);
    }
  }
};

// Finds the sequence that a block merges, from first_part to last_part. Returns false if one part holds it.
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

// One unit: 8 rows of 16 columns per piece, or one warp's share of their sum. In each pair of tiles a lane has half a
// row of one tile. Warps past the last unit only take part in the barriers.
template <typename Spec, int kPieces>
__device__ __forceinline__ void combine_unit(const DecodeParams& params, const SplitSequence& split, int unit,
                                             int member) {
  using Element = typename Spec::Element;
  constexpr int kColumns = kPieces * kSumColumns;
  constexpr int kColumnUnits = kLatentDim / kColumns;
  constexpr int kAtOnce = 16 / kPieces;  // parts whose loads are in flight
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
  const auto row_of = [&](int part) {
    return (part == first_part ? split.first_slot : slot_of(part, false)) * slot_rows + row;
  };
  // Four lanes share a row: each loads the exponents and sums of every fourth part.
  const int lane_of_row = lane % 2 + lane / 16 * 2;
  float shift[kAtOnce / kRowLanes];
  float sum[kAtOnce / kRowLanes];
  const auto load_states = [&](int part) {
#pragma unroll
    for (int i = 0; i < kAtOnce / kRowLanes; ++i) {
      const int own = part + (i * kRowLanes + lane_of_row) * warps;
      uint32_t state[2] = {ptx::float_bits(ptx::negative_infinity()), 0};
      if (exists && own <= last_part) ptx::ld_global_64(state, params.state_partial + row_of(own) * 2);
      shift[i] = ptx::bits_float(state[0]);
      sum[i] = ptx::bits_float(state[1]);
    }
  };
  float4 out[kAtOnce][kPieces];
  const int64_t part_bytes = 2 * slot_rows * warps * (kLatentDim * 4);
  const auto load_columns = [&](int part) {
    const float* out_gmem = params.out_partial + partial_tile(row_of(part) - lane % 16 / 2, first_column) + lane * 4;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (exists && part + i * warps <= last_part) {
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) out[i][piece] = ptx::ld_global_float4(out_gmem + piece * 128);
      }
      if (i == 0) out_gmem -= (row_of(part) - slot_of(part, false) * slot_rows - row) * kLatentDim;
      out_gmem = ptx::advance_pointer(out_gmem, part_bytes);
    }
  };
  const int first = first_part + member;
  load_states(first);
  load_columns(first);  // in flight together with the exponents that weight them
  const ptx::SmemPointer block_smem = ptx::dynamic_shared_memory();
  float largest = ptx::negative_infinity();
  for (int part = first;;) {
#pragma unroll
    for (int i = 0; i < kAtOnce / kRowLanes; ++i) largest = ptx::max_ftz(largest, shift[i]);
    part += kAtOnce * warps;
    if (part > last_part) break;
    load_states(part);
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
  ColumnSum<kPieces> total{};
  if (last_part - first_part >= kAtOnce * warps) load_states(first);  // the loop left a later batch in the registers
  for (int part = first;;) {
    float weight[kAtOnce / kRowLanes];
#pragma unroll
    for (int i = 0; i < kAtOnce / kRowLanes; ++i) {
      // -inf: no part has seen a key; or only NaN, which the sums carry.
      weight[i] = largest == ptx::negative_infinity() ? 1.0f : ptx::exp2_approx(ptx::sub_rn(shift[i], largest));
      total.sum = ptx::fma_rn(weight[i], sum[i], total.sum);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int other = lane % 16 / 2 * 2 + i % 2 + i / 2 % 2 * 16;  // the lane of this row that has the part's weight
      const float own_weight = ptx::shuffle_index(weight[i / kRowLanes], other);
      if (exists && part + i * warps <= last_part) total.add(own_weight, out[i]);
    }
    part += kAtOnce * warps;
    if (part > last_part) break;
    load_states(part);
    load_columns(part);
  }
  total.sum += ptx::shuffle_xor(total.sum, 1);
  total.sum += ptx::shuffle_xor(total.sum, 16);
  if (warps > 1) {
    const auto sum_smem = [&](int warp, int piece) {  // the sums of exponentials follow the pieces
      return block_smem + warp * Spec::kSumBytes + piece * 512 + lane * (piece < kPieces ? 16 : 4);
    };
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const uint32_t words[4] = {ptx::float_bits(total.out[piece][0]), ptx::float_bits(total.out[piece][1]),
                                 ptx::float_bits(total.out[piece][2]), ptx::float_bits(total.out[piece][3])};
      ptx::st_shared_128(sum_smem(ptx::warp_index(), piece), words);
    }
    ptx::st_shared_float(sum_smem(ptx::warp_index(), kPieces), total.sum);
    ptx::barrier_sync_block();  // read after write: the warps' sums
    if (member != 0) return;
    for (int other = ptx::warp_index() + 1; other < ptx::warp_index() + params.warps_per_sum; ++other) {
      float4 out[kPieces];
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) out[piece] = ptx::ld_shared_float4(sum_smem(other, piece));
      total.add(1.0f, out);
      total.sum += ptx::ld_shared_float(sum_smem(other, kPieces));
    }
  }
  if (!exists) return;
  const FinishedRow finished = finish_row(params, row % params.heads, largest, total.sum);
  const int column = first_column + lane / 16 * 8 + lane % 2 * 4;
  if (column == 0 && params.lse != nullptr) store_lse(params, split.batch, row, finished.lse);
  Element* out_gmem =
      static_cast<Element*>(params.out) + (static_cast<int64_t>(split.batch) * num_rows + row) * kLatentDim + column;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const float (&out)[4] = total.out[piece];
    const uint32_t packed[2] = {pack<Element>(out[0] * finished.inverse, out[1] * finished.inverse),
                                pack<Element>(out[2] * finished.inverse, out[3] * finished.inverse)};
    ptx::st_global_64(out_gmem + piece * 16, packed);
  }
}

// The blocks of a sequence take its units in strides, so that each block makes the plan only once.
template <typename Spec, int kPieces>
__device__ __forceinline__ void combine_units(const DecodeParams& params, const SplitSequence& split, int first_block,
                                              int blocks) {
  const int sums = Spec::kNumWarps / params.warps_per_sum;  // per block at once
  const int member = ptx::warp_index() % params.warps_per_sum;
  const int units = (params.tokens * params.heads + kSumRows - 1) / kSumRows * (kLatentDim / (kPieces * kSumColumns));
#pragma unroll 1
  for (int first = first_block * sums; first < units; first += blocks * sums) {
    combine_unit<Spec, kPieces>(params, split, first + ptx::warp_index() / params.warps_per_sum, member);
  }
}

template <typename Spec>
__device__ __forceinline__ void combine(const DecodeParams& params) {
  ptx::grid_launch_dependents();
  const int blocks = ptx::grid_size() / min(params.batch, params.parts);  // per sequence
  const int index = ptx::block_index() / blocks;
  Segment found;
  SplitSequence split;
  int share;
  // The lengths can be read before the wait: the preceding kernel waited for them before it let this one start.
  const bool is_split = find_split(params, index, found, split.first_part, split.last_part, share);
  ptx::grid_dependency_wait();  // in every block: a kernel that waits for this one thereby waits for the preceding one
  if (!is_split) return;
  split.batch = found.batch;
  split.first_slot = slot_of(split.first_part, found.position > split.first_part * share);
  const int first_block = ptx::block_index() - index * blocks;
  if (params.sum_pieces == 1) {
    combine_units<Spec, 1>(params, split, first_block, blocks);
  } else {
    combine_units<Spec, Spec::kMostPieces>(params, split, first_block, blocks);
  }
}

}  // namespace flashmoe::mla
