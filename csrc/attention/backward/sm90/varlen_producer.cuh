// The producers for MaskKind::kRuntime: one warp, which finds its tiles from the lengths in device memory. One elected
// lane issues the TMA loads (elected, so that the compiler knows it is one lane: otherwise every load becomes a loop
// over lanes). Values that are needed once per tile are kept in shared memory, because there are few registers.
#pragma once

#include "attention/backward/sm90/dropout.cuh"
#include "attention/backward/sm90/producer.cuh"
#include "attention/backward/sm90/products.cuh"

namespace flashmoe::attention::backward::sm90 {

// Tiles by number, for a block that requests ascending numbers.
template <typename Spec, bool kOwnsKeys>
struct VarlenSchedule {
  static constexpr int kSectionRows = (32 << 20) / (2 * (Spec::kHeadDim + Spec::kValueDim));
  // With up to this many tiles per block, sequences share sections if tiles differ in length: otherwise the last
  // sequence's longest tile would begin too late. With more tiles sharing costs up to 10%, because fewer concurrent
  // tiles share a stream.
  static constexpr int kFewRounds = 5;
  using Finder = TileFinder<Spec::kOwnRows, kOwnsKeys>;

  const BackwardParams& params;
  const SharedMemory<Spec> shared;

  __device__ __forceinline__ VarlenSchedule(const BackwardParams& params_, const SharedMemory<Spec>& shared_)
      : params(params_), shared(shared_) {
    Finder finder(params);
    const int num_tiles = finder.count();
    if constexpr (Spec::kOrdersReduction) record_order();
    store_finder(finder, !Spec::kOrdersReduction || has_growing_rows() ? num_tiles : ~num_tiles);
  }

  // The orders of fused.cuh, in sections of about the size used for dense batches; all heads of a sequence are treated
  // alike. Tiles of the sequences [first_sequence, end_sequence) and heads from first_head on are descending: those of
  // one section, of all, or of none.
  struct Order {
    int section_heads;  // within a sequence; if at least twice its heads, over several sequences
    int first_sequence;
    int end_sequence;
    int first_head;
  };
  __device__ __forceinline__ bool is_causal() const {
    return params.score_options.right < kUnbounded && params.score_options.left >= kUnbounded;
  }
  __device__ __forceinline__ int section_heads() const {
    const int heads = params.heads_kv;
    const int group = params.heads_q / heads;
    const bool has_both = is_causal() && group == 1;  // ascending sections, and a descending one
    int limit = Spec::kSectionHeads;
    if (group > 1) {
      const int tiles = ceil_div(params.seq_k, Spec::kOwnRows);
      limit = maximum(1, is_causal() ? grouped_section_heads<true>(tiles) : grouped_section_heads<false>(tiles));
    } else if (!Spec::kIsWide || has_both) {
      const int section_rows = ((params.seq_q < 8192 ? 12 : 16) << 20) / (4 * Spec::kHeadDim);
      limit = maximum(1, section_rows / maximum(1, params.seq_q));
    }
    if (has_both) {
      // The number of sequences if all had the maximum length.
      const int sequences = params.sequences.cu_seqlens_k == nullptr
                                ? params.batch
                                : maximum(1, params.sequences.keys_total / maximum(1, params.seq_k));
      limit = minimum(limit, maximum(1, heads * minimum(sequences, limit) / 2));
    }
    if (limit >= 2 * heads) return limit;
    // With few key heads and long streams, exceed the limit slightly rather than use smaller sections.
    const int sections = group > 1 ? maximum(1, (heads + limit / 2) / limit) : ceil_div(heads, limit);
    return ceil_div(heads, sections);
  }
  __device__ __forceinline__ Order make_order() const {
    Order order{section_heads(), 0, 0, 0};
    // The last sequence of at least half the maximum length: only short tiles follow it.
    int last_long = 0;
    for (int sequence = ptx::lane_index(); sequence < params.batch; sequence += 32) {
      if (2 * static_cast<int64_t>(own_extent<true>(params, sequence).length) >= params.seq_k) last_long = sequence;
    }
    last_long = static_cast<int>(ptx::reduce_max(static_cast<uint32_t>(last_long)));
    const int heads = params.heads_kv;
    if (!is_causal()) return order;
    if (params.heads_q > heads) {
      order.end_sequence = num_sequences(params);
    } else if (order.section_heads >= 2 * heads) {
      const int sequences = order.section_heads / heads;  // per section, among a warp's 32
      order.first_sequence = last_long - last_long % 32 % sequences;
      order.end_sequence = minimum(order.first_sequence + sequences, last_long / 32 * 32 + 32);
    } else {
      order.first_sequence = last_long;
      order.end_sequence = last_long + 1;
      order.first_head = (heads - 1) / order.section_heads * order.section_heads;
    }
    return order;
  }
  // In the gap before the dS^T buffers.
  __device__ __forceinline__ unsigned char* order_smem() const {
    static_assert(Spec::Base::kSharedBytes + 16 <= Spec::kScoreOffset, "the gap before the 1024-byte boundary");
    return shared.base + Spec::kScoreOffset - 16;
  }
  __device__ __forceinline__ void record_order() const {
    const Order order = make_order();
    const uint32_t words[4] = {static_cast<uint32_t>(order.section_heads), static_cast<uint32_t>(order.first_sequence),
                               static_cast<uint32_t>(order.end_sequence), static_cast<uint32_t>(order.first_head)};
    if (ptx::lane_index() == 0) ptx::st_shared_128(order_smem(), words);
    ptx::warp_sync();
  }
  __device__ __forceinline__ Order order() const {
    uint32_t words[4];
    ptx::ld_shared_128(words, order_smem());
    return Order{static_cast<int>(words[0]), static_cast<int>(words[1]), static_cast<int>(words[2]),
                 static_cast<int>(words[3])};
  }

  // Returns false if cu_seqlens is not monotonic: overlapping sequences would share partials of dq and corrupt each
  // other's reduction ranks.
  __device__ __forceinline__ bool has_growing_rows() const {
    const int32_t* cu_seqlens = params.sequences.cu_seqlens_q;
    bool falls = false;
    for (int sequence = ptx::lane_index(); cu_seqlens != nullptr && sequence < params.batch; sequence += 32) {
      falls = falls || load_length(cu_seqlens + sequence + 1) < load_length(cu_seqlens + sequence);
    }
    return ptx::vote_ballot(falls) == 0;
  }

  // The words of this lane.
  __device__ __forceinline__ unsigned char* words() const { return shared.finder() + ptx::lane_index() * 16; }
  __device__ __forceinline__ void store_finder(const Finder& finder, int num_tiles) const {
    const uint32_t stored[4] = {static_cast<uint32_t>(finder.first_sequence), static_cast<uint32_t>(finder.first_tile),
                                static_cast<uint32_t>(finder.end), static_cast<uint32_t>(num_tiles)};
    ptx::st_shared_128(words(), stored);
  }
  __device__ __forceinline__ int num_tiles() const {
    const int stored = static_cast<int>(ptx::ld_shared_32(words() + 12));
    return Spec::kOrdersReduction && stored < 0 ? ~stored : stored;
  }

  // The index is negative past the last tile.
  __device__ __forceinline__ VarlenTile tile(int number) const {
    uint32_t stored[4];
    ptx::ld_shared_128(stored, words());
    if constexpr (Spec::kOrdersReduction) return ordered_tile(number, stored);
    const int num_tiles = static_cast<int>(stored[3]);
    if (number >= num_tiles) return VarlenTile{-1, 0, 0, 0, {}, 0};
    Finder finder(params, static_cast<int>(stored[0]), static_cast<int>(stored[1]), static_cast<int>(stored[2]));
    const bool mixes = params.score_options.right < kUnbounded && num_tiles <= kFewRounds * ptx::grid_size();
    const SequenceTile found = finder.template find<kSectionRows, true>(number, mixes);
    store_finder(finder, num_tiles);
    return VarlenTile{found.index, found.head, found.sequence, 0, sequence_extents(params, found.sequence), 0};
  }

  // All tiles of a sequence's head, and of a section, have the same direction.
  __device__ __forceinline__ VarlenTile ordered_tile(int number, const uint32_t (&stored)[4]) const {
    const bool has_rows = static_cast<int>(stored[3]) >= 0;
    const int num_tiles = has_rows ? static_cast<int>(stored[3]) : ~static_cast<int>(stored[3]);
    if (number >= num_tiles) return VarlenTile{-1, 0, 0, 0, {}, 0};
    const Order order = this->order();
    Finder finder(params, static_cast<int>(stored[0]), static_cast<int>(stored[1]), static_cast<int>(stored[2]));
    const SequenceTile found = finder.find_in_sections(number, order.section_heads);
    store_finder(finder, static_cast<int>(stored[3]));
    VarlenTile tile{found.index, found.head, found.sequence, 0, sequence_extents(params, found.sequence), 0};
    if (!has_rows) tile.extents.row_count = 0;
    tile.is_descending =
        found.sequence >= order.first_sequence && found.sequence < order.end_sequence && found.head >= order.first_head;
    if (!tile.is_descending) tile.index = ceil_div(tile.extents.key_room, Spec::kOwnRows) - 1 - found.index;
    return tile;
  }

  // Publishes the tile with the blocks that it sees, for the producer itself (one lane) and, later, the consumers.
  __device__ __forceinline__ void publish(VarlenTile tile, const BlockRange& range) const {
    tile.begin_block = range.begin;
    tile.end_block = range.end;
    publish_tile(shared.produced_tile(), tile);
  }
};

// Loads the own rows of every warpgroup, for the published tile.
template <typename Spec, bool kOwnsKeys>
__device__ __forceinline__ void load_published(const BackwardParams& params, const SharedMemory<Spec>& shared,
                                               const ptx::TensorMap& first_map, const ptx::TensorMap& second_map,
                                               int parity) {
  const VarlenTile tile = read_tile<VarlenTile>(shared.produced_tile());
  const RaggedCoordinates first = kOwnsKeys ? keys_read(params.sequence_rows.k, tile, tile.head)
                                            : rows_read(params.sequence_rows.q, tile, tile.head);
  const RaggedCoordinates second = kOwnsKeys ? keys_read(params.sequence_rows.v, tile, tile.head)
                                             : rows_read(params.sequence_rows.dout, tile, tile.head);
#pragma unroll
  for (int own = 0; own < Spec::kNumOwnTiles; ++own) {
    load_own<Spec>(shared, first_map, second_map, own, parity, tile, first, second);
  }
}

// For the dq kernel, in the order of produce_keys.
template <typename Spec>
__device__ __forceinline__ void produce_varlen_keys(const BackwardParams& params, const SharedMemory<Spec>& shared,
                                                    const ptx::TensorMap& q_map, const ptx::TensorMap& k_map,
                                                    const ptx::TensorMap& v_map, const ptx::TensorMap& dout_map) {
  const VarlenSchedule<Spec, false> schedule(params, shared);
  RingPosition<Spec::kFirstStages> key;
  RingPosition<Spec::kSecondStages> value;
  int own_parity = 0;

  for (int number = ptx::block_index();; own_parity ^= 1) {
    const VarlenTile tile = schedule.tile(number);
    if (tile.index < 0) break;
    int next_number = -1;
    if (ptx::elect_one()) {
      const int first_row = tile.index * Spec::kOwnRows;
      const BlockRange range =
          key_blocks<Spec, MaskKind::kRuntime>(params, tile, first_row, first_row + Spec::kOwnRows);
      schedule.publish(tile, range);
      const int head = tile.head / (params.heads_q / params.heads_kv);
      const RaggedCoordinates key_at = keys_read(params.sequence_rows.k, tile, head);
      const RaggedCoordinates value_at = keys_read(params.sequence_rows.v, tile, head);
      bool own_is_loaded = false;
      for (int block = range.end - 1; block >= range.begin; --block) {
        if (next_number < 0 && block <= range.begin + kDrawAhead) {
          next_number = next_tile_index(params.tile_counter, schedule.num_tiles(), number);
        }
        load_block<Spec>(shared, key, value, k_map, v_map, block * Spec::kStreamRows, key_at, value_at);
        key.advance();
        value.advance();
        if (!own_is_loaded) load_published<Spec, false>(params, shared, q_map, dout_map, own_parity);
        own_is_loaded = true;
      }
    }
    number = static_cast<int>(ptx::reduce_max(static_cast<uint32_t>(next_number + 1))) - 1;
  }
  if (ptx::elect_one()) end_work<Spec, MaskKind::kRuntime>(shared, own_parity);
}

struct NoMask {
  __device__ __forceinline__ void narrow(BlockRange&, const VarlenTile&) const {}
  __device__ __forceinline__ int rank_of(const BackwardParams&, int, int rank) const { return rank; }
  template <typename Spec>
  __device__ __forceinline__ void load(const BackwardParams&, const SharedMemory<Spec>&, int, int, int) const {}
};

// For the dk, dv kernel, in the order of produce_queries; another warp loads the statistics. Keys that no query sees
// have no block.
template <typename Spec, typename Mask = NoMask>
__device__ __forceinline__ void produce_varlen_queries(const BackwardParams& params, const SharedMemory<Spec>& shared,
                                                       const ptx::TensorMap& q_map, const ptx::TensorMap& k_map,
                                                       const ptx::TensorMap& v_map, const ptx::TensorMap& dout_map,
                                                       const Mask& mask = {}) {
  const VarlenSchedule<Spec, true> schedule(params, shared);
  RingPosition<Spec::kFirstStages> at;  // both rings have the same number of stages
  int own_parity = 0;

  for (int number = first_tile<Spec>(params.tile_counter, schedule.num_tiles());; own_parity ^= 1) {
    const VarlenTile tile = schedule.tile(number);
    if (tile.index < 0) break;
    int next_number = -1;
    if (ptx::elect_one()) {
      const int first_key = tile.index * Spec::kOwnRows;
      BlockRange range = query_blocks<Spec, MaskKind::kRuntime>(params, tile, first_key, first_key + Spec::kOwnRows);
      mask.narrow(range, tile);
      schedule.publish(tile, range);
      const int group = params.heads_q / params.heads_kv;
      RaggedCoordinates query_at = rows_read(params.sequence_rows.q, tile, tile.head * group);
      RaggedCoordinates dout_at = rows_read(params.sequence_rows.dout, tile, tile.head * group);
      const bool is_descending = Spec::kOrdersReduction && tile.is_descending != 0;
      int block = is_descending ? range.end - 1 : range.begin;
      int heads_left = group;
      bool own_is_loaded = false;
      for (int left = group * (range.end - range.begin); left > 0; --left) {
        if (next_number < 0 && left <= kDrawAhead + 1) {
          next_number = next_tile<Spec>(params.tile_counter, schedule.num_tiles(), number);
        }
        load_block<Spec>(shared, at, at, q_map, dout_map, block * Spec::kStreamRows, query_at, dout_at);
        mask.load(params, shared, at.stage, block * Spec::kStreamRows, query_at.head);
        if (!own_is_loaded) load_published<Spec, true>(params, shared, k_map, v_map, own_parity);
        own_is_loaded = true;
        at.advance();
        if constexpr (Spec::kOrdersReduction) {  // a block of each head of the group, then the next block
          const int further = --heads_left > 0 ? 1 : 1 - group;
          query_at.head += further;
          dout_at.head += further;
          if (heads_left == 0) {
            heads_left = group;
            block += is_descending ? -1 : 1;
          }
        } else if (++block == range.end) {
          block = range.begin;
          ++query_at.head;
          ++dout_at.head;
        }
      }
      if (!own_is_loaded) {
        next_number = next_tile<Spec>(params.tile_counter, schedule.num_tiles(), number);
        load_published<Spec, true>(params, shared, k_map, v_map, own_parity);
      }
    }
    number = static_cast<int>(ptx::reduce_max(static_cast<uint32_t>(next_number + 1))) - 1;
  }
  if (ptx::elect_one()) end_work<Spec, MaskKind::kRuntime>(shared, own_parity);
}

// As Statistics::store, with precomputed byte offsets: the store is a third of this warp's work per block.
template <typename Spec>
__device__ __forceinline__ void store_statistics(const Statistics<Spec>& statistics, unsigned char* smem,
                                                 const int (&offsets)[Statistics<Spec>::kRows]) {
  constexpr float kLog2e = 1.44269504088896340736f;
#pragma unroll
  for (int i = 0; i < Statistics<Spec>::kRows; ++i) {
    const float lse = statistics.lse[i];
    ptx::st_shared_float(smem + offsets[i], lse == ptx::negative_infinity() ? -ptx::negative_infinity() : lse * kLog2e);
    ptx::st_shared_float(smem + offsets[i] + 4 * Spec::kStreamRows, statistics.row_dot[i]);
  }
}

// A warp that streams the statistics of the blocks that produce_varlen_queries loads: of all blocks, or, as one of two
// warps (`warp` 0 and 1), of every second block, so that the first two of a tile are fetched at once. It reads the tile
// record as the consumers do.
template <typename Spec>
__device__ __forceinline__ void produce_varlen_statistics(const BackwardParams& params,
                                                          const SharedMemory<Spec>& shared, int warp) {
  constexpr int kWarps = Spec::kOrdersReduction ? 1 : 2;
  RingPosition<Spec::kFirstStages> at;
  Statistics<Spec> statistics;
  constexpr bool kPrecomputesOffsets = Spec::kOrdersReduction && Spec::kProducerRegisters >= 32;  // other specs have 24
  [[maybe_unused]] int offsets[Statistics<Spec>::kRows];
  if constexpr (kPrecomputesOffsets) {
#pragma unroll
    for (int i = 0; i < Statistics<Spec>::kRows; ++i) offsets[i] = 4 * statistics_index(i * 32 + ptx::lane_index());
  }
  const int group = params.heads_q / params.heads_kv;
  [[maybe_unused]] int to_pass = warp;  // blocks of the other warp before this warp's next one
  if (warp > 0) at.advance();
  for (int parity = 0;; parity ^= 1) {
    ptx::mbarrier_wait(shared.tile_full(0), parity);
    const VarlenTile tile = read_tile<VarlenTile>(shared.tile(0));
    if (tile.index < 0) break;
    // Hazard: the next tile is written before every lane has read this one: consumers of a tile without blocks wait for
    // no statistics.
    release(shared.own_empty(0));
    int64_t first = first_statistic(params, tile, tile.head * group);
    const int64_t head_rows = first_statistic(params, tile, tile.head * group + 1) - first;
    const int64_t back_to_first = head_rows * (1 - group);
    const bool is_descending = Spec::kOrdersReduction && tile.is_descending != 0;
    int block = is_descending ? tile.end_block - 1 : tile.begin_block;
    int heads_left = group;
    int left = group * (tile.end_block - tile.begin_block);
    const auto pass = [&] {  // advances to the next block
      if constexpr (Spec::kOrdersReduction) {
        first += --heads_left > 0 ? head_rows : back_to_first;
        if (heads_left == 0) {
          heads_left = group;
          block += is_descending ? -1 : 1;
        }
      } else if (++block == tile.end_block) {
        block = tile.begin_block;
        first += head_rows;
      }
    };
    if constexpr (kWarps > 1) {
      if (to_pass > 0) pass();
      left -= to_pass;
    }
    if (left > 0) statistics.fetch(params, first, tile.extents.row_count, block);
    for (; left > 0; left -= kWarps) {
      if constexpr (Spec::kHasDropout && Spec::kOrdersReduction) statistics.divide_row_dot(value_scale<Spec>(params));
      // Hazard: the statistics of this stage may still be read.
      ptx::mbarrier_wait(shared.first_empty(at.stage), at.parity ^ 1);
      if constexpr (kPrecomputesOffsets) {
        store_statistics(statistics, shared.statistics(at.stage), offsets);
      } else {
        statistics.store(shared.statistics(at.stage));
      }
      ptx::mbarrier_arrive(shared.first_full(at.stage));
#pragma unroll
      for (int i = 0; i < kWarps; ++i) {
        at.advance();
        pass();
      }
      if (left > kWarps) statistics.fetch(params, first, tile.extents.row_count, block);
    }
    if constexpr (kWarps > 1) to_pass = -left;
  }
}

}  // namespace flashmoe::attention::backward::sm90
