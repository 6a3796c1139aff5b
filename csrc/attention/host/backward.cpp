// The backward pass of dense attention: its torch operator, and for a GPU the selection of the kernels and their
// launches.

#include <optional>
#include <utility>
#include <vector>

#include "attention/backward/sm90/tensor_map.h"
#include "attention/host/arguments.h"
#include "attention/host/backends.h"
#include "attention/host/backward_launch.h"
#include "attention/params/fused_backward.h"
#include "host/arguments.h"
#include "host/copies.h"

namespace flashmoe::attention {
namespace {

struct BackwardArguments : BackwardTensors {
  ForwardArguments forward;  // q, k, v, scale, mask
  int64_t needs = kNeedsAll;

  bool needs_dq() const { return (needs & kNeedsDq) != 0; }
  bool needs_dkv() const { return (needs & (kNeedsDk | kNeedsDv)) != 0; }
};

// The same problem on tensors that the kernels can load. Both kernels have the same requirements.
BackwardArguments make_loadable(const BackwardArguments& arguments, const Kernel& kernel) {
  BackwardArguments copied;
  copied.forward.q = host::loadable(arguments.forward.q, kernel);
  copied.forward.k = host::loadable(arguments.forward.k, kernel);
  copied.forward.v = host::loadable(arguments.forward.v, kernel);
  copied.forward.scale = arguments.forward.scale;
  copied.forward.torch_dtype = arguments.forward.torch_dtype;
  copied.forward.device_type = arguments.forward.device_type;
  copied.forward.device_index = arguments.forward.device_index;
  copied.out = host::loadable(arguments.out, kernel);
  copied.dout = host::loadable(arguments.dout, kernel);
  copied.lse = host::alias(arguments.lse);
  if (arguments.dlse.get() != nullptr) copied.dlse = host::alias(arguments.dlse);
  return copied;
}

// With the same layout as the tensors they are gradients of, so that the operations that follow need no copies.
Gradients allocate_gradients(const ForwardArguments& forward, bool with_dq, bool with_dk, bool with_dv) {
  Gradients gradients;
  if (with_dq) gradients.dq = dense_like(forward.q, forward.q.sizes(), forward.q.dtype());
  if (with_dk) gradients.dk = dense_like(forward.k, forward.k.sizes(), forward.k.dtype());
  if (with_dv) gradients.dv = dense_like(forward.v, forward.v.sizes(), forward.v.dtype());
  return gradients;
}

BackwardParams make_params(const BackwardArguments& arguments, const Gradients& gradients) {
  return make_backward_params(make_params(arguments.forward, {}), arguments, gradients);
}

std::vector<CUtensorMap> query_gradient_maps(const BackwardParams& params, const Kernel& kernel) {
  if (kernel.num_tensor_maps == 0) return {};
  return encode_query_gradient_maps(backward::sm90::query_gradient_tensor_maps(params, kernel.block_n), kernel.dtype);
}

std::vector<CUtensorMap> key_value_gradient_maps(const BackwardParams& params, const Kernel& kernel) {
  if (kernel.num_tensor_maps == 0) return {};
  return encode_key_value_gradient_maps(backward::sm90::key_value_gradient_tensor_maps(params, kernel.block_m),
                                        kernel.dtype);
}

void run_fused(const BackwardParams& params, const BackwardKernels& kernels, const host::Device& gpu) {
  const Kernel& fused = *kernels.fused;
  auto queries = fused_query_params<FusedQueryParams>(params);
  queries.keys = params.seq_k;
  const bool is_causal = static_cast<Mask>(fused.axes[axis::kMask]) == Mask::kCausal;
  queries.row_keys = is_causal ? params.seq_k - params.seq_q + 1 : params.seq_k;
  const int64_t partials = ceil_div(params.seq_q, fused.block_m) * params.batch * params.heads_q;
  const int64_t tiles = ceil_div(params.seq_k, fused.block_n) * params.batch * params.heads_kv;
  run_fused(DropoutBackwardParams{params, Dropout{}}, kernels, queries, partials, fused.block_m, tiles,
            key_value_gradient_maps, gpu);
}

void run_split(const BackwardParams& params, const BackwardKernels& kernels, const host::Device& gpu) {
  const int64_t batch = params.batch;
  const SplitTiles tiles{ceil_div(params.seq_q, kernels.dq->block_m) * batch * params.heads_q,
                         ceil_div(params.seq_k, kernels.dkv->block_n) * batch * params.heads_kv};
  run_split({params, {}}, kernels, tiles, params.head_dim, query_gradient_maps, key_value_gradient_maps, gpu);
}

SelectorInput make_selector_input(const ForwardArguments& forward, const host::Device& gpu) {
  const int64_t* q = forward.q.sizes();
  const int64_t* k = forward.k.sizes();
  return {host::make_request(gpu, forward.dtype),
          forward.is_causal ? Mask::kCausal : Mask::kFull,
          static_cast<int32_t>(q[3]),
          q[0],
          q[1],
          k[1],
          q[2],
          k[2]};
}

std::optional<Gradients> backward_cuda(const BackwardArguments& arguments) {
  const host::Device& gpu = host::device(arguments.forward.device_index);
  const ForwardArguments& forward = arguments.forward;
  const SelectorInput problem = make_selector_input(forward, gpu);
  const BackwardKernels kernels = select_backward(problem.request, problem.mask, problem.head_dim);
  if (kernels.dq == nullptr) return std::nullopt;
  const BackwardArguments operands = make_loadable(arguments, *kernels.dq);
  const bool is_padded = operands.forward.q.sizes()[3] != arguments.forward.q.sizes()[3];
  const bool with_dq = arguments.needs_dq(), with_dkv = arguments.needs_dkv();
  const bool is_fused = with_dq && with_dkv && prefers_fused(kernels, problem);
  const auto compute = [&](const BackwardParams& params) {
    is_fused ? run_fused(params, kernels, gpu) : run_split(params, kernels, gpu);
  };
  Gradients gradients = allocate_gradients(arguments.forward, with_dq, with_dkv, with_dkv);
  if (is_padded) {
    const Gradients padded =
        allocate_gradients(operands.forward, with_dq, with_dkv, with_dkv);  // at the kernel's width
    compute(make_params(operands, padded));
    if (with_dq) host::copy_unpadded(padded.dq, gradients.dq);
    if ((arguments.needs & kNeedsDk) != 0) host::copy_unpadded(padded.dk, gradients.dk);
    if ((arguments.needs & kNeedsDv) != 0) host::copy_unpadded(padded.dv, gradients.dv);
  } else {
    compute(make_params(operands, gradients));
  }
  return gradients;
}

std::optional<Gradients> backward_on_cpu(const BackwardArguments& arguments) {
  Gradients gradients = allocate_gradients(arguments.forward, arguments.needs_dq(), (arguments.needs & kNeedsDk) != 0,
                                           (arguments.needs & kNeedsDv) != 0);
  backward_cpu(make_params(arguments, gradients), arguments.forward);
  return gradients;
}

template <std::optional<Gradients> (*kBackend)(const BackwardArguments&)>
void boxed_backward(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("attention backward", num_arguments, 10, num_outputs, 3);
  BackwardArguments arguments;
  host::Arguments given(stack);
  arguments.dout = given.tensor();
  arguments.dlse = given.optional_tensor();
  given.tensors(arguments.forward.q, arguments.forward.k, arguments.forward.v, arguments.out, arguments.lse);
  arguments.forward.scale = given.number();
  arguments.forward.is_causal = given.flag();
  arguments.needs = given.integer();
  check_arguments(arguments.forward);
  check_backward_tensors(arguments, arguments.forward, arguments.forward.q.sizes());
  std::optional<Gradients> gradients = kBackend(arguments);
  for (int index = 0; index < 3; ++index) stack[index] = host::box_none();
  if (!gradients.has_value()) return;
  if ((arguments.needs & kNeedsDq) != 0) stack[0] = host::box_optional(std::move(gradients->dq));
  if ((arguments.needs & kNeedsDk) != 0) stack[1] = host::box_optional(std::move(gradients->dk));
  if ((arguments.needs & kNeedsDv) != 0) stack[2] = host::box_optional(std::move(gradients->dv));
}

}  // namespace
}  // namespace flashmoe::attention

STABLE_TORCH_LIBRARY_FRAGMENT(flashmoe, library) {
  // needs: bits, 1 for dq, 2 for dk, 4 for dv; None for the others, and for all if this GPU has no backward kernel.
  // Needs at least one row and one key.
  library.def(
      "_flash_attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor "
      "lse, float scale, bool causal, int needs=7) -> (Tensor?, Tensor?, Tensor?)");
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CPU, library) {
  library.impl("_flash_attention_backward", &flashmoe::attention::boxed_backward<flashmoe::attention::backward_on_cpu>);
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CUDA, library) {
  library.impl("_flash_attention_backward", &flashmoe::attention::boxed_backward<flashmoe::attention::backward_cuda>);
}
