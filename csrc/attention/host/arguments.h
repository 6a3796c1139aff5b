// Checks of the forward operators' arguments, and the parameter block made from them. Each rule is checked only here:
// a check throws the rule's name and the values, and flashmoe/attn/rules.py has the words that explain what is wrong.
#pragma once

#include "attention/host/select.h"
#include "attention/params/backward.h"
#include "attention/params/forward.h"
#include "host/tensor.h"

namespace flashmoe::attention {

constexpr double kLog2E = 1.4426950408889634;

using host::Tensor;

// Operands common to all operators; check_operands sets everything except the tensors.
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
  Tensor out;  // as q, with v's head_dim; contiguous if ragged, otherwise with q's order of strides
  Tensor
      lse;  // [batch, heads_q, seq_q], or [heads_q, tokens] for ragged rows; fp32, contiguous; not given if not needed
};

// What a backward pass takes in addition to the operands.
struct BackwardTensors {
  Tensor out;   // from the forward pass; q's sizes with v's head_dim, last dimension contiguous
  Tensor dout;  // gradient of out: same shape, last dimension contiguous
  Tensor lse;   // [batch, heads_q, seq_q], or [heads_q, tokens] for ragged rows; float32, contiguous
  Tensor dlse;  // gradient of lse: same shape, contiguous; not given if there is none
};

// Allocated by the operator; not given if not needed, but the kernels of dk and dv compute both. Ragged attention on
// the CPU: zeroed if rows or keys may belong to no sequence (ragged tensors, seqused_k), because its kernels write only
// what belongs to one. GPU kernels write zeros to the rest themselves.
struct Gradients {
  Tensor dq;
  Tensor dk;
  Tensor dv;
  Tensor row_dot;  // as lse: BackwardParams::row_dot, if the caller needs it for the gradient of the sinks. GPU only
  Tensor scores;   // [batch, heads_q, rows, keys or a few more]: MaskBackwardParams::scores_gradient
  Tensor mask;     // their sums, [batch or 1, heads_q or 1, as scores], if the mask has fewer matrices
};

// Throws unless q, k and v are on one device and have one dtype with kernels there; or, for a cache of codes, unless k
// and v are float8_e4m3fn and q has 16 bits.
void check_operands(QueryKeyValue& operands, bool has_codes = false);
void check_devices(QueryKeyValue& operands);  // on one device, whatever their dtypes

struct Layout {
  const char* text;
  int64_t rank;
};
constexpr Layout kDenseLayout{"[batch, heads, length, head_dim]", 4};

// Rank, sizes below 2^31 and a contiguous last dimension.
void check_layout(const Tensor& tensor, const char* name, const Layout& layout);
void check_last_stride(const Tensor& tensor, const char* name);

// q and k share one head_dim, q and v have 1 to kMaxHeadDim, and heads_kv divides the number of query heads.
void check_heads(const QueryKeyValue& operands, int64_t heads_kv);

// A tensor that accompanies q: on its device, with this dtype and rank, last dimension contiguous.
void check_companion(const Tensor& tensor, const char* name, const QueryKeyValue& operands, int32_t dtype,
                     int64_t rank);
void check_device(const Tensor& tensor, const char* name, const QueryKeyValue& operands);

// `sizes`: those of out, with q's rank.
void check_backward_tensors(const BackwardTensors& tensors, const QueryKeyValue& operands, const int64_t* sizes);

void check_batch(int64_t of_q, int64_t of_k);
void check_scale(double scale);

// Throws for the first rule that the arguments break.
void check_arguments(ForwardArguments& arguments);

// Kernels hold scale * log2(e) in float32. False for NaN too.
bool is_possible_scale(double scale);

// Uninitialised, with these sizes: dense, in the tensor's order of dimensions, as torch's empty_like; contiguous if the
// tensor overlaps itself.
Tensor dense_like(const Tensor& tensor, const int64_t* sizes, int32_t torch_dtype);

// Uninitialised outputs of the right shape, dtype and device.
ForwardOutputs allocate_outputs(const QueryKeyValue& operands, bool with_lse);

// In elements, for a tensor of rows or keys: dense, ragged or pages.
Strides strides_of(const Tensor& tensor, bool is_paged = false);

// The operands and outputs as all kernels take them; scale stays 0. Outputs may be empty.
ForwardParams make_operand_params(const QueryKeyValue& operands, const ForwardOutputs& outputs, bool is_paged);

// Sizes, strides and pointers; num_splits 1, no tile counter. Outputs may be empty.
ForwardParams make_params(const ForwardArguments& arguments, const ForwardOutputs& outputs);

// All parameters except tile_counter, for dense and ragged attention. `forward`: made with empty outputs.
BackwardParams make_backward_params(const ForwardParams& forward, const BackwardTensors& tensors,
                                    const Gradients& gradients);

}  // namespace flashmoe::attention
