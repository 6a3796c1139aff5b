// The backward pass: its operator as torch knows it; on a GPU which kernels, on what, and the list that is launched.

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
#include "host/last_kernel.h"
#include "host/launch.h"
#include "host/tensor_map.h"
#include "host/tile_counters.h"
#include "host/workspace.h"

namespace flashmoe {
namespace attention {
namespace {

using host::Tensor;

struct BackwardArguments : BackwardTensors {
  ForwardArguments forward;  // q, k, v, scale, mask
  int64_t needs = kNeedsAll;

  bool needs_dq() const { return (needs & kNeedsDq) != 0; }
  bool needs_dkv() const { return (needs & (kNeedsDk | kNeedsDv)) != 0; }
};

// Null handles where nobody needs them. The kernel of dk and dv gives both.
struct Gradients {
  Tensor dq;
  Tensor dk;
  Tensor dv;
};

int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// The same problem on tensors that the kernels can load. Both kernels ask for the same.
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

// In the layout of what they are gradients of, so that the operations behind them need no copies.
Gradients allocate_gradients(const ForwardArguments& forward, bool with_dq, bool with_dk, bool with_dv) {
  Gradients gradients;
  if (with_dq) gradients.dq = dense_like(forward.q, forward.q.sizes());
  if (with_dk) gradients.dk = dense_like(forward.k, forward.k.sizes());
  if (with_dv) gradients.dv = dense_like(forward.v, forward.v.sizes());
  return gradients;
}

void set_gradient(const Tensor& gradient, void** address, Strides* strides) {
  if (gradient.get() == nullptr) return;
  *address = gradient.data();
  *strides = row_strides(gradient);
}

BackwardParams make_backward_params(const BackwardArguments& arguments, const Gradients& gradients) {
  const ForwardParams forward = make_params(arguments.forward, {});
  BackwardParams params{};
  params.q = forward.q;
  params.k = forward.k;
  params.v = forward.v;
  params.out = arguments.out.data();
  params.dout = arguments.dout.data();
  params.lse = static_cast<const float*>(arguments.lse.data());
  params.dlse = arguments.dlse.get() != nullptr ? static_cast<const float*>(arguments.dlse.data()) : nullptr;
  params.q_stride = forward.q_stride;
  params.k_stride = forward.k_stride;
  params.v_stride = forward.v_stride;
  params.out_stride = row_strides(arguments.out);
  params.dout_stride = row_strides(arguments.dout);
  set_gradient(gradients.dq, &params.dq, &params.dq_stride);
  set_gradient(gradients.dk, &params.dk, &params.dk_stride);
  set_gradient(gradients.dv, &params.dv, &params.dv_stride);
  params.batch = forward.batch;
  params.heads_q = forward.heads_q;
  params.heads_kv = forward.heads_kv;
  params.seq_q = forward.seq_q;
  params.seq_k = forward.seq_k;
  params.head_dim = forward.head_dim;
  params.scale = forward.scale;
  params.scale_log2 = forward.scale_log2;
  return params;
}

// What the kernels of dq, and of dk and dv, take after their parameters; none outside the sm90 family.
std::vector<CUtensorMap> query_gradient_maps(const BackwardParams& params, const Kernel& kernel) {
  if (kernel.num_tensor_maps == 0) return {};
  const auto maps = backward::sm90::query_gradient_tensor_maps(params, kernel.block_n);
  const auto encode = [&kernel](const auto& description, const char* name) {
    return host::encode_tensor_map(description, kernel.dtype, name);
  };
  return {encode(maps.q, "q"), encode(maps.k, "k"), encode(maps.v, "v"), encode(maps.dout, "grad_out"),
          encode(maps.dq, "dq")};
}

std::vector<CUtensorMap> key_value_gradient_maps(const BackwardParams& params, const Kernel& kernel) {
  if (kernel.num_tensor_maps == 0) return {};
  const auto maps = backward::sm90::key_value_gradient_tensor_maps(params, kernel.block_m);
  const auto encode = [&kernel](const auto& description, const char* name) {
    return host::encode_tensor_map(description, kernel.dtype, name);
  };
  return {encode(maps.q, "q"),           encode(maps.k, "k"),   encode(maps.v, "v"),
          encode(maps.dout, "grad_out"), encode(maps.dk, "dk"), encode(maps.dv, "dv")};
}

FusedQueryParams make_fused_query_params(const BackwardParams& params, Mask mask) {
  auto queries = fused_query_params<FusedQueryParams>(params);
  queries.keys = params.seq_k;
  queries.row_keys = mask == Mask::kCausal ? params.seq_k - params.seq_q + 1 : params.seq_k;
  return queries;
}

// All three gradients by one kernel, between one that computes row_dot and zeroes the sums of dq, and one that converts these.
void run_fused(BackwardParams params, const BackwardKernels& kernels, const host::Device& gpu) {
  const Kernel& fused = *kernels.fused;
  const int64_t heads = static_cast<int64_t>(params.batch) * params.heads_q;
  const int64_t pieces = ceil_div(params.seq_q, fused.block_m) * heads;
  const int64_t tiles = ceil_div(params.seq_k, fused.block_n) * params.batch * params.heads_kv;
  const host::CudaCall call(gpu);
  const host::TileCounter counter = host::tile_counter(call);
  params.tile_counter = counter.address;
  host::Workspace workspace;
  const int64_t row_dot = workspace.add<float>(heads * params.seq_q);
  const int64_t sums = workspace.add<float>(pieces * (fused.block_m * fused.axes[0] + 1));  // and a turn for each piece
  workspace.allocate(call);
  params.row_dot = workspace.address<float>(row_dot);
  FusedQueryParams queries = make_fused_query_params(params, static_cast<Mask>(fused.axes[axis::kMask]));
  queries.sums = workspace.address<float>(sums);
  params.dq = queries.sums;
  const std::vector<CUtensorMap> maps = key_value_gradient_maps(params, fused);
  host::LaunchList list;
  list.add({kernels.prepare, pieces, &queries, nullptr, /*is_dependent=*/false});
  list.add({&fused, host::grid_for(fused, tiles, gpu), &params, maps.data(), /*is_dependent=*/false});
  list.add({kernels.convert, pieces, &queries, nullptr, /*is_dependent=*/false});
  list.run(call);
  host::set_last_kernel(fused.symbol);
}

// dq or null, dk and dv or null: a kernel runs where its gradient is needed. Without dq a small kernel gives row_dot.
void run(BackwardParams params, const BackwardKernels& kernels, const host::Device& gpu) {
  const bool with_dq = params.dq != nullptr;
  const bool with_dkv = params.dk != nullptr;
  const Kernel& dq = *kernels.dq;
  const Kernel& dkv = *kernels.dkv;
  const int64_t heads = static_cast<int64_t>(params.batch) * params.heads_q;
  const int64_t heads_kv = static_cast<int64_t>(params.batch) * params.heads_kv;
  const int64_t dq_grid = host::grid_for(dq, ceil_div(params.seq_q, dq.block_m) * heads, gpu);
  const int64_t dkv_grid = host::grid_for(dkv, ceil_div(params.seq_k, dkv.block_n) * heads_kv, gpu);
  const host::CudaCall call(gpu);
  host::TileCounter counter;
  if (dq.is_persistent || dkv.is_persistent) {
    counter = host::tile_counter(call);  // one for both, which follow each other
    params.tile_counter = counter.address;
  }
  host::Workspace workspace;
  const int64_t row_dot = workspace.add<float>(heads * params.seq_q);
  workspace.allocate(call);
  params.row_dot = workspace.address<float>(row_dot);

  const RowDotParams row_dot_params = make_row_dot_params(params, params.head_dim);
  std::vector<CUtensorMap> dq_maps, dkv_maps;
  host::LaunchList list;
  if (with_dq) {
    dq_maps = query_gradient_maps(params, dq);
    list.add({&dq, dq_grid, &params, dq_maps.data(), /*is_dependent=*/false});
  } else {
    list.add(row_dot_launch(select_row_dot(host::make_request(gpu, dq.dtype)), row_dot_params));
  }
  if (with_dkv) {
    dkv_maps = key_value_gradient_maps(params, dkv);
    list.add({&dkv, dkv_grid, &params, dkv_maps.data(), /*is_dependent=*/false});
  }
  list.run(call);
  host::set_last_kernel(with_dkv ? dkv.symbol : dq.symbol);
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
  const auto compute = with_dq && with_dkv && prefers_fused(kernels, problem) ? run_fused : run;
  Gradients gradients = allocate_gradients(arguments.forward, with_dq, with_dkv, with_dkv);
  if (is_padded) {
    const Gradients padded =
        allocate_gradients(operands.forward, with_dq, with_dkv, with_dkv);  // at the kernel's width
    compute(make_backward_params(operands, padded), kernels, gpu);
    if (with_dq) host::copy_unpadded(padded.dq, gradients.dq);
    if ((arguments.needs & kNeedsDk) != 0) host::copy_unpadded(padded.dk, gradients.dk);
    if ((arguments.needs & kNeedsDv) != 0) host::copy_unpadded(padded.dv, gradients.dv);
  } else {
    compute(make_backward_params(operands, gradients), kernels, gpu);
  }
  return gradients;
}

std::optional<Gradients> backward_on_cpu(const BackwardArguments& arguments) {
  Gradients gradients = allocate_gradients(arguments.forward, arguments.needs_dq(), (arguments.needs & kNeedsDk) != 0,
                                           (arguments.needs & kNeedsDv) != 0);
  backward_cpu(make_backward_params(arguments, gradients), arguments.forward);
  return gradients;
}

template <std::optional<Gradients> (*kBackend)(const BackwardArguments&)>
void boxed_backward(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("attention backward", num_arguments, 10, num_outputs, 3);
  BackwardArguments arguments;
  host::Arguments given(stack);
  arguments.dout = given.tensor();
  arguments.dlse = given.optional_tensor();
  arguments.forward.q = given.tensor();
  arguments.forward.k = given.tensor();
  arguments.forward.v = given.tensor();
  arguments.out = given.tensor();
  arguments.lse = given.tensor();
  arguments.forward.scale = given.number();
  arguments.forward.is_causal = given.flag();
  arguments.needs = given.integer();
  check_arguments(arguments.forward);
  check_backward_tensors(arguments, arguments.forward, arguments.forward.q.sizes());
  std::optional<Gradients> gradients = kBackend(arguments);
  for (int index = 0; index < 3; ++index) stack[index] = host::give_none();
  if (!gradients.has_value()) return;
  if ((arguments.needs & kNeedsDq) != 0) stack[0] = host::give_optional(std::move(gradients->dq));
  if ((arguments.needs & kNeedsDk) != 0) stack[1] = host::give_optional(std::move(gradients->dk));
  if ((arguments.needs & kNeedsDv) != 0) stack[2] = host::give_optional(std::move(gradients->dv));
}

}  // namespace
}  // namespace attention
}  // namespace flashmoe

STABLE_TORCH_LIBRARY_FRAGMENT(flashmoe, library) {
  // needs: bits, 1 for dq, 2 for dk, 4 for dv; None for the others, and for all where this GPU has no backward kernel. At least
  // one row and one key are needed.
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
