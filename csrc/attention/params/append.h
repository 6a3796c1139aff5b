// What the host passes to the kernel that appends new keys and values to a cache.
#pragma once

#include "attention/params/forward.h"

namespace flashmoe::attention {

// New key i of sequence b becomes key cache_seqlens[b] + i of its cache. It is dropped if the cache has no room for it
// or the block table names no page of the cache. The cache is dense, [batch, heads_kv, room, ...], or paged as in
// Batch.
struct AppendParams {
  void* k_cache;
  void* v_cache;
  const void* k_new;  // [batch, heads_kv, new_keys, head_dim]
  const void* v_new;  // [batch, heads_kv, new_keys, head_dim_v]
  Strides k_cache_stride;
  Strides v_cache_stride;
  Strides k_new_stride;
  Strides v_new_stride;
  const int32_t* cache_seqlens;  // [batch]
  const int32_t* block_table;    // [batch, pages of a sequence], rows block_table_stride apart; null: a dense cache
  int64_t block_table_stride;
  int32_t page_size;
  int32_t num_pages;
  int32_t batch;
  int32_t heads_kv;
  int32_t new_keys;
  int32_t room;  // keys per sequence; with pages, at most as many as its row of block_table holds
  int32_t head_dim;
  int32_t head_dim_v;
  int32_t is_aligned;  // every row starts and ends at a multiple of 16 bytes
};

}  // namespace flashmoe::attention
