// Caches in float8_e4m3fn ("codes") with 16-bit queries, and attention with q, k and v in 8 bits: arguments, checks and
// parameter blocks.
#pragma once

#include "attention/host/varlen_arguments.h"
#include "attention/params/e4m3.h"

namespace flashmoe::attention {

// A cache's codes are multiplied by factor, and by a float32 tensor [], [heads_kv], [batch, heads_kv], or with four
// dimensions that is broadcast to the cache: [batch or 1, heads_kv or 1, 1, 1]; for pages
// [pages or 1, 1, heads_kv or 1, 1].
struct ScaleArgument {
  Tensor values;  // not given: only factor
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

// q, k and v in 8 bits, dense. dtype and torch_dtype are the output's.
struct Fp8Arguments {
  ForwardArguments forward;
  ScaleArgument q_scale;
  ScaleArgument k_scale;
  ScaleArgument v_scale;
};

// The same for ragged rows and keys.
struct Fp8VarlenArguments {
  VarlenArguments varlen;
  ScaleArgument q_scale;
  ScaleArgument k_scale;
  ScaleArgument v_scale;
};

// Throws for the first rule that the arguments break.
void check_fp8(Fp8Arguments& arguments);
void check_fp8(Fp8VarlenArguments& arguments);

// Needs at least one row.
void forward_fp8_cuda(const Fp8Arguments& arguments, const ForwardOutputs& outputs);
void forward_fp8_cuda(const Fp8VarlenArguments& arguments, const ForwardOutputs& outputs);

// The tensor itself if its rows of codes can be loaded in place, 16 bytes at a time; otherwise a copy whose rows are
// padded with zeros to a multiple of 16 bytes. may_repeat: dimensions of stride 0 are allowed.
Tensor loadable_codes(const Tensor& codes, bool may_repeat);

// The most elements of a cache that are copied to 16 bits at once, 512 MiB; a larger cache is copied in parts. Tests
// set it.
extern int64_t most_copied;

void check_scale(const ScaleArgument& scale, const char* name, const QueryKeyValue& operands, const Tensor& codes,
                 int64_t batch, bool has_pages);

// Throws for the first rule that the scales break; all other arguments are already checked.
void check_e4m3_scales(const E4m3Arguments& arguments);
void check_e4m3_scales(const E4m3AppendArguments& arguments);

CacheScale make_scale(const ScaleArgument& scale, bool has_pages);

// As forward_varlen and append in backends.h.
void forward_e4m3_cpu(const E4m3Arguments& arguments, const ForwardOutputs& outputs);
void forward_e4m3_cuda(const E4m3Arguments& arguments, const ForwardOutputs& outputs);
void append_e4m3_cpu(const E4m3AppendArguments& arguments);
void append_e4m3_cuda(const E4m3AppendArguments& arguments);

}  // namespace flashmoe::attention
