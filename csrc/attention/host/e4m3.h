// Caches of 8-bit floats (float8_e4m3fn) with queries of 16 bits: arguments, checks and parameter blocks.
#pragma once

#include "attention/host/varlen_arguments.h"
#include "attention/params/e4m3.h"

namespace flashmoe {
namespace attention {

// What a cache's codes are multiplied by: factor, times a float32 tensor [], [heads_kv], [batch, heads_kv], or of four dimensions that is
// broadcast to the cache: [batch or 1, heads_kv or 1, 1, 1], of pages [pages or 1, 1, heads_kv or 1, 1].
struct ScaleArgument {
  Tensor values;  // not given: factor alone
  double factor = 1.0;
};

struct E4m3Arguments {
  VarlenArguments varlen;
  ScaleArgument k_scale;
  ScaleArgument v_scale;
};

struct E4m3AppendArguments {
  AppendArguments append;
  ScaleArgument k_scale;
  ScaleArgument v_scale;
};

// Throws the first rule that the scales break; the rest is checked.
void check_e4m3_scales(const E4m3Arguments& arguments);
void check_e4m3_scales(const E4m3AppendArguments& arguments);

CacheScale make_scale(const ScaleArgument& scale, bool has_pages);

// As forward_varlen and append of backends.h.
void forward_e4m3_cpu(const E4m3Arguments& arguments, const ForwardOutputs& outputs);
void forward_e4m3_cuda(const E4m3Arguments& arguments, const ForwardOutputs& outputs);
void append_e4m3_cpu(const E4m3AppendArguments& arguments);
void append_e4m3_cuda(const E4m3AppendArguments& arguments);

}  // namespace attention
}  // namespace flashmoe
