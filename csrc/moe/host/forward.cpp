// The forward operators on a GPU: which kernels, on what, and the list that is launched.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>

#include "host/last_kernel.h"
#include "moe/host/backends.h"
#include "moe/host/launch.h"
#include "moe/host/prepare.h"

namespace flashmoe {
namespace moe {
namespace {

// For kernels whose tensors' dtypes are parameters.
host::KernelRequest request_without_dtype(const host::Device& gpu) { return host::make_request(gpu, Dtype::kFloat32); }

// The layer's tensors, as the kernels can load them.
struct LayerOperands {
  Tensor x;
  WeightOperand w13;
  WeightOperand w2;
  Tensor b13;
  Tensor b2;
  Tensor shared;
};

LayerOperands make_operands(const LayerArguments& arguments) {
  const bool is_transposed = arguments.shape.is_transposed;
  return {loadable_rows(arguments.x),
          loadable_weights(arguments.w13, is_transposed),
          loadable_weights(arguments.w2, is_transposed),
          loadable_rows(arguments.b13),
          loadable_rows(arguments.b2),
          loadable_rows(arguments.shared)};
}

// h = activation(x W13^T + b13), by row; z as well where it is kept.
void set_gated(GemmParams& params, const LayerArguments& arguments, const LayerOperands& operands, const Sorted& sorted,
               const LayerOutputs& outputs, void* hidden_rows) {
  const LayerShape& shape = arguments.shape;
  params.a = operands.x.data();
  params.a_stride = operands.x.strides()[0];
  params.a_slots = sorted.row_slots;
  params.d = hidden_rows;
  params.d_stride = shape.intermediate;
  params.bias = data_or_null(operands.b13);
  params.preactivation = arguments.keep ? outputs.preactivation.data() : nullptr;
  params.row_weights = sorted.row_weights;
  params.expert_offsets = sorted.expert_offsets;
  params.tokens = static_cast<int32_t>(shape.tokens);
  params.top_k = static_cast<int32_t>(shape.top_k);
  params.activation = shape.activation;
  params.is_interleaved = shape.is_interleaved ? 1 : 0;
  constexpr int64_t kMostEarlySlots = 32;
  if (shape.slots <= kMostEarlySlots && arguments.routing.expert_map.get() == nullptr) {
    params.ids = arguments.routing.ids.data();
    params.id_bytes = scalar_of(arguments.routing.ids) == Scalar::kInt64 ? 8 : 4;
  }
}

// d = a W^T + bias, all by row.
void set_plain(GemmParams& params, const Sorted& sorted, const LayerShape& shape, const void* a, const void* bias,
               void* d) {
  params.a = a;
  params.a_stride = params.k;
  params.d = d;
  params.d_stride = params.n;
  params.bias = bias;
  params.row_weights = sorted.row_weights;
  params.expert_offsets = sorted.expert_offsets;
  params.tokens = static_cast<int32_t>(shape.tokens);
  params.top_k = static_cast<int32_t>(shape.top_k);
}

// [experts + 1] int32: 0, then the ends that the operator was given.
Tensor make_expert_offsets(const Tensor& ends, int64_t experts, const host::CudaCall& call) {
  Tensor offsets = host::empty({experts + 1}, aoti_torch_dtype_int32(), aoti_torch_device_type_cuda(), call.gpu.index);
  host::fill_words(offsets.data(), 0, 1, call.stream, "first offset");
  const int64_t stride = 1;
  AtenTensorHandle rest = nullptr;
  host::check_shim(aoti_torch__reinterpret_tensor(offsets.get(), 1, &experts, &stride, 1, &rest),
                   "_reinterpret_tensor");
  const Tensor view(rest);
  host::check_shim(aoti_torch_copy_(view.get(), ends.get(), /*non_blocking=*/1), "copy_");
  return offsets;
}

}  // namespace

void route_cuda(const RouteArguments& arguments, const RouteOutputs& outputs) {
  constexpr int64_t kTokensPerBlock = 4;  // one warp each, for as long as there are fewer than blocks
  constexpr int64_t kBlocksPerMultiprocessor = 8;
  const host::Device& gpu = host::device(arguments.common.device_index);
  const Kernel& kernel = select_step(request_without_dtype(gpu), Step::kRoute);
  RouteParams params{};
  params.logits = arguments.logits.data();
  params.bias = static_cast<const float*>(data_or_null(arguments.bias));
  params.weights = static_cast<float*>(outputs.weights.data());
  params.ids = static_cast<int32_t*>(outputs.ids.data());
  params.counts = static_cast<int32_t*>(outputs.counts.data());
  params.logits_stride = arguments.logits.strides()[0];
  params.logits_dtype = scalar_of(arguments.logits);
  params.scoring = arguments.scoring;
  params.tokens = static_cast<int32_t>(arguments.tokens);
  params.experts = static_cast<int32_t>(arguments.experts);
  params.top_k = static_cast<int32_t>(arguments.top_k);
  params.groups = static_cast<int32_t>(arguments.groups);
  params.topk_groups = static_cast<int32_t>(arguments.topk_groups);
  params.renormalize = arguments.renormalize ? 1 : 0;
  params.scale = static_cast<float>(arguments.scale);
  const host::CudaCall call(gpu);
  host::fill_words(params.counts, 0, arguments.experts, call.stream, "counts of experts");
  const int64_t grid =
      std::min(ceil_div(arguments.tokens, kTokensPerBlock), kBlocksPerMultiprocessor * gpu.num_multiprocessors);
  host::LaunchList list;
  list.add({&kernel, grid, &params, nullptr, /*is_dependent=*/false});
  list.run(call);
  host::set_last_kernel(kernel.symbol);
}

void sort_cuda(const SortArguments& arguments, const SortOutputs& outputs) {
  const host::Device& gpu = host::device(arguments.common.device_index);
  host::Workspace workspace;
  SortPart sort(arguments, request_without_dtype(gpu), workspace);
  const host::CudaCall call(gpu);
  workspace.allocate(call);
  host::LaunchList list;
  sort.add(list, pointers_of(outputs), workspace);
  list.run(call);
  host::set_last_kernel(sort.symbol());
}

void layer_cuda(const LayerArguments& arguments, const LayerOutputs& outputs) {
  const host::Device& gpu = host::device(arguments.common.device_index);
  const host::KernelRequest request = host::make_request(gpu, arguments.common.dtype);
  const LayerShape& shape = arguments.shape;
  const LayerOperands operands = make_operands(arguments);

  host::Workspace workspace;
  SortPart sort(arguments.routing, request, workspace);
  ProductPart gated(Product::kGated, request, operands.w13.view, shape.is_interleaved, shape.slots, shape.experts);
  ProductPart down(Product::kPlain, request, operands.w2.view, /*is_paired=*/false, shape.slots, shape.experts);
  const Kernel& combine = select_step(request, Step::kCombine);

  const host::CudaCall call(gpu);
  std::optional<SortedRoom> room;
  if (!arguments.keep) room.emplace(workspace, shape.slots, shape.experts);
  const int64_t hidden_rows = workspace.add<uint16_t>(shape.slots * shape.intermediate);
  const int64_t down_rows = workspace.add<uint16_t>(shape.slots * shape.hidden);
  workspace.allocate(call);
  const Sorted sorted = room.has_value() ? room->pointers(workspace) : pointers_of(outputs.sorted);
  void* const h = workspace.address<void>(hidden_rows);
  void* const y = workspace.address<void>(down_rows);

  host::LaunchList list;
  std::optional<host::TileCounter> counter;
  sort.add(list, sorted, workspace);
  set_gated(gated.params, arguments, operands, sorted, outputs, h);
  gated.add(list, /*is_dependent=*/true, call, counter);
  set_plain(down.params, sorted, shape, h, data_or_null(operands.b2), y);
  down.add(list, /*is_dependent=*/down.may_follow(gated), call, counter);
  const CombineParams combined = combine_params(shape, sorted, operands.shared, outputs.out, y);
  const int64_t grid = combine_grid(combine, shape.tokens, shape.hidden, gpu.num_multiprocessors);
  list.add({&combine, grid, &combined, nullptr, /*is_dependent=*/true});
  list.run(call);
  host::set_last_kernel(gated.kernel().symbol);
}

void grouped_cuda(const GroupedArguments& arguments, const Tensor& out) {
  const host::Device& gpu = host::device(arguments.common.device_index);
  const host::KernelRequest request = host::make_request(gpu, arguments.common.dtype);
  const Tensor a = loadable_rows(arguments.a);
  const WeightOperand b = loadable_weights(arguments.b_owner, /*is_transposed=*/true);
  ProductPart product(Product::kPlain, request, b.view, /*is_paired=*/false, arguments.rows, b.view.experts);
  const host::CudaCall call(gpu);
  const Tensor offsets = make_expert_offsets(arguments.offsets, b.view.experts, call);
  GemmParams& params = product.params;
  // Rows past the last offset are nobody's; which those are only the device knows.
  host::fill_bytes(out.data(), 0, arguments.rows * b.view.n * static_cast<int64_t>(sizeof(uint16_t)), call.stream,
                   "output of ", arguments.rows, " rows");
  params.a = a.data();
  params.a_stride = a.strides()[0];
  params.d = out.data();
  params.d_stride = params.n;
  params.expert_offsets = static_cast<const int32_t*>(offsets.data());
  params.tokens = static_cast<int32_t>(arguments.rows);
  params.top_k = 1;
  host::LaunchList list;
  std::optional<host::TileCounter> counter;
  product.add(list, /*is_dependent=*/false, call, counter);
  list.run(call);
  host::set_last_kernel(product.kernel().symbol);
}

void grouped_gradient_cuda(const GroupedGradientArguments& arguments, const Tensor& out) {
  const host::Device& gpu = host::device(arguments.common.device_index);
  const host::KernelRequest request = host::make_request(gpu, arguments.common.dtype);
  const Tensor a = loadable_rows(arguments.a);
  const Tensor b = loadable_rows(arguments.b);
  ProductPart product(Product::kWeightGradient, request, sizes_of(out), /*is_paired=*/false, arguments.rows,
                      arguments.experts);
  const host::CudaCall call(gpu);
  const Tensor offsets = make_expert_offsets(arguments.offsets, arguments.experts, call);
  GemmParams& params = product.params;
  params.a = a.data();
  params.a_stride = a.strides()[0];
  params.b = b.data();
  params.b_stride = b.strides()[0];
  params.n = static_cast<int32_t>(a.sizes()[1]);
  params.k = static_cast<int32_t>(b.sizes()[1]);
  params.d = out.data();
  params.d_stride = params.k;
  params.expert_offsets = static_cast<const int32_t*>(offsets.data());
  params.tokens = static_cast<int32_t>(arguments.rows);
  params.top_k = 1;
  host::LaunchList list;
  std::optional<host::TileCounter> counter;
  product.add(list, /*is_dependent=*/false, call, counter);
  list.run(call);
  host::set_last_kernel(product.kernel().symbol);
}

}  // namespace moe
}  // namespace flashmoe
