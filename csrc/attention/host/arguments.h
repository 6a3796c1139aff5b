// Checks of the forward operators' arguments, and the parameter block made from them. The Python statement of the same rules,
// with longer explanations, is flashmoe/operators/attention/arguments.py; a test holds the two against each other.
#pragma once

#include "attention/host/select.h"
#include "attention/params/forward.h"
#include "host/tensor.h"

namespace flashmoe {
namespace attention {

using host::Tensor;

// What every operator attends with; check_operands sets all but the tensors.
struct QueryKeyValue {
  Tensor q;
  Tensor k;
  Tensor v;
  Dtype dtype = Dtype::kFloat32;
  int32_t torch_dtype = 0;
  int32_t device_type = 0;
  int32_t device_index = 0;
};

// q [batch, heads_q, seq_q, head_dim], k and v [batch, heads_kv, seq_k, head_dim].
struct ForwardArguments : QueryKeyValue {
  double scale = 0.0;
  bool has_default_scale = false;  // then scale is set by check_arguments
  bool is_causal = false;
};

struct ForwardOutputs {
  Tensor out;  // [batch, heads_q, seq_q, head_dim], q's order of strides
  Tensor lse;  // [batch, heads_q, seq_q] fp32; empty where nobody wants it
};

// Throws unless q, k and v are tensors of one device and of one dtype that has kernels there.
void check_operands(QueryKeyValue& operands);

// Throws with a code and a message on the first rule that the arguments break.
void check_arguments(ForwardArguments& arguments);

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
