// The forward operators on a GPU: select the kernels, prepare their operands and launch them as one list.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>

#include "host/last_kernel.h"
#include "moe/host/backends.h"
#include "moe/host/launch.h"

namespace flashmoe::moe {
namespace {

// For kernels that take the dtypes of their tensors as parameters.
host::KernelRequest request_without_dtype(const host::Device& gpu) { return host::make_request(gpu, Dtype::kFloat32); }

// Runs a single grouped product.
void run_alone(GroupedGemm& product, const host::CudaCall& call) {
  CallList list(call);
  product.add(list, /*is_dependent=*/false);
  list.run();
  host::set_last_kernel(product.kernel().symbol);
}

// [experts + 1] int32: 0, then the ends passed to the operator.
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
  constexpr int64_t kTokensPerBlock = 4;  // one warp per token, up to the number of blocks below
  constexpr int64_t kBlocksPerMultiprocessor = 8;
  const host::Device& gpu = host::device(arguments.common.device_index);
  const Kernel& kernel = select_op(request_without_dtype(gpu), Op::kRoute);
  const RouteParams params = route_params(arguments, outputs);
  const host::CudaCall call(gpu);
  host::fill_words(params.counts, 0, arguments.experts, call.stream, "counts of experts");
  const int64_t grid =
      std::min(ceil_div(arguments.tokens, kTokensPerBlock), kBlocksPerMultiprocessor * gpu.num_multiprocessors);
  CallList list(call);
  list.add(kernel, grid, &params, /*is_dependent=*/false);
  list.run();
  host::set_last_kernel(kernel.symbol);
}

void sort_cuda(const SortArguments& arguments, const SortOutputs& outputs) {
  const host::Device& gpu = host::device(arguments.common.device_index);
  host::Workspace workspace;
  SortKernels sort(arguments, request_without_dtype(gpu), workspace);
  const host::CudaCall call(gpu);
  workspace.allocate(call);
  CallList list(call);
  sort.add(list, pointers_of(outputs), workspace);
  list.run();
  host::set_last_kernel(sort.symbol());
}

void layer_cuda(const LayerArguments& arguments, const LayerOutputs& outputs) {
  const host::Device& gpu = host::device(arguments.common.device_index);
  const host::KernelRequest request = host::make_request(gpu, arguments.common.dtype);
  const LayerShape& shape = arguments.shape;
  const Tensor x = loadable_rows(arguments.x), b13 = loadable_rows(arguments.b13), b2 = loadable_rows(arguments.b2);
  const Tensor shared = loadable_rows(arguments.shared);
  const WeightOperand w13 = loadable_weights(arguments.w13, shape.is_transposed);
  const WeightOperand w2 = loadable_weights(arguments.w2, shape.is_transposed);

  host::Workspace workspace;
  SortKernels sort(arguments.routing, request, workspace);
  GroupedGemm gated = make_gemm(Product::kGated, request, w13.view, shape.is_interleaved, shape.slots, shape.experts);
  GroupedGemm down = make_gemm(Product::kPlain, request, w2.view, /*is_interleaved=*/false, shape.slots, shape.experts);
  const Kernel& combine = select_op(request, Op::kCombine);

  const host::CudaCall call(gpu);
  std::optional<SortedWorkspace> local_sorted;
  if (!outputs.is_for_backward()) local_sorted.emplace(workspace, shape.slots, shape.experts);
  const int64_t hidden_rows = workspace.add<uint16_t>(shape.slots * shape.intermediate);
  const int64_t down_rows = workspace.add<uint16_t>(shape.slots * shape.hidden);
  workspace.allocate(call);
  const Sorted sorted = local_sorted.has_value() ? local_sorted->pointers(workspace) : pointers_of(outputs.sorted);
  void* const h = workspace.address<void>(hidden_rows);
  void* const y = workspace.address<void>(down_rows);

  CallList list(call);
  sort.add(list, sorted, workspace);

  // h = activation(x W13^T + b13), by row; for a backward pass the values before the activation as well.
  set_layer(gated.params, shape, sorted);
  set_operands(gated.params, token_rows(x, sorted.row_slots), h, shape.intermediate);
  gated.params.bias = data_or_null(b13);
  gated.params.preactivation = data_or_null(outputs.preactivation);
  set_early_ids(gated.params, arguments.routing, gpu);
  gated.add(list);

  // y = h W2^T + b2, by row.
  set_layer(down.params, shape, sorted);
  set_operands(down.params, sorted_rows(h, shape.intermediate), y, shape.hidden);
  down.params.bias = data_or_null(b2);
  down.add(list);

  const CombineParams combined = combine_params(shape, sorted, shared, outputs.out, y);
  add_combine(list, combine, combined);
  list.run();
  host::set_last_kernel(gated.kernel().symbol);
}

void grouped_cuda(const GroupedArguments& arguments, const Tensor& out) {
  const host::Device& gpu = host::device(arguments.common.device_index);
  const host::KernelRequest request = host::make_request(gpu, arguments.common.dtype);
  const Tensor a = loadable_rows(arguments.a);
  const WeightOperand b = loadable_weights(arguments.b_owner, /*is_transposed=*/true);
  GroupedGemm product =
      make_gemm(Product::kPlain, request, b.view, /*is_interleaved=*/false, arguments.rows, b.view.experts);
  const host::CudaCall call(gpu);
  const Tensor offsets = make_expert_offsets(arguments.offsets, b.view.experts, call);
  // Rows past the last offset belong to no expert; only the device knows which ones these are.
  host::fill_bytes(out.data(), 0, arguments.rows * b.view.n * static_cast<int64_t>(sizeof(uint16_t)), call.stream,
                   "output of ", arguments.rows, " rows");
  set_grouped(product.params, arguments, a, static_cast<const int32_t*>(offsets.data()), out);
  run_alone(product, call);
}

void grouped_gradient_cuda(const GroupedGradientArguments& arguments, const Tensor& out) {
  const host::Device& gpu = host::device(arguments.common.device_index);
  const host::KernelRequest request = host::make_request(gpu, arguments.common.dtype);
  const Tensor a = loadable_rows(arguments.a), b = loadable_rows(arguments.b);
  GroupedGemm product = make_gemm(Product::kWeightGradient, request, sizes_of(out), /*is_interleaved=*/false,
                                  arguments.rows, arguments.experts);
  const host::CudaCall call(gpu);
  const Tensor offsets = make_expert_offsets(arguments.offsets, arguments.experts, call);
  set_grouped_gradient(product.params, arguments, a, b, static_cast<const int32_t*>(offsets.data()), out);
  run_alone(product, call);
}

}  // namespace flashmoe::moe
