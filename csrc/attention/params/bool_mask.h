// What the host passes to the kernels that prepare a bool mask for the kernels that stream masks, and what they pass
// on. Plain C types only.
#pragma once

#include "attention/params/forward.h"

namespace flashmoe::attention {

constexpr int32_t kMaskBlock = 64;      // rows, or keys, of a block of a mask
constexpr int32_t kMaskWordBlocks = 4;  // blocks of keys in a word of VisibleBlocks, one per byte
constexpr int32_t kMaskTileKeys = 128;  // of a tile of VisibleTiles; kBlockN of the fused backward kernels
constexpr int32_t kMaxMaskTiles = 1024;

// Which blocks of 64 rows and 64 keys a mask hides as a whole: their byte is zero. The matrix of a sequence and a head
// has the number sequence * per_sequence + head * per_head; a factor is 0 where sequences or heads share a matrix.
struct VisibleBlocks {
  const int32_t* words;  // [matrices, row_blocks, key_words]; null: all blocks are visible
  int32_t row_blocks;
  int32_t key_words;
  int32_t per_sequence;
  int32_t per_head;
};

// For the fused backward kernel, whose tiles of 128 keys each see a range of blocks of 64 rows.
struct VisibleTiles {
  const int32_t* ranges;  // [matrices, tiles, 2]: the first block, and the one after the last; null: all blocks
  const int32_t* ranks;   // [matrices, tiles, row_blocks]: how many later tiles have the block in their range
  int32_t tiles;
  int32_t row_blocks;
  int32_t per_sequence;  // as in VisibleBlocks
  int32_t per_head;      // 0 if query heads share a key head
};

// Converts a bool mask to an additive one of 0 and -inf.
struct BoolMaskParams {
  const void* mask;      // [batch, heads, rows, keys], a byte each; 0 hides a key
  void* additive;        // [batch, heads, rows, additive_row] of element type, fewer than 2^31; past the last key -inf
  int32_t* words;        // VisibleBlocks::words, to be written
  int64_t stride_batch;  // bytes, of mask
  int64_t stride_head;
  int64_t stride_row;
  int64_t stride_key;
  int32_t additive_row;  // elements, a multiple of eight
  int32_t heads;
  int32_t rows;
  int32_t keys;
};

// Computes the arrays of VisibleTiles.
struct BoolMaskTilesParams {
  VisibleBlocks blocks;
  int32_t* ranges;
  int32_t* ranks;
  int32_t tiles;  // at most kMaxMaskTiles
};

struct MaskForwardParams {
  ForwardParams forward;
  VisibleBlocks visible;
};

}  // namespace flashmoe::attention
