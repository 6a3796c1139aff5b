// Runs tiles whose stages form one continuous stream, for 8-bit and 4-bit weights: with half or a quarter of the bytes
// per tile, the ring would be empty between tiles too often. While one tile's last stages are multiplied, the next
// one's first are loaded, so the sums have their own shared memory.
//
// `Work`, a tile in progress, has
//   Params                               the kernel's parameters, with the product's sizes in `gemm`
//   WeightLoads, weight_loads(params, tile)
//                                        the loader of weights without the rest
//   Work(params, tile)                   starts no copies
//   weights, rows                        loaders: load(stage's memory); weights also have advance()
//   scales                               of a stage: load(stage)
//   load(stage's memory, pending)        loads weights and rows of the next stage; issued counts the stages
//   Pending                              what load() may leave unfinished: store() finishes it
//   multiply(sums, stage's memory, step, stages)
//   store(params, sums)                  stores the results
#pragma once

#include "moe/grouped_gemm/few_rows/grouped_gemm.cuh"

namespace flashmoe::moe::few_rows {

// Waits until at most `pending` groups of copies are in flight, and no more than kMax.
template <int kMax>
__device__ __forceinline__ void wait_for_copies(int pending) {
  if constexpr (kMax == 0) {
    ptx::cp_async_wait<0>();
  } else {
    if (pending >= kMax) return ptx::cp_async_wait<kMax>();
    wait_for_copies<kMax - 1>(pending);
  }
}

template <typename Spec, bool kIsGated, typename Work>
__device__ __forceinline__ void stream_tiles(const typename Work::Params& all) {
  constexpr int kAhead = Spec::kNumStages - 1;
  const GemmParams& params = all.gemm;
  const ptx::SmemPointer ring_smem = ptx::dynamic_shared_memory();
  const ptx::SmemPointer list_smem = ring_smem + Spec::kNumStages * Spec::kStageBytes;
  const ptx::SmemPointer warp_counts_smem = list_smem + Spec::kListBytes;
  const ptx::SmemPointer next_smem = warp_counts_smem + 4 * Spec::kNumWarps;  // two words
  const ptx::SmemPointer sums_smem = warp_counts_smem + Spec::kWordBytes;
  const int stages = ceil_div(params.k, Spec::kBlockK);
  const auto stage_at = [ring_smem](int stage) { return ring_smem + stage * Spec::kStageBytes; };

  // What may begin early, and why: see multiply_tiles.
  int tile_index = ptx::block_index();
  bool has_started = false;
  if (kIsGated && params.ids == nullptr) ptx::grid_dependency_wait();
  const TileList<Spec> tiles(params, list_smem, warp_counts_smem);
  if (kIsGated && params.ids != nullptr) {
    has_started = tile_index < tiles.count;
    if (has_started) {
      typename Work::WeightLoads weights = Work::weight_loads(params, tiles.find_weights(tile_index));
      for (int ahead = 0; ahead < kAhead; ++ahead)
        if (ahead < stages) weights.load(stage_at(ahead));
    }
    ptx::grid_dependency_wait();
  }
  if (tile_index >= tiles.count) {
    if constexpr (!kIsGated) ptx::grid_dependency_wait();  // the next kernel relies on this one's end
    ptx::cp_async_wait<0>();
    return;
  }
  Work work(all, tiles.find(tile_index));
  const int started = minimum(kAhead, stages);
  work.issued = started;
  for (int ahead = 0; ahead < started; ++ahead) {
    if (has_started) {
      work.weights.advance();
    } else {
      work.weights.load(stage_at(ahead));
    }
  }
  if constexpr (!kIsGated) ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  for (int ahead = 0; ahead < started; ++ahead) {
    work.rows.load(stage_at(ahead) + Spec::kWeightBytes);
    ptx::cp_async_commit();
  }
  work.scales.load(0);

  // Each step commits one group, so the stage being multiplied is complete once at most started - 1 groups are pending:
  // if a tile has fewer stages than the ring, the next tile's first stage is loaded in this one's first step.
  typename Work::Pending pending;
  const auto after = [](int stage) { return stage == Spec::kNumStages - 1 ? 0 : stage + 1; };
  int read_stage = 0, write_stage = started % Spec::kNumStages, stages_in_ring = started, word = 0;
  while (true) {
    if (ptx::thread_index() == 0)  // the tile after this one; the other word may still be read
      ptx::st_shared_32(next_smem + 4 * word, next_tile_index(params.tile_counter, tiles.count, tile_index));
    pending.store();
    wait_for_copies<kAhead - 1>(started - 1);
    // The first stage is complete; all warps are done with the one before; the next number is written.
    ptx::barrier_sync_block();
    tile_index = ptx::ld_shared_32(next_smem + 4 * word);
    word ^= 1;
    const bool has_next = tile_index < tiles.count;
    Work next = work;
    if (has_next) {
      next = Work(all, tiles.find(tile_index));
      next.scales.load(0);
    }
    Accumulator<Spec> accumulator = {};
    for (int step = 0; step < stages; ++step) {
      if (step > 0) {
        pending.store();
        wait_for_copies<kAhead - 1>(started - 1);
        ptx::barrier_sync_block();  // this stage is complete; all warps are done with the one before, which is refilled
      }
      for (; stages_in_ring < Spec::kNumStages; ++stages_in_ring) {
        if (work.issued < stages) {
          work.load(stage_at(write_stage), pending);
        } else if (has_next && next.issued < stages) {
          next.load(stage_at(write_stage), pending);
        } else {
          break;
        }
        write_stage = after(write_stage);
      }
      ptx::cp_async_commit();
      work.multiply(accumulator, stage_at(read_stage), step, stages);
      read_stage = after(read_stage);
      --stages_in_ring;
    }
    const WarpSums<Spec> sums(sums_smem, accumulator);
    work.store(params, sums);
    if (!has_next) break;
    work = next;
  }
  ptx::cp_async_wait<0>();
}

}  // namespace flashmoe::moe::few_rows
