// Chunks: the rows of a tile are the query heads that share a key head, position by position, and several blocks may
// share a tile's keys.
//
// A position takes 2^k rows, the smallest power of two that holds the group: row r of a key head is head r % 2^k of
// position r / 2^k, and TMA fills heads past the group with zeros (tensor_map.h). With params.num_splits above 1 every
// split writes its own partial output, and attention_combine merges them. Splits are whole key blocks and depend only
// on the lengths.
#pragma once

#include "attention/forward/sm90/varlen/schedule.cuh"
#include "attention/params/forward.h"
#include "attention/scores.cuh"
#include "attention/sequences.cuh"
#include "device/math.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention::sm90 {

// The fields packed into VarlenTile::head of a folded tile.
struct Folding {
  int kv_head;  // below 2^16
  int group;    // query heads per key head, 1 to 64
  int shift;    // 2^shift rows for each position
  int split;    // below 32

  __device__ __forceinline__ int packed() const { return kv_head | group << 16 | shift << 23 | split << 26; }
};
__device__ __forceinline__ Folding folding_of(const VarlenTile& tile) {
  const int packed = tile.head;
  return Folding{packed & 0xffff, packed >> 16 & 0x7f, packed >> 23 & 0x7, packed >> 26};
}

__device__ __forceinline__ int rows_log2(int group) {
  int shift = 0;
  while (1 << shift < group) ++shift;
  return shift;
}

template <typename Spec>
__device__ __forceinline__ int folded_row_blocks(int rows, int group) {
  return ceil_div(rows << rows_log2(group), Spec::kBlockM);
}

// The position in the sequence that a row of a tile belongs to; without folding, the row itself.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ int position_of(const Tile<kMask>& tile, int row) {
  if constexpr (Spec::kIsFolded) return row >> folding_of(tile).shift;
  return row;
}

// The query head and position of a row of a tile (counted as in row_of_thread), and whether the call has such a row.
struct FoldedRow {
  int head;
  int position;
  bool is_there;
};
__device__ __forceinline__ FoldedRow folded_row(const VarlenTile& tile, int row) {
  const Folding folding = folding_of(tile);
  const int head = row & ((1 << folding.shift) - 1);
  const int position = row >> folding.shift;
  return FoldedRow{folding.kv_head * folding.group + head, position, head < folding.group && position < tile.rows};
}

// The index of a row among the rows of the log-sum-exp, or of the partial results.
__device__ __forceinline__ int64_t result_of(const ForwardParams& params, const VarlenTile& tile,
                                             const FoldedRow& row) {
  const VarlenSequence sequence = tile.sequence(params);
  return sequence.result_row(sequence.template result_head<true>(row.head, folding_of(tile).split)) + row.position;
}

// The fewest keys that are worth a split.
constexpr int kLeastShare = 256;

// Work item `index` of the batch: a split of a tile's key blocks, or all of them if num_splits is 1. The split is empty
// if the tile has fewer splits than num_splits.
template <typename Spec>
__device__ __forceinline__ NextTile decode_folded_tile(const ForwardParams& params, SequenceIterator<Spec>& sequences,
                                                       int index) {
  const auto found = sequences.find(index);
  const VarlenSequence sequence(params, found.batch, found.row, found.key);
  const int shift = rows_log2(sequences.group());
  const int m_blocks = folded_row_blocks<Spec>(sequence.rows(), sequences.group());
  ScheduledTile scheduled{0, found.index};  // its heads are the splits of key heads
  if (m_blocks > 1) {
    if (params.score_options.right < kUnbounded) {
      const int section_heads = key_heads_per_section<Spec>(params, sequence) * params.num_splits;
      const int first_head = found.index / (section_heads * m_blocks) * section_heads;
      const Section section{found.index - first_head * m_blocks, first_head,
                            minimum(section_heads, params.heads_kv * params.num_splits - first_head)};
      scheduled = schedule_tile<MaskKind::kCausal>(section, m_blocks);
    } else {
      scheduled = schedule_tile<MaskKind::kFull>(Section{found.index, 0, 0}, m_blocks);
    }
  }
  const int kv_head = scheduled.head / params.num_splits;
  const int split = scheduled.head - kv_head * params.num_splits;
  const int positions = Spec::kBlockM >> shift;
  const int first = scheduled.m_block * positions;
  const KeyRange seen = seen_blocks<Spec, MaskKind::kRuntime>(sequence, first, first + positions);
  const int blocks = seen.end - seen.begin;
  const int shares = maximum(1, minimum(params.num_splits, blocks / (kLeastShare / Spec::kBlockN)));
  KeyRange share{seen.begin, seen.begin};
  if (split < shares) {
    share = KeyRange{seen.begin + blocks * split / shares, seen.begin + blocks * (split + 1) / shares};
  }
  const VarlenTile tile{scheduled.m_block,
                        Folding{kv_head, sequences.group(), shift, split}.packed(),
                        found.batch,
                        sequence.row.first,
                        sequence.rows(),
                        sequence.keys(),
                        share};
  return NextTile{tile, sequence.key.first, kv_head, 1, 0};
}

// For a split without keys: a log-sum-exp of -inf, so that it counts for nothing when splits are merged.
template <typename Spec>
__device__ __forceinline__ void clear_share(const ForwardParams& params, const VarlenTile& tile) {
  for (int row = ptx::lane_index(); row < Spec::kBlockM; row += 32) {
    const FoldedRow at = folded_row(tile, tile.m_block * Spec::kBlockM + row);
    if (at.is_there) ptx::st_global_float(params.lse_partial + result_of(params, tile, at), ptx::negative_infinity());
  }
}

// The sinks of a thread's two rows times log2(e), -inf for none; row: the first of the two. Only the first split
// includes the sink.
__device__ __forceinline__ void load_folded_sinks(const ForwardParams& params, const VarlenTile& tile, int row,
                                                  float (&sink_log2)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const FoldedRow at = folded_row(tile, row + 8 * r);
    const bool has_sink = params.score_options.sinks != nullptr && at.is_there && folding_of(tile).split == 0;
    sink_log2[r] =
        has_sink ? ptx::ld_global_float(params.score_options.sinks + at.head) * kLog2E : ptx::negative_infinity();
  }
}

}  // namespace flashmoe::attention::sm90
