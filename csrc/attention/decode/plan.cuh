// Divides the key tiles of a batch over the blocks of a decoding kernel, from the lengths in device memory.
//
// The rows of a key head are the query heads that share it: row r of a sequence is head r % folded_heads of position
// r / folded_heads. An item is a query tile (up to kBlockM rows) of one key head of one sequence, with the key tiles
// that the sequence's rows see. The tiles of all items form one list, item by item, and every block takes an equal
// share of it, whatever the lengths: the end of one item, complete items, and the beginning of another. If several
// blocks share an item, the last of them to finish merges it (merge.cuh). If items are equal and numerous enough, none
// is shared: blocks take complete items, in rounds, so that heads that share pages are read together. With
// num_splits == 1 this is always so, and the order of a row's sums does not depend on the batch.
//
// Every warp of a block makes the same plan; it reads the sequences 32 at a time, one per lane.
#pragma once

#include "attention/masks.cuh"
#include "attention/params/forward.h"
#include "attention/sequences.cuh"
#include "device/math.cuh"
#include "device/reduce.cuh"
#include "ptx/math.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention::decode {

// The part of an item that a block computes. Key tiles are counted from the sequence's first key.
struct Segment {
  int batch;
  Extent query_rows;  // of the sequence
  Extent keys;        // of the sequence
  KeyRange seen;      // keys that some row of the sequence sees
  int head_kv;
  int row;   // the item's first row within its key head
  int rows;  // 1 to kBlockM
  int tile;  // first key tile
  int end_tile;
  // In the list of all tiles: the item's range, and the segment's first tile. Unused if no item is shared.
  int item_tile;
  int item_end;
  int position;

  __device__ __forceinline__ Sequence<MaskKind::kRuntime> sequence(const ForwardParams& params) const {
    return Sequence<MaskKind::kRuntime>(params, batch, query_rows, keys);
  }
};

// The blocks that share an item.
struct ItemSplit {
  int first_block;
  int last_block;
  bool starts_late;  // first_block computes the end of another item before this one
  int slot;          // of this block's partial results: see slot_of
};

// A block that ends one item and begins another has a slot for the partial results of each.
__device__ __forceinline__ int slot_of(int block, bool is_later) { return 2 * block + (is_later ? 1 : 0); }

// The keys that some row of a sequence sees.
__device__ __forceinline__ KeyRange keys_of_sequence(const Sequence<MaskKind::kRuntime>& sequence) {
  const ScoreOptions& options = sequence.params.score_options;
  return KeyRange{window_around(options, sequence, diagonal_key(sequence, 0)).begin,
                  window_around(options, sequence, diagonal_key(sequence, sequence.rows() - 1)).end};
}

// How often keys and values are read, for the cache hints. kOnceInSmallBatch: once, in a batch so small that the L2
// cache has room for what other kernels have left there if keys and values are evicted first. kOnce: once. kOften: by
// many sequences.
enum class KvReuse { kOnceInSmallBatch, kOnce, kOften };

__device__ __noinline__ uint32_t divide(uint32_t a, uint32_t b) { return a / b; }

// Unsigned, because the signed division takes half as many instructions more. Kernels with two loops, which are longer,
// call it instead of inlining it.
template <typename Spec>
__device__ __forceinline__ int quotient(int a, int b) {
  const uint32_t dividend = static_cast<uint32_t>(a);
  const uint32_t divisor = static_cast<uint32_t>(b);
  return static_cast<int>(Spec::kHasTwoLoops ? divide(dividend, divisor) : dividend / divisor);
}

// Prefetches at once what a block waits for before its first keys, the lengths and then the pages: as many lines of the
// page table as a warp has lanes, from where the block's share would begin if all sequences were equally long.
template <typename Spec>
__device__ __forceinline__ void prefetch_tables(const ForwardParams& params) {
  constexpr int kLine = 32;  // elements
  const Batch& sequences = params.sequences;
  const int thread = ptx::thread_index();
  const int at = thread * kLine;
  if (at < params.batch) {
    if (sequences.seqused_k != nullptr) ptx::prefetch_global(sequences.seqused_k + at);
    if (sequences.cu_seqlens_q != nullptr) ptx::prefetch_global(sequences.cu_seqlens_q + at);
    if (sequences.cu_seqlens_k != nullptr) ptx::prefetch_global(sequences.cu_seqlens_k + at);
  }
  if (sequences.block_table == nullptr || thread >= 32) return;
  const int64_t pages = params.batch * sequences.block_table_stride;
  if (pages > (1 << 30)) return;
  const int page = ptx::block_index() * quotient<Spec>(static_cast<int>(pages), ptx::grid_size()) + at;
  if (page < pages) ptx::prefetch_global(sequences.block_table + page);
}

// A row of an item.
struct QueryRow {
  int position;  // among the rows of the sequence
  int head;

  __device__ __forceinline__ int64_t offset(const Strides& stride) const {
    return position * stride.row + head * stride.head;
  }
};

// Row `index` of the segment's item.
template <typename Spec>
__device__ __forceinline__ QueryRow query_row(const ForwardParams& params, const Segment& segment, int index) {
  const int group = params.score_options.folded_heads;
  const int row = segment.row + index;
  if (group == 1) return QueryRow{row, segment.head_kv};
  const int position = segment.query_rows.length == 1 ? 0 : quotient<Spec>(row, group);
  return QueryRow{position, segment.head_kv * group + row - position * group};
}

template <typename Spec>
struct Plan {
  // The cost of an item's start and end, besides its tiles and in units of tiles, if items differ.
  static constexpr int kLead = 1;
  // In tiles: up to 192 MB of keys and values are read evict_first, so that the L2 cache need not write back what other
  // kernels have left in it to make room for them.
  static constexpr int kSmall = (192 << 20) / (Spec::kNumWarps * Spec::kStageBytes);

  const ForwardParams& params;
  const bool is_uniform;  // all sequences have the same lengths
  bool is_whole;          // blocks take complete items
  KvReuse reuse;
  int lead;             // list positions before each item's tiles, for the cost of its start and end
  int tiles_per_block;  // unused if is_whole
  int position;         // in the list of all tiles: where the next segment begins; if is_whole, the next item
  int end;              // of the block's share; if is_whole, of all items
  int group;            // sequences group to group + 31 are in the lanes
  int group_tile;       // list position of the group's first sequence
  // Of this lane's sequence:
  Extent rows;
  Extent keys;
  KeyRange seen;
  int tiles;  // per item
  int items;
  int sequence_end;  // where the sequence ends in the list, counted from group_tile

  // Unsigned, so that the division is a shift.
  __device__ __forceinline__ static int tile_of(int key) {
    return static_cast<int>(static_cast<uint32_t>(key) / Spec::kTileKeys);
  }
  // Row blocks of one key head for `positions` query positions.
  __device__ __forceinline__ int row_blocks_of(int positions) const {
    const uint32_t rows = static_cast<uint32_t>(positions * params.score_options.folded_heads);
    return static_cast<int>((rows + Spec::kBlockM - 1) / Spec::kBlockM);
  }

  // If another kernel computes a part of the batch: whether the sequence, of which at most seq_q rows are counted, is
  // one of that kernel's.
  __device__ __forceinline__ bool is_longer(int batch) const {
    if (params.num_splits >= 0 || rows.length < params.seq_q) return false;
    const int32_t* cu_seqlens = params.sequences.cu_seqlens_q + batch;
    return load_length(cu_seqlens + 1) - load_length(cu_seqlens) > params.seq_q;
  }

  __device__ __forceinline__ void load_sequence(int batch) {
    rows = keys = Extent{0, 0};
    seen = KeyRange{0, 0};
    items = 0;
    tiles = 1;
    if (batch >= params.batch) return;
    const Sequence<MaskKind::kRuntime> sequence(params, batch);
    rows = sequence.row;
    keys = sequence.key;
    if (rows.length == 0 || is_longer(batch)) return;
    seen = keys_of_sequence(sequence);
    // Rows that see no key have an output as well: one tile, fully masked.
    tiles = maximum(1, tile_of(seen.end + Spec::kTileKeys - 1) - tile_of(seen.begin));
    items = row_blocks_of(rows.length) * params.heads_kv;
  }

  // The lanes hold the sequences from `first` on.
  __device__ __forceinline__ void set_group(int first) {
    group = first;
    sequence_end = items * (lead + tiles);
    if (!is_uniform) sequence_end = warp_prefix_sum(sequence_end);
  }

  __device__ __forceinline__ explicit Plan(const ForwardParams& params_)
      : params(params_),
        is_uniform(params_.batch == 1 ||
                   (params_.sequences.cu_seqlens_q == nullptr && params_.sequences.cu_seqlens_k == nullptr &&
                    params_.sequences.seqused_k == nullptr)),
        reuse(KvReuse::kOften),
        lead(0),
        group_tile(0) {
    tiles_per_block = 0;
    is_whole = params.num_splits <= 1;
    if (is_whole) {
      take_whole_items();
      return;
    }
    int total = 0;
    int most = 0;
    int all_items = 0;
#pragma unroll 1
    for (int first = is_uniform ? 0 : (params.batch - 1) / 32 * 32; first >= 0; first -= 32) {  // first group last
      load_sequence(is_uniform ? 0 : first + ptx::lane_index());
      total += items * tiles;
      most = max(most, tiles);
      all_items += items;
    }
    if (is_uniform) {
      total *= params.batch;
      all_items *= params.batch;
    } else {
      most = static_cast<int>(ptx::reduce_max(static_cast<uint32_t>(most)));
      total = ptx::reduce_add(total);
      all_items = ptx::reduce_add(all_items);
    }
    const bool is_small = total <= kSmall;
    const bool is_equal = static_cast<int64_t>(most) * all_items == total;
    const bool may_be_whole = is_equal && fills_rounds(all_items);
    const Witness pages = is_small && !may_be_whole ? Witness{0, 1} : common_page();
    is_whole = may_be_whole && pages.first != pages.other;
    if (is_whole) {
      reuse = is_small ? KvReuse::kOnceInSmallBatch : KvReuse::kOnce;
      take_whole_items();
      return;
    }
    lead = is_equal ? 0 : kLead;
    total += lead * all_items;
    set_group(0);
    // Shares need not begin where items do, so an item of num_splits - 1 shares may span num_splits blocks.
    tiles_per_block = max(quotient<Spec>(total + ptx::grid_size() - 1, ptx::grid_size()),
                          quotient<Spec>(most + params.num_splits - 2, params.num_splits - 1));
    if (is_equal) tiles_per_block = aligned(tiles_per_block, most);
    if (pages.first != pages.other) reuse = is_small ? KvReuse::kOnceInSmallBatch : KvReuse::kOnce;
    position = min(total, ptx::block_index() * tiles_per_block);
    end = min(total, position + tiles_per_block);
  }

  __device__ __forceinline__ void take_whole_items() {
    position = ptx::block_index();
    end = params.batch * params.heads_kv * row_blocks_of(params.seq_q);
  }

  // Whether equal items in rounds of one per block keep the blocks busy: every block has one, and in the last round two
  // fifths of the blocks do, which read as fast as all, or what is missing is less than a 64th of the work. Two thirds
  // on GPUs with fast memory, for which the host sets hints: there 120 of 264 blocks took 4% longer than shares. (Fewer
  // items than blocks: 3% slower, because the blocks with an item are not spread one per multiprocessor.)
  __device__ __forceinline__ bool fills_rounds(int items) const {
    const int blocks = ptx::grid_size();
    const int full_blocks = quotient<Spec>(2 * blocks, params.hints != 0 ? 3 : 5);
    // Unsigned: there may be no items.
    const uint32_t full_rounds =
        static_cast<uint32_t>(quotient<Spec>(items - 1, blocks)) * static_cast<uint32_t>(blocks);
    const int last_round = static_cast<int>(static_cast<uint32_t>(items) - full_rounds);
    return items >= blocks && 64 * (full_blocks - last_round) <= items;
  }

  // The pages of two sequences that hold the same key. If they are one page, most likely all sequences share their
  // pages and read them from the L2 cache.
  struct Witness {
    int first;
    int other;
  };

  // For the group in the lanes, at the key in the middle of those that both its first and its last sequence see. Only
  // issues the loads; the wait is where the pages are compared.
  __device__ __forceinline__ Witness common_page() const {
    const Batch& sequences = params.sequences;
    const int other = min(params.batch, 32) - 1;
    const int begin = max(ptx::shuffle_index(seen.begin, 0), ptx::shuffle_index(seen.begin, other));
    const int keys_end = min(ptx::shuffle_index(seen.end, 0), ptx::shuffle_index(seen.end, other));
    if (sequences.block_table == nullptr || other == 0 || begin >= keys_end) return Witness{0, 1};
    const int32_t* page = sequences.block_table + quotient<Spec>(begin + (keys_end - begin) / 2, sequences.page_size);
    return Witness{load_length(page), load_length(page + other * sequences.block_table_stride)};
  }

  // For equal items: a share up to a sixteenth longer that is a multiple of an item, or an equal part of one, if there
  // is such a share. Two partial items in a block would be two merges, and blocks that begin items together read shared
  // pages together.
  __device__ __forceinline__ static int aligned(int tiles_per_block, int item_tiles) {
    constexpr int kLonger = 16;
    if (tiles_per_block < kLonger) return tiles_per_block;
    if (item_tiles < tiles_per_block) {
      const int whole = quotient<Spec>(tiles_per_block + item_tiles - 1, item_tiles) * item_tiles;
      return whole <= tiles_per_block + tiles_per_block / kLonger ? whole : tiles_per_block;
    }
    const int parts = quotient<Spec>(item_tiles, tiles_per_block);
    const int part = quotient<Spec>(item_tiles, parts);
    return part * parts == item_tiles && part <= tiles_per_block + tiles_per_block / kLonger ? part : tiles_per_block;
  }

  // Sets the segment to item `index` of the sequence that `lane` holds.
  __device__ __forceinline__ void set_item(Segment& segment, int batch, int lane, int index) const {
    segment.batch = batch;
    segment.query_rows = Extent{ptx::shuffle_index(rows.first, lane), ptx::shuffle_index(rows.length, lane)};
    segment.keys = Extent{ptx::shuffle_index(keys.first, lane), ptx::shuffle_index(keys.length, lane)};
    segment.seen = KeyRange{ptx::shuffle_index(seen.begin, lane), ptx::shuffle_index(seen.end, lane)};
    segment.tile = tile_of(segment.seen.begin);
    const int m_blocks = row_blocks_of(segment.query_rows.length);
    segment.head_kv = m_blocks == 1 ? index : quotient<Spec>(index, m_blocks);
    segment.row = (index - segment.head_kv * m_blocks) * Spec::kBlockM;
    segment.rows = min(Spec::kBlockM, segment.query_rows.length * params.score_options.folded_heads - segment.row);
  }

  // Advances to the next item that its sequence has; returns false at the end.
  __device__ __forceinline__ bool next_whole(Segment& segment) {
    const int most_items = params.heads_kv * row_blocks_of(params.seq_q);
    for (; position < end; position += ptx::grid_size()) {
      const int batch = quotient<Spec>(position, most_items);
      const int index = position - batch * most_items;
      load_sequence(batch);
      if (index < items) {
        set_item(segment, batch, 0, index);
        segment.end_tile = segment.tile + tiles;
        segment.item_tile = segment.item_end = segment.position = 0;
        position += ptx::grid_size();
        return true;
      }
    }
    return false;
  }

  // Advances to the next segment of the block's share; returns false at its end.
  __device__ __forceinline__ bool next(Segment& segment) {
    if (is_whole) return next_whole(segment);
    if (position >= end) return false;
    int batch = 0;
    int sequence_tile;  // list position of the sequence's first item
    int lane = 0;
    if (is_uniform) {
      if (params.batch > 1) batch = quotient<Spec>(position, sequence_end);
      sequence_tile = batch * sequence_end;
    } else {
      uint32_t reached = ptx::vote_ballot(group_tile + sequence_end > position);
      while (reached == 0) {
        group_tile += ptx::shuffle_index(sequence_end, 31);
        load_sequence(group + 32 + ptx::lane_index());
        set_group(group + 32);
        reached = ptx::vote_ballot(group_tile + sequence_end > position);
      }
      lane = ptx::population_count(~reached & (reached - 1));  // the first sequence that ends past it
      batch = group + lane;
      sequence_tile = group_tile + ptx::shuffle_index(sequence_end - items * (lead + tiles), lane);
    }
    const int item_tiles = ptx::shuffle_index(tiles, lane);
    const int index = quotient<Spec>(position - sequence_tile, lead + item_tiles);
    segment.item_tile = sequence_tile + index * (lead + item_tiles) + lead;
    segment.item_end = segment.item_tile + item_tiles;
    position = max(position, segment.item_tile);
    if (position >= end) return false;
    set_item(segment, batch, lane, index);
    segment.position = position;
    segment.tile += position - segment.item_tile;
    const int segment_end = min(segment.item_end, end);
    segment.end_tile = segment.tile + segment_end - position;
    position = segment_end;
    return true;
  }

  // Computed at a segment's end, because nothing needs it earlier.
  __device__ __forceinline__ ItemSplit item_split(const Segment& segment) const {
    if (is_whole) return ItemSplit{0, 0, false, 0};
    ItemSplit result;
    result.first_block = quotient<Spec>(segment.item_tile, tiles_per_block);
    result.last_block = quotient<Spec>(segment.item_end - 1, tiles_per_block);
    result.starts_late = segment.item_tile > result.first_block * tiles_per_block;
    result.slot = slot_of(ptx::block_index(), segment.position > ptx::block_index() * tiles_per_block);
    return result;
  }
};

}  // namespace flashmoe::attention::decode
