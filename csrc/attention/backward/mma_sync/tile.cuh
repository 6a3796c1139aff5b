// Which rows a thread block owns, and which blocks of the stream they see. One thread block per tile.
#pragma once

#include "attention/backward/sequence_tiles.cuh"
#include "attention/forward/tile.cuh"
#include "attention/masks.cuh"
#include "attention/params/backward.h"
#include "attention/schedule.cuh"
#include "device/math.cuh"
#include "device/swizzle.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention::backward::mma_sync {

// Rows `row` to row + kOwnRows - 1 of a head: a query head in the dq kernel, a key head in the dk, dv kernel.
struct DenseTile {
  int batch;
  int head;
  int row;
};

// A tile of a sequence, dense or ragged.
struct VarlenTile {
  int batch;  // the sequence; negative: this thread block has no tile
  int head;
  int row;
  SequenceExtents extents;
};
constexpr int kNoTile = -1;
constexpr int kClearsStrays = -2;  // row: the index of this block's share of them

template <MaskKind kMask>
struct TileOfMask {
  using Type = DenseTile;
};
template <>
struct TileOfMask<MaskKind::kRuntime> {
  using Type = VarlenTile;
};
template <MaskKind kMask>
using MaskTile = typename TileOfMask<kMask>::Type;

__device__ __forceinline__ Lengths lengths_of(const BackwardParams& params, const DenseTile&) {
  return Lengths{params};
}
__device__ __forceinline__ const SequenceExtents& lengths_of(const BackwardParams&, const VarlenTile& tile) {
  return tile.extents;
}

// Rows and keys of a tile's sequence that have a gradient: all that the tensors hold.
__device__ __forceinline__ int row_room(const BackwardParams& params, const DenseTile&) { return params.seq_q; }
__device__ __forceinline__ int row_room(const BackwardParams&, const VarlenTile& tile) { return tile.extents.row_room; }
__device__ __forceinline__ int key_room(const BackwardParams& params, const DenseTile&) { return params.seq_k; }
__device__ __forceinline__ int key_room(const BackwardParams&, const VarlenTile& tile) { return tile.extents.key_room; }

// Elements from the start of a tensor to the first row or key of `head` of a tile's sequence.
__device__ __forceinline__ int64_t row_offset(const Strides& stride, const DenseTile& tile, int head) {
  return tile.batch * stride.batch + head * stride.head;
}
__device__ __forceinline__ int64_t key_offset(const Strides& stride, const DenseTile& tile, int head) {
  return tile.batch * stride.batch + head * stride.head;
}
__device__ __forceinline__ int64_t row_offset(const Strides& stride, const VarlenTile& tile, int head) {
  return tile.batch * stride.batch + head * stride.head + tile.extents.first_row * stride.row;
}
__device__ __forceinline__ int64_t key_offset(const Strides& stride, const VarlenTile& tile, int head) {
  return tile.batch * stride.batch + head * stride.head + tile.extents.first_key * stride.row;
}

// The first row of query head `head` of a tile's sequence, among all rows of the log-sum-exp and of row_dot.
__device__ __forceinline__ int64_t first_statistic(const BackwardParams& params, const DenseTile& tile, int head) {
  return static_cast<int64_t>(tile.batch * params.heads_q + head) * params.seq_q;
}
__device__ __forceinline__ int64_t first_statistic(const BackwardParams& params, const VarlenTile& tile, int head) {
  return statistics_row(params, tile.batch, head, tile.extents.first_row);
}

template <MaskKind kMask>
__device__ __forceinline__ int value_columns(const BackwardParams& params) {
  return kMask == MaskKind::kRuntime ? params.head_dim_v : params.head_dim;
}

// Whether a window limits the keys on the left.
__device__ __forceinline__ bool has_left_end(const BackwardParams& params) {
  return params.score_options.left < kUnbounded;
}

__device__ __forceinline__ int heads_per_key_head(const BackwardParams& params) {
  return params.heads_q / params.heads_kv;
}

// Grid: ceil(own rows / kOwnRows) * own heads * batch blocks. Causal: in sections of heads whose streams fit the L2 cache,
// the tiles with the longest streams first; those are the last rows, or the first keys.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ DenseTile locate_dense_tile(const BackwardParams& params) {
  const int group = heads_per_key_head(params);
  const int heads = Spec::kStreamsQueries ? params.heads_kv : params.heads_q;
  const int tiles = ceil_div(Spec::kStreamsQueries ? params.seq_k : params.seq_q, Spec::kOwnRows);
  Section section{ptx::block_index(), 0, 0};
  if constexpr (kMask == MaskKind::kCausal) {
    constexpr int kFittingRows = kL2GroupBytes / (2 * Spec::kRowBytes);
    const int all_heads = params.batch * heads;
    const int fitting = Spec::kStreamsQueries ? max(1, kFittingRows / params.seq_q / group)
                                              : max(1, kFittingRows / params.seq_k) * group;
    const int section_heads = min(all_heads, fitting);
    section.first_head = section.index / (section_heads * tiles) * section_heads;
    section.index -= section.first_head * tiles;
    section.heads = min(section_heads, all_heads - section.first_head);
  }
  const ScheduledTile scheduled = schedule_tile<kMask>(section, tiles);
  const int index =
      kMask == MaskKind::kCausal && Spec::kStreamsQueries ? tiles - 1 - scheduled.m_block : scheduled.m_block;
  const int batch = scheduled.head / heads;
  return DenseTile{batch, scheduled.head - batch * heads, index * Spec::kOwnRows};
}

// As sequence_extents, but issues all loads before it waits for one.
__device__ __forceinline__ SequenceExtents extents_at_once(const BackwardParams& params, int sequence) {
  const Batch& lengths = params.sequences;
  const bool is_sequence = sequence < params.batch;
  // Indices of two words of cu_seqlens: a sequence's begin and end, or the end of the last and the begin of the first.
  const int at = min(sequence, params.batch);
  const int next = is_sequence ? sequence + 1 : 0;
  int row_first = 0, row_end = 0, key_first = 0, key_end = 0, used = 0;
  const bool has_rows = lengths.cu_seqlens_q != nullptr;
  const bool has_keys = lengths.cu_seqlens_k != nullptr;
  const bool has_used = lengths.seqused_k != nullptr && is_sequence;
  if (has_rows) {
    row_first = load_length(lengths.cu_seqlens_q + at);
    row_end = load_length(lengths.cu_seqlens_q + next);
  }
  if (has_keys) {
    key_first = load_length(lengths.cu_seqlens_k + at);
    key_end = load_length(lengths.cu_seqlens_k + next);
  }
  if (has_used) used = load_length(lengths.seqused_k + sequence);
  const auto extent = [&](bool is_ragged, int first, int end, int total, int most) {
    if (!is_ragged) return Extent{0, is_sequence ? most : 0};
    first = sequence > params.batch ? 0 : max(0, min(total, first));
    end = sequence == params.batch ? total : max(first, min(total, end));
    return Extent{first, end - first};
  };
  const Extent row = extent(has_rows, row_first, row_end, lengths.rows_total, params.seq_q);
  const Extent key = extent(has_keys, key_first, key_end, lengths.keys_total, params.seq_k);
  SequenceExtents extents{0, 0, row.first, key.first, row.length, key.length};
  if (!is_sequence) return extents;
  extents.row_count = min(row.length, params.seq_q);
  extents.key_count = min(key.length, params.seq_k);
  if (has_used) extents.key_count = max(0, min(extents.key_count, used));
  return extents;
}

// Varlen: the grid has one block per possible tile; every warp finds the tile of its block, if there is one.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ MaskTile<kMask> locate_tile(const BackwardParams& params) {
  if constexpr (kMask == MaskKind::kRuntime) {
    constexpr int kFittingRows = kL2GroupBytes / (2 * Spec::kRowBytes);
    const SequenceTile found =
        tile_of_slot<Spec::kOwnRows, Spec::kStreamsQueries, kFittingRows>(params, ptx::block_index());
    if (found.sequence < 0) return VarlenTile{kClearsStrays, found.head, found.index, {}};
    const SequenceExtents extents = extents_at_once(params, found.sequence);
    const int row = found.index * Spec::kOwnRows;
    const bool is_tile = row < (Spec::kStreamsQueries ? extents.key_room : extents.row_room);
    return VarlenTile{is_tile ? found.sequence : kNoTile, found.head, row, extents};
  } else {
    return locate_dense_tile<Spec, kMask>(params);
  }
}

// Writes zeros to this block's share of rows of a head of a gradient; `tile` is that of a block that clears unowned
// rows. Rows count from the tensor's first.
template <typename Spec>
__device__ __forceinline__ void clear_rows(void* tensor, const Strides& stride, const VarlenTile& tile, int columns,
                                           const Extent& rows) {
  constexpr int kChunks = Spec::kHeadDim / kChunkElements;
  constexpr int kPassRows = Spec::kNumThreads / kChunks;
  const int thread = ptx::thread_index();
  const int column = thread % kChunks * kChunkElements;
  if (column >= columns) return;
  auto* gmem =
      static_cast<typename Spec::Element*>(tensor) + tile.head * stride.head + rows.first * stride.row + column;
#pragma unroll 1
  for (int row = tile.row * kPassRows + thread / kChunks; row < rows.length; row += kClearingSlots * kPassRows) {
    ptx::st_global_128(gmem + row * stride.row, {0, 0, 0, 0});
  }
}
// The same for all gradients that the kernel computes.
template <typename Spec>
__device__ __forceinline__ void clear_rows(const BackwardParams& params, const VarlenTile& tile, const Extent& rows) {
  if constexpr (Spec::kStreamsQueries) {
    clear_rows<Spec>(params.dk, params.dk_stride, tile, params.head_dim, rows);
    clear_rows<Spec>(params.dv, params.dv_stride, tile, params.head_dim_v, rows);
  } else {
    clear_rows<Spec>(params.dq, params.dq_stride, tile, params.head_dim, rows);
    float* row_dot = params.row_dot + static_cast<int64_t>(tile.head) * params.sequences.rows_total + rows.first;
    constexpr int kStep = kClearingSlots * Spec::kNumThreads;
#pragma unroll 1
    for (int row = tile.row * Spec::kNumThreads + ptx::thread_index(); row < rows.length; row += kStep) {
      ptx::st_global_float(row_dot + row, 0.0f);
    }
  }
}

// Clears unowned rows: in a grid of equal slots no block's tile has the gradients of some rows, which must be zero:
// those before the first sequence, after the last, and past the maximum length in a sequence that cu_seqlens makes
// longer.
template <typename Spec>
__device__ __forceinline__ void clear_unowned_rows(const BackwardParams& params, const VarlenTile& tile) {
  constexpr bool kOwnsKeys = Spec::kStreamsQueries;
  const Extent in_front = own_extent<kOwnsKeys>(params, params.batch + 1);
  const Extent behind = own_extent<kOwnsKeys>(params, params.batch);
  clear_rows<Spec>(params, tile, in_front);
  clear_rows<Spec>(params, tile, behind);
  const int most = tiles_of_longest<Spec::kOwnRows, kOwnsKeys>(params) * Spec::kOwnRows;
  const int lane = ptx::lane_index();
#pragma unroll 1
  for (int first = 0; first < params.batch; first += 32) {
    const Extent own = first + lane < params.batch ? own_extent<kOwnsKeys>(params, first + lane) : Extent{0, 0};
    for (uint32_t longer = ptx::vote_ballot(own.length > most); longer != 0; longer &= longer - 1) {
      const int from = ptx::population_count((longer & (0 - longer)) - 1);
      clear_rows<Spec>(params, tile,
                       {ptx::shuffle_index(own.first, from) + most, ptx::shuffle_index(own.length, from) - most});
    }
  }
}

// Saves what the epilogue needs from a varlen tile: finding it again would cost 3% of the time of short sequences.
// (sm75 has no shared memory left for it.)
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void store_tile(ptx::SmemPointer block_smem, const MaskTile<kMask>& tile) {
  if constexpr (Spec::kIsVarlen && !Spec::kServesPlain) {
    const ptx::SmemPointer smem = block_smem + Spec::kTileOffset + ptx::warp_index() * Spec::kTileBytes;
    const SequenceExtents& extents = tile.extents;
    if (ptx::lane_index() == 0) {
      ptx::st_shared_128(smem, {static_cast<uint32_t>(tile.batch), static_cast<uint32_t>(tile.head),
                                static_cast<uint32_t>(tile.row), 0});
      ptx::st_shared_64(smem + 16,
                        {static_cast<uint32_t>(Spec::kStreamsQueries ? extents.first_key : extents.first_row),
                         static_cast<uint32_t>(Spec::kStreamsQueries ? extents.key_room : extents.row_room)});
    }
    ptx::warp_sync();  // read after write
  }
}
// The tile for the epilogue, so that no register holds it through the loop; in its extents only those of the own rows
// are valid.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ MaskTile<kMask> end_tile(const BackwardParams& params, ptx::SmemPointer block_smem) {
  if constexpr (Spec::kIsVarlen && !Spec::kServesPlain) {
    const ptx::SmemPointer smem = block_smem + Spec::kTileOffset + ptx::recompute(ptx::warp_index()) * Spec::kTileBytes;
    uint32_t words[4];
    uint32_t own[2];
    ptx::ld_shared_128(words, smem);
    ptx::ld_shared_64(own, smem + 16);
    const int first = static_cast<int>(own[0]);
    const int room = static_cast<int>(own[1]);
    return VarlenTile{static_cast<int>(words[0]), static_cast<int>(words[1]), static_cast<int>(words[2]),
                      SequenceExtents{0, 0, first, first, room, room}};
  } else {
    return locate_tile<Spec, kMask>(params);
  }
}

// Blocks of the stream [begin, end) that some row of a tile sees, for each of the heads [head, end_head).
struct StreamRange {
  int begin;
  int end;
  int head;
  int end_head;
};

template <typename Spec, MaskKind kMask>
__device__ __forceinline__ StreamRange stream_range(const BackwardParams& params, const MaskTile<kMask>& tile) {
  const int group = kMask == MaskKind::kRuntime && params.heads_q == params.heads_kv ? 1 : heads_per_key_head(params);
  const auto& lengths = lengths_of(params, tile);
  if constexpr (Spec::kStreamsQueries) {
    const int first_head = tile.head * group;
    const int begin = visible_rows<kMask>(params, lengths, tile.row).begin / Spec::kStreamRows;
    if constexpr (kMask == MaskKind::kRuntime) {
      const int last_key = min(tile.row + Spec::kOwnRows, lengths.keys()) - 1;
      if (tile.row > last_key) return StreamRange{0, 0, first_head, first_head};
      const int end = ceil_div(visible_rows<kMask>(params, lengths, last_key).end, Spec::kStreamRows);
      return StreamRange{begin, end, first_head, end > begin ? first_head + group : first_head};
    }
    return StreamRange{begin, ceil_div(params.seq_q, Spec::kStreamRows), first_head, (tile.head + 1) * group};
  } else {
    const int last_row = min(tile.row + Spec::kOwnRows, lengths.rows()) - 1;
    const int key_head = kMask == MaskKind::kRuntime && group == 1 ? tile.head : tile.head / group;
    const int begin =
        kMask == MaskKind::kRuntime
            ? visible_keys<kMask>(params, lengths, min(tile.row, max(0, last_row))).begin / Spec::kStreamRows
            : 0;
    const int end = ceil_div(visible_keys<kMask>(params, lengths, last_row).end, Spec::kStreamRows);
    return StreamRange{begin, kMask == MaskKind::kRuntime ? max(begin, end) : end, key_head, key_head + 1};
  }
}

// The blocks of stream_range() that some of a warp's rows, or keys, from `row` on sees: [begin, end). Empty if it has
// no rows.
template <typename Spec>
__device__ __forceinline__ KeyRange seen_blocks(const BackwardParams& params, const VarlenTile& tile, int row) {
  const int own_rows = Spec::kStreamsQueries ? tile.extents.keys() : tile.extents.rows();
  if (row >= own_rows) return KeyRange{0, 0};
  const int last_row = min(row + Spec::kWarpRows, own_rows) - 1;
  const auto visible = [&](int at) {
    return Spec::kStreamsQueries ? visible_rows<MaskKind::kRuntime>(params, tile.extents, at)
                                 : visible_keys<MaskKind::kRuntime>(params, tile.extents, at);
  };
  return KeyRange{visible(row).begin / Spec::kStreamRows, ceil_div(visible(last_row).end, Spec::kStreamRows)};
}

// The blocks of stream_range() that need no mask, [begin, end): every row of the tile sees all of each.
template <typename Spec>
__device__ __forceinline__ KeyRange full_blocks(const BackwardParams& params, const VarlenTile& tile) {
  const auto visible = [&](int row) {
    return Spec::kStreamsQueries ? visible_rows<MaskKind::kRuntime>(params, tile.extents, row)
                                 : visible_keys<MaskKind::kRuntime>(params, tile.extents, row);
  };
  // Keys past the last are seen by none; what rows past the last see does not matter.
  const int last_row = tile.row + Spec::kOwnRows - 1;
  const int begin = visible(Spec::kStreamsQueries ? last_row : min(last_row, max(0, tile.extents.rows() - 1))).begin;
  const int end = Spec::kStreamsQueries && last_row >= tile.extents.keys() ? 0 : visible(tile.row).end;
  return KeyRange{ceil_div(begin, Spec::kStreamRows), end / Spec::kStreamRows};
}

}  // namespace flashmoe::attention::backward::mma_sync
