// Checks of the forward operators' arguments, and the parameter block made from them. Each rule stands here alone: a check throws the
// rule's name and the values, and flashmoe/attn/rules.py says in words what is wrong.
#pragma once

#include "attention/host/select.h"
#include "attention/params/backward.h"
#include "attention/params/forward.h"
#include "host/tensor.h"

namespace flashmoe::attention {

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
  bool is_consistent = false;
};

struct ForwardOutputs {
  Tensor out;  // as q, with v's head_dim; contiguous where ragged, else q's order of strides
  Tensor
      lse;  // [batch, heads_q, seq_q], or [heads_q, tokens] of ragged rows; fp32, contiguous; not given where nobody wants it
};

// What a backward pass takes beside the operands.
struct BackwardTensors {
  Tensor out;   // of the forward pass; q's sizes with v's head_dim, its last dimension contiguous
  Tensor dout;  // as out: its gradient
  Tensor lse;   // [batch, heads_q, seq_q], or [heads_q, tokens] of ragged rows; float32, contiguous
  Tensor dlse;  // as lse: its gradient; not given where there is none
};

// Allocated by the operator; not given where nobody needs one, but the kernels of dk and dv give both. Of ragged attention on the CPU zero
// where rows or keys may belong to no sequence (ragged tensors, seqused_k): its kernels write what belongs to one. A GPU's kernels write
// zeros to the rest, too.
struct Gradients {
  Tensor dq;
  Tensor dk;
  Tensor dv;
  Tensor
      row_dot;  // as lse: BackwardParams::row_dot, where the caller needs it for the gradient of the sinks. A GPU's alone
  Tensor scores;  // [batch, heads_q, rows, keys or a few more]: MaskBackwardParams::scores_gradient
  Tensor mask;    // their sums, [batch or 1, heads_q or 1, as scores], where the mask has fewer matrices
};

// Throws unless q, k and v are tensors of one device and of one dtype that has kernels there; or, of a cache of codes, k and v of
// float8_e4m3fn and q of 16 bits.
void check_operands(QueryKeyValue& operands, bool has_codes = false);
void check_places(QueryKeyValue& operands);  // tensors of one device, whatever their dtypes

struct Layout {
  const char* text;
  int64_t rank;
};
constexpr Layout kDenseLayout{"[batch, heads, length, head_dim]", 4};

// Rank, sizes below 2^31 and a contiguous last dimension.
void check_layout(const Tensor& tensor, const char* name, const Layout& layout);
void check_last_stride(const Tensor& tensor, const char* name);

// One head_dim for q and k, 1 to kMaxHeadDim for q and v, and a number of query heads that heads_kv divides.
void check_heads(const QueryKeyValue& operands, int64_t heads_kv);

// A tensor that goes with q: on its device, of this type and rank, its last dimension contiguous.
void check_companion(const Tensor& tensor, const char* name, const QueryKeyValue& operands, int32_t dtype,
                     int64_t rank);
void check_device(const Tensor& tensor, const char* name, const QueryKeyValue& operands);

// `sizes`: of out, with q's rank.
void check_backward_tensors(const BackwardTensors& tensors, const QueryKeyValue& operands, const int64_t* sizes);

void check_batch(int64_t of_q, int64_t of_k);
void check_scale(double scale);

// Throws the first rule that the arguments break.
void check_arguments(ForwardArguments& arguments);

// Kernels hold scale * log2(e) in float32. False for NaN, too.
bool is_possible_scale(double scale);

// Uninitialised, of these sizes: dense, with the tensor's order of dimensions, as torch's empty_like gives it; contiguous where
// the tensor overlaps itself.
Tensor dense_like(const Tensor& tensor, const int64_t* sizes, int32_t torch_dtype);

// Uninitialised outputs of the right shape, dtype and device.
ForwardOutputs allocate_outputs(const QueryKeyValue& operands, bool with_lse);

// In elements, of a tensor of rows or keys: dense, ragged or pages.
Strides strides_of(const Tensor& tensor, bool is_paged = false);

// What all kernels take of the operands and outputs; scale stays 0. Outputs may be empty.
ForwardParams make_operand_params(const QueryKeyValue& operands, const ForwardOutputs& outputs, bool is_paged);

// Sizes, strides and pointers; no split, no counter. Outputs may be empty.
ForwardParams make_params(const ForwardArguments& arguments, const ForwardOutputs& outputs);

// All of the parameters but tile_counter, of dense and ragged attention. `forward`: with empty outputs.
BackwardParams make_backward_params(const ForwardParams& forward, const BackwardTensors& tensors,
                                    const Gradients& gradients);

}  // namespace flashmoe::attention
