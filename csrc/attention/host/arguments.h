// Checks of the forward operators' arguments, and the parameter block made from them. The Python statement of the same rules,
// with longer explanations, is flashmoe/checks.py; a test holds the two against each other.
#pragma once

#include "attention/host/select.h"
#include "attention/params/forward.h"
#include "host/tensor.h"

namespace flashmoe {
namespace attention {

using host::Tensor;

struct ForwardArguments {
  Tensor q;  // [batch, heads_q,  seq_q, head_dim]
  Tensor k;  // [batch, heads_kv, seq_k, head_dim]
  Tensor v;  // [batch, heads_kv, seq_k, head_dim]
  double scale = 0.0;
  bool has_default_scale = false;  // then scale is set by check_arguments
  bool is_causal = false;
  Dtype dtype = Dtype::kFloat32;
  int32_t torch_dtype = 0;
  int32_t device_type = 0;
  int32_t device_index = 0;
};

struct ForwardOutputs {
  Tensor out;  // [batch, heads_q, seq_q, head_dim], q's order of strides
  Tensor lse;  // [batch, heads_q, seq_q] fp32; empty where nobody wants it
};

// Throws with a code and a message on the first rule that the arguments break.
void check_arguments(ForwardArguments& arguments);

// The element type, where attention has kernels for it on that kind of device.
Dtype supported_dtype(int32_t torch_dtype, bool is_cuda);

// Kernels hold scale * log2(e) in float32. False for NaN, too.
bool is_possible_scale(double scale);

// Uninitialised, of these sizes: dense, with the tensor's order of dimensions, as torch's empty_like gives it; contiguous where
// the tensor overlaps itself.
Tensor dense_like(const Tensor& tensor, const int64_t* sizes);

// Uninitialised outputs of the right shape, dtype and device.
ForwardOutputs allocate_outputs(const ForwardArguments& arguments, bool with_lse);

// Of the first three dimensions, in elements.
Strides row_strides(const Tensor& tensor);

// Sizes, strides and pointers; no split, no counter. Outputs may be empty.
ForwardParams make_params(const ForwardArguments& arguments, const ForwardOutputs& outputs);

}  // namespace attention
}  // namespace flashmoe
