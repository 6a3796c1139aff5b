// Writing latents into a cache of 8-bit floats: arguments, checks and the launch.
#pragma once

#include "host/arguments.h"
#include "host/tensor.h"

namespace flashmoe::mla {

using host::Dtype;
using host::Tensor;

// A tensor that was not given has a null handle. Rows are named by slots, or by the lengths.
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

// Takes the operator's arguments; throws the first rule that they break.
AppendArguments take_append(host::Arguments& given);

// Of a call with tokens.
void append_cuda(const AppendArguments& arguments);

}  // namespace flashmoe::mla
