// How the key blocks of a batch are divided over the blocks of a decoding kernel, from the lengths in device memory.
//
// The key blocks of all sequences are laid end to end, and every part takes an equal share: the end of one sequence,
// whole sequences, and the beginning of another. Equal sequences are cut alike if that makes no share much longer: a
// part then has keys of one sequence, or whole sequences. Thread block `row_tile + row_tiles * part` computes a part
// for one tile of rows, so that the tiles of a sequence read its keys at the same time. combine.cuh makes the same plan
// and merges the sequences that span several parts.
//
// Every warp makes the plan for itself, looking at 32 sequences at a time, one per lane.
#pragma once

#include "device/reduce.cuh"
#include "mla/params/decode.h"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::mla {

// The key blocks of a sequence that belong to a part.
struct Segment {
  int batch;
  int keys;  // of the sequence
  int begin_block;
  int end_block;
  int num_blocks;  // of the sequence, at least one
  int position;    // of begin_block among all key blocks; unused if sequences are not split

  __device__ __forceinline__ bool is_whole() const { return begin_block == 0 && end_block == num_blocks; }
};

// The end of the keys that a row sees.
__device__ __forceinline__ int visible_end(const DecodeParams& params, int keys, int row) {
  if (params.is_causal == 0) return keys;
  const int token = static_cast<int>(static_cast<uint32_t>(row) / static_cast<uint32_t>(params.heads));
  return keys - (params.tokens - 1 - token);
}

// A part can end one sequence and begin another: each has its own slot for partial results.
__device__ __forceinline__ int slot_of(int part, bool is_later) { return 2 * part + (is_later ? 1 : 0); }

struct Plan {
  // What a sequence costs a part besides its key blocks, in key blocks: Q, and the output.
  static constexpr int kLead = 2;

  const DecodeParams& params;
  const int part;
  int share;     // key blocks per part
  int position;  // among all key blocks: where the next segment begins
  int group;     // the lanes have sequences group to group + 31
  int group_position;
  // Of this lane's sequence:
  int keys;
  int blocks;
  int behind;  // where the sequence ends, counted from group_position

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

  // lead: added to each sequence's key blocks, in front of them.
  __device__ __forceinline__ void set_group(int first, int lead = kLead, bool is_loaded = false) {
    group = first;
    if (!is_loaded) load_sequence(first + ptx::lane_index());
    behind = warp_prefix_sum(blocks > 0 ? blocks + lead : 0);
  }

  __device__ __forceinline__ Plan(const DecodeParams& params_, int part_)
      : params(params_), part(part_), group_position(0) {
    share = 1;
    position = part;
    if (params.num_splits == 1) return;
    load_sequence(0);
    int most = blocks;
    int least = blocks;
    int total = params.batch * (blocks + kLead);
    if (params.cache_seqlens != nullptr) {
      total = most = 0;
#pragma unroll 4
      for (int first = 0; first < params.batch; first += 32) {
        load_sequence(first + ptx::lane_index());
        total += blocks > 0 ? blocks + kLead : 0;
        most = max(most, blocks);
        if (blocks > 0) least = min(least, blocks);
      }
      total = ptx::reduce_add(total);
      most = static_cast<int>(warp_max(static_cast<uint32_t>(most)));
      least = static_cast<int>(warp_min(static_cast<uint32_t>(least)));
    }
    // Shares do not begin where sequences do: a sequence of num_splits - 1 shares may span num_splits parts.
    const int least_share = most < params.num_splits
                                ? params.least_share
                                : max(params.least_share, (most + params.num_splits - 2) / (params.num_splits - 1));
    share = max((total + params.parts - 1) / params.parts, least_share);
    // Equal sequences: whole parts for each, or whole sequences per part, if no part becomes more than 1/16 longer.
    int lead = kLead;
    if (least == most) {
      int item = most + kLead;
      int aligned;
      if (params.parts_each > 0) {
        aligned = max((most + params.parts_each - 1) / params.parts_each, least_share);
        item = params.parts_each * aligned;
      } else {
        aligned = (share + item - 1) / item * item;
      }
      if (aligned <= share + share / 16) {
        lead = item - most;
        share = aligned;
      }
    }
    position = part * share;
    set_group(0, lead, /*is_loaded=*/params.cache_seqlens != nullptr && params.batch <= 32);
  }

  // Finds the next segment of the part; returns false at its end.
  __device__ __forceinline__ bool next(Segment& segment) {
    const int end = (part + 1) * share;
    if (position >= end) return false;
    if (params.num_splits == 1) {
      load_sequence(position);
      segment = Segment{position, keys, 0, blocks, blocks, 0};
      position = end;
      return true;
    }
    uint32_t reached = ptx::vote_ballot(group_position + behind > position);
    while (reached == 0) {
      if (group + 32 >= params.batch) return false;
      group_position += ptx::shuffle_index(behind, 31);
      set_group(group + 32);
      reached = ptx::vote_ballot(group_position + behind > position);
    }
    const int lane = ptx::population_count(~reached & (reached - 1));  // the first sequence that ends past position
    set_segment(segment, lane);
    const int first = segment.position;
    position = max(position, first);
    if (position >= end) return false;
    segment.position = position;
    segment.begin_block = position - first;
    segment.end_block = min(segment.num_blocks, end - first);
    position = first + segment.end_block;
    return true;
  }

  // Finds all key blocks of a sequence, in whichever parts they are.
  __device__ __forceinline__ void find(int batch, Segment& segment) {
    while (batch >= group + 32) {
      group_position += ptx::shuffle_index(behind, 31);
      set_group(group + 32);
    }
    set_segment(segment, batch - group);
    segment.end_block = segment.num_blocks;
  }

  // Sets the segment to a lane's sequence, from its first block on.
  __device__ __forceinline__ void set_segment(Segment& segment, int lane) const {
    segment.batch = group + lane;
    segment.keys = ptx::shuffle_index(keys, lane);
    segment.num_blocks = ptx::shuffle_index(blocks, lane);
    segment.begin_block = 0;
    segment.position = group_position + ptx::shuffle_index(behind, lane) - segment.num_blocks;
  }

  __device__ __forceinline__ int slot(const Segment& segment) const {
    return slot_of(part, segment.position > part * share);
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
