// The layer with e4m3 weights and one scale per 128 by 128 of them, on a GPU, launched as one list.
// flashmoe/moe/scaled.py computes the layer if there is no kernel.
#include <optional>

#include "host/copies.h"
#include "host/last_kernel.h"
#include "moe/host/backends.h"
#include "moe/host/launch.h"
#include "moe/host/scaled.h"

namespace flashmoe::moe {
namespace {

// An e4m3 tensor whose rows the kernels can load, or a copy of it: strides are multiples of 16 bytes, and no dimension
// repeats.
Tensor loadable_e4m3(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  bool is_loadable = reinterpret_cast<uintptr_t>(tensor.data()) % 16 == 0 && tensor.strides()[last] == 1;
  for (int64_t axis = 0; axis < last; ++axis) {
    const int64_t stride = tensor.strides()[axis];
    is_loadable = is_loadable && (tensor.sizes()[axis] <= 1 || (stride > 0 && stride % 16 == 0));
  }
  return is_loadable ? host::alias(tensor) : host::padded_copy(tensor);
}

// 16-bit rows that the kernels can load; if no tensor is given, none is returned.
Tensor loadable_tokens(const Tensor& tensor) {
  if (!tensor.is_given() || tensor.strides()[1] == 1) return loadable_rows(tensor);
  return host::contiguous(tensor);
}

// One conversion of rows to e4m3 with scales.
class QuantizeRows {
 public:
  QuantizeRows(const Kernel& kernel, int64_t rows, int64_t columns, host::Workspace& workspace)
      : kernel_(kernel),
        values_(workspace.add<uint8_t>(rows * columns)),
        scales_(workspace.add<float>(rows * columns / kScaleBlock)) {
    params_.rows = static_cast<int32_t>(rows);
    params_.columns = static_cast<int32_t>(columns);
  }

  // overlaps_previous_grid: the previous kernel of the list does not write x.
  void add(CallList& list, const host::Workspace& workspace, const void* x, int64_t stride,
           bool overlaps_previous_grid) {
    params_.x = x;
    params_.x_stride = stride;
    params_.values = workspace.address<void>(values_);
    params_.scales = workspace.address<float>(scales_);
    params_.overlaps_previous_grid = overlaps_previous_grid ? 1 : 0;
    const int64_t blocks = int64_t{params_.rows} * params_.columns / kScaleBlock;
    list.add(kernel_, ceil_div(blocks, kernel_.threads / 16), &params_);
  }

  // Valid after add.
  const void* values() const { return params_.values; }
  const float* scales() const { return params_.scales; }

 private:
  const Kernel& kernel_;
  int64_t values_;
  int64_t scales_;
  QuantizeParams params_{};
};

}  // namespace

ScaledGemm make_scaled_gemm(Product product, host::KernelRequest request, int64_t slots, int64_t experts,
                            const Tensor& weights, const Tensor& scales) {
  // The gated product's kernel has no 16-bit tensor: the table lists it as bf16.
  if (product != Product::kScaled) request.dtype = Dtype::kBFloat16;
  const int64_t* sizes = weights.sizes();
  ScaledGemm made(product, select_product({request, product, WeightLayout::kNk, slots, experts, sizes[1], sizes[2]}));
  GemmParams& gemm = made.params.gemm;
  gemm.b = weights.data();
  gemm.b_stride = weights.strides()[1] / 2;
  gemm.b_expert_stride = weights.strides()[0] / 2;
  gemm.n = static_cast<int32_t>(sizes[1]);
  gemm.k = static_cast<int32_t>(sizes[2] / 2);
  made.params.b_scale = static_cast<const float*>(scales.data());
  return made;
}

void set_scaled_operands(ScaledGemmParams& params, const Rows& values, const float* scales, void* d, int64_t d_stride) {
  set_operands(params.gemm, values, d, d_stride);
  params.gemm.a_stride /= 2;
  params.a_scale = scales;
}

void scaled_cuda(const ScaledArguments& arguments, const LayerOutputs& outputs) {
  const host::Device& gpu = host::device(outputs.out.device_index());
  const host::KernelRequest request = host::make_request(gpu, arguments.common.dtype);
  const LayerShape& shape = arguments.shape;
  const bool quantizes = !arguments.x_scale.is_given();
  const Tensor x = quantizes ? loadable_tokens(arguments.x) : loadable_e4m3(arguments.x);
  const Tensor w13 = loadable_e4m3(arguments.w13), w2 = loadable_e4m3(arguments.w2);
  const Tensor shared = loadable_tokens(arguments.shared);

  host::Workspace workspace;
  SortKernels sort(arguments.routing, request, workspace);
  const Product gated_product = outputs.is_for_backward() ? Product::kScaledGatedKept : Product::kScaledGated;
  ScaledGemm gated = make_scaled_gemm(gated_product, request, shape.slots, shape.experts, w13, arguments.w13_scale);
  ScaledGemm down = make_scaled_gemm(Product::kScaled, request, shape.slots, shape.experts, w2, arguments.w2_scale);
  const Kernel& combine = select_op(request, Op::kCombine);
  const bool has_few_rows = is_for_few_rows(gated.kernel());  // then h is float32

  const host::CudaCall call(gpu);
  std::optional<SortedWorkspace> local_sorted;
  if (!outputs.is_for_backward()) local_sorted.emplace(workspace, shape.slots, shape.experts);
  std::optional<QuantizeRows> of_x, of_h;
  if (quantizes) of_x.emplace(select_op(request, Op::kQuantize), shape.tokens, shape.hidden, workspace);
  if (has_few_rows) {
    of_h.emplace(select_op(request, Op::kQuantizeFloat), shape.slots, shape.intermediate, workspace);
  }
  const int64_t h_numbers = shape.slots * shape.intermediate;
  const int64_t h = has_few_rows ? workspace.add<float>(h_numbers) : workspace.add<uint8_t>(h_numbers);
  const int64_t h_scales = workspace.add<float>(has_few_rows ? 0 : h_numbers / kScaleBlock);
  const int64_t down_rows = workspace.add<uint16_t>(shape.slots * shape.hidden);
  workspace.allocate(call);
  const Sorted sorted = local_sorted.has_value() ? local_sorted->pointers(workspace) : pointers_of(outputs.sorted);
  void* const h_rows = workspace.address<void>(h);
  void* const y = workspace.address<void>(down_rows);

  CallList list(call);
  sort.add(list, sorted, workspace);

  Rows x_rows = token_rows(x, sorted.row_slots);
  const float* x_scales = static_cast<const float*>(data_or_null(arguments.x_scale));
  if (of_x.has_value()) {
    of_x->add(list, workspace, x.data(), x.strides()[0], /*overlaps_previous_grid=*/true);
    x_rows = {of_x->values(), shape.hidden, shape.hidden, sorted.row_slots};
    x_scales = of_x->scales();
  }
  set_layer(gated.params.gemm, shape, sorted);
  set_scaled_operands(gated.params, x_rows, x_scales, h_rows,
                      has_few_rows ? shape.intermediate : shape.intermediate / 2);
  gated.params.d_scale = workspace.address<float>(h_scales);
  gated.params.gemm.preactivation = data_or_null(outputs.preactivation);
  if (has_few_rows) set_early_ids(gated.params.gemm, arguments.routing, gpu);
  gated.add(list);

  const void* h_values = h_rows;
  const float* scales_of_h = gated.params.d_scale;
  if (of_h.has_value()) {
    of_h->add(list, workspace, h_rows, shape.intermediate, /*overlaps_previous_grid=*/false);
    h_values = of_h->values();
    scales_of_h = of_h->scales();
  }
  set_layer(down.params.gemm, shape, sorted);
  set_scaled_operands(down.params, sorted_rows(h_values, shape.intermediate), scales_of_h, y, shape.hidden);
  down.params.overlaps_previous_grid = 1;
  down.add(list);

  const CombineParams combined = combine_params(shape, sorted, shared, outputs.out, y);
  add_combine(list, combine, combined);
  list.run();
  host::set_last_kernel(gated.kernel().symbol);
}

}  // namespace flashmoe::moe
