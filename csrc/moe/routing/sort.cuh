// Stable counting sort of slots by expert, without atomics: the order of rows depends only on the ids.
//
// The slots are divided, in order, into one share per block, and a block's share into one per warp. A warp ranks its
// share 32 slots at a time: lanes with the same expert find each other by ballots on the bits of the expert, and the
// first of them updates the count for all. A slot's row is the first row of its expert, plus the expert's slots in
// earlier blocks, in earlier warps, and before it in the warp's share.
//
//   one     grid 1: everything in one block
//   count   grid B: writes block_counts[b][e]; slot_rows: how many of the expert's slots precede this one in the block
//   place   the same grid: sums the counts of all blocks, and of the blocks before it, then places
//
// A warp's last 128 slots stay in registers between ranking and placing; the ranks of earlier ones are kept in
// slot_rows.
#pragma once

#include "device/math.cuh"
#include "moe/params/routing.h"
#include "moe/prefix_sum.cuh"
#include "moe/routing/scalars.cuh"
#include "ptx/barrier.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::moe {

template <typename Element_, int kNumWarps_, int kCounts_>
struct SortSpec {
  using Element = Element_;  // unused: the dtypes of ids and weights are parameters
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kCounts = kCounts_;  // [warps][experts]; with many experts fewer warps count
  static constexpr int kSharedBytes = 4 * (kCounts + 2 * kNumThreads + 32 + 1);
  static_assert(kNumThreads == 1024, "one thread per expert, at most 1024");
  static_assert(kCounts >= kNumThreads, "one warp's counts of all experts");
};

constexpr int kBatch = 4;       // groups of 32 slots
constexpr int kWarpSlots = 64;  // minimum slots of a warp: fewer warps have fewer counts to add up
constexpr int kMostLoads = 16;  // loads of counts in flight

// A range of slots.
struct Share {
  int64_t begin, end;
};

// 128 slots of a warp, four per lane.
struct Batch {
  int64_t first;             // this lane's first slot; the next ones are 32 apart
  int experts[kBatch];       // -1: none, or past the end of the share
  uint32_t weights[kBatch];  // their bits
  int ranks[kBatch];         // how many of the expert's slots precede this one
};

template <typename Spec>
struct SortMemory {
  ptx::SmemPointer start = ptx::dynamic_shared_memory();

  // counts: occurrences of (warp, expert) so far; later, those in all earlier warps.
  __device__ __forceinline__ ptx::SmemPointer count(int index) const { return start + 4 * index; }
  // Partial sums over blocks: over all blocks, and over those before this one.
  __device__ __forceinline__ ptx::SmemPointer partial_total(int i) const { return start + 4 * (Spec::kCounts + i); }
  __device__ __forceinline__ ptx::SmemPointer partial_before(int i) const {
    return partial_total(Spec::kNumThreads + i);
  }
  // First row of an expert in this block; replaces its first partial sum.
  __device__ __forceinline__ ptx::SmemPointer first_row(int expert) const { return partial_total(expert); }
  __device__ __forceinline__ ptx::SmemPointer warp_total(int warp) const {
    return partial_total(2 * Spec::kNumThreads + warp);
  }
  __device__ __forceinline__ ptx::SmemPointer num_rows() const { return warp_total(32); }
};

// Share `index` of `shares` of a range, in multiples of 32 slots.
__device__ __forceinline__ Share share_of(Share whole, int shares, int index) {
  const uint32_t size = static_cast<uint32_t>(whole.end - whole.begin);
  const int64_t slots = (static_cast<int64_t>((size + shares - 1) / shares) + 31) / 32 * 32;
  const int64_t begin = whole.begin + index * slots, end = begin + slots;
  return {begin < whole.end ? begin : whole.end, end < whole.end ? end : whole.end};
}

// The experts of slots first, first + 32, ..., or -1 for none.
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
      id[i][1] = 0;  // as an unsigned number, a negative id is past any end
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

// The lanes that have this lane's expert, as bits. match.any would take one step per distinct expert.
__device__ __forceinline__ void lanes_alike(const int (&experts)[kBatch], int num_experts, uint32_t (&lanes)[kBatch]) {
#pragma unroll
  for (int i = 0; i < kBatch; ++i) lanes[i] = ptx::vote_ballot(experts[i] >= 0);
#pragma unroll 1
  for (int bit = 1; bit < num_experts; bit *= 2) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const bool is_set = (experts[i] & bit) != 0;
      const uint32_t others = ptx::vote_ballot(is_set);
      lanes[i] &= is_set ? others : ~others;
    }
  }
}

// The start of a share's last batch.
__device__ __forceinline__ int64_t last_start(Share share) {
  return share.begin + maximum(static_cast<int>(share.end - share.begin) - 1, 0) / (32 * kBatch) * (32 * kBatch);
}

template <SortStep kStep>
__device__ __forceinline__ void load_batch(const SortParams& params, int64_t start, int64_t end, Batch& batch) {
  batch.first = start + ptx::lane_index();
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int64_t slot = batch.first + 32 * i;
    if (kStep == SortStep::kCount || slot >= end) continue;
    batch.weights[i] = load_bits(params.topk_weights, slot, params.weights_dtype);
  }
  load_experts(params, batch.first, end, batch.experts);
}

__device__ __forceinline__ void load_ranks(const SortParams& params, int64_t end, Batch& batch) {
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int64_t slot = batch.first + 32 * i;
    if (slot < end) batch.ranks[i] = static_cast<int>(ptx::ld_global_32(params.slot_rows + slot));
  }
}

// Writes rows[i] for the batch's slots that have an expert, -1 for the others.
__device__ __forceinline__ void store_slot_rows(const SortParams& params, int64_t end, const Batch& batch,
                                                const int (&rows)[kBatch]) {
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int64_t slot = batch.first + 32 * i;
    const int row = batch.experts[i] >= 0 ? rows[i] : -1;
    if (slot < end) ptx::st_global_32(params.slot_rows + slot, static_cast<uint32_t>(row));
  }
}

// Ranks the batch and adds it to the warp's counts.
template <typename Spec>
__device__ __forceinline__ void rank_batch(const SortParams& params, const SortMemory<Spec>& memory, int first_count,
                                           Batch& batch) {
  uint32_t lanes[kBatch];
  lanes_alike(batch.experts, params.experts, lanes);
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const ptx::SmemPointer count = memory.count(first_count + maximum(batch.experts[i], 0));
    const int before = static_cast<int>(ptx::ld_shared_32(count));
    const int lanes_ahead = lanes_before(lanes[i]);
    batch.ranks[i] = before + lanes_ahead;
    ptx::warp_sync();  // all lanes have read it
    if (batch.experts[i] >= 0 && lanes_ahead == 0) ptx::st_shared_32(count, before + ptx::population_count(lanes[i]));
    ptx::warp_sync();  // before the next 32 slots read it
  }
}

// Ranks the warp's share; leaves its last batch in `batch`.
template <typename Spec, SortStep kStep>
__device__ __forceinline__ void rank_share(const SortParams& params, Share share, const SortMemory<Spec>& memory,
                                           int first_count, Batch& batch) {
  const int64_t last = last_start(share);
#pragma unroll 1
  for (int64_t start = share.begin; start <= last; start += 32 * kBatch) {
    load_batch<kStep>(params, start, share.end, batch);
    rank_batch(params, memory, first_count, batch);
    if (start < last) store_slot_rows(params, share.end, batch, batch.ranks);
  }
}

// Turns ranks into rows or, in step `count`, into ranks within the block.
template <typename Spec, SortStep kStep>
__device__ __forceinline__ void place_batch(const SortParams& params, int64_t end, const SortMemory<Spec>& memory,
                                            int first_count, const Batch& batch) {
  int rows[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int expert = maximum(batch.experts[i], 0);
    rows[i] = batch.ranks[i];
    if (kStep != SortStep::kPlace) rows[i] += static_cast<int>(ptx::ld_shared_32(memory.count(first_count + expert)));
    if (kStep != SortStep::kCount) rows[i] += static_cast<int>(ptx::ld_shared_32(memory.first_row(expert)));
  }
  store_slot_rows(params, end, batch, rows);
  if constexpr (kStep != SortStep::kCount) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (batch.experts[i] < 0) continue;
      ptx::st_global_32(params.row_slots + rows[i], static_cast<uint32_t>(batch.first + 32 * i));
      ptx::st_global_float(params.row_weights + rows[i], float_of_bits(batch.weights[i], params.weights_dtype));
    }
  }
}

// `batch`: the last one of the share; the others are read again.
template <typename Spec, SortStep kStep>
__device__ __forceinline__ void place_share(const SortParams& params, Share share, const SortMemory<Spec>& memory,
                                            int first_count, Batch& batch) {
  place_batch<Spec, kStep>(params, share.end, memory, first_count, batch);
  const int64_t last = last_start(share);
#pragma unroll 1
  for (int64_t start = share.begin; start < last; start += 32 * kBatch) {
    load_batch<kStep>(params, start, share.end, batch);
    load_ranks(params, share.end, batch);
    place_batch<Spec, kStep>(params, share.end, memory, first_count, batch);
  }
}

// Partial sums over block_counts: thread t sums those of expert t % experts over every `shares`-th block.
template <typename Spec>
__device__ __forceinline__ void add_block_counts(const SortParams& params, const SortMemory<Spec>& memory) {
  const int blocks = ptx::grid_size(), shares = Spec::kNumThreads / params.experts;
  const int thread = ptx::thread_index();
  const int share_index = thread / params.experts, expert = thread - share_index * params.experts;
  if (share_index >= shares) return;
  uint32_t total = 0, before = 0;
  for (int start = share_index; start < blocks; start += kMostLoads * shares) {
    uint32_t counts[kMostLoads];
#pragma unroll
    for (int i = 0; i < kMostLoads; ++i) {
      const int block = start + i * shares;
      counts[i] = block < blocks
                      ? ptx::ld_global_32(params.block_counts + static_cast<int64_t>(block) * params.experts + expert)
                      : 0;
    }
#pragma unroll
    for (int i = 0; i < kMostLoads; ++i) {
      total += counts[i];
      if (start + i * shares < ptx::block_index()) before += counts[i];
    }
  }
  ptx::st_shared_32(memory.partial_total(thread), total);
  ptx::st_shared_32(memory.partial_before(thread), before);
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

// Replaces the per-warp counts of the thread's expert by the sums over earlier warps; returns their total.
template <typename Spec>
__device__ __forceinline__ int add_warp_counts(const SortParams& params, const SortMemory<Spec>& memory, int warps) {
  constexpr int kLoads = 8;  // in flight
  int before = 0;
#pragma unroll 1
  for (int start = 0; start < warps; start += kLoads) {
    const int first = start * params.experts + ptx::thread_index();
    uint32_t counts[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      counts[i] = start + i < warps ? ptx::ld_shared_32(memory.count(first + i * params.experts)) : 0;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (start + i < warps) ptx::st_shared_32(memory.count(first + i * params.experts), before);
      before += static_cast<int>(counts[i]);
    }
  }
  return before;
}

// Adds the partial sums that add_block_counts left.
template <typename Spec>
__device__ __forceinline__ void add_partial_sums(const SortParams& params, const SortMemory<Spec>& memory, int& total,
                                                 int& before) {
  const int end = Spec::kNumThreads / params.experts * params.experts;
  for (int i = ptx::thread_index(); i < end; i += params.experts) {
    total += static_cast<int>(ptx::ld_shared_32(memory.partial_total(i)));
    before += static_cast<int>(ptx::ld_shared_32(memory.partial_before(i)));
  }
}

// Computes the experts' first rows, one expert per thread: `total` rows, `before` of them in earlier blocks. Writes
// expert_offsets.
template <typename Spec>
__device__ __forceinline__ void store_first_rows(const SortParams& params, const SortMemory<Spec>& memory, int total,
                                                 int before) {
  const int expert = ptx::thread_index();
  const int offset = block_exclusive_sum(total, memory);
  if (expert >= params.experts) return;
  ptx::st_shared_32(memory.first_row(expert), static_cast<uint32_t>(offset + before));
  const bool is_last = expert == params.experts - 1;
  if (is_last) ptx::st_shared_32(memory.num_rows(), static_cast<uint32_t>(offset + total));
  if (ptx::block_index() != 0) return;
  ptx::st_global_32(params.expert_offsets + expert, static_cast<uint32_t>(offset));
  if (is_last) ptx::st_global_32(params.expert_offsets + params.experts, static_cast<uint32_t>(offset + total));
}

// Clears the rows past the last one: there are some if slots have no expert.
template <typename Spec>
__device__ __forceinline__ void clear_rest(const SortParams& params, const SortMemory<Spec>& memory) {
  const int64_t num_rows = static_cast<int>(ptx::ld_shared_32(memory.num_rows()));
  const int64_t step = static_cast<int64_t>(ptx::grid_size()) * Spec::kNumThreads;
  const int thread = ptx::thread_index();
  for (int64_t row = num_rows + ptx::block_index() * Spec::kNumThreads + thread; row < params.slots; row += step) {
    ptx::st_global_32(params.row_slots + row, 0xffffffffu);
    ptx::st_global_float(params.row_weights + row, 0.0f);
  }
}

template <typename Spec, SortStep kStep>
__device__ __forceinline__ void sort(const SortParams& params) {
  const SortMemory<Spec> memory;
  const int thread = ptx::thread_index(), warp = ptx::warp_index();
  const bool has_expert = thread < params.experts;
  const Share block = share_of({0, params.slots}, ptx::grid_size(), ptx::block_index());
  const int max_warps = minimum(Spec::kNumWarps, Spec::kCounts / params.experts);
  const int warp_slots = maximum(static_cast<int>(share_of(block, max_warps, 0).end - block.begin), kWarpSlots);
  const int block_slots = static_cast<int>(block.end - block.begin);
  const int warps = (block_slots + warp_slots - 1) / warp_slots;  // warps that have slots
  const int first_count = warp * params.experts;
  Share share{0, 0};
  if (warp < warps) {
    share.begin = block.begin + static_cast<int64_t>(warp) * warp_slots;
    share.end = share.begin + minimum(warp_slots, block_slots - warp * warp_slots);
  }
  if constexpr (kStep != SortStep::kPlace) {
    for (int i = thread; i < warps * params.experts; i += Spec::kNumThreads) ptx::st_shared_32(memory.count(i), 0);
    ptx::barrier_sync_block();  // zeros before counts
  }
  Batch batch;
  // The inputs of `count` may be read before the wait: `count` starts this step only when it may read them itself.
  if constexpr (kStep == SortStep::kPlace) load_batch<kStep>(params, last_start(share), share.end, batch);
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if constexpr (kStep == SortStep::kPlace) {
    load_ranks(params, share.end, batch);
    add_block_counts(params, memory);
  } else {
    if (warp < warps) rank_share<Spec, kStep>(params, share, memory, first_count, batch);
  }
  ptx::barrier_sync_block();  // all warps have counted
  int total = 0, before = 0;
  if constexpr (kStep == SortStep::kPlace) {
    if (has_expert) add_partial_sums(params, memory, total, before);
  } else {
    if (has_expert) total = add_warp_counts(params, memory, warps);
  }
  if constexpr (kStep == SortStep::kCount) {
    const int64_t first = static_cast<int64_t>(ptx::block_index()) * params.experts;
    if (has_expert) ptx::st_global_32(params.block_counts + first + thread, static_cast<uint32_t>(total));
  } else {
    store_first_rows(params, memory, total, before);
  }
  ptx::barrier_sync_block();  // all first rows are written
  if (warp < warps) place_share<Spec, kStep>(params, share, memory, first_count, batch);
  if constexpr (kStep != SortStep::kCount) clear_rest(params, memory);
}

}  // namespace flashmoe::moe
