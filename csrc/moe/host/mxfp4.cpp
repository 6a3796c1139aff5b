// The layer with 4-bit weights on a GPU, launched as one list.

#include "host/copies.h"
#include "host/last_kernel.h"
#include "moe/host/backends.h"
#include "moe/host/launch.h"

namespace flashmoe::moe {
namespace {

constexpr int32_t kPackedCapability = 90;  // the only one with kernels for packed weights
constexpr int64_t kElementBytes = 2;       // per element that the kernels' loads count, four weights

// Codes whose rows are 16-byte aligned, or a copy of them.
Tensor loadable_codes(const Tensor& tensor) {
  bool is_loadable = reinterpret_cast<uintptr_t>(tensor.data()) % 16 == 0;
  for (int axis = 0; axis < 2; ++axis) {
    const int64_t stride = tensor.strides()[axis];
    is_loadable = is_loadable && (tensor.sizes()[axis] <= 1 || (stride > 0 && stride % 16 == 0));
  }
  return is_loadable ? host::alias(tensor) : host::padded_copy(tensor);
}

// Packed weights, contiguous and 16-byte aligned, or a copy of them.
Tensor loadable_packed(const Tensor& tensor) {
  const bool is_aligned = reinterpret_cast<uintptr_t>(tensor.data()) % 16 == 0;
  return is_aligned ? host::alias(tensor) : host::padded_copy(tensor);
}

Mxfp4Gemm make_packed_gemm(Product product, const host::KernelRequest& request, const LayerShape& shape,
                           const Tensor& weights) {
  const int64_t n = kMxfp4PackedRows * weights.sizes()[1], k = kMxfp4PackedK * weights.sizes()[2];
  Mxfp4Gemm made(product, select_product({request, product, WeightLayout::kNk, shape.slots, shape.experts, n, k}));
  made.params.gemm.b = weights.data();
  made.params.gemm.n = static_cast<int32_t>(n);
  made.params.gemm.k = static_cast<int32_t>(k);
  return made;
}

Mxfp4Gemm make_mxfp4_gemm(Product product, const host::KernelRequest& request, const LayerShape& shape,
                          const Tensor& weights, const Tensor& scales) {
  const int64_t n = weights.sizes()[1], k = 2 * weights.sizes()[2];
  Mxfp4Gemm made(product, select_product({request, product, WeightLayout::kNk, shape.slots, shape.experts, n, k}));
  GemmParams& gemm = made.params.gemm;
  gemm.b = weights.data();
  gemm.b_stride = weights.strides()[1] / kElementBytes;
  gemm.b_expert_stride = weights.strides()[0] / kElementBytes;
  gemm.n = static_cast<int32_t>(n);
  gemm.k = static_cast<int32_t>(k);
  made.params.b_scale = static_cast<const uint8_t*>(scales.data());
  return made;
}

}  // namespace

void mxfp4_cuda(const Mxfp4Arguments& arguments, const Tensor& out) {
  const host::Device& gpu = host::device(out.device_index());
  const host::KernelRequest request = host::make_request(gpu, arguments.common.dtype);
  if (arguments.is_packed && request.capability != kPackedCapability) {
    host::violate(
        "moe.mxfp4_packed_gpu",
        {{"gpu", gpu.name}, {"major", int64_t{request.capability / 10}}, {"minor", int64_t{request.capability % 10}}});
  }
  const LayerShape& shape = arguments.shape;
  const Tensor x = loadable_rows(arguments.x), b13 = loadable_rows(arguments.b13), b2 = loadable_rows(arguments.b2);
  const Tensor shared = loadable_rows(arguments.shared);
  const auto loadable = arguments.is_packed ? &loadable_packed : &loadable_codes;
  const Tensor w13 = loadable(arguments.w13), w2 = loadable(arguments.w2);

  host::Workspace workspace;
  SortKernels sort(arguments.routing, request, workspace);
  Mxfp4Gemm gated = arguments.is_packed
                        ? make_packed_gemm(Product::kMxfp4PackedGated, request, shape, w13)
                        : make_mxfp4_gemm(Product::kMxfp4Gated, request, shape, w13, arguments.w13_scale);
  Mxfp4Gemm down = arguments.is_packed ? make_packed_gemm(Product::kMxfp4Packed, request, shape, w2)
                                       : make_mxfp4_gemm(Product::kMxfp4, request, shape, w2, arguments.w2_scale);
  const Kernel& combine = select_op(request, Op::kCombine);

  const host::CudaCall call(gpu);
  const SortedWorkspace local_sorted(workspace, shape.slots, shape.experts);
  const int64_t hidden_rows = workspace.add<uint16_t>(shape.slots * shape.intermediate);
  const int64_t down_rows = workspace.add<uint16_t>(shape.slots * shape.hidden);  // first used for x's gathered rows
  workspace.allocate(call);
  const Sorted sorted = local_sorted.pointers(workspace);
  void* const h = workspace.address<void>(hidden_rows);
  void* const y = workspace.address<void>(down_rows);

  CallList list(call);
  sort.add(list, sorted, workspace);

  Rows rows = token_rows(x, sorted.row_slots);
  GatherParams gathered{x.data(),
                        y,
                        sorted.slot_rows,
                        rows.stride,
                        static_cast<int32_t>(shape.tokens),
                        static_cast<int32_t>(shape.top_k),
                        static_cast<int32_t>(shape.hidden)};
  if (arguments.is_packed && !packed_gathers(gated.kernel().block_m)) {
    const Kernel& gather = select_op(request, Op::kGather);
    list.add(gather, ceil_div(shape.tokens, gather.threads / 32), &gathered);
    rows = sorted_rows(y, shape.hidden);
  }
  set_layer(gated.params.gemm, shape, sorted);
  set_operands(gated.params.gemm, rows, h, shape.intermediate);
  gated.params.gemm.bias = data_or_null(b13);
  if (is_for_few_rows(gated.kernel())) set_early_ids(gated.params.gemm, arguments.routing, gpu);
  gated.add(list);

  set_layer(down.params.gemm, shape, sorted);
  set_operands(down.params.gemm, sorted_rows(h, shape.intermediate), y, shape.hidden);
  down.params.gemm.bias = data_or_null(b2);
  down.add(list);

  const CombineParams combined = combine_params(shape, sorted, shared, out, y);
  add_combine(list, combine, combined);
  list.run();
  host::set_last_kernel(gated.kernel().symbol);
}

}  // namespace flashmoe::moe
