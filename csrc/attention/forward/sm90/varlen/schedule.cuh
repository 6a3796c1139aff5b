// Which tile of a ragged batch a block works on. Tiles are numbered sequence by sequence; only the device knows how
// many a sequence has.
#pragma once

#include "attention/forward/sm90/schedule.cuh"
#include "attention/forward/sm90/spec.cuh"
#include "attention/masks.cuh"
#include "attention/params/forward.h"
#include "attention/schedule.cuh"
#include "attention/sequences.cuh"
#include "device/math.cuh"
#include "device/persistent.cuh"
#include "ptx/math.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe {
namespace attention::sm90 {

using VarlenSequence = Sequence<MaskKind::kRuntime>;

// Holds the lengths of its sequence, so that no consumer waits for them.
template <>
struct Tile<MaskKind::kRuntime> {
  int m_block;
  int head;
  int batch;
  int first_row;  // of the sequence, among all rows
  int rows;
  int keys;
  KeyRange blocks;  // key blocks that some row of the tile sees

  __device__ __forceinline__ VarlenSequence sequence(const ForwardParams& params) const {
    return VarlenSequence(params, batch, Extent{first_row, rows}, Extent{0, keys});
  }
  __device__ __forceinline__ int num_rows(const ForwardParams&) const { return rows; }

  template <typename Spec>
  __device__ __forceinline__ KeyRange key_blocks(const ForwardParams&) const {
    return blocks;
  }
};
using VarlenTile = Tile<MaskKind::kRuntime>;
}  // namespace attention::sm90

// Like the generic version (device/persistent.cuh) but without a loop: the compiler would keep the tile in memory until
// loops are unrolled, and then order its sums differently.
__device__ __forceinline__ void publish_tile(unsigned char* slot_smem, const attention::sm90::VarlenTile& tile) {
  uint32_t words[2][4];
  memcpy(words, &tile, sizeof(tile));
  ptx::st_shared_128(slot_smem, words[0]);
  ptx::st_shared_128(slot_smem + 16, words[1]);
}
template <>
__device__ __forceinline__ attention::sm90::VarlenTile read_tile(const unsigned char* slot_smem) {
  uint32_t words[2][4];
  ptx::ld_shared_128(words[0], slot_smem);
  ptx::ld_shared_128(words[1], slot_smem + 16);
  attention::sm90::VarlenTile tile;
  memcpy(&tile, words, sizeof(tile));
  return tile;
}

namespace attention::sm90 {

// Row blocks of a key head if the heads of its group are rows: folded.cuh.
template <typename Spec>
__device__ __forceinline__ int folded_row_blocks(int rows, int group);

// Short sequences: if a head has rows for at most half of the warpgroups, a tile holds several of the query heads that
// share a key head, each in separate warpgroups. Keys are then read once for all of them, and the products of one hide
// the softmax of another. Not if that would leave multiprocessors without a tile, or nearly so. A row's bits are the
// same either way. Not with dropout or a mask, because a row of such a tile does not know its index.
template <typename Spec>
struct SharedTiles {
  int count;  // tiles per key head
  int heads;  // heads per tile, as equal as possible

  static __device__ __forceinline__ bool serve(const ForwardParams& params, int rows) {
    // A difference, not a product: "Registers of the plain loop" in docs/notebook/2026-11-23-attention-ragged.md.
    return !Spec::kHasDropout && !Spec::kIsFolded && rows > 0 && rows <= Spec::kNumConsumers / 2 * 64 &&
           params.batch * params.heads_q - ptx::grid_size() > ptx::grid_size() && params.heads_q > params.heads_kv &&
           params.score_options.mask == nullptr;
  }
  __device__ __forceinline__ SharedTiles(int group, int rows)
      : count(ceil_div(group * ceil_div(rows, 64), Spec::kNumConsumers)), heads(ceil_div(group, count)) {}
};

// A warp's iterator over the sequences of a batch, 32 at a time, one per lane. Requested tile numbers must not
// decrease.
template <typename Spec>
class SequenceIterator {
 public:
  __device__ __forceinline__ explicit SequenceIterator(const ForwardParams& params) : params_(params) {}

  // Must be called first: reads the first sequences.
  __device__ __forceinline__ void start() { read_group(); }

  // Tiles of the whole batch. Called by all lanes.
  __device__ __forceinline__ int count_tiles() const {
    int tiles = tiles_of_sequence(ptx::lane_index());
#pragma unroll 4
    for (int batch = 32 + ptx::lane_index(); batch < params_.batch; batch += 32) tiles += tiles_of_sequence(batch);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2)
      tiles += static_cast<int>(ptx::shuffle_xor(static_cast<uint32_t>(tiles), mask));
    return tiles;
  }

  // Query heads that share a key head.
  __device__ __forceinline__ int group() const { return heads_; }

  // find: the sequence of tile `index`, its rows and keys, and the index of the tile within the sequence. Called by all
  // lanes.
  struct TileOfSequence {
    int batch;
    int index;
    Extent row;
    Extent key;
  };
  __device__ __forceinline__ TileOfSequence find(int index) {
    while (index - before_ >= ptx::shuffle_index(end_, 31)) {
      before_ += ptx::shuffle_index(end_, 31);
      group_ += 32;
      read_group();
    }
    const int in_group = index - before_;
    const int lane = ptx::population_count(ptx::vote_ballot(end_ <= in_group));  // ends do not decrease
    const int end_of_previous = ptx::shuffle_index(end_, maximum(0, lane - 1));
    return TileOfSequence{group_ + lane, in_group - (lane == 0 ? 0 : end_of_previous), of_lane(row_, lane),
                          of_lane(key_, lane)};
  }

 private:
  static __device__ __forceinline__ Extent of_lane(const Extent& extent, int lane) {
    return Extent{ptx::shuffle_index(extent.first, lane), ptx::shuffle_index(extent.length, lane)};
  }
  __device__ __forceinline__ int tiles_of_rows(int rows) const {
    if constexpr (Spec::kIsFolded)
      return folded_row_blocks<Spec>(rows, group()) * params_.heads_kv * params_.num_splits;
    if (rows <= -params_.num_splits) return 0;
    if (SharedTiles<Spec>::serve(params_, rows)) {
      return SharedTiles<Spec>(heads_, rows).count * params_.heads_kv * Spec::kValueParts;
    }
    return ceil_div(rows, Spec::kBlockM) * params_.heads_q * Spec::kValueParts;
  }
  __device__ __forceinline__ int tiles_of_sequence(int batch) const {
    return batch < params_.batch ? tiles_of_rows(row_extent(params_, batch).length) : 0;
  }
  __device__ __forceinline__ void read_group() {
    const int lane = ptx::lane_index();
    row_ = key_ = Extent{0, 0};
    if (group_ + lane < params_.batch) {  // at once, instead of the keys once the sequence is known
      row_ = row_extent(params_, group_ + lane);
      key_ = key_extent(params_, group_ + lane);
    }
    end_ = tiles_of_rows(row_.length);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int behind = ptx::shuffle_index(end_, maximum(0, lane - distance));
      if (lane >= distance) end_ += behind;
    }
  }

  const ForwardParams& params_;
  int heads_ = heads_per_key_head(params_);
  int group_ = 0;   // the sequence of lane 0
  int before_ = 0;  // tiles of the sequences before it
  Extent row_;      // of the lane's sequence
  Extent key_;
  int end_;  // tiles of the group's sequences up to this lane's
};

// Key heads of a sequence that are scheduled together: the rule of heads_per_section of the dense kernels, for the keys
// that tiles read at one time. With a window these are few, and all heads are scheduled together, so that their short
// tiles come last and fill the end.
template <typename Spec>
__device__ __forceinline__ int key_heads_per_section(const ForwardParams& params, const VarlenSequence& sequence) {
  constexpr int kSectionKeys = (32 << 20) / (2 * (Spec::kHeadDim + Spec::kValueDim));
  const ScoreOptions& options = params.score_options;
  int keys = sequence.keys();
  if (options.left < keys / 4 && options.right < keys / 4) keys = 2 * (options.left + options.right + 1);
  int kv_heads = params.heads_kv;
  if (sequence.keys() / 4 >= sequence.rows()) {
    kv_heads = 1;
  } else if (params.heads_kv > 1 && static_cast<int64_t>(params.heads_kv) * keys > kSectionKeys) {
    kv_heads = maximum(1, kSectionKeys / keys);
  }
  return kv_heads;
}

// V of 8-bit floats is transposed in blocks (e4m3/transpose.cuh). first_value_block is the first block of a sequence:
// no two sequences share a block, and the host need not know where sequences begin.
constexpr int kTransposedKeys = 128;  // keys per block: kBlockN of every kernel that reads it
__device__ __forceinline__ int first_value_block(int first_key, int sequence) {
  return first_key / kTransposedKeys + sequence;
}

// What the loading thread needs to know about a tile.
struct NextTile {
  VarlenTile tile;
  int first_key;  // of the sequence, among all keys; 0 with pages
  int kv_head;
  int heads;  // number of heads that share the tile: its own and those after it
  int part;   // of the output's columns
};

// Tile `index` of the batch. With a right bound a sequence's longest tiles come first.
template <typename Spec>
__device__ __forceinline__ NextTile decode_tile(const ForwardParams& params, SequenceIterator<Spec>& sequences,
                                                int index) {
  auto found = sequences.find(index);
  // The column parts of a tile are adjacent: they read the same keys at the same time.
  const int part = found.index % Spec::kValueParts;
  found.index /= Spec::kValueParts;
  const VarlenSequence sequence(params, found.batch, found.row, found.key);
  const int m_blocks = ceil_div(sequence.rows(), Spec::kBlockM);
  const int group = heads_per_key_head(params);
  ScheduledTile scheduled{0, found.index};
  int heads = 1;
  if (SharedTiles<Spec>::serve(params, sequence.rows())) {
    const SharedTiles<Spec> shared(group, sequence.rows());
    const int kv_head = found.index / shared.count;
    const int first = (found.index - kv_head * shared.count) * shared.heads;
    scheduled.head = kv_head * group + first;
    heads = minimum(shared.heads, group - first);
  } else if (m_blocks > 1) {
    if (params.score_options.right < kUnbounded) {
      const int section_heads = key_heads_per_section<Spec>(params, sequence) * heads_per_key_head(params);
      const int first_head = found.index / (section_heads * m_blocks) * section_heads;
      const Section section{found.index - first_head * m_blocks, first_head,
                            minimum(section_heads, params.heads_q - first_head)};
      scheduled = schedule_tile<MaskKind::kCausal>(section, m_blocks);
    } else {
      scheduled = schedule_tile<MaskKind::kFull>(Section{found.index, 0, 0}, m_blocks);
    }
  }
  const int first_row = scheduled.m_block * Spec::kBlockM;
  const KeyRange blocks = seen_blocks<Spec, MaskKind::kRuntime>(sequence, first_row, first_row + Spec::kBlockM);
  const VarlenTile tile{scheduled.m_block, scheduled.head,  found.batch, sequence.row.first,
                        sequence.rows(),   sequence.keys(), blocks};
  return NextTile{tile, sequence.key.first, scheduled.head / heads_per_key_head(params), heads, part};
}

}  // namespace attention::sm90
}  // namespace flashmoe
