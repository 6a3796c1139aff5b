// What kernels of MaskKind::kRuntime work on: the entries of a batch, dense or ragged, and which tiles of rows or keys they have.
// The lengths are in device memory; no host knows them.
#pragma once

#include "attention/masks.cuh"
#include "attention/params/backward.h"
#include "attention/sequences.cuh"
#include "device/math.cuh"
#include "ptx/math.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe {
namespace attention {
namespace backward {

// Rows and keys of one entry, and how many of them the tensors have room for: gradients of those past the last are zero.
struct EntryExtents {
  int row_count;
  int key_count;
  int first_row;
  int first_key;
  int row_room;
  int key_room;

  __device__ __forceinline__ int rows() const { return row_count; }
  __device__ __forceinline__ int keys() const { return key_count; }
};

// What a gradient is due to: the rows of an entry (dq), or the keys that it has room for (dk and dv). Two entries more have what
// belongs to none in a ragged tensor: the rows or keys behind the last sequence, and those before the first.
template <bool kOwnsKeys>
__device__ __forceinline__ Extent own_extent(const BackwardParams& params, int entry) {
  const int32_t* cu_seqlens = kOwnsKeys ? params.sequences.cu_seqlens_k : params.sequences.cu_seqlens_q;
  const int most = kOwnsKeys ? params.seq_k : params.seq_q;
  if (cu_seqlens == nullptr) return Extent{0, entry < params.batch ? most : 0};
  const int total = kOwnsKeys ? params.sequences.keys_total : params.sequences.rows_total;
  if (entry < params.batch) return extent_of(cu_seqlens, entry, total, total);
  const bool is_behind = entry == params.batch;
  const int limit = max(0, min(total, load_length(cu_seqlens + (is_behind ? params.batch : 0))));
  return is_behind ? Extent{limit, total - limit} : Extent{0, limit};
}
__device__ __forceinline__ int num_entries(const BackwardParams& params) { return params.batch + 2; }

__device__ __forceinline__ EntryExtents entry_extents(const BackwardParams& params, int entry) {
  const Extent row = own_extent<false>(params, entry);
  const Extent key = own_extent<true>(params, entry);
  EntryExtents extents{0, 0, row.first, key.first, row.length, key.length};
  if (entry >= params.batch) return extents;
  extents.row_count = min(row.length, params.seq_q);
  extents.key_count = min(key.length, params.seq_k);
  if (params.sequences.seqused_k != nullptr) {
    extents.key_count = max(0, min(extents.key_count, load_length(params.sequences.seqused_k + entry)));
  }
  return extents;
}

// A tile as its number among those of its entry says.
struct EntryTile {
  int entry;
  int index;
  int head;
};

// Of `heads` heads, those of the own rows whose streams fit the cache. kFittingRows: rows of the stream, of as many heads as fit the
// second-level cache.
template <bool kOwnsKeys, int kFittingRows>
__device__ __forceinline__ int fitting_heads(const BackwardParams& params) {
  const int group = params.heads_q / params.heads_kv;
  return kOwnsKeys ? max(1, kFittingRows / max(1, params.seq_q * group))
                   : max(1, kFittingRows / max(1, params.seq_k)) * group;
}

// In sections of heads, the tiles with the longest streams (of a causal mask) first: the last rows, or the first keys.
template <bool kOwnsKeys>
__device__ __forceinline__ EntryTile tile_in_sections(int entry, int tiles_of_head, int number, int heads,
                                                      int section_heads) {
  const int first_head = number / (section_heads * tiles_of_head) * section_heads;
  const int in_section = min(section_heads, heads - first_head);
  const int rest = number - first_head * tiles_of_head;
  const int index = rest / in_section;
  return EntryTile{entry, kOwnsKeys ? index : tiles_of_head - 1 - index, first_head + rest - index * in_section};
}

// In sections of heads whose streams fit the cache.
template <bool kOwnsKeys, int kFittingRows>
__device__ __forceinline__ EntryTile tile_of_entry(const BackwardParams& params, int entry, int tiles_of_head,
                                                   int number) {
  const int heads = kOwnsKeys ? params.heads_kv : params.heads_q;
  return tile_in_sections<kOwnsKeys>(entry, tiles_of_head, number, heads,
                                     min(heads, fitting_heads<kOwnsKeys, kFittingRows>(params)));
}

// The first of an entry's slots, one for each block of own rows that it may have: as many as it has, or one more. No sum over the
// entries before it is needed. Rows in front of the first entry have those from 0 on.
template <int kOwnRows, bool kOwnsKeys>
__device__ __forceinline__ int first_slot(const BackwardParams& params, int entry) {
  const int row = load_length((kOwnsKeys ? params.sequences.cu_seqlens_k : params.sequences.cu_seqlens_q) + entry);
  return max(0, min(kOwnsKeys ? params.sequences.keys_total : params.sequences.rows_total, row)) / kOwnRows + entry + 1;
}

// The last entry whose slots begin at `slot` or before, one in 32 of what is left at a time; -1 in front of all. The entry
// `batch` has what lies behind the others.
template <int kOwnRows, bool kOwnsKeys>
__device__ __forceinline__ int entry_of_slot(const BackwardParams& params, int slot) {
  const int lane = ptx::lane_index();
  int entry = -1;
  for (int left = params.batch + 1; left > 0;) {  // entries behind `entry`
    const int step = ceil_div(left, 32);
    const int asked = entry + 1 + lane * step;
    const bool is_reached = lane * step < left && first_slot<kOwnRows, kOwnsKeys>(params, asked) <= slot;
    const int reached = ptx::population_count(ptx::vote_ballot(is_reached));
    if (reached == 0) break;
    const int passed = (reached - 1) * step + 1;
    entry += passed;
    left = min(step - 1, left - passed);
  }
  return entry;
}

// Tiles that an entry of the longest length has.
template <int kOwnRows, bool kOwnsKeys>
__device__ __forceinline__ int tiles_of_longest(const BackwardParams& params) {
  return ceil_div(kOwnsKeys ? params.seq_k : params.seq_q, kOwnRows);
}

// The tile that block `number` of the grid has; past those of its entry where it has none. A negative entry: the block has the part
// `index` of the kClearingSlots that a head's strays are divided into.
//
// Where no entry may have more than few tiles, each has as many slots as the longest. That is what the host asks for if it makes
// the smaller grid. Otherwise an entry has the slots that begin where its rows do.
template <int kOwnRows, bool kOwnsKeys, int kFittingRows>
__device__ __forceinline__ EntryTile tile_of_slot(const BackwardParams& params, int number) {
  const int heads = kOwnsKeys ? params.heads_kv : params.heads_q;
  if ((kOwnsKeys ? params.sequences.cu_seqlens_k : params.sequences.cu_seqlens_q) == nullptr) {
    const int tiles_of_head = ceil_div(kOwnsKeys ? params.seq_k : params.seq_q, kOwnRows);
    const int entry = number / (tiles_of_head * heads);
    return tile_of_entry<kOwnsKeys, kFittingRows>(params, entry, tiles_of_head, number - entry * tiles_of_head * heads);
  }
  int slot = number / heads;
  const int most = tiles_of_longest<kOwnRows, kOwnsKeys>(params);
  const bool is_equal = (static_cast<int64_t>(most) * params.batch + kClearingSlots) * heads == ptx::grid_size();
  int entry;
  int begin;
  int end;
  if (is_equal) {
    if (slot < kClearingSlots) return EntryTile{-1, slot, number - slot * heads};
    number -= kClearingSlots * heads;
    slot -= kClearingSlots;
    entry = most == 1 ? slot : slot / most;
    begin = entry * most;
    end = begin + most;
  } else {
    entry = entry_of_slot<kOwnRows, kOwnsKeys>(params, slot);
    begin = entry < 0 ? 0 : first_slot<kOwnRows, kOwnsKeys>(params, entry);
    end = entry < params.batch ? first_slot<kOwnRows, kOwnsKeys>(params, entry + 1) : ptx::grid_size() / heads;
    if (entry < 0) entry = params.batch + 1;
  }
  const int64_t rows_of_stream = kOwnsKeys ? static_cast<int64_t>(params.seq_q) * params.heads_q
                                           : static_cast<int64_t>(params.seq_k) * params.heads_kv;
  if (rows_of_stream <= kFittingRows) {  // the same as below, where all heads are one section: no more divisions
    return EntryTile{entry, max(0, kOwnsKeys ? slot - begin : end - 1 - slot), number - slot * heads};
  }
  return tile_of_entry<kOwnsKeys, kFittingRows>(params, entry, max(1, end - begin), max(0, number - begin * heads));
}

// Finds tiles by their numbers: entry by entry, in each as `tile_of_entry` orders them. A warp's lanes hold 32 entries at a
// time; all of them take part in every call.
template <int kOwnRows, bool kOwnsKeys>
struct TileFinder {
  const BackwardParams& params;
  const int heads;
  int first_entry = 0;  // of the warp's
  int first_tile = 0;   // of that entry
  int end;              // tiles of a head of this lane's entry and of those of the lanes before

  __device__ __forceinline__ explicit TileFinder(const BackwardParams& params_)
      : params(params_), heads(kOwnsKeys ? params_.heads_kv : params_.heads_q) {
    load();
  }
  // As it was left.
  __device__ __forceinline__ TileFinder(const BackwardParams& params_, int first_entry_, int first_tile_, int end_)
      : params(params_),
        heads(kOwnsKeys ? params_.heads_kv : params_.heads_q),
        first_entry(first_entry_),
        first_tile(first_tile_),
        end(end_) {}

  __device__ __forceinline__ int tiles_of(int entry) const {
    return entry < num_entries(params) ? ceil_div(own_extent<kOwnsKeys>(params, entry).length, kOwnRows) : 0;
  }

  __device__ __forceinline__ void load() {
    const int lane = ptx::lane_index();
    end = tiles_of(first_entry + lane);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = ptx::shuffle_index(end, max(0, lane - distance));
      if (lane >= distance) end += before;
    }
  }

  // Of all entries and heads.
  __device__ __forceinline__ int count() const {
    int sum = 0;
    for (int entry = ptx::lane_index(); entry < num_entries(params); entry += 32) sum += tiles_of(entry);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      sum += static_cast<int>(ptx::shuffle_xor(static_cast<uint32_t>(sum), distance));
    }
    return sum * heads;
  }

  // Goes on to the 32 entries that have the tile; the lane of its entry.
  __device__ __forceinline__ int lane_of(int number) {
    int chunk;
    while (number >= first_tile + (chunk = ptx::shuffle_index(end, 31) * heads)) {
      first_tile += chunk;
      first_entry += 32;
      load();
    }
    return ptx::population_count(ptx::vote_ballot(first_tile + end * heads <= number));
  }

  // `number` is at least that of the call before, and less than count(). kFittingRows: rows of the stream, of as many heads as
  // fit the second-level cache. kMayMix and mixes: neighbouring entries whose streams fit it together are one section.
  template <int kFittingRows, bool kMayMix = false>
  __device__ __forceinline__ EntryTile find(int number, bool mixes = false) {
    const int lane = lane_of(number);
    const int before = ptx::shuffle_index(end, max(0, lane - 1));
    const int tiles_before = lane > 0 ? before : 0;
    const int tiles_of_head = ptx::shuffle_index(end, lane) - tiles_before;
    if constexpr (kMayMix) {
      const int entries = mixes ? fitting_heads<kOwnsKeys, kFittingRows>(params) / heads : 1;
      if (entries > 1) return tile_of_section(lane, entries, number - first_tile);
    }
    return tile_of_entry<kOwnsKeys, kFittingRows>(params, first_entry + lane, tiles_of_head,
                                                  number - first_tile - tiles_before * heads);
  }

  // As find, in sections of `section_heads` heads of an entry, or of several entries that have as many together.
  __device__ __forceinline__ EntryTile find_in_sections(int number, int section_heads) {
    const int lane = lane_of(number);
    const int before = ptx::shuffle_index(end, max(0, lane - 1));
    const int tiles_before = lane > 0 ? before : 0;
    const int tiles_of_head = ptx::shuffle_index(end, lane) - tiles_before;
    if (section_heads >= 2 * heads) return tile_of_section(lane, section_heads / heads, number - first_tile);
    return tile_in_sections<kOwnsKeys>(first_entry + lane, tiles_of_head, number - first_tile - tiles_before * heads,
                                       heads, section_heads);
  }

  // Among the warp's entries, `entries` by `entries`, of which `lane` has the tile: those that are n-th from their entry's last
  // (dq) or before it (dk and dv), for falling n.
  __device__ __forceinline__ EntryTile tile_of_section(int lane, int entries, int number) const {
    const int own_lane = ptx::lane_index();
    const int first_lane = lane / entries * entries;
    const int before = ptx::shuffle_index(end, max(0, first_lane - 1));
    const int own_before = ptx::shuffle_index(end, max(0, own_lane - 1));
    const bool is_inside = own_lane / entries == lane / entries;
    const int tiles = is_inside ? end - (own_lane > 0 ? own_before : 0) : 0;
    int left = tiles;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      left = max(left, static_cast<int>(ptx::shuffle_xor(static_cast<uint32_t>(left), distance)));
    }
    int rest = number - (first_lane > 0 ? before : 0) * heads;
    uint32_t having = ptx::vote_ballot(tiles >= left);
    for (int count; rest >= (count = ptx::population_count(having) * heads);) {
      rest -= count;
      --left;
      having = ptx::vote_ballot(tiles >= left);
    }
    const int place = rest / heads;
    const bool is_own = tiles >= left && ptx::population_count(having & ((1u << own_lane) - 1)) == place;
    const int entry_lane = ptx::population_count(ptx::vote_ballot(is_own) - 1);
    const int index = kOwnsKeys ? ptx::shuffle_index(tiles, entry_lane) - left : left - 1;
    return EntryTile{first_entry + entry_lane, index, rest - place * heads};
  }
};

// The first row of `head` of an entry in the log-sum-exp, its gradient and row_dot: [batch, heads_q, seq_q], or
// [heads_q, rows_total].
__device__ __forceinline__ int64_t statistics_row(const BackwardParams& params, int entry, int head, int first_row) {
  if (params.sequences.cu_seqlens_q != nullptr) {
    return static_cast<int64_t>(head) * params.sequences.rows_total + first_row;
  }
  return (static_cast<int64_t>(entry) * params.heads_q + head) * params.seq_q;
}

}  // namespace backward
}  // namespace attention
}  // namespace flashmoe
