// Stable counting sort of slots by expert, without atomics: the order of rows depends on the ids alone.
//
// The slots are cut into one share a block, and a block's into one share a warp, in their order. A warp counts its share 32 slots at
// a time: lanes with the same expert find each other by match_any, and the first of them adds for all. From the counts follows the
// first row of each (block, warp, expert); then the warp goes over its share again, and a slot's row is what its warp has placed of
// that expert so far plus the lanes before it.
//
//   one     grid 1: all of it in one block
//   count   grid B: block_counts[b][e]
//   place   the same grid: adds up the counts of all blocks, and of those before it, then places
#pragma once

#include "device/math.cuh"
#include "moe/params/routing.h"
#include "moe/routing/scalars.cuh"
#include "ptx/barrier.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe {
namespace moe {

template <typename Element_, int kNumWarps_, int kCounts_>
struct SortSpec {
  using Element = Element_;  // unused: the dtypes of ids and weights are parameters
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kCounts = kCounts_;  // [warps][experts]; with many experts fewer warps count
  static constexpr int kSharedBytes = 4 * (kCounts + 2 * kNumThreads + 32 + 1);
  static_assert(kNumThreads == 1024, "a thread an expert, at most 1024 of them");
  static_assert(kCounts >= kNumThreads, "one warp's counts of all experts");
};

constexpr int kBatch = 4;  // loads of ids in flight, 32 slots each

// A range of slots, and words of shared memory.
struct Share {
  int64_t begin, end;
};

template <typename Spec>
struct SortMemory {
  ptx::SmemPointer start = ptx::dynamic_shared_memory();

  // counts: how often (warp, expert) occurs, later the row of its next slot.
  __device__ __forceinline__ ptx::SmemPointer count(int index) const { return start + 4 * index; }
  // Parts of sums over blocks: of all, and of those before this one.
  __device__ __forceinline__ ptx::SmemPointer part_of_total(int i) const { return start + 4 * (Spec::kCounts + i); }
  __device__ __forceinline__ ptx::SmemPointer part_of_before(int i) const {
    return part_of_total(Spec::kNumThreads + i);
  }
  __device__ __forceinline__ ptx::SmemPointer warp_total(int warp) const {
    return part_of_total(2 * Spec::kNumThreads + warp);
  }
  __device__ __forceinline__ ptx::SmemPointer num_rows() const { return warp_total(32); }
};

// Part `index` of `parts` of a range, in steps of 32 slots.
__device__ __forceinline__ Share share_of(Share whole, int parts, int index) {
  const uint32_t size = static_cast<uint32_t>(whole.end - whole.begin);
  const int64_t part = (static_cast<int64_t>((size + parts - 1) / parts) + 31) / 32 * 32;
  const int64_t begin = whole.begin + index * part, end = begin + part;
  return {begin < whole.end ? begin : whole.end, end < whole.end ? end : whole.end};
}

// The experts of slots first, first + 32, ...; -1: none.
__device__ __forceinline__ void load_experts(const SortParams& params, int64_t first, int64_t end,
                                             int (&experts)[kBatch]) {
  uint32_t id[kBatch][2];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int64_t slot = first + 32 * i;
    id[i][0] = id[i][1] = 0xffffffffu;
    if (slot >= end) continue;
    if (params.ids_dtype == Scalar::kInt64) {
      ptx::ld_global_64(id[i], static_cast<const int64_t*>(params.ids) + slot);
    } else {
      id[i][0] = ptx::ld_global_32(static_cast<const int32_t*>(params.ids) + slot);
      id[i][1] = 0;  // a negative one is past any end as an unsigned number
    }
  }
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const bool is_known = id[i][1] == 0 && id[i][0] < static_cast<uint32_t>(params.ids_end);
    experts[i] = is_known ? static_cast<int>(id[i][0]) : -1;
    if (is_known && params.expert_map != nullptr) {
      experts[i] = static_cast<int>(ptx::ld_global_32(params.expert_map + id[i][0]));
    }
  }
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    if (static_cast<uint32_t>(experts[i]) >= static_cast<uint32_t>(params.experts)) experts[i] = -1;
  }
}

__device__ __forceinline__ int lanes_before(uint32_t lanes) {
  return ptx::population_count(lanes & ((1u << ptx::lane_index()) - 1));
}

// Adds the warp's share to its row of counts.
template <typename Spec>
__device__ __forceinline__ void count_share(const SortParams& params, Share share, const SortMemory<Spec>& memory,
                                            int first_count) {
  for (int64_t start = share.begin; start < share.end; start += 32 * kBatch) {
    int experts[kBatch];
    load_experts(params, start + ptx::lane_index(), share.end, experts);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (start + 32 * i >= share.end) break;
      const uint32_t lanes = ptx::match_any(static_cast<uint32_t>(experts[i]));
      if (experts[i] >= 0 && lanes_before(lanes) == 0) {
        const ptx::SmemPointer count = memory.count(first_count + experts[i]);
        ptx::st_shared_32(count, ptx::ld_shared_32(count) + ptx::population_count(lanes));
      }
      ptx::warp_sync();  // the next 32 slots' first lanes are others
    }
  }
}

// Writes the warp's share; its counts hold the rows of each expert's next slot.
template <typename Spec>
__device__ __forceinline__ void place_share(const SortParams& params, Share share, const SortMemory<Spec>& memory,
                                            int first_count) {
  for (int64_t start = share.begin; start < share.end; start += 32 * kBatch) {
    const int64_t first = start + ptx::lane_index();
    int experts[kBatch];
    uint32_t weights[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t slot = first + 32 * i;
      weights[i] = slot < share.end ? load_bits(params.topk_weights, slot, params.weights_dtype) : 0;
    }
    load_experts(params, first, share.end, experts);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (start + 32 * i >= share.end) break;
      const uint32_t lanes = ptx::match_any(static_cast<uint32_t>(experts[i]));
      const ptx::SmemPointer next = memory.count(first_count + maximum(experts[i], 0));
      const int next_row = static_cast<int>(ptx::ld_shared_32(next));
      ptx::warp_sync();  // all lanes have read it
      if (experts[i] >= 0 && lanes_before(lanes) == 0) ptx::st_shared_32(next, next_row + ptx::population_count(lanes));
      ptx::warp_sync();  // before the next 32 slots read it
      const int64_t slot = first + 32 * i;
      if (slot >= share.end) continue;
      const int row = experts[i] >= 0 ? next_row + lanes_before(lanes) : -1;
      ptx::st_global_32(params.slot_rows + slot, static_cast<uint32_t>(row));
      if (row < 0) continue;
      ptx::st_global_32(params.row_slots + row, static_cast<uint32_t>(slot));
      ptx::st_global_float(params.row_weights + row, float_of_bits(weights[i], params.weights_dtype));
    }
  }
}

// Parts of the sums over block_counts: thread t adds those of expert t % experts of every so-manieth block.
template <typename Spec>
__device__ __forceinline__ void add_block_counts(const SortParams& params, const SortMemory<Spec>& memory) {
  constexpr int kLoads = 8;  // in flight
  const int blocks = ptx::grid_size(), parts = Spec::kNumThreads / params.experts;
  const int thread = ptx::thread_index();
  const int part = thread / params.experts, expert = thread - part * params.experts;
  if (part >= parts) return;
  uint32_t total = 0, before = 0;
  for (int start = part; start < blocks; start += kLoads * parts) {
    uint32_t counts[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int block = start + i * parts;
      counts[i] = block < blocks
                      ? ptx::ld_global_32(params.block_counts + static_cast<int64_t>(block) * params.experts + expert)
                      : 0;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      total += counts[i];
      if (start + i * parts < ptx::block_index()) before += counts[i];
    }
  }
  ptx::st_shared_32(memory.part_of_total(thread), total);
  ptx::st_shared_32(memory.part_of_before(thread), before);
}

__device__ __forceinline__ int warp_inclusive_sum(int value) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = ptx::shuffle_index(value, ptx::lane_index() - distance);
    if (ptx::lane_index() >= distance) value += other;
  }
  return value;
}

// The sum of `value` over the threads before this one.
template <typename Spec>
__device__ __forceinline__ int block_exclusive_sum(int value, const SortMemory<Spec>& memory) {
  const int lane = ptx::lane_index(), warp = ptx::warp_index();
  const int inclusive = warp_inclusive_sum(value);
  if (lane == 31) ptx::st_shared_32(memory.warp_total(warp), static_cast<uint32_t>(inclusive));
  ptx::barrier_sync_block();  // all warps' totals are there
  const int totals = warp_inclusive_sum(static_cast<int>(ptx::ld_shared_32(memory.warp_total(lane))));
  const int warps_before = ptx::shuffle_index(totals, warp - 1);
  return (warp > 0 ? warps_before : 0) + inclusive - value;
}

// Turns counts into first rows, a thread an expert; writes expert_offsets. `warps`: that have counted.
template <typename Spec, bool kIsOne>
__device__ __forceinline__ void counts_to_rows(const SortParams& params, const SortMemory<Spec>& memory, int warps) {
  const int expert = ptx::thread_index();
  const bool has_expert = expert < params.experts;
  int total = 0, before = 0;
  if (has_expert) {
    if constexpr (kIsOne) {
      for (int warp = 0; warp < warps; ++warp) {
        total += static_cast<int>(ptx::ld_shared_32(memory.count(warp * params.experts + expert)));
      }
    } else {
      for (int i = expert; i < Spec::kNumThreads / params.experts * params.experts; i += params.experts) {
        total += static_cast<int>(ptx::ld_shared_32(memory.part_of_total(i)));
        before += static_cast<int>(ptx::ld_shared_32(memory.part_of_before(i)));
      }
    }
  }
  const int offset = block_exclusive_sum(total, memory);
  if (!has_expert) return;
  int row = offset + before;
  for (int warp = 0; warp < warps; ++warp) {
    const ptx::SmemPointer count = memory.count(warp * params.experts + expert);
    const int rows = static_cast<int>(ptx::ld_shared_32(count));
    ptx::st_shared_32(count, static_cast<uint32_t>(row));
    row += rows;
  }
  const bool is_last = expert == params.experts - 1;
  if (is_last) ptx::st_shared_32(memory.num_rows(), static_cast<uint32_t>(offset + total));
  if (ptx::block_index() != 0) return;
  ptx::st_global_32(params.expert_offsets + expert, static_cast<uint32_t>(offset));
  if (is_last) ptx::st_global_32(params.expert_offsets + params.experts, static_cast<uint32_t>(offset + total));
}

template <typename Spec, SortStep kStep>
__device__ __forceinline__ void sort(const SortParams& params) {
  const SortMemory<Spec> memory;
  const int thread = ptx::thread_index(), warp = ptx::warp_index();
  const Share block = share_of({0, params.slots}, ptx::grid_size(), ptx::block_index());
  const int most_warps = minimum(Spec::kNumWarps, Spec::kCounts / params.experts);
  const int64_t warp_slots = maximum(static_cast<int>(share_of(block, most_warps, 0).end - block.begin), 1);
  const int warps = static_cast<int>((block.end - block.begin + warp_slots - 1) / warp_slots);  // that have any
  const int first_count = warp * params.experts;
  for (int i = thread; i < warps * params.experts; i += Spec::kNumThreads) ptx::st_shared_32(memory.count(i), 0);
  ptx::barrier_sync_block();  // zeros before counts
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const Share share = warp < warps ? share_of(block, most_warps, warp) : Share{0, 0};
  count_share(params, share, memory, first_count);
  if constexpr (kStep == SortStep::kPlace) add_block_counts(params, memory);
  ptx::barrier_sync_block();  // all warps have counted
  if constexpr (kStep == SortStep::kCount) {
    if (thread >= params.experts) return;
    uint32_t total = 0;
    for (int i = 0; i < warps; ++i) total += ptx::ld_shared_32(memory.count(i * params.experts + thread));
    ptx::st_global_32(params.block_counts + static_cast<int64_t>(ptx::block_index()) * params.experts + thread, total);
  } else {
    counts_to_rows<Spec, kStep == SortStep::kOne>(params, memory, warps);
    ptx::barrier_sync_block();  // rows for all warps
    place_share(params, share, memory, first_count);
    const int64_t num_rows = static_cast<int>(ptx::ld_shared_32(memory.num_rows()));
    const int64_t step = static_cast<int64_t>(ptx::grid_size()) * Spec::kNumThreads;
    for (int64_t row = num_rows + ptx::block_index() * Spec::kNumThreads + thread; row < params.slots; row += step) {
      ptx::st_global_32(params.row_slots + row, 0xffffffffu);
      ptx::st_global_float(params.row_weights + row, 0.0f);
    }
  }
}

}  // namespace moe
}  // namespace flashmoe
