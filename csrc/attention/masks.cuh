// Which keys a query row sees, and which key tiles of a query tile need a mask: the device's one home for that.
//
// Rows and keys count from the first of their sequence. What a row sees is a range [begin, end), and a later row's begins
// and ends no earlier; so of the key tiles [begin, end) of a query tile, only those at either end can need a mask. Every
// mask so far begins at key 0: only the right end is masked. A window moves `begin` in visible_keys and key_tiles, adds
// KeyTiles::full_begin (tiles [begin, full_begin) need a mask), and gives TileMask a first column.
//
// A score function (softcap) belongs before mask_scores, on every tile, so that -inf stays -inf. A sink is no score: it is
// one more exponential in a row's sum, once that has been added over the quad (finish_tile in mma_sync/epilogue.cuh,
// finish_softmax in sm90/softmax.cuh).
#pragma once

#include "attention/sequences.cuh"
#include "device/math.cuh"

namespace flashmoe {
namespace attention {

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

// Keys that `row` sees, which may be past the last row: it sees every key.
template <bool kIsCausal>
__device__ __forceinline__ KeyRange visible_keys(const Sequence& sequence, int row) {
  return KeyRange{0,
                  kIsCausal ? maximum(0, minimum(sequence.keys(), diagonal_key(sequence, row + 1))) : sequence.keys()};
}

// Key tiles [begin, end) that some row of a query tile sees; every row sees all of those before full_end, the others need
// a mask.
struct KeyTiles {
  int begin;
  int end;
  int full_end;
};

// What a query tile asks of the mask; all its rows are the sequence's own.
template <bool kIsCausal>
struct Mask {
  const Sequence& sequence;
  const int diagonal;

  __device__ __forceinline__ explicit Mask(const Sequence& sequence_)
      : sequence(sequence_), diagonal(sequence.keys() - sequence.rows()) {}

  __device__ __forceinline__ int last_key(int row) const { return diagonal_key(sequence, row); }

  template <int kBlockN>
  __device__ __forceinline__ KeyTiles key_tiles(int row, int rows) const {
    const int end_of_first = kIsCausal ? max(0, row + 1 + diagonal) : sequence.keys();
    const int end_of_last = kIsCausal ? max(0, row + rows + diagonal) : sequence.keys();
    return KeyTiles{0, ceil_div(end_of_last, kBlockN), end_of_first / kBlockN};
  }
};

// What the rows of a warp see of one key tile, as columns of that tile.
template <bool kIsCausal>
struct TileMask {
  int last_key;     // column of the sequence's last key
  int causal_last;  // the last column that the warp's first row sees, if causal; each row after it sees one more

  __device__ __forceinline__ int last_column(int row) const {
    return kIsCausal ? min(last_key, causal_last + row) : last_key;
  }
};

}  // namespace attention
}  // namespace flashmoe
