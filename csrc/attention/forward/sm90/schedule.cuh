// Which tile a block works on, and which keys a tile sees.
#pragma once

#include "attention/params/forward.h"
#include "attention/forward/sm90/spec.cuh"
#include "ptx/atomics.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe {
namespace attention {
namespace sm90 {

// kBlockM rows of Q of one (batch, head), and which share of their keys; m_block < 0 ends the work.
struct Tile {
  int m_block;
  int head;
  int batch;
  int split;  // 0 to num_splits - 1
};

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }
__device__ __forceinline__ int minimum(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int maximum(int a, int b) { return a > b ? a : b; }

// Leading keys visible to query `row`: key j is visible when j <= row + seq_k - seq_q (bottom-right) and j < seq_k.
template <bool kIsCausal>
__device__ __forceinline__ int visible_keys(const ForwardParams& params, int row) {
  if constexpr (!kIsCausal) return params.seq_k;
  return maximum(0, minimum(params.seq_k, row + 1 + params.seq_k - params.seq_q));
}

// Key blocks that some row before end_row sees: the last row sees the most. A tile that sees no key works on one block,
// all of it masked: that gives the right result, and no tile needs a path of its own.
template <typename Spec, bool kIsCausal>
__device__ __forceinline__ int key_blocks(const ForwardParams& params, int end_row) {
  const int last_row = minimum(end_row, params.seq_q) - 1;
  return maximum(1, ceil_div(visible_keys<kIsCausal>(params, last_row), Spec::kBlockN));
}

// Key blocks [begin, end) of a work item; end - begin is 0 for some where a tile has fewer blocks than splits.
struct KeyRange {
  int begin;
  int end;
};

// The tile's own blocks in equal shares, so that items of a tile cost the same.
template <typename Spec, bool kIsCausal>
__device__ __forceinline__ KeyRange key_range(const ForwardParams& params, const Tile& tile) {
  const int blocks = key_blocks<Spec, kIsCausal>(params, (tile.m_block + 1) * Spec::kBlockM);
  if constexpr (!Spec::kIsSplit) return KeyRange{0, blocks};
  return KeyRange{blocks * tile.split / params.num_splits, blocks * (tile.split + 1) / params.num_splits};
}

// Work items of a tile. Where it is not 1, the schedule takes every share for a head of its own, with all row blocks.
template <typename Spec>
__device__ __forceinline__ int items_per_tile(const ForwardParams& params) {
  return Spec::kIsSplit ? params.num_splits : 1;
}

// Heads whose keys and values together fit half of the second-level cache, in whole groups of query heads that share
// them. One group where queries are few beside the keys: its tiles are about equally long, and read the same keys at
// the same time (1% to 2% at D=128).
template <typename Spec>
__device__ __forceinline__ int heads_per_section(const ForwardParams& params) {
  constexpr int kSectionKeys = (32 << 20) / (4 * Spec::kHeadDim);
  const bool is_chunk = params.seq_k / 4 >= params.seq_q;
  const int all_kv_heads = params.heads_kv * params.batch;
  int kv_heads = all_kv_heads;
  if (is_chunk || static_cast<int64_t>(all_kv_heads) * params.seq_k > kSectionKeys) {
    kv_heads = is_chunk ? 1 : minimum(all_kv_heads, maximum(1, kSectionKeys / params.seq_k));
  }
  return kv_heads * (params.heads_q / params.heads_kv) * items_per_tile<Spec>(params);
}

template <typename Spec>
__device__ __forceinline__ Tile make_tile(const ForwardParams& params, int m_block, int schedule_head) {
  int head = schedule_head;
  int split = 0;
  if constexpr (Spec::kIsSplit) {
    head = schedule_head / params.num_splits;
    split = schedule_head - head * params.num_splits;
  }
  const int batch = head / params.heads_q;
  return Tile{m_block, head - batch * params.heads_q, batch, split};
}

// Full: the row blocks of a head after another, so that blocks at work share its keys. Causal: sections of heads that
// fit the cache; inside one the longest row blocks of all heads first, so that short ones fill the end.
template <typename Spec, bool kIsCausal>
__device__ __forceinline__ Tile decode_tile(const ForwardParams& params, int m_blocks, int section_heads, int index) {
  if constexpr (!kIsCausal) {
    const int head = index / m_blocks;
    return make_tile<Spec>(params, index - head * m_blocks, head);
  } else {
    const int all_heads = params.heads_q * params.batch * items_per_tile<Spec>(params);
    const int first_head = section_heads < all_heads ? index / (section_heads * m_blocks) * section_heads : 0;
    const int heads = minimum(section_heads, all_heads - first_head);
    const int rest = index - first_head * m_blocks;
    const int row = rest / heads;
    return make_tile<Spec>(params, m_blocks - 1 - row, first_head + rest - row * heads);
  }
}

// The tile index after `index` of this block, whose first is block_index(); num_tiles or more ends its work.
//
// Without a counter, rounds of one tile a block, forth and back: a block that had the longest tile of a round gets the
// shortest of the next. With one, blocks draw from it. Every block draws until it gets a number past the end, num_tiles
// draws in all, and who draws the last puts the counter back to zero for the next launch.
__device__ __forceinline__ int next_tile_index(const ForwardParams& params, int num_tiles, int index) {
  const int blocks = ptx::grid_size();
  if (num_tiles <= blocks) return num_tiles;
  if (params.tile_counter == nullptr) return index + 2 * (blocks - index % blocks) - 1;
  const int drawn = ptx::atomic_add_global(params.tile_counter, 1);
  if (drawn == num_tiles - 1) ptx::st_global_32(params.tile_counter, 0);
  return drawn + blocks;
}

__device__ __forceinline__ void publish_tile(unsigned char* slot, const Tile& tile) {
  const uint32_t words[4] = {static_cast<uint32_t>(tile.m_block), static_cast<uint32_t>(tile.head),
                             static_cast<uint32_t>(tile.batch), static_cast<uint32_t>(tile.split)};
  ptx::st_shared_128(slot, words);
}

__device__ __forceinline__ Tile read_tile(const unsigned char* slot) {
  uint32_t words[4];
  ptx::ld_shared_128(words, slot);
  return Tile{static_cast<int>(words[0]), static_cast<int>(words[1]), static_cast<int>(words[2]),
              static_cast<int>(words[3])};
}

}  // namespace sm90
}  // namespace attention
}  // namespace flashmoe
