// What the host passes to the kernels of multi-head latent attention.
#pragma once

#ifdef __CUDACC_RTC__
using int32_t = int;
using int64_t = long long;
#else
#include <cstdint>
#endif

namespace flashmoe::mla {

constexpr int kHeadDim = 576;    // of a query and a key: the latent, then the rotary columns
constexpr int kLatentDim = 512;  // of a value: the first columns of its key
// A warp of combine.cuh sums pairs of 8 x 8 tiles of partial results.
constexpr int kSumRows = 8;
constexpr int kSumColumns = 16;

// A row is one head of one query token: row token * heads + head of a sequence. All rows of a sequence share its keys.
struct DecodeParams {
  const void* q;                 // [batch, rows, 576], rows q_stride_row elements apart
  const void* cache;             // [num_pages, page_size, 576]; FP8: 656 bytes per key (fp8.h)
  void* out;                     // [batch, rows, 512], contiguous
  float* lse;                    // [batch, heads, tokens], contiguous; null: not wanted
  const int32_t* cache_seqlens;  // [batch]; null: max_keys each
  const int32_t* indices;        // [batch, max_keys]: rows among all pages; null: a sequence's own keys
  const int32_t*
      block_table;     // [batch, pages of a sequence], rows block_table_stride apart; null: sequence b is page b
  const float* sinks;  // [heads]; null: none
  // Only if sequences are split: tiles of rows and columns.
  float* out_partial;    // [2 * num_sm_parts, row_tiles, block_m / 8, 64, 8, 8]
  float* state_partial;  // [2 * num_sm_parts, row_tiles, block_m, 2]: base-2 exponent that the sums refer to, and sum
  int64_t q_stride_batch;
  int64_t q_stride_row;
  int64_t page_stride;  // elements; FP8: bytes
  int64_t key_stride;
  int64_t block_table_stride;
  int32_t batch;
  int32_t tokens;                // query tokens per sequence
  int32_t batches_per_sequence;  // its tokens, if indices make each token a sequence (for lse); else 1
  int32_t heads;
  int32_t max_keys;  // per sequence: what its pages hold
  int32_t page_size;
  int32_t num_pages;
  int32_t num_slots;           // rows of all pages, for indices
  int32_t is_fp8;              // the cache is FP8: how TMA counts its elements (sm90/tensor_map.h)
  int32_t box_rows;            // keys that TMA loads from a page at once (sm90/tensor_map.h); unused by other kernels
  int32_t is_causal;           // token t sees the keys before cache_seqlens - (tokens - 1 - t)
  int32_t block_m;             // rows of a tile
  int32_t row_tiles;           // tiles per sequence
  int32_t block_n_log2;        // log2 of the keys per key block
  int32_t num_sm_parts;        // equal shares of all sequences' key blocks (tile_scheduler.cuh)
  int32_t parts_per_sequence;  // if all are equal; 0: more sequences than lanes of a warp, or than parts
  int32_t min_blocks_per_part;
  int32_t num_splits;           // maximum parts per sequence; 1: none is split
  int32_t warps_per_sum;        // of combine.cuh: warps that share the sum over a row's parts
  int32_t tile_pairs_per_warp;  // of combine.cuh: pairs of tiles that a warp adds up, 1 or 2
  float scale_log2;             // scale * log2(e), above zero
};

}  // namespace flashmoe::mla
