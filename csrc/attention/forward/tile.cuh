// Which part of the problem a thread block computes: (batch, head, M block, key tiles).
#pragma once

#include "attention/params/forward.h"
#include "ptx/special_registers.cuh"
#include "ptx/types.cuh"

namespace flashmoe {
namespace attention {

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

struct QueryTile {
  int batch;
  int head_q;
  int head_kv;
  int row;    // first query row
  int rows;   // valid ones, 1 to kBlockM
  int split;  // which share of the key tiles, 0 to num_splits - 1
};

// Grid: ceil(seq_q / kBlockM) * heads_q * batch * num_splits blocks.
// Full: M blocks of a head are neighbours, so that they share its K and V in L2. Causal: work grows with the M block, so
// the longest come first, and short ones fill the tail of each wave; but only among as many heads as fit L2 with their K
// and V (16 MiB, a third of an H100's and less than an A100's), since every M block reads them anew.
constexpr int kL2GroupBytes = 16 << 20;

template <int kBlockM, int kHeadDim, bool kIsCausal, bool kIsSplit>
__device__ __forceinline__ QueryTile locate_query_tile(const ForwardParams& params) {
  QueryTile tile;
  int index = ptx::block_index();
  tile.split = 0;
  if constexpr (kIsSplit) {
    tile.split = index % params.num_splits;
    index /= params.num_splits;
  }
  const int m_blocks = ceil_div(params.seq_q, kBlockM);
  int m_block = 0;
  int head = index;  // over batch and heads
  if (m_blocks > 1) {
    if constexpr (kIsCausal) {
      const int heads = params.batch * params.heads_q;
      const int heads_kv = params.batch * params.heads_kv;
      constexpr int kFittingKeys = kL2GroupBytes / (2 * 2 * kHeadDim);
      int group_heads = heads;
      if (heads_kv > 1 && static_cast<int64_t>(heads_kv) * params.seq_k > kFittingKeys) {
        // Not all of them fit. Divisions before the first load cost 0.1 us each, so small problems do without these.
        const int fitting = max(1, kFittingKeys / params.seq_k) * (params.heads_q / params.heads_kv);
        head = index / (fitting * m_blocks) * fitting;
        index -= head * m_blocks;
        group_heads = min(fitting, heads - head);
      } else {
        head = 0;
      }
      m_block = index / group_heads;
      head += index - m_block * group_heads;
      m_block = m_blocks - 1 - m_block;
    } else {
      head = index / m_blocks;
      m_block = index - head * m_blocks;
    }
  }
  tile.batch = params.batch == 1 ? 0 : head / params.heads_q;
  tile.head_q = head - tile.batch * params.heads_q;
  tile.head_kv = params.heads_q == params.heads_kv ? tile.head_q : tile.head_q / (params.heads_q / params.heads_kv);
  tile.row = m_block * kBlockM;
  tile.rows = min(kBlockM, params.seq_q - tile.row);
  return tile;
}

// Key tiles [begin, end) that some row of the query tile sees; those from `masked` on need a mask for some row (without a split).
struct KeyTiles {
  int begin;
  int masked;
  int end;
};

template <int kBlockN, bool kIsCausal, bool kIsSplit>
__device__ __forceinline__ KeyTiles visible_key_tiles(const ForwardParams& params, const QueryTile& tile) {
  KeyTiles tiles;
  int visible_to_first = params.seq_k;  // keys that the first row sees
  int visible_to_last = params.seq_k;
  if constexpr (kIsCausal) {
    const int diagonal = params.seq_k - params.seq_q;
    visible_to_first = max(0, tile.row + 1 + diagonal);
    visible_to_last = max(0, tile.row + tile.rows + diagonal);
  }
  tiles.begin = 0;
  tiles.end = ceil_div(visible_to_last, kBlockN);
  tiles.masked = visible_to_first / kBlockN;
  if constexpr (kIsSplit) {
    const int share = ceil_div(ceil_div(params.seq_k, kBlockN), params.num_splits);
    tiles.begin = min(tile.split * share, tiles.end);
    tiles.end = min(tiles.begin + share, tiles.end);
  }
  return tiles;
}

}  // namespace attention
}  // namespace flashmoe
