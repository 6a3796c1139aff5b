// The producers of MaskKind::kBand: one warp, which finds its tiles by the lengths in device memory, and of which one elected lane
// feeds the copy engine (elected, so that the compiler sees that it is one: else it makes a loop over lanes of every load). What a
// tile needs once stands in shared memory meanwhile: there are few registers.
#pragma once

#include "attention/backward/sm90/producer.cuh"
#include "attention/backward/sm90/products.cuh"

namespace flashmoe {
namespace attention {
namespace backward {
namespace sm90 {

// Tiles by number, for a block that asks for growing ones.
template <typename Spec, bool kOwnsKeys>
struct BandSchedule {
  static constexpr int kSectionRows = (32 << 20) / (4 * Spec::kHeadDim);
  // Tiles a block up to which entries share sections, where tiles differ in length: the last entry's longest would begin too late.
  // With more it costs up to 10%, as fewer tiles at work share a stream.
  static constexpr int kFewRounds = 5;
  using Finder = TileFinder<Spec::kOwnRows, kOwnsKeys>;

  const BackwardParams& params;
  const SharedMemory<Spec> shared;

  __device__ __forceinline__ BandSchedule(const BackwardParams& params_, const SharedMemory<Spec>& shared_)
      : params(params_), shared(shared_) {
    Finder finder(params);
    const int num_tiles = finder.count();
    keep(finder, !Spec::kTakesTurns || has_growing_rows() ? num_tiles : ~num_tiles);
  }

  // Entries whose rows overlap, of lengths that lie, would share pieces of dq, and count each other's turns.
  __device__ __forceinline__ bool has_growing_rows() const {
    const int32_t* cu_seqlens = params.entries.cu_seqlens_q;
    bool falls = false;
    for (int entry = ptx::lane_index(); cu_seqlens != nullptr && entry < params.batch; entry += 32) {
      falls = falls || load_length(cu_seqlens + entry + 1) < load_length(cu_seqlens + entry);
    }
    return ptx::vote_ballot(falls) == 0;
  }

  // Each lane's own words.
  __device__ __forceinline__ unsigned char* words() const { return shared.finder() + ptx::lane_index() * 16; }
  __device__ __forceinline__ void keep(const Finder& finder, int num_tiles) const {
    const uint32_t kept[4] = {static_cast<uint32_t>(finder.first_entry), static_cast<uint32_t>(finder.first_tile),
                              static_cast<uint32_t>(finder.end), static_cast<uint32_t>(num_tiles)};
    ptx::st_shared_128(words(), kept);
  }
  __device__ __forceinline__ int num_tiles() const {
    const int kept = static_cast<int>(ptx::ld_shared_32(words() + 12));
    return Spec::kTakesTurns && kept < 0 ? ~kept : kept;
  }

  // index < 0 behind the last tile.
  __device__ __forceinline__ BandTile tile(int number) const {
    uint32_t kept[4];
    ptx::ld_shared_128(kept, words());
    if constexpr (Spec::kTakesTurns) return tile_with_turns(number, kept);
    const int num_tiles = static_cast<int>(kept[3]);
    if (number >= num_tiles) return BandTile{-1, 0, 0, 0, {}, 0};
    Finder finder(params, static_cast<int>(kept[0]), static_cast<int>(kept[1]), static_cast<int>(kept[2]));
    const bool mixes = params.band.right < kUnbounded && num_tiles <= kFewRounds * ptx::grid_size();
    const EntryTile found = finder.template find<kSectionRows, true>(number, mixes);
    keep(finder, num_tiles);
    return BandTile{found.index, found.head, found.entry, 0, entry_extents(params, found.entry), 0};
  }

  // In the orders of fused.cuh, sections as of the dense batches. Whether an entry's head goes up or down is the same for all its tiles.
  __device__ __forceinline__ BandTile tile_with_turns(int number, const uint32_t (&kept)[4]) const {
    const bool has_rows = static_cast<int>(kept[3]) >= 0;
    const int num_tiles = has_rows ? static_cast<int>(kept[3]) : ~static_cast<int>(kept[3]);
    if (number >= num_tiles) return BandTile{-1, 0, 0, 0, {}, 0};
    const bool is_causal = params.band.right < kUnbounded && params.band.left >= kUnbounded;
    const int group = params.heads_q / params.heads_kv;
    const bool all_downwards = is_causal && group > 1;
    const int section_rows = ((params.seq_q < 8192 ? 12 : 16) << 20) / (4 * Spec::kHeadDim);
    int section_heads = all_downwards ? Spec::kSectionHeads / 2 : Spec::kSectionHeads;
    if (!Spec::kIsWide || (is_causal && !all_downwards)) {
      section_heads = maximum(1, section_rows / maximum(1, group * params.seq_q));
    }
    if (all_downwards &&
        section_heads < params.heads_kv) {  // or somewhat more: tiles that begin at one block want many heads
      section_heads = ceil_div(params.heads_kv, maximum(1, (params.heads_kv + section_heads / 2) / section_heads));
    }
    Finder finder(params, static_cast<int>(kept[0]), static_cast<int>(kept[1]), static_cast<int>(kept[2]));
    const EntryTile found = finder.find_in_sections(number, section_heads);
    keep(finder, static_cast<int>(kept[3]));
    BandTile tile{found.index, found.head, found.entry, 0, entry_extents(params, found.entry), 0};
    if (!has_rows) tile.extents.row_count = 0;
    const int64_t keys_behind = params.entries.cu_seqlens_k != nullptr
                                    ? params.entries.keys_total - tile.extents.first_key - tile.extents.key_room
                                    : static_cast<int64_t>(params.batch - 1 - found.entry) * params.seq_k;
    const int64_t rows_behind =
        keys_behind * params.heads_kv + static_cast<int64_t>(tile.extents.key_room) * (params.heads_kv - found.head);
    tile.downwards = all_downwards || (is_causal && rows_behind <= section_rows);
    if (!tile.downwards) tile.index = ceil_div(tile.extents.key_room, Spec::kOwnRows) - 1 - found.index;
    return tile;
  }

  // With the blocks that it sees, for the producer itself (one lane) and, later, the consumers.
  __device__ __forceinline__ void note(BandTile tile, const BlockRange& range) const {
    tile.begin_block = range.begin;
    tile.end_block = range.end;
    publish_tile(shared.produced_tile(), tile);
  }
};

// The own rows of every warpgroup, of the tile that was noted.
template <typename Spec, bool kOwnsKeys>
__device__ __forceinline__ void load_noted(const BackwardParams& params, const SharedMemory<Spec>& shared,
                                           const ptx::TensorMap& first_map, const ptx::TensorMap& second_map,
                                           int parity) {
  const BandTile tile = read_tile<BandTile>(shared.produced_tile());
  const RaggedPlace first =
      kOwnsKeys ? keys_read(params.entry_rows.k, tile, tile.head) : rows_read(params.entry_rows.q, tile, tile.head);
  const RaggedPlace second =
      kOwnsKeys ? keys_read(params.entry_rows.v, tile, tile.head) : rows_read(params.entry_rows.dout, tile, tile.head);
#pragma unroll
  for (int own = 0; own < Spec::kNumOwnTiles; ++own) {
    load_own<Spec>(shared, first_map, second_map, own, parity, tile, first, second);
  }
}

// Of the kernel of dq, in the order of produce_keys.
template <typename Spec>
__device__ __forceinline__ void produce_band_keys(const BackwardParams& params, const SharedMemory<Spec>& shared,
                                                  const ptx::TensorMap& q_map, const ptx::TensorMap& k_map,
                                                  const ptx::TensorMap& v_map, const ptx::TensorMap& dout_map) {
  const BandSchedule<Spec, false> schedule(params, shared);
  RingPosition<Spec::kFirstStages> key;
  RingPosition<Spec::kSecondStages> value;
  int own_parity = 0;

  for (int number = ptx::block_index();; own_parity ^= 1) {
    const BandTile tile = schedule.tile(number);
    if (tile.index < 0) break;
    int next_number = -1;
    if (ptx::elect_one()) {
      const int first_row = tile.index * Spec::kOwnRows;
      const BlockRange range = key_blocks<Spec, MaskKind::kBand>(params, tile, first_row, first_row + Spec::kOwnRows);
      schedule.note(tile, range);
      const int head = tile.head / (params.heads_q / params.heads_kv);
      const RaggedPlace key_place = keys_read(params.entry_rows.k, tile, head);
      const RaggedPlace value_place = keys_read(params.entry_rows.v, tile, head);
      bool own_is_loaded = false;
      for (int block = range.end - 1; block >= range.begin; --block) {
        if (next_number < 0 && block <= range.begin + kDrawAhead) {
          next_number = next_tile_index(params.tile_counter, schedule.num_tiles(), number);
        }
        load_block<Spec>(shared, key, value, k_map, v_map, block * Spec::kStreamRows, key_place, value_place);
        key.advance();
        value.advance();
        if (!own_is_loaded) load_noted<Spec, false>(params, shared, q_map, dout_map, own_parity);
        own_is_loaded = true;
      }
    }
    number = static_cast<int>(ptx::reduce_max(static_cast<uint32_t>(next_number + 1))) - 1;
  }
  if (ptx::elect_one()) end_work<Spec, MaskKind::kBand>(shared, own_parity);
}

// Of the kernel of dk and dv, in the order of produce_queries; the statistics are another warp's. Keys that no query sees have no
// block.
template <typename Spec>
__device__ __forceinline__ void produce_band_queries(const BackwardParams& params, const SharedMemory<Spec>& shared,
                                                     const ptx::TensorMap& q_map, const ptx::TensorMap& k_map,
                                                     const ptx::TensorMap& v_map, const ptx::TensorMap& dout_map) {
  const BandSchedule<Spec, true> schedule(params, shared);
  RingPosition<Spec::kFirstStages> at;  // both rings have as many stages
  int own_parity = 0;

  for (int number = first_tile<Spec>(params.tile_counter, schedule.num_tiles());; own_parity ^= 1) {
    const BandTile tile = schedule.tile(number);
    if (tile.index < 0) break;
    int next_number = -1;
    if (ptx::elect_one()) {
      const int first_key = tile.index * Spec::kOwnRows;
      const BlockRange range = query_blocks<Spec, MaskKind::kBand>(params, tile, first_key, first_key + Spec::kOwnRows);
      schedule.note(tile, range);
      const int group = params.heads_q / params.heads_kv;
      RaggedPlace query_place = rows_read(params.entry_rows.q, tile, tile.head * group);
      RaggedPlace dout_place = rows_read(params.entry_rows.dout, tile, tile.head * group);
      const bool downwards = Spec::kTakesTurns && tile.downwards != 0;
      int block = downwards ? range.end - 1 : range.begin;
      int heads_left = group;
      bool own_is_loaded = false;
      for (int left = group * (range.end - range.begin); left > 0; --left) {
        if (next_number < 0 && left <= kDrawAhead + 1) {
          next_number = next_tile<Spec>(params.tile_counter, schedule.num_tiles(), number);
        }
        load_block<Spec>(shared, at, at, q_map, dout_map, block * Spec::kStreamRows, query_place, dout_place);
        if (!own_is_loaded) load_noted<Spec, true>(params, shared, k_map, v_map, own_parity);
        own_is_loaded = true;
        at.advance();
        if constexpr (Spec::kTakesTurns) {  // a block of each head of the group, then the next block
          const int further = --heads_left > 0 ? 1 : 1 - group;
          query_place.head += further;
          dout_place.head += further;
          if (heads_left == 0) {
            heads_left = group;
            block += downwards ? -1 : 1;
          }
        } else if (++block == range.end) {
          block = range.begin;
          ++query_place.head;
          ++dout_place.head;
        }
      }
      if (!own_is_loaded) {
        next_number = next_tile<Spec>(params.tile_counter, schedule.num_tiles(), number);
        load_noted<Spec, true>(params, shared, k_map, v_map, own_parity);
      }
    }
    number = static_cast<int>(ptx::reduce_max(static_cast<uint32_t>(next_number + 1))) - 1;
  }
  if (ptx::elect_one()) end_work<Spec, MaskKind::kBand>(shared, own_parity);
}

// A warp that streams the statistics of the blocks that produce_band_queries loads. It learns of a tile as the consumers do,
// with the own rows, for which they wait, too.
template <typename Spec>
__device__ __forceinline__ void produce_band_statistics(const BackwardParams& params,
                                                        const SharedMemory<Spec>& shared) {
  RingPosition<Spec::kFirstStages> at;
  Statistics<Spec> statistics;
  for (int parity = 0;; parity ^= 1) {
    ptx::mbarrier_wait(shared.tile_full(0), parity);
    const BandTile tile = read_tile<BandTile>(shared.tile(0));
    if (tile.index < 0) break;
    // Hazard: the next tile is written before every lane has read this one: consumers of a tile without blocks wait for no
    // statistics.
    release(shared.own_empty(0));
    const int group = params.heads_q / params.heads_kv;
    int64_t first = first_statistic(params, tile, tile.head * group);
    const int64_t head_rows = first_statistic(params, tile, tile.head * group + 1) - first;
    const bool downwards = Spec::kTakesTurns && tile.downwards != 0;
    int block = downwards ? tile.end_block - 1 : tile.begin_block;
    int heads_left = group;
    int left = group * (tile.end_block - tile.begin_block);
    if (left > 0) statistics.fetch(params, first, tile.extents.row_count, block);
    for (; left > 0; --left) {
      // Hazard: the statistics of this stage may still be read.
      ptx::mbarrier_wait(shared.first_empty(at.stage), at.parity ^ 1);
      statistics.store(shared.statistics(at.stage));
      ptx::mbarrier_arrive(shared.first_full(at.stage));
      at.advance();
      if constexpr (Spec::kTakesTurns) {
        first += --heads_left > 0 ? head_rows : head_rows * (1 - group);
        if (heads_left == 0) {
          heads_left = group;
          block += downwards ? -1 : 1;
        }
      } else if (++block == tile.end_block) {
        block = tile.begin_block;
        first += head_rows;
      }
      if (left > 1) statistics.fetch(params, first, tile.extents.row_count, block);
    }
  }
}

}  // namespace sm90
}  // namespace backward
}  // namespace attention
}  // namespace flashmoe
