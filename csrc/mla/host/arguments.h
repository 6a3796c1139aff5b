// Checks of the arguments of multi-head latent attention.
#pragma once

#include "host/arguments.h"
#include "host/tensor.h"

namespace flashmoe::mla {

using host::Dtype;
using host::Tensor;

// A tensor that was not given has a null handle.
struct DecodeArguments {
  Tensor q;              // [batch, tokens, heads, 576]
  Tensor kv_cache;       // [pages, page_size, 576] with block_table, else [batch, keys, 576]; FP8: 656 bytes per key
  Tensor cache_seqlens;  // [batch] int32, contiguous; not given with indices
  Tensor block_table;    // [batch, pages] int32, last dimension contiguous
  Tensor sinks;          // [heads] float32, contiguous
  Tensor indices;        // [batch, tokens, keys] int32: rows among all pages; -1: no key
  double scale = 0.0;
  bool is_causal = true;
  int64_t num_splits = 0;         // 0: the kernels choose; 1: each row's result is the same in any batch
  Dtype dtype = Dtype::kFloat16;  // of q
  bool is_fp8 = false;            // kv_cache holds 8-bit floats

  int64_t batch() const { return q.sizes()[0]; }
  int64_t tokens() const { return q.sizes()[1]; }
  int64_t heads() const { return q.sizes()[2]; }
  bool is_sparse() const { return indices.is_given(); }
  // Keys that a sequence's memory can hold, or indices per token.
  int64_t max_keys() const {
    if (is_sparse()) return indices.sizes()[2];
    return kv_cache.sizes()[1] * (block_table.is_given() ? block_table.sizes()[1] : 1);
  }
};

// Reads and checks the operator's arguments; throws on the first broken rule.
DecodeArguments parse_decode(host::Arguments& given);

// Writes out [batch, tokens, heads, 512], contiguous, and lse [batch, heads, tokens]. Requires at least one row.
void decode_cuda(const DecodeArguments& arguments, const Tensor& out, const Tensor& lse);

}  // namespace flashmoe::mla
