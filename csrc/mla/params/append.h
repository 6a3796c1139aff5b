// What the host passes to the kernel that writes latents into an FP8 cache.
#pragma once

#ifdef __CUDACC_RTC__
using int32_t = int;
using int64_t = long long;
#else
#include <cstdint>
#endif

#include "mla/params/fp8.h"

namespace flashmoe::mla {

// Token i of sequence b becomes row slots[b * tokens + i] among all pages, or key cache_seqlens[b] + i of the sequence.
// It is dropped if there is no such row.
struct AppendParams {
  const void* latents;           // [batch, tokens, 576], 16 bits
  void* cache;                   // [num_pages, page_size, 656 bytes]
  const int64_t* slots;          // [batch * tokens]; null: append at cache_seqlens
  const int32_t* cache_seqlens;  // [batch]
  const int32_t*
      block_table;  // [batch, pages of a sequence], rows block_table_stride apart; null: sequence b is page b
  int64_t latents_stride_batch;  // elements
  int64_t latents_stride_token;
  int64_t page_stride;  // bytes
  int64_t key_stride;
  int64_t block_table_stride;
  int32_t batch;
  int32_t tokens;  // new tokens per sequence
  int32_t page_size;
  int32_t num_pages;
  int32_t capacity;  // keys that a sequence can hold
};

}  // namespace flashmoe::mla
