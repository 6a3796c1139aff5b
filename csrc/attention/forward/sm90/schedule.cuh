// Which tile a block works on, and which keys a tile sees.
#pragma once

#include "attention/forward/sm90/spec.cuh"
#include "attention/masks.cuh"
#include "attention/params/forward.h"
#include "attention/schedule.cuh"
#include "attention/sequences.cuh"
#include "device/math.cuh"

namespace flashmoe::attention::sm90 {

// Key blocks that some of the rows [first_row, end_row) see; the last row sees the last blocks. Rows that see no key
// process one block, all of it masked: this gives the right result without a special case.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ KeyRange seen_blocks(const Sequence<kMask>& sequence, int first_row, int end_row) {
  const int last_row = minimum(end_row, sequence.rows()) - 1;
  const int begin = visible_keys<kMask>(sequence, first_row).begin / Spec::kBlockN;
  const int end = ceil_div(visible_keys<kMask>(sequence, last_row).end, Spec::kBlockN);
  return KeyRange{begin, maximum(begin + 1, end)};
}

// What the producer passes to the consumers: kBlockM rows of Q of one (batch, head), and which share of their keys;
// m_block < 0 ends the work. (For MaskKind::kRuntime see varlen/schedule.cuh.)
template <MaskKind kMask>
struct Tile {
  int m_block;
  int head;
  int batch;
  int split;  // 0 to num_splits - 1

  __device__ __forceinline__ Sequence<kMask> sequence(const ForwardParams& params) const { return {params, batch}; }
  __device__ __forceinline__ int num_rows(const ForwardParams& params) const { return params.seq_q; }

  // Key blocks of the work item; none for some items if a tile has fewer blocks than splits. The tile's blocks are
  // divided equally, so that its items cost the same.
  template <typename Spec>
  __device__ __forceinline__ KeyRange key_blocks(const ForwardParams& params) const {
    const Sequence<kMask> sequence(params, batch);
    const int last_row = minimum((m_block + 1) * Spec::kBlockM, sequence.rows()) - 1;
    const int blocks = maximum(1, ceil_div(visible_keys<kMask>(sequence, last_row).end, Spec::kBlockN));
    if constexpr (!Spec::kIsSplit) return KeyRange{0, blocks};
    return KeyRange{blocks * split / params.num_splits, blocks * (split + 1) / params.num_splits};
  }
};

// Work items per tile. If there are several, the schedule treats every share as a separate head, with all row blocks.
template <typename Spec>
__device__ __forceinline__ int items_per_tile(const ForwardParams& params) {
  return Spec::kIsSplit ? params.num_splits : 1;
}

// Query heads whose keys and values together take at most 32 MiB of the L2 cache, in multiples of the group that shares
// a key head. One group if queries are few compared to keys: its tiles are about equally long and read the same keys at
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
  return kv_heads * heads_per_key_head(params) * items_per_tile<Spec>(params);
}

// Tile `index` of the schedule; section_heads is the result of heads_per_section.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ Tile<kMask> decode_tile(const ForwardParams& params, int m_blocks, int section_heads,
                                                   int index) {
  Section section{index, 0, 0};
  if constexpr (kMask == MaskKind::kCausal) {
    const int all_heads = params.heads_q * params.batch * items_per_tile<Spec>(params);
    section.first_head = section_heads < all_heads ? index / (section_heads * m_blocks) * section_heads : 0;
    section.heads = minimum(section_heads, all_heads - section.first_head);
    section.index = index - section.first_head * m_blocks;
  }
  const ScheduledTile scheduled = schedule_tile<kMask>(section, m_blocks);
  int head = scheduled.head;
  int split = 0;
  if constexpr (Spec::kIsSplit) {
    head = scheduled.head / params.num_splits;
    split = scheduled.head - head * params.num_splits;
  }
  const int batch = head / params.heads_q;
  return {scheduled.m_block, head - batch * params.heads_q, batch, split};
}

}  // namespace flashmoe::attention::sm90
