// The producers of MaskKind::kBand: one warp, which finds its tiles by the lengths in device memory; its first lane feeds the
// copy engine. What a tile needs once stands in shared memory meanwhile: the warp has 40 registers a thread.
#pragma once

#include "attention/backward/sm90/producer.cuh"

namespace flashmoe {
namespace attention {
namespace backward {
namespace sm90 {

// Tiles by number, for a block that asks for growing ones.
template <typename Spec, bool kOwnsKeys>
struct BandSchedule {
  static constexpr int kSectionRows = (32 << 20) / (4 * Spec::kHeadDim);
  using Finder = TileFinder<Spec::kOwnRows, kOwnsKeys>;

  const BackwardParams& params;
  const SharedMemory<Spec> shared;

  __device__ __forceinline__ BandSchedule(const BackwardParams& params_, const SharedMemory<Spec>& shared_)
      : params(params_), shared(shared_) {
    Finder finder(params);
    keep(finder, finder.count());
  }

  // Each lane's own words.
  __device__ __forceinline__ unsigned char* words() const { return shared.finder() + ptx::lane_index() * 16; }
  __device__ __forceinline__ void keep(const Finder& finder, int num_tiles) const {
    const uint32_t kept[4] = {static_cast<uint32_t>(finder.first_entry), static_cast<uint32_t>(finder.first_tile),
                              static_cast<uint32_t>(finder.end), static_cast<uint32_t>(num_tiles)};
    ptx::st_shared_128(words(), kept);
  }
  __device__ __forceinline__ int num_tiles() const { return static_cast<int>(ptx::ld_shared_32(words() + 12)); }

  // index < 0 behind the last tile.
  __device__ __forceinline__ BandTile tile(int number) const {
    uint32_t kept[4];
    ptx::ld_shared_128(kept, words());
    const int num_tiles = static_cast<int>(kept[3]);
    if (number >= num_tiles) return BandTile{-1, 0, 0, 0, {}, 0};
    Finder finder(params, static_cast<int>(kept[0]), static_cast<int>(kept[1]), static_cast<int>(kept[2]));
    const EntryTile found = finder.template find<kSectionRows>(number);
    keep(finder, num_tiles);
    return BandTile{found.index, found.head, found.entry, 0, entry_extents(params, found.entry), 0};
  }

  // With the blocks that it sees, for the producer itself (first lane) and, later, the consumers.
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
  const bool is_first_lane = ptx::lane_index() == 0;
  RingPosition<Spec::kFirstStages> key;
  RingPosition<Spec::kSecondStages> value;
  int own_parity = 0;

  for (int number = ptx::block_index();; own_parity ^= 1) {
    const BandTile tile = schedule.tile(number);
    if (tile.index < 0) break;
    int next_number = -1;
    if (is_first_lane) {
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
    number = ptx::shuffle_index(next_number, 0);
  }
  if (is_first_lane) end_work<Spec, MaskKind::kBand>(shared, own_parity);
}

// Of the kernel of dk and dv, in the order of produce_queries. Keys that no query sees have no block.
template <typename Spec>
__device__ __forceinline__ void produce_band_queries(const BackwardParams& params, const SharedMemory<Spec>& shared,
                                                     const ptx::TensorMap& q_map, const ptx::TensorMap& k_map,
                                                     const ptx::TensorMap& v_map, const ptx::TensorMap& dout_map) {
  const BandSchedule<Spec, true> schedule(params, shared);
  const bool is_first_lane = ptx::lane_index() == 0;
  RingPosition<Spec::kFirstStages> at;  // both rings have as many stages
  int own_parity = 0;
  Statistics<Spec> statistics;

  for (int number = ptx::block_index();; own_parity ^= 1) {
    const BandTile tile = schedule.tile(number);
    if (tile.index < 0) break;
    int next_number = -1;
    const int first_key = tile.index * Spec::kOwnRows;
    const BlockRange range = query_blocks<Spec, MaskKind::kBand>(params, tile, first_key, first_key + Spec::kOwnRows);
    if (is_first_lane) schedule.note(tile, range);
    const int group = params.heads_q / params.heads_kv;
    RaggedPlace query_place = rows_read(params.entry_rows.q, tile, tile.head * group);
    RaggedPlace dout_place = rows_read(params.entry_rows.dout, tile, tile.head * group);
    int& head = query_place.head;
    int block = range.begin;
    bool own_is_loaded = false;
    int left = group * (range.end - range.begin);
    if (left > 0) statistics.fetch(params, first_statistic(params, tile, head), tile.extents.row_count, block);
    for (; left > 0; --left) {
      if (is_first_lane) {
        if (next_number < 0 && left <= kDrawAhead + 1) {
          next_number = next_tile_index(params.tile_counter, schedule.num_tiles(), number);
        }
        dout_place.head = head;
        load_block<Spec>(shared, at, at, q_map, dout_map, block * Spec::kStreamRows, query_place, dout_place);
        if (!own_is_loaded) load_noted<Spec, true>(params, shared, k_map, v_map, own_parity);
      }
      own_is_loaded = true;
      // Hazard: the statistics of this stage may still be read; the first lane has waited for that, the others have not.
      ptx::warp_sync();
      statistics.store(shared.statistics(at.stage));
      ptx::mbarrier_arrive(shared.first_full(at.stage));
      at.advance();
      if (++block == range.end) {
        block = range.begin;
        ++head;
      }
      if (left > 1) statistics.fetch(params, first_statistic(params, tile, head), tile.extents.row_count, block);
    }
    if (is_first_lane && !own_is_loaded) {
      next_number = next_tile_index(params.tile_counter, schedule.num_tiles(), number);
      load_noted<Spec, true>(params, shared, k_map, v_map, own_parity);
    }
    number = ptx::shuffle_index(next_number, 0);
  }
  if (is_first_lane) end_work<Spec, MaskKind::kBand>(shared, own_parity);
}

}  // namespace sm90
}  // namespace backward
}  // namespace attention
}  // namespace flashmoe
