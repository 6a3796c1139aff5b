// Which keys a query row sees, and which key tiles of a query tile need a mask. All device code takes both from here.
//
// Rows and keys count from the start of their sequence. A row sees a range [begin, end) of keys, and the range of a
// later row begins and ends no earlier. So of the key tiles [begin, end) of a query tile, only those at the ends can
// need a mask: at the right end with every kind of mask, at the left end with a window.
//
// A score function (softcap) must run before mask_scores, on every tile, so that -inf stays -inf. A sink is not a
// score: it is one more exponential in a row's sum, added after the sum over the quad (finish_tile in
// mma_sync/epilogue.cuh, Consumer::run in sm90/consumer.cuh).
#pragma once

#include "attention/sequences.cuh"
#include "device/math.cuh"

namespace flashmoe::attention {

struct KeyRange {
  int begin;
  int end;
};

// The causal rule, aligned bottom-right: key j is visible to row i if j <= i + (keys - rows). Returns the last key that
// `row` sees: negative if it sees none, past the last key if `row` is past the last row. Lengths: a Sequence, or any
// type with rows() and keys().
template <typename Lengths>
__device__ __forceinline__ int diagonal_key(const Lengths& sequence, int row) {
  return row + sequence.keys() - sequence.rows();
}
// The inverse: returns the first row that sees `key`, negative if all rows do.
template <typename Lengths>
__device__ __forceinline__ int diagonal_row(const Lengths& sequence, int key) {
  return key + sequence.rows() - sequence.keys();
}

// The key from which the window of `row` is counted: the last key minus the number of rows after `row`. With folded
// rows it is the last key for every row.
template <typename Lengths>
__device__ __forceinline__ int window_key(const ScoreOptions& options, const Lengths& sequence, int row) {
  return options.folded_heads > 1 ? sequence.keys() - 1 : diagonal_key(sequence, row);
}

// Keys of the window counted from `key`, which may be past the last key. Lengths are at most 2^30, so the sums do not
// overflow.
template <typename Lengths>
__device__ __forceinline__ KeyRange window_around(const ScoreOptions& options, const Lengths& sequence, int key) {
  const int begin = options.left >= kUnbounded ? 0 : maximum(0, key - options.left);
  const int end = options.right >= kUnbounded ? sequence.keys() : minimum(sequence.keys(), key + options.right + 1);
  return KeyRange{begin, maximum(begin, end)};
}
// Keys in the window of `row`, which may be past the last row.
template <typename Lengths>
__device__ __forceinline__ KeyRange window_keys(const ScoreOptions& options, const Lengths& sequence, int row) {
  return window_around(options, sequence, window_key(options, sequence, row));
}
// Rows [begin, end) of the sequence whose windows contain `key`.
template <typename Lengths>
__device__ __forceinline__ KeyRange window_rows(const ScoreOptions& options, const Lengths& sequence, int key) {
  const int row = diagonal_row(sequence, key);
  const int begin = options.right >= kUnbounded ? 0 : maximum(0, row - options.right);
  const int end = options.left >= kUnbounded ? sequence.rows() : minimum(sequence.rows(), row + options.left + 1);
  return KeyRange{begin, maximum(begin, end)};
}

// Keys that `row` sees. `row` may be past the last row: it then sees every key with causal and full masks.
template <MaskKind kMask>
__device__ __forceinline__ KeyRange visible_keys(const Sequence<kMask>& sequence, int row) {
  if constexpr (kMask == MaskKind::kRuntime) return window_keys(sequence.params.score_options, sequence, row);
  return KeyRange{0, kMask == MaskKind::kCausal ? maximum(0, minimum(sequence.keys(), diagonal_key(sequence, row + 1)))
                                                : sequence.keys()};
}

// Key tiles [begin, end) are seen by some row of a query tile. Every row sees all keys of the tiles
// [full_begin, full_end); the other tiles need a mask.
struct KeyTiles {
  int begin;
  int end;
  int full_end;
  int full_begin;
};

// The mask of a query tile, all of whose rows belong to the sequence.
template <MaskKind kMask>
struct Mask {
  const Sequence<kMask>& sequence;
  const int diagonal;

  __device__ __forceinline__ explicit Mask(const Sequence<kMask>& sequence_)
      : sequence(sequence_), diagonal(sequence.keys() - sequence.rows()) {}

  __device__ __forceinline__ int last_key(int row) const { return diagonal_key(sequence, row); }

  template <int kBlockN>
  __device__ __forceinline__ KeyTiles key_tiles(int row, int rows) const {
    const int end_of_first = kMask == MaskKind::kCausal ? max(0, row + 1 + diagonal) : sequence.keys();
    const int end_of_last = kMask == MaskKind::kCausal ? max(0, row + rows + diagonal) : sequence.keys();
    return KeyTiles{0, ceil_div(end_of_last, kBlockN), end_of_first / kBlockN, 0};
  }
};

template <>
struct Mask<MaskKind::kRuntime> {
  const Sequence<MaskKind::kRuntime>& sequence;

  __device__ __forceinline__ explicit Mask(const Sequence<MaskKind::kRuntime>& sequence_) : sequence(sequence_) {}

  __device__ __forceinline__ int last_key(int row) const {
    return window_key(sequence.params.score_options, sequence, row);
  }

  // Keys that at least one of the rows sees.
  __device__ __forceinline__ KeyRange keys(int row, int rows) const {
    const ScoreOptions& options = sequence.params.score_options;
    return KeyRange{window_keys(options, sequence, row).begin, window_keys(options, sequence, row + rows - 1).end};
  }

  template <int kBlockN>
  __device__ __forceinline__ KeyTiles key_tiles(int row, int rows) const {
    const ScoreOptions& options = sequence.params.score_options;
    const KeyRange first = window_keys(options, sequence, row);
    const KeyRange last = window_keys(options, sequence, row + rows - 1);
    return KeyTiles{first.begin / kBlockN, ceil_div(last.end, kBlockN), first.end / kBlockN,
                    ceil_div(last.begin, kBlockN)};
  }
};

// What the rows of a warp see of one key tile, as columns of that tile.
template <MaskKind kMask>
struct TileMask {
  int last_key;     // column of the sequence's last key
  int causal_last;  // the last column that the warp's first row sees, if causal; each row after it sees one more

  __device__ __forceinline__ int last_column(int row) const {
    return kMask == MaskKind::kCausal ? min(last_key, causal_last + row) : last_key;
  }
  // Returns whether at least one of the warp's rows does not see the whole tile.
  template <int kBlockN>
  __device__ __forceinline__ bool hides_some(int) const {
    return last_column(0) < kBlockN - 1;
  }
};

// Row 0 sees columns first to last; with each further row the range moves by `step`, which is 0 for folded rows.
template <>
struct TileMask<MaskKind::kRuntime> {
  int last_key;
  int first;
  int last;
  int step;

  __device__ __forceinline__ int first_column(int row) const { return first + row * step; }
  __device__ __forceinline__ int last_column(int row) const { return min(last_key, last + row * step); }
  template <int kBlockN>
  __device__ __forceinline__ bool hides_some(int rows) const {
    return last_column(0) < kBlockN - 1 || first_column(rows - 1) > 0;
  }
};

// last_of_warp: Mask::last_key of the warp's first row.
template <MaskKind kMask>
__device__ __forceinline__ TileMask<kMask> tile_mask(const Sequence<kMask>& sequence, int last_of_warp, int first_key) {
  if constexpr (kMask == MaskKind::kRuntime) {
    const ScoreOptions& options = sequence.params.score_options;
    const int column = last_of_warp - first_key;
    return {sequence.keys() - 1 - first_key, options.left >= kUnbounded ? -kUnbounded : column - options.left,
            options.right >= kUnbounded ? kUnbounded : column + options.right, options.folded_heads > 1 ? 0 : 1};
  } else {
    return {sequence.keys() - 1 - first_key, last_of_warp - first_key};
  }
}

}  // namespace flashmoe::attention
