// Which keys a query row sees, and which key tiles of a query tile need a mask: the device's one home for that.
//
// Rows and keys count from the first of their sequence. What a row sees is a range [begin, end), and a later row's begins
// and ends no earlier; so of the key tiles [begin, end) of a query tile, only those at either end can need a mask: the right
// end of all kinds, the left end of a window.
//
// A score function (softcap) belongs before mask_scores, on every tile, so that -inf stays -inf. A sink is no score: it is
// one more exponential in a row's sum, once that has been added over the quad (finish_tile in mma_sync/epilogue.cuh,
// finish_softmax in sm90/softmax.cuh).
#pragma once

#include "attention/sequences.cuh"
#include "device/math.cuh"

namespace flashmoe::attention {

struct KeyRange {
  int begin;
  int end;
};

// The causal rule, aligned bottom-right: key j is visible to row i when j <= i + (keys - rows). So this is the last key
// that `row` sees. Negative where it sees none; past the last key where `row` is past the last row.
// Lengths: a Sequence, or whatever else has rows() and keys().
template <typename Lengths>
__device__ __forceinline__ int diagonal_key(const Lengths& sequence, int row) {
  return row + sequence.keys() - sequence.rows();
}
// The other way round: the first row that sees `key`, negative where all rows do.
template <typename Lengths>
__device__ __forceinline__ int diagonal_row(const Lengths& sequence, int key) {
  return key + sequence.rows() - sequence.keys();
}

// The key that a row's window is counted from: the last key less the rows that follow it; of folded rows, the last for all.
template <typename Lengths>
__device__ __forceinline__ int window_key(const ScoreOptions& options, const Lengths& sequence, int row) {
  return options.folded_heads > 1 ? sequence.keys() - 1 : diagonal_key(sequence, row);
}

// Keys of the window that is counted from `key`, which may be past the last one. Lengths up to 2^30 leave room for the sums.
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
// Rows whose windows hold `key`: [begin, end) of the sequence's.
template <typename Lengths>
__device__ __forceinline__ KeyRange window_rows(const ScoreOptions& options, const Lengths& sequence, int key) {
  const int row = diagonal_row(sequence, key);
  const int begin = options.right >= kUnbounded ? 0 : maximum(0, row - options.right);
  const int end = options.left >= kUnbounded ? sequence.rows() : minimum(sequence.rows(), row + options.left + 1);
  return KeyRange{begin, maximum(begin, end)};
}

// Keys that `row` sees, which may be past the last row: causal and full, it sees every key.
template <MaskKind kMask>
__device__ __forceinline__ KeyRange visible_keys(const Sequence<kMask>& sequence, int row) {
  if constexpr (kMask == MaskKind::kRuntime) return window_keys(sequence.params.score_options, sequence, row);
  return KeyRange{0, kMask == MaskKind::kCausal ? maximum(0, minimum(sequence.keys(), diagonal_key(sequence, row + 1)))
                                                : sequence.keys()};
}

// Key tiles [begin, end) that some row of a query tile sees; every row sees all of those in [full_begin, full_end), the others
// need a mask.
struct KeyTiles {
  int begin;
  int end;
  int full_end;
  int full_begin;
};

// What a query tile asks of the mask; all its rows are the sequence's own.
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

  // Keys that some of the rows sees.
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
  // Whether some of the warp's rows does not see all of the tile.
  template <int kBlockN>
  __device__ __forceinline__ bool hides_some(int) const {
    return last_column(0) < kBlockN - 1;
  }
};

// Row 0 sees columns first to last, each row after it the same number further (all folded rows the same).
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
