#include "attention/host/prepare.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>
#include <torch/csrc/stable/library.h>

#include "host/copies.h"

namespace flashmoe::attention {
namespace {

bool is_scale_positive(const ForwardArguments& arguments) { return static_cast<float>(arguments.scale) > 0.0F; }

// Kernels find the maximum of a row of q k^T before they scale it; that is the maximum after scaling only if the scale
// is positive. So the sign of a negative scale moves into the copied q; for a scale of zero, q becomes q - q: zero, or
// NaN where q is not finite.
void make_scale_positive(ForwardArguments& arguments) {
  if (arguments.scale < 0.0) {
    StableIValue stack[1] = {torch::stable::detail::from(host::alias(arguments.q).release())};
    host::check_shim(torch_call_dispatcher("aten::neg_", "", stack, TORCH_ABI_VERSION), "neg_");
    arguments.q = Tensor(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
    arguments.scale = -arguments.scale;
  }
  if (!is_scale_positive(arguments)) {
    AtenTensorHandle zeros = nullptr;
    host::check_shim(aoti_torch_aten_subtract_Tensor(arguments.q.get(), arguments.q.get(), 1.0, &zeros), "subtract");
    arguments.q = Tensor(zeros);
    arguments.scale = 1.0;
  }
}

// A head_dim that is not a multiple of 16 bytes pads all three inputs alike, and the output with them.
bool is_padded(const ForwardArguments& copied, const ForwardOutputs& outputs) {
  return copied.q.sizes()[3] != outputs.out.sizes()[3];
}

}  // namespace

Problem make_problem(const ForwardArguments& arguments, const ForwardOutputs& outputs) {
  Problem problem{make_params(arguments, outputs), arguments.is_causal ? Mask::kCausal : Mask::kFull};
  ForwardParams& params = problem.params;
  if (params.seq_q == 1 && params.heads_q > params.heads_kv) {
    const int32_t group = params.heads_q / params.heads_kv;
    for (Strides* stride : {&params.q_stride, &params.out_stride}) {
      stride->row = stride->head;
      stride->head *= group;
    }
    params.heads_q = params.heads_kv;
    params.seq_q = group;
    problem.mask = Mask::kFull;
  }
  return problem;
}

bool runs_in_place(const ForwardArguments& arguments, const Kernel& kernel) {
  return is_scale_positive(arguments) && host::is_loadable(arguments.q, kernel) &&
         host::is_loadable(arguments.k, kernel) && host::is_loadable(arguments.v, kernel);
}

Operands make_operands(const ForwardArguments& arguments, const ForwardOutputs& outputs, const Kernel& kernel) {
  Operands result;
  ForwardArguments& copied = result.arguments;
  copied.q = is_scale_positive(arguments) ? host::loadable(arguments.q, kernel) : host::padded_copy(arguments.q);
  copied.k = host::loadable(arguments.k, kernel);
  copied.v = host::loadable(arguments.v, kernel);
  copied.scale = arguments.scale;
  copied.is_causal = arguments.is_causal;
  copied.is_consistent = arguments.is_consistent;
  copied.dtype = arguments.dtype;
  copied.torch_dtype = arguments.torch_dtype;
  copied.device_type = arguments.device_type;
  copied.device_index = arguments.device_index;
  if (!is_scale_positive(copied)) make_scale_positive(copied);
  result.outputs.out = is_padded(copied, outputs) ? host::empty_like(outputs.out, host::padded_sizes(outputs.out))
                                                  : host::alias(outputs.out);
  if (outputs.lse.get() != nullptr) result.outputs.lse = host::alias(outputs.lse);
  return result;
}

void return_outputs(const Operands& operands, const ForwardOutputs& outputs) {
  if (is_padded(operands.arguments, outputs)) host::copy_unpadded(operands.outputs.out, outputs.out);
}

}  // namespace flashmoe::attention
