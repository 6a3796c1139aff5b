// How the key blocks of a batch are divided over the blocks of a decoding kernel, from the lengths in device memory.
//
// The key blocks of all sequences are laid end to end, and every SM part (FlashMLA's name) takes an equal share: the
// end of one sequence, whole sequences, and the beginning of another. Equal sequences are cut alike if that makes no
// share much longer: a part then has keys of one sequence, or whole sequences. Thread block `row_tile + row_tiles *
// sm_part` computes a part for one tile of rows, so that the tiles of a sequence read its keys at the same time.
// combine.cuh makes the same schedule and merges the sequences that span several parts.
//
// Every warp makes the schedule for itself, looking at 32 sequences at a time, one per lane.
#pragma once

#include "device/reduce.cuh"
#include "mla/params/decode.h"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::mla {

// The key blocks of a sequence that belong to a part.
struct WorkTile {
  int batch;
  int keys;  // of the sequence
  int begin_block;
  int end_block;
  int num_blocks;  // of the sequence, at least one
  int offset;      // of begin_block among all key blocks; unused if sequences are not split

  __device__ __forceinline__ bool is_whole() const { return begin_block == 0 && end_block == num_blocks; }
};

// The end of the keys that a row sees.
__device__ __forceinline__ int visible_end(const DecodeParams& params, int keys, int row) {
  if (params.is_causal == 0) return keys;
  const int token = static_cast<int>(static_cast<uint32_t>(row) / static_cast<uint32_t>(params.heads));
  return keys - (params.tokens - 1 - token);
}

// The page of a sequence's key, from the block table, clamped to the cache; without a table each sequence is one page.
__device__ __forceinline__ int get_page(const DecodeParams& params, int batch, int key) {
  if (params.block_table == nullptr) return batch;
  const int32_t* page_gmem = params.block_table + batch * params.block_table_stride +
                             static_cast<uint32_t>(key) / static_cast<uint32_t>(params.page_size);
  return max(0, min(params.num_pages - 1, static_cast<int>(ptx::ld_global_32(page_gmem))));
}

// The row of its page that has the key.
__device__ __forceinline__ int row_in_page(const DecodeParams& params, int key) {
  return static_cast<int>(static_cast<uint32_t>(key) % static_cast<uint32_t>(params.page_size));
}

// A part can end one sequence and begin another: each has its own slot for partial results.
__device__ __forceinline__ int slot_of(int sm_part, bool is_later) { return 2 * sm_part + (is_later ? 1 : 0); }

struct TileScheduler {
  // What a sequence costs a part besides its key blocks, in key blocks: Q, and the output.
  static constexpr int kOverheadBlocks = 2;

  const DecodeParams& params;
  const int sm_part;
  int blocks_per_part;
  int offset;  // among all key blocks: where the next work tile begins
  int group;   // the lanes have sequences group to group + 31
  int group_offset;
  // Of this lane's sequence:
  int keys;
  int blocks;
  int sequence_end;  // where the sequence ends, counted from group_offset

  __device__ __forceinline__ void load_sequence(int batch) {
    keys = 0;
    blocks = 0;
    if (batch >= params.batch) return;
    keys = params.max_keys;
    if (params.cache_seqlens != nullptr) {
      keys = max(0, min(keys, static_cast<int>(ptx::ld_global_32(params.cache_seqlens + batch))));
    }
    blocks =
        max(1, (keys + (1 << params.block_n_log2) - 1) >> params.block_n_log2);  // rows without keys have an output
  }

  // overhead: added to each sequence's key blocks, in front of them.
  __device__ __forceinline__ void set_group(int first, int overhead = kOverheadBlocks, bool is_loaded = false) {
    group = first;
    if (!is_loaded) load_sequence(first + ptx::lane_index());
    sequence_end = warp_prefix_sum(blocks > 0 ? blocks + overhead : 0);
  }

  __device__ __forceinline__ TileScheduler(const DecodeParams& params_, int sm_part_)
      : params(params_), sm_part(sm_part_), group_offset(0) {
    blocks_per_part = 1;
    offset = sm_part;
    if (params.num_splits == 1) return;
    load_sequence(0);
    int max_blocks = blocks;
    int min_blocks = blocks;
    int total = params.batch * (blocks + kOverheadBlocks);
    if (params.cache_seqlens != nullptr) {
      total = max_blocks = 0;
#pragma unroll 4
      for (int first = 0; first < params.batch; first += 32) {
        load_sequence(first + ptx::lane_index());
        total += blocks > 0 ? blocks + kOverheadBlocks : 0;
        max_blocks = max(max_blocks, blocks);
        if (blocks > 0) min_blocks = min(min_blocks, blocks);
      }
      total = ptx::reduce_add(total);
      max_blocks = static_cast<int>(warp_max(static_cast<uint32_t>(max_blocks)));
      min_blocks = static_cast<int>(warp_min(static_cast<uint32_t>(min_blocks)));
    }
    // Shares do not begin where sequences do: a sequence of num_splits - 1 shares may span num_splits parts.
    const int min_blocks_per_part =
        max_blocks < params.num_splits
            ? params.min_blocks_per_part
            : max(params.min_blocks_per_part, (max_blocks + params.num_splits - 2) / (params.num_splits - 1));
    blocks_per_part = max((total + params.num_sm_parts - 1) / params.num_sm_parts, min_blocks_per_part);
    // Equal sequences: whole parts for each, or whole sequences per part, if no part becomes more than 1/16 longer.
    int overhead = kOverheadBlocks;
    if (min_blocks == max_blocks) {
      int sequence_blocks = max_blocks + kOverheadBlocks;
      int aligned;
      if (params.parts_per_sequence > 0) {
        aligned = max((max_blocks + params.parts_per_sequence - 1) / params.parts_per_sequence, min_blocks_per_part);
        sequence_blocks = params.parts_per_sequence * aligned;
      } else {
        aligned = (blocks_per_part + sequence_blocks - 1) / sequence_blocks * sequence_blocks;
      }
      if (aligned <= blocks_per_part + blocks_per_part / 16) {
        overhead = sequence_blocks - max_blocks;
        blocks_per_part = aligned;
      }
    }
    offset = sm_part * blocks_per_part;
    set_group(0, overhead, /*is_loaded=*/params.cache_seqlens != nullptr && params.batch <= 32);
  }

  // Finds the next work tile of the part; returns false at its end.
  __device__ __forceinline__ bool next(WorkTile& work) {
    const int end = (sm_part + 1) * blocks_per_part;
    if (offset >= end) return false;
    if (params.num_splits == 1) {
      load_sequence(offset);
      work = WorkTile{offset, keys, 0, blocks, blocks, 0};
      offset = end;
      return true;
    }
    uint32_t reached = ptx::vote_ballot(group_offset + sequence_end > offset);
    while (reached == 0) {
      if (group + 32 >= params.batch) return false;
      group_offset += ptx::shuffle_index(sequence_end, 31);
      set_group(group + 32);
      reached = ptx::vote_ballot(group_offset + sequence_end > offset);
    }
    const int lane = ptx::population_count(~reached & (reached - 1));  // the first sequence that ends past offset
    set_work_tile(work, lane);
    const int first = work.offset;
    offset = max(offset, first);
    if (offset >= end) return false;
    work.offset = offset;
    work.begin_block = offset - first;
    work.end_block = min(work.num_blocks, end - first);
    offset = first + work.end_block;
    return true;
  }

  // Finds all key blocks of a sequence, in whichever parts they are.
  __device__ __forceinline__ void find_sequence(int batch, WorkTile& work) {
    while (batch >= group + 32) {
      group_offset += ptx::shuffle_index(sequence_end, 31);
      set_group(group + 32);
    }
    set_work_tile(work, batch - group);
    work.end_block = work.num_blocks;
  }

  // Sets the work tile to a lane's sequence, from its first block on.
  __device__ __forceinline__ void set_work_tile(WorkTile& work, int lane) const {
    work.batch = group + lane;
    work.keys = ptx::shuffle_index(keys, lane);
    work.num_blocks = ptx::shuffle_index(blocks, lane);
    work.begin_block = 0;
    work.offset = group_offset + ptx::shuffle_index(sequence_end, lane) - work.num_blocks;
  }

  __device__ __forceinline__ int slot(const WorkTile& work) const {
    return slot_of(sm_part, work.offset > sm_part * blocks_per_part);
  }
};

// Row of the partial results: states are rows of 2, outputs rows of 512 in 8 x 8 tiles; a slot's row tiles adjoin.
__device__ __forceinline__ int64_t partial_row(const DecodeParams& params, int slot, int row_tile, int row) {
  return (static_cast<int64_t>(slot) * params.row_tiles + row_tile) * params.block_m + row;
}

// Offset of the 8 x 8 tile at a row and a column. A warp's product has two of its columns per lane: 256 adjacent bytes.
__device__ __forceinline__ int64_t partial_tile(int64_t partial_row, int column) {
  return partial_row * kLatentDim + column * kSumRows;
}

}  // namespace flashmoe::mla
