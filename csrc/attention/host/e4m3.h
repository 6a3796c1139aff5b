// Caches of 8-bit floats (float8_e4m3fn) with queries of 16 bits, and queries of 8 bits, too: arguments, checks and parameter blocks.
#pragma once

#include "attention/host/varlen_arguments.h"
#include "attention/params/e4m3.h"

namespace flashmoe::attention {

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

// All three of 8 bits, dense. dtype and torch_dtype are the output's.
struct Fp8Arguments {
  ForwardArguments forward;
  ScaleArgument q_scale;
  ScaleArgument k_scale;
  ScaleArgument v_scale;
};

// The same of ragged rows and keys.
struct Fp8VarlenArguments {
  VarlenArguments varlen;
  ScaleArgument q_scale;
  ScaleArgument k_scale;
  ScaleArgument v_scale;
};

// Throws the first rule that the arguments break.
void check_fp8(Fp8Arguments& arguments);
void check_fp8(Fp8VarlenArguments& arguments);

// At least one row.
void forward_fp8_cuda(const Fp8Arguments& arguments, const ForwardOutputs& outputs);
void forward_fp8_cuda(const Fp8VarlenArguments& arguments, const ForwardOutputs& outputs);

// Whether rows of codes can be loaded by 16 bytes where they lie; may_repeat: dimensions of stride 0 are no hindrance. The tensor itself then,
// or a copy with rows of whole 16 bytes, zeros behind.
Tensor loadable_codes(const Tensor& codes, bool may_repeat);

// Elements that a cache is copied to 16 bits in parts of, where it has more: 512 MiB. Tests set it.
extern int64_t most_copied;

void check_scale(const ScaleArgument& scale, const char* name, const QueryKeyValue& operands, const Tensor& codes,
                 int64_t batch, bool has_pages);

// Throws the first rule that the scales break; the rest is checked.
void check_e4m3_scales(const E4m3Arguments& arguments);
void check_e4m3_scales(const E4m3AppendArguments& arguments);

CacheScale make_scale(const ScaleArgument& scale, bool has_pages);

// As forward_varlen and append of backends.h.
void forward_e4m3_cpu(const E4m3Arguments& arguments, const ForwardOutputs& outputs);
void forward_e4m3_cuda(const E4m3Arguments& arguments, const ForwardOutputs& outputs);
void append_e4m3_cpu(const E4m3AppendArguments& arguments);
void append_e4m3_cuda(const E4m3AppendArguments& arguments);

}  // namespace flashmoe::attention
