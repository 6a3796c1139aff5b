// The sequences of a batch, dense or ragged, and the tiles of rows or keys of each, for kernels of MaskKind::kRuntime.
// The lengths are in device memory; the host does not know them.
#pragma once

#include "attention/masks.cuh"
#include "attention/params/backward.h"
#include "attention/sequences.cuh"
#include "device/math.cuh"
#include "ptx/math.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention::backward {

// Rows and keys of one sequence, and the number that the tensors have room for: gradients past row_count or key_count
// are zero.
struct SequenceExtents {
  int row_count;
  int key_count;
  int first_row;
  int first_key;
  int row_room;
  int key_room;

  __device__ __forceinline__ int rows() const { return row_count; }
  __device__ __forceinline__ int keys() const { return key_count; }
};

// The rows (dq), or the keys including unused ones (dk and dv), whose gradient is written for a sequence. In a ragged
// tensor two extra sequences cover the rows or keys that belong to no sequence: `batch` those after the last sequence,
// `batch` + 1 those before the first.
template <bool kOwnsKeys>
__device__ __forceinline__ Extent own_extent(const BackwardParams& params, int sequence) {
  const int32_t* cu_seqlens = kOwnsKeys ? params.sequences.cu_seqlens_k : params.sequences.cu_seqlens_q;
  const int most = kOwnsKeys ? params.seq_k : params.seq_q;
  if (cu_seqlens == nullptr) return Extent{0, sequence < params.batch ? most : 0};
  const int total = kOwnsKeys ? params.sequences.keys_total : params.sequences.rows_total;
  if (sequence < params.batch) return extent_of(cu_seqlens, sequence, total, total);
  const bool is_behind = sequence == params.batch;
  const int limit = max(0, min(total, load_length(cu_seqlens + (is_behind ? params.batch : 0))));
  return is_behind ? Extent{limit, total - limit} : Extent{0, limit};
}
__device__ __forceinline__ int num_sequences(const BackwardParams& params) { return params.batch + 2; }

__device__ __forceinline__ SequenceExtents sequence_extents(const BackwardParams& params, int sequence) {
  const Extent row = own_extent<false>(params, sequence);
  const Extent key = own_extent<true>(params, sequence);
  SequenceExtents extents{0, 0, row.first, key.first, row.length, key.length};
  if (sequence >= params.batch) return extents;
  extents.row_count = min(row.length, params.seq_q);
  extents.key_count = min(key.length, params.seq_k);
  if (params.sequences.seqused_k != nullptr) {
    extents.key_count = max(0, min(extents.key_count, load_length(params.sequences.seqused_k + sequence)));
  }
  return extents;
}

// A tile of a sequence's head, by its index.
struct SequenceTile {
  int sequence;
  int index;
  int head;
};

// The number of heads whose streams fit the L2 cache together. kFittingRows: stream rows, over all heads, that fit it.
template <bool kOwnsKeys, int kFittingRows>
__device__ __forceinline__ int fitting_heads(const BackwardParams& params) {
  const int group = params.heads_q / params.heads_kv;
  return kOwnsKeys ? max(1, kFittingRows / max(1, params.seq_q * group))
                   : max(1, kFittingRows / max(1, params.seq_k)) * group;
}

// Orders tiles in sections of heads; within a section, tiles with the longest streams (under a causal mask) first: the
// last rows, or the first keys.
template <bool kOwnsKeys>
__device__ __forceinline__ SequenceTile tile_in_sections(int sequence, int tiles_of_head, int number, int heads,
                                                         int section_heads) {
  const int first_head = number / (section_heads * tiles_of_head) * section_heads;
  const int in_section = min(section_heads, heads - first_head);
  const int rest = number - first_head * tiles_of_head;
  const int index = rest / in_section;
  return SequenceTile{sequence, kOwnsKeys ? index : tiles_of_head - 1 - index, first_head + rest - index * in_section};
}

// In sections of heads whose streams fit the L2 cache.
template <bool kOwnsKeys, int kFittingRows>
__device__ __forceinline__ SequenceTile tile_of_sequence(const BackwardParams& params, int sequence, int tiles_of_head,
                                                         int number) {
  const int heads = kOwnsKeys ? params.heads_kv : params.heads_q;
  return tile_in_sections<kOwnsKeys>(sequence, tiles_of_head, number, heads,
                                     min(heads, fitting_heads<kOwnsKeys, kFittingRows>(params)));
}

// The first slot of a sequence. A sequence has one slot per block of own rows, or one more; this needs no sum over the
// sequences before it. Rows before the first sequence have the slots from 0 on.
template <int kOwnRows, bool kOwnsKeys>
__device__ __forceinline__ int first_slot(const BackwardParams& params, int sequence) {
  const int row = load_length((kOwnsKeys ? params.sequences.cu_seqlens_k : params.sequences.cu_seqlens_q) + sequence);
  return max(0, min(kOwnsKeys ? params.sequences.keys_total : params.sequences.rows_total, row)) / kOwnRows + sequence +
         1;
}

// The last sequence whose slots begin at `slot` or before, by a 32-way search; -1 if there is none. Sequence `batch`
// means the rows after the last one.
template <int kOwnRows, bool kOwnsKeys>
__device__ __forceinline__ int sequence_of_slot(const BackwardParams& params, int slot) {
  const int lane = ptx::lane_index();
  int sequence = -1;
  for (int left = params.batch + 1; left > 0;) {  // sequences after `sequence`
    const int step = ceil_div(left, 32);
    const int asked = sequence + 1 + lane * step;
    const bool is_reached = lane * step < left && first_slot<kOwnRows, kOwnsKeys>(params, asked) <= slot;
    const int reached = ptx::population_count(ptx::vote_ballot(is_reached));
    if (reached == 0) break;
    const int passed = (reached - 1) * step + 1;
    sequence += passed;
    left = min(step - 1, left - passed);
  }
  return sequence;
}

// Tiles of a sequence of the maximum length.
template <int kOwnRows, bool kOwnsKeys>
__device__ __forceinline__ int tiles_of_longest(const BackwardParams& params) {
  return ceil_div(kOwnsKeys ? params.seq_k : params.seq_q, kOwnRows);
}

// The tile of thread block `number`; the index is past the sequence's last tile if the block has no tile. If `sequence`
// is negative, the block clears share `index` of the kClearingSlots shares of a head's stray rows.
//
// If every sequence gets as many slots as the longest, which the host chooses if that grid is smaller, the search is a
// division. Otherwise a sequence has the slots from first_slot on.
template <int kOwnRows, bool kOwnsKeys, int kFittingRows>
__device__ __forceinline__ SequenceTile tile_of_slot(const BackwardParams& params, int number) {
  const int heads = kOwnsKeys ? params.heads_kv : params.heads_q;
  if ((kOwnsKeys ? params.sequences.cu_seqlens_k : params.sequences.cu_seqlens_q) == nullptr) {
    const int tiles_of_head = ceil_div(kOwnsKeys ? params.seq_k : params.seq_q, kOwnRows);
    const int sequence = number / (tiles_of_head * heads);
    return tile_of_sequence<kOwnsKeys, kFittingRows>(params, sequence, tiles_of_head,
                                                     number - sequence * tiles_of_head * heads);
  }
  int slot = number / heads;
  const int most = tiles_of_longest<kOwnRows, kOwnsKeys>(params);
  const bool is_equal = (static_cast<int64_t>(most) * params.batch + kClearingSlots) * heads == ptx::grid_size();
  int sequence;
  int begin;
  int end;
  if (is_equal) {
    if (slot < kClearingSlots) return SequenceTile{-1, slot, number - slot * heads};
    number -= kClearingSlots * heads;
    slot -= kClearingSlots;
    sequence = most == 1 ? slot : slot / most;
    begin = sequence * most;
    end = begin + most;
  } else {
    sequence = sequence_of_slot<kOwnRows, kOwnsKeys>(params, slot);
    begin = sequence < 0 ? 0 : first_slot<kOwnRows, kOwnsKeys>(params, sequence);
    end = sequence < params.batch ? first_slot<kOwnRows, kOwnsKeys>(params, sequence + 1) : ptx::grid_size() / heads;
    if (sequence < 0) sequence = params.batch + 1;
  }
  const int64_t rows_of_stream = kOwnsKeys ? static_cast<int64_t>(params.seq_q) * params.heads_q
                                           : static_cast<int64_t>(params.seq_k) * params.heads_kv;
  if (rows_of_stream <= kFittingRows) {  // as below if all heads are one section, without its divisions
    return SequenceTile{sequence, max(0, kOwnsKeys ? slot - begin : end - 1 - slot), number - slot * heads};
  }
  return tile_of_sequence<kOwnsKeys, kFittingRows>(params, sequence, max(1, end - begin),
                                                   max(0, number - begin * heads));
}

// Finds tiles by number: sequence by sequence, within a sequence in the order of `tile_of_sequence`. The lanes of a
// warp hold 32 sequences at a time; all lanes must take part in every call.
template <int kOwnRows, bool kOwnsKeys>
struct TileFinder {
  const BackwardParams& params;
  const int heads;
  int first_sequence = 0;  // of the 32
  int first_tile = 0;      // of that sequence
  int end;                 // prefix sum: tiles per head of this lane's sequence and of those in the lanes before

  __device__ __forceinline__ explicit TileFinder(const BackwardParams& params_)
      : params(params_), heads(kOwnsKeys ? params_.heads_kv : params_.heads_q) {
    load();
  }
  // Restores a finder's state.
  __device__ __forceinline__ TileFinder(const BackwardParams& params_, int first_sequence_, int first_tile_, int end_)
      : params(params_),
        heads(kOwnsKeys ? params_.heads_kv : params_.heads_q),
        first_sequence(first_sequence_),
        first_tile(first_tile_),
        end(end_) {}

  __device__ __forceinline__ int tiles_of(int sequence) const {
    return sequence < num_sequences(params) ? ceil_div(own_extent<kOwnsKeys>(params, sequence).length, kOwnRows) : 0;
  }

  __device__ __forceinline__ void load() {
    const int lane = ptx::lane_index();
    end = tiles_of(first_sequence + lane);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = ptx::shuffle_index(end, max(0, lane - distance));
      if (lane >= distance) end += before;
    }
  }

  // The number of tiles of all sequences and heads.
  __device__ __forceinline__ int count() const {
    int sum = 0;
    for (int sequence = ptx::lane_index(); sequence < num_sequences(params); sequence += 32) sum += tiles_of(sequence);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      sum += static_cast<int>(ptx::shuffle_xor(static_cast<uint32_t>(sum), distance));
    }
    return sum * heads;
  }

  // Advances to the 32 sequences that include the tile's; returns the lane of that sequence.
  __device__ __forceinline__ int lane_of(int number) {
    int chunk;
    while (number >= first_tile + (chunk = ptx::shuffle_index(end, 31) * heads)) {
      first_tile += chunk;
      first_sequence += 32;
      load();
    }
    return ptx::population_count(ptx::vote_ballot(first_tile + end * heads <= number));
  }

  // `number` is at least that of the previous call, and less than count(). kFittingRows: stream rows that fit the L2
  // cache. If kMayMix and mixes, neighbouring sequences whose streams fit it together form one section.
  template <int kFittingRows, bool kMayMix = false>
  __device__ __forceinline__ SequenceTile find(int number, bool mixes = false) {
    const int lane = lane_of(number);
    const int before = ptx::shuffle_index(end, max(0, lane - 1));
    const int tiles_before = lane > 0 ? before : 0;
    const int tiles_of_head = ptx::shuffle_index(end, lane) - tiles_before;
    if constexpr (kMayMix) {
      const int sequences = mixes ? fitting_heads<kOwnsKeys, kFittingRows>(params) / heads : 1;
      if (sequences > 1) return tile_of_section(lane, sequences, number - first_tile);
    }
    return tile_of_sequence<kOwnsKeys, kFittingRows>(params, first_sequence + lane, tiles_of_head,
                                                     number - first_tile - tiles_before * heads);
  }

  // As find, in sections of `section_heads` heads of one sequence, or of several sequences with that many heads
  // together.
  __device__ __forceinline__ SequenceTile find_in_sections(int number, int section_heads) {
    const int lane = lane_of(number);
    const int before = ptx::shuffle_index(end, max(0, lane - 1));
    const int tiles_before = lane > 0 ? before : 0;
    const int tiles_of_head = ptx::shuffle_index(end, lane) - tiles_before;
    if (section_heads >= 2 * heads) return tile_of_section(lane, section_heads / heads, number - first_tile);
    return tile_in_sections<kOwnsKeys>(first_sequence + lane, tiles_of_head, number - first_tile - tiles_before * heads,
                                       heads, section_heads);
  }

  // Orders the section of `sequences` neighbouring lanes that includes `lane`: for falling n, the n-th tiles from the
  // start (dq) or from the end (dk and dv) of their sequence, over all sequences and heads that have one.
  __device__ __forceinline__ SequenceTile tile_of_section(int lane, int sequences, int number) const {
    const int own_lane = ptx::lane_index();
    const int first_lane = lane / sequences * sequences;
    const int before = ptx::shuffle_index(end, max(0, first_lane - 1));
    const int own_before = ptx::shuffle_index(end, max(0, own_lane - 1));
    const bool is_inside = own_lane / sequences == lane / sequences;
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
    const int position = rest / heads;
    const bool is_own = tiles >= left && ptx::population_count(having & ((1u << own_lane) - 1)) == position;
    const int sequence_lane = ptx::population_count(ptx::vote_ballot(is_own) - 1);
    const int index = kOwnsKeys ? ptx::shuffle_index(tiles, sequence_lane) - left : left - 1;
    return SequenceTile{first_sequence + sequence_lane, index, rest - position * heads};
  }
};

// The index of the first row of `head` of a sequence in the log-sum-exp, its gradient and row_dot:
// [batch, heads_q, seq_q], or [heads_q, rows_total].
__device__ __forceinline__ int64_t statistics_row(const BackwardParams& params, int sequence, int head, int first_row) {
  if (params.sequences.cu_seqlens_q != nullptr) {
    return static_cast<int64_t>(head) * params.sequences.rows_total + first_row;
  }
  return (static_cast<int64_t>(sequence) * params.heads_q + head) * params.seq_q;
}

// The lengths of every sequence of a dense batch, for the mask rule.
struct Lengths {
  const BackwardParams& params;

  __device__ __forceinline__ int rows() const { return params.seq_q; }
  __device__ __forceinline__ int keys() const { return params.seq_k; }
};

// Keys that query `row` sees.
template <MaskKind kMask, typename LengthsType>
__device__ __forceinline__ KeyRange visible_keys(const BackwardParams& params, const LengthsType& lengths, int row) {
  if constexpr (kMask == MaskKind::kRuntime) return window_keys(params.score_options, lengths, row);
  if constexpr (kMask == MaskKind::kFull) return KeyRange{0, params.seq_k};
  return KeyRange{0, max(0, min(params.seq_k, diagonal_key(Lengths{params}, row + 1)))};
}

// Queries that see key `key`. Without a window the last query sees every key. Keys past the last are seen by none.
template <MaskKind kMask, typename LengthsType>
__device__ __forceinline__ KeyRange visible_rows(const BackwardParams& params, const LengthsType& lengths, int key) {
  if constexpr (kMask == MaskKind::kRuntime) {
    if (key >= lengths.keys()) return KeyRange{0, 0};
    return window_rows(params.score_options, lengths, key);
  }
  if constexpr (kMask == MaskKind::kFull) return KeyRange{0, params.seq_q};
  return KeyRange{max(0, diagonal_row(Lengths{params}, key)), params.seq_q};
}

}  // namespace flashmoe::attention::backward
