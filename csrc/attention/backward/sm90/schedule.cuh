// Which tile a block works on, and which blocks of the stream a tile sees.
#pragma once

#include "attention/backward/sm90/spec.cuh"
#include "attention/masks.cuh"
#include "attention/params/backward.h"
#include "device/math.cuh"
#include "device/persistent.cuh"

namespace flashmoe {
namespace attention {
namespace backward {
namespace sm90 {

// kOwnRows rows, from row index * kOwnRows on, of one (batch, head): a query head in the kernel of dq, a key head in the
// kernel of dk and dv. index < 0 ends the work.
struct Tile {
  int index;
  int head;
  int batch;
  int padding = 0;  // a tile passes through shared memory in 16 bytes
};

__device__ __forceinline__ int minimum(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int maximum(int a, int b) { return a > b ? a : b; }

// Of every batch entry, for the mask rule.
struct Lengths {
  const BackwardParams& params;

  __device__ __forceinline__ int rows() const { return params.seq_q; }
  __device__ __forceinline__ int keys() const { return params.seq_k; }
};

// Leading keys visible to query `row`.
template <MaskKind kMask>
__device__ __forceinline__ int visible_keys(const BackwardParams& params, int row) {
  if constexpr (kMask == MaskKind::kFull) return params.seq_k;
  return maximum(0, minimum(params.seq_k, diagonal_key(Lengths{params}, row + 1)));
}

// Key blocks that some row before end_row sees: the last row sees the most. Rows that see no key work on one block, all
// of it masked: that gives zeros, and no tile needs a path of its own.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ int key_blocks(const BackwardParams& params, int end_row) {
  const int last_row = minimum(end_row, params.seq_q) - 1;
  return maximum(1, ceil_div(visible_keys<kMask>(params, last_row), Spec::kStreamRows));
}

// The first query that sees key `key`. Every key is seen by the last query.
template <MaskKind kMask>
__device__ __forceinline__ int first_query(const BackwardParams& params, int key) {
  if constexpr (kMask == MaskKind::kFull) return 0;
  return maximum(0, diagonal_row(Lengths{params}, key));
}

// How the tiles of a launch are numbered.
//   kDescending   a causal tile is the longer, the larger its index (dq), or the smaller (dk and dv)
// Full: the tiles of a head one after another, so that blocks at work share the head's stream. Causal: sections of heads
// whose streams together fit the second-level cache; inside a section the longest tiles of all heads first, so that short
// ones fill the end.
template <typename Spec, MaskKind kMask, bool kDescending>
struct Schedule {
  int tiles_per_head;
  int heads;  // of one batch entry
  int all_heads;
  int section_heads;

  // stream_rows: rows of the stream of one head; sharing: neighbouring heads with the same stream
  __device__ __forceinline__ Schedule(const BackwardParams& params, int own_rows, int heads_, int stream_rows,
                                      int sharing) {
    constexpr int kSectionRows = (32 << 20) / (4 * Spec::kHeadDim);
    tiles_per_head = ceil_div(own_rows, Spec::kOwnRows);
    heads = heads_;
    all_heads = heads_ * params.batch;
    section_heads = minimum(all_heads, maximum(1, kSectionRows / maximum(1, stream_rows)) * sharing);
  }

  __device__ __forceinline__ int num_tiles() const { return tiles_per_head * all_heads; }

  __device__ __forceinline__ Tile tile(int number) const {
    int index, head;  // head over all batch entries
    if constexpr (kMask == MaskKind::kFull) {
      head = number / tiles_per_head;
      index = number - head * tiles_per_head;
    } else {
      const int first_head = number / (section_heads * tiles_per_head) * section_heads;
      const int in_section = minimum(section_heads, all_heads - first_head);
      const int rest = number - first_head * tiles_per_head;
      index = rest / in_section;
      head = first_head + rest - index * in_section;
      if constexpr (kDescending) index = tiles_per_head - 1 - index;
    }
    const int batch = head / heads;
    return Tile{index, head - batch * heads, batch};
  }
};

}  // namespace sm90
}  // namespace backward
}  // namespace attention
}  // namespace flashmoe
