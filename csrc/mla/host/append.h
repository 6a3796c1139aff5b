// Writing latents into an FP8 cache: arguments, checks and the launch.
#pragma once

#include "host/arguments.h"
#include "host/tensor.h"

namespace flashmoe::mla {

using host::Dtype;
using host::Tensor;

// A tensor that was not given has a null handle. Rows are given by slots or by cache_seqlens.
struct AppendArguments {
  Tensor latents;        // [batch, tokens, 576]
  Tensor kv_cache;       // [pages, page_size, 656] with slots or block_table, else [batch, keys, 656]
  Tensor cache_seqlens;  // [batch] int32
  Tensor block_table;    // [batch, pages] int32
  Tensor slots;          // [batch, tokens] int64, contiguous
  Dtype dtype = Dtype::kFloat16;

  int64_t batch() const { return latents.sizes()[0]; }
  int64_t tokens() const { return latents.sizes()[1]; }
  bool has_pages() const { return slots.is_given() || block_table.is_given(); }
};

// Reads and checks the operator's arguments; throws on the first broken rule.
AppendArguments parse_append(host::Arguments& given);

// Requires at least one token.
void append_cuda(const AppendArguments& arguments);

}  // namespace flashmoe::mla
