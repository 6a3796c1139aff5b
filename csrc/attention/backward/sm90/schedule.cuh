// Which tile a thread block works on, and which blocks of the stream a tile sees.
#pragma once

#include "attention/backward/sequence_tiles.cuh"
#include "attention/backward/sm90/spec.cuh"
#include "attention/masks.cuh"
#include "attention/params/backward.h"
#include "device/math.cuh"
#include "device/persistent.cuh"

namespace flashmoe::attention::backward::sm90 {

// kOwnRows rows, from row index * kOwnRows on, of one (batch, head): a query head in the dq kernel, a key head in the
// dk, dv kernel. index < 0 ends the work.
struct Tile {
  int index;
  int head;
  int batch;
  int is_descending =
      0;  // with an ordered reduction: queries go from the last block to the first. 16 bytes in shared memory
};

// A tile of a sequence, dense or ragged, with the sequence's values that consumers need, so that they read no lengths.
// 48 bytes.
struct VarlenTile {
  int index;
  int head;
  int batch;        // the sequence
  int begin_block;  // of the stream
  SequenceExtents extents;
  int end_block;
  int is_descending = 0;  // as in Tile
};

template <MaskKind kMask>
struct TileOfMask {
  using Type = Tile;
};
template <>
struct TileOfMask<MaskKind::kRuntime> {
  using Type = VarlenTile;
};
template <MaskKind kMask>
using MaskTile = typename TileOfMask<kMask>::Type;

__device__ __forceinline__ Lengths lengths_of(const BackwardParams& params, const Tile&) { return Lengths{params}; }
__device__ __forceinline__ const SequenceExtents& lengths_of(const BackwardParams&, const VarlenTile& tile) {
  return tile.extents;
}

// Only the lengths, read from a VarlenTile in shared memory when a block needs a mask, so that consumers hold no
// registers for them.
struct VarlenLengths {
  int row_count;
  int key_count;

  __device__ __forceinline__ int rows() const { return row_count; }
  __device__ __forceinline__ int keys() const { return key_count; }
};

template <MaskKind kMask>
__device__ __forceinline__ auto lengths_in(const BackwardParams& params, const unsigned char* tile_smem) {
  if constexpr (kMask == MaskKind::kRuntime) {
    uint32_t words[2];
    ptx::ld_shared_64(words, tile_smem + 16);
    return VarlenLengths{static_cast<int>(words[0]), static_cast<int>(words[1])};
  } else {
    return Lengths{params};
  }
}

// Rows and keys of a tile's sequence that have a gradient: all that the tensors hold.
__device__ __forceinline__ int row_room(const BackwardParams& params, const Tile&) { return params.seq_q; }
__device__ __forceinline__ int row_room(const BackwardParams&, const VarlenTile& tile) { return tile.extents.row_room; }
__device__ __forceinline__ int key_room(const BackwardParams& params, const Tile&) { return params.seq_k; }
__device__ __forceinline__ int key_room(const BackwardParams&, const VarlenTile& tile) { return tile.extents.key_room; }

// Blocks of the stream [begin, end); those of [full_begin, full_end) need no mask.
struct BlockRange {
  int begin;
  int full_begin;
  int full_end;
  int end;
};

// Key blocks that some of the rows first_row to end_row - 1 sees: the last row sees the last ones, the first row the
// first. Rows that see no key work on one fully masked block: that gives zeros, and no tile needs its own code path.
template <typename Spec, MaskKind kMask, typename TileType>
__device__ __forceinline__ BlockRange key_blocks(const BackwardParams& params, const TileType& tile, int first_row,
                                                 int end_row) {
  const int last_row = minimum(end_row, lengths_of(params, tile).rows()) - 1;
  const KeyRange last = visible_keys<kMask>(params, lengths_of(params, tile), last_row);
  const int end = maximum(1, ceil_div(last.end, Spec::kStreamRows));
  const KeyRange first = visible_keys<kMask>(params, lengths_of(params, tile), first_row);
  if constexpr (kMask != MaskKind::kRuntime) return BlockRange{0, 0, first.end / Spec::kStreamRows, end};
  const int begin = minimum(first.begin / Spec::kStreamRows, end - 1);
  return BlockRange{begin, ceil_div(last.begin, Spec::kStreamRows), maximum(begin, first.end / Spec::kStreamRows), end};
}

// Query blocks of one head that see some of the keys first_key to end_key - 1; none for keys past the last.
template <typename Spec, MaskKind kMask, typename TileType>
__device__ __forceinline__ BlockRange query_blocks(const BackwardParams& params, const TileType& tile, int first_key,
                                                   int end_key) {
  const int keys = lengths_of(params, tile).keys();
  const int last_key = minimum(end_key, keys) - 1;
  const KeyRange first = visible_rows<kMask>(params, lengths_of(params, tile), first_key);
  const KeyRange last = visible_rows<kMask>(params, lengths_of(params, tile), last_key);
  const int begin = first.begin / Spec::kStreamRows;
  const int full_begin = ceil_div(last.begin, Spec::kStreamRows);
  const int end = ceil_div(last.end, Spec::kStreamRows);
  if constexpr (kMask != MaskKind::kRuntime) return BlockRange{begin, full_begin, end, end};
  if (first_key >= keys) return BlockRange{0, 0, 0, 0};
  // Queries past the end need no mask: their log-sum-exp is +inf. Keys past the end but inside the tensor do: their
  // gradient is stored.
  int full_end = first.end == lengths_of(params, tile).rows() ? end : first.end / Spec::kStreamRows;
  if (end_key > keys && keys < key_room(params, tile)) full_end = begin;
  return BlockRange{begin, minimum(full_begin, end), maximum(begin, full_end), maximum(begin, end)};
}

// The blocks that some row or key of a tile sees: a VarlenTile holds them.
template <typename Compute>
__device__ __forceinline__ BlockRange tile_blocks(const Tile&, Compute compute) {
  return compute();
}
template <typename Compute>
__device__ __forceinline__ BlockRange tile_blocks(const VarlenTile& tile, Compute) {
  return BlockRange{tile.begin_block, 0, 0, tile.end_block};
}

// The index of the first row of query head `head` of a tile's sequence among all rows of the log-sum-exp and of
// row_dot.
__device__ __forceinline__ int64_t first_statistic(const BackwardParams& params, const Tile& tile, int head) {
  return (static_cast<int64_t>(tile.batch) * params.heads_q + head) * params.seq_q;
}
__device__ __forceinline__ int64_t first_statistic(const BackwardParams& params, const VarlenTile& tile, int head) {
  return statistics_row(params, tile.batch, head, tile.extents.first_row);
}

// Elements from the start of a tensor to the first row of `head` of a tile's sequence.
__device__ __forceinline__ int64_t row_offset(const Strides& stride, const Tile& tile, int head) {
  return tile.batch * stride.batch + head * stride.head;
}
__device__ __forceinline__ int64_t row_offset(const Strides& stride, const VarlenTile& tile, int head) {
  return tile.batch * stride.batch + head * stride.head + tile.extents.first_row * stride.row;
}

// The numbering of the tiles of a launch.
//   kDescending   a causal tile is longer the larger its index is (dq), or the smaller it is (dk and dv)
// Full: the tiles of a head one after another, so that the running blocks share the head's stream. Causal: sections of
// heads whose streams together fit the L2 cache; inside a section the longest tiles of all heads first, so that short
// ones fill the end.
template <typename Spec, MaskKind kMask, bool kDescending>
struct Schedule {
  int tiles_per_head;
  int heads;  // per sequence
  int all_heads;
  int section_heads;

  // stream_rows: rows of the stream of one head; sharing: neighbouring heads with the same stream
  __device__ __forceinline__ Schedule(const BackwardParams& params, int own_rows, int heads_, int stream_rows,
                                      int sharing) {
    constexpr int kSectionRows = (32 << 20) / (2 * (Spec::kHeadDim + Spec::kValueDim));
    tiles_per_head = ceil_div(own_rows, Spec::kOwnRows);
    heads = heads_;
    all_heads = heads_ * params.batch;
    section_heads = minimum(all_heads, maximum(1, kSectionRows / maximum(1, stream_rows)) * sharing);
  }

  __device__ __forceinline__ int num_tiles() const { return tiles_per_head * all_heads; }

  __device__ __forceinline__ Tile tile(int number) const {
    int index, head;  // head over all sequences
    if constexpr (kMask == MaskKind::kFull) {
      head = number / tiles_per_head;
      index = number - head * tiles_per_head;
    } else {
      const int first_head = number / (section_heads * tiles_per_head) * section_heads;
      const int in_section = minimum(section_heads, all_heads - first_head);
      const int rest = number - first_head * tiles_per_head;
      index = rest / in_section;
      head = first_head + rest - index * in_section;
      if constexpr (kDescending) index = tiles_per_head - 1 - index;
    }
    const int batch = head / heads;
    return Tile{index, head - batch * heads, batch};
  }
};

template <MaskKind kMask>
__device__ __forceinline__ bool is_descending(const Tile& tile) {
  return kMask == MaskKind::kCausal && tile.is_descending != 0;
}
template <MaskKind kMask>
__device__ __forceinline__ bool is_descending(const VarlenTile& tile) {
  return tile.is_descending != 0;
}

// The order of key tiles.
template <typename Spec, MaskKind kMask, bool kOrdersReduction>
struct KeySchedule : Schedule<Spec, kMask, false> {
  using Schedule<Spec, kMask, false>::Schedule;
};

// Key heads per section if query heads share them: enough for two tiles per thread block, so that the tiles of a head
// read its long stream at the same time, and, with the longest tiles first, the sections overlap; without a mask four,
// because all tiles take equally long.
template <bool kIsCausal>
__device__ __forceinline__ int grouped_section_heads(int tiles_per_head) {
  constexpr int kTilesPerBlock = kIsCausal ? 2 : 4;
  return kTilesPerBlock * ptx::grid_size() / maximum(1, tiles_per_head);
}

// With an ordered reduction; fused.cuh describes the orders. Neighbouring tiles belong to different heads if possible,
// as under a causal mask, so that few wait; but a section has so few heads that Q, dO and the partials of dq stay in
// the L2 cache. Measured: 12 MB of Q and dO, 16 for long sequences; at head dim 128 without a mask sections of
// kSectionHeads.
template <typename Spec, MaskKind kMask>
struct KeySchedule<Spec, kMask, true> {
  const BackwardParams& params;

  __device__ __forceinline__ KeySchedule(const BackwardParams& params_, int, int, int, int) : params(params_) {}

  __device__ __forceinline__ int tiles_per_head() const { return ceil_div(params.seq_k, Spec::kOwnRows); }
  __device__ __forceinline__ int num_tiles() const { return tiles_per_head() * params.heads_kv * params.batch; }

  __device__ __forceinline__ Tile tile(int number) const {
    constexpr bool kIsCausal = kMask == MaskKind::kCausal;
    const int heads = ptx::recompute(params.heads_kv);  // like what follows: no register lives from tile to tile
    const int tiles = ceil_div(ptx::recompute(params.seq_k), Spec::kOwnRows);
    const int all_heads = heads * params.batch;
    const int seq_q = ptx::recompute(params.seq_q);
    const bool all_descending = kIsCausal && params.heads_q > heads;
    int section_heads = Spec::kSectionHeads;
    if (params.heads_q > heads) {
      section_heads = grouped_section_heads<kIsCausal>(tiles);
    } else if (!Spec::kIsWide || kIsCausal) {
      const int section_rows = ((seq_q < 8192 ? 12 : 16) << 20) / (4 * Spec::kHeadDim);
      section_heads = section_rows / maximum(1, seq_q);
    }
    if (kIsCausal && !all_descending) section_heads = minimum(section_heads, all_heads / 2);
    section_heads = maximum(1, minimum(section_heads, all_heads));
    const int last_section = all_heads / section_heads - 1;  // also takes the remaining heads
    const int section = minimum(number / (section_heads * tiles), last_section);
    const int first_head = section * section_heads;
    if (section == last_section) section_heads = all_heads - first_head;
    const int rest = number - first_head * tiles;
    const int position = rest / section_heads;
    const int head = first_head + rest - position * section_heads;
    const int batch = head / heads;
    const bool is_descending = all_descending || (kIsCausal && section == last_section);
    return Tile{is_descending ? position : tiles - 1 - position, head - batch * heads, batch, is_descending};
  }
};

}  // namespace flashmoe::attention::backward::sm90
