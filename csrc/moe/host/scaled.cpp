// The layer with e4m3 weights that have a scale for each 128 by 128 of them, on a GPU: the checks of its arguments, the list that is
// launched, and the operator. flashmoe/operators/moe/scaled.py states the rules, and computes the layer where there is no kernel.
#include "moe/host/scaled.h"

#include <initializer_list>
#include <utility>

#include "host/boxed.h"
#include "host/copies.h"
#include "host/last_kernel.h"
#include "moe/host/launch.h"
#include "moe/host/prepare.h"
#include "moe/host/tensor_maps.h"

namespace flashmoe {
namespace moe {
namespace {

using host::describe_device;
using host::describe_dtype;
using host::describe_sizes;
using host::ErrorCode;
using host::fail;

struct ScaledArguments {
  Dtype dtype = Dtype::kBFloat16;  // of the output
  int32_t torch_dtype = 0;
  LayerShape shape;
  Tensor x;          // [tokens, hidden], 16 bits or e4m3
  Tensor w13;        // [experts, 2 * intermediate, hidden] e4m3
  Tensor w2;         // [experts, hidden, intermediate] e4m3
  Tensor w13_scale;  // [experts, 2 * intermediate / 128, hidden / 128]
  Tensor w2_scale;   // [experts, hidden / 128, intermediate / 128]
  Tensor x_scale;    // [tokens, hidden / 128]; no handle: x has 16 bits
  Tensor shared;     // [tokens, hidden]; no handle: none
  SortArguments routing;
};

void check_tensor(const Tensor& tensor, const char* name, std::initializer_list<int64_t> sizes, int32_t dtype,
                  const Tensor& x) {
  if (tensor.get() == nullptr || !tensor.is_defined()) fail(ErrorCode::kArgument, name, " is None; a tensor is needed");
  if (tensor.device_type() != x.device_type() || tensor.device_index() != x.device_index()) {
    fail(ErrorCode::kDevice, "all tensors must be on one device; found x on ", describe_device(x), " and ", name,
         " on ", describe_device(tensor), "; move it with .to(x.device)");
  }
  if (tensor.dtype() != dtype) {
    fail(ErrorCode::kDtype, name, " is ", describe_dtype(tensor.dtype()), "; ", describe_dtype(dtype),
         " is needed; convert it with .to()");
  }
  const auto rank = static_cast<int64_t>(sizes.size());
  bool is_equal = tensor.dim() == rank;
  for (int64_t axis = 0; is_equal && axis < rank; ++axis) is_equal = tensor.sizes()[axis] == sizes.begin()[axis];
  if (!is_equal) {
    fail(ErrorCode::kShape, name, " has shape ", describe_sizes(tensor.sizes(), tensor.dim()), "; ",
         describe_sizes(sizes.begin(), rank), " is needed");
  }
}

void check_blocks(int64_t size, const char* what) {
  if (size >= kScaleBlock && size % kScaleBlock == 0) return;
  fail(ErrorCode::kShape, what, " is ", size, "; with float8_e4m3fn weights on a GPU it must be a multiple of ",
       kScaleBlock, "; pad the weights with zeros, or use CPU tensors");
}

void check(ScaledArguments& arguments) {
  const int32_t e4m3 = aoti_torch_dtype_float8_e4m3fn(), float32 = aoti_torch_dtype_float32();
  const Tensor& x = arguments.x;
  LayerShape& shape = arguments.shape;
  const bool is_scaled = x.dtype() == e4m3;
  arguments.torch_dtype = is_scaled ? aoti_torch_dtype_bfloat16() : x.dtype();
  const auto dtype = host::dtype_of(arguments.torch_dtype);
  if (!dtype.has_value() || *dtype == Dtype::kFloat32) {
    fail(ErrorCode::kDtype, "x is ", describe_dtype(x.dtype()),
         "; supported with float8_e4m3fn weights: float16, bfloat16, float8_e4m3fn; convert it with .to()");
  }
  arguments.dtype = *dtype;
  if (is_scaled != (arguments.x_scale.get() != nullptr)) {
    fail(ErrorCode::kArgument,
         is_scaled ? "x is float8_e4m3fn without x_scale" : "x_scale is given for an x in 16 bits",
         "; x_scale goes with x in float8_e4m3fn alone");
  }
  const Tensor& ids = arguments.routing.ids;
  if (x.dim() != 2 || arguments.w13.dim() != 3 || arguments.w2.dim() != 3 || ids.dim() != 2) {
    fail(ErrorCode::kShape, "x of 2, w13 and w2 of 3 and topk_ids of 2 dimensions are needed; found ", x.dim(), ", ",
         arguments.w13.dim(), ", ", arguments.w2.dim(), " and ", ids.dim());
  }
  shape.tokens = x.sizes()[0];
  shape.hidden = x.sizes()[1];
  shape.experts = arguments.w2.sizes()[0];
  shape.intermediate = arguments.w2.sizes()[2];
  shape.top_k = ids.sizes()[1];
  check_blocks(shape.hidden, "the hidden size");
  check_blocks(shape.intermediate, "the intermediate size");
  constexpr int64_t kMaxSize = 0x3fffffff;
  if (shape.top_k < 1 || shape.top_k > kMaxTopK || shape.intermediate > kMaxSize || shape.hidden > kMaxSize ||
      shape.tokens > 2 * kMaxSize / shape.top_k) {
    fail(ErrorCode::kShape, "topk_ids has shape ", describe_sizes(ids.sizes(), 2), "; supported: 1 to ", kMaxTopK,
         " experts of a token, and rows, hidden and intermediate sizes below 2^30; split the choices or tokens");
  }
  shape.slots = shape.tokens * shape.top_k;
  const int64_t hidden_blocks = shape.hidden / kScaleBlock, blocks = shape.intermediate / kScaleBlock;
  check_tensor(arguments.w13, "w13", {shape.experts, 2 * shape.intermediate, shape.hidden}, e4m3, x);
  check_tensor(arguments.w2, "w2", {shape.experts, shape.hidden, shape.intermediate}, e4m3, x);
  check_tensor(arguments.w13_scale, "w13_scale", {shape.experts, 2 * blocks, hidden_blocks}, float32, x);
  check_tensor(arguments.w2_scale, "w2_scale", {shape.experts, hidden_blocks, blocks}, float32, x);
  if (is_scaled) check_tensor(arguments.x_scale, "x_scale", {shape.tokens, hidden_blocks}, float32, x);
  if (arguments.shared.get() != nullptr) {
    check_tensor(arguments.shared, "shared", {shape.tokens, shape.hidden}, arguments.torch_dtype, x);
  }
  check_tensor(ids, "topk_ids", {shape.tokens, shape.top_k}, ids.dtype(), x);
  arguments.routing.experts = shape.experts;
  check_sort(arguments.routing);
}

// A tensor of e4m3 whose rows the kernels can load, or a copy of it: rows of whole 16-byte pieces, no dimension that repeats.
Tensor loadable_e4m3(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  bool is_loadable = reinterpret_cast<uintptr_t>(tensor.data()) % 16 == 0 && tensor.strides()[last] == 1;
  for (int64_t axis = 0; axis < last; ++axis) {
    const int64_t stride = tensor.strides()[axis];
    is_loadable = is_loadable && (tensor.sizes()[axis] <= 1 || (stride > 0 && stride % 16 == 0));
  }
  return is_loadable ? host::alias(tensor) : host::padded_copy(tensor);
}

// 16-bit rows that the kernels can load; no handle stays none.
Tensor loadable_tokens(const Tensor& tensor) {
  if (tensor.get() == nullptr || tensor.strides()[1] == 1) return loadable_rows(tensor);
  return host::contiguous(tensor);
}

// One product of e4m3 operands.
class ScaledPart {
 public:
  // The kernel of the gated product has no tensor in 16 bits: it is in the table as bf16.
  ScaledPart(Product product, host::KernelRequest request, const LayerShape& shape, const Tensor& weights,
             const Tensor& scales)
      : product_(product) {
    if (product == Product::kScaledGated) request.dtype = Dtype::kBFloat16;
    const int64_t* sizes = weights.sizes();
    kernel_ = &select_product({request, product, Memory::kNk, shape.slots, shape.experts, sizes[1], sizes[2]});
    GemmParams& gemm = params.gemm;
    gemm.b = weights.data();
    gemm.b_stride = weights.strides()[1] / 2;
    gemm.b_expert_stride = weights.strides()[0] / 2;
    gemm.n = static_cast<int32_t>(sizes[1]);
    gemm.k = static_cast<int32_t>(sizes[2] / 2);
    gemm.experts = static_cast<int32_t>(shape.experts);
    gemm.slots = static_cast<int32_t>(shape.slots);
    gemm.tokens = static_cast<int32_t>(shape.tokens);
    gemm.top_k = static_cast<int32_t>(shape.top_k);
    gemm.activation = shape.activation;
    params.b_scale = static_cast<const float*>(scales.data());
  }

  ScaledGemmParams params{};

  const Kernel& kernel() const { return *kernel_; }

  void set_rows(const void* values, int64_t stride, const float* scales, const Sorted& sorted) {
    params.gemm.a = values;
    params.gemm.a_stride = stride / 2;
    params.gemm.expert_offsets = sorted.expert_offsets;
    params.a_scale = scales;
  }

  // Not dependent: the kernel waits for all that is in front of it.
  void add(host::LaunchList& list, bool is_dependent, const host::CudaCall& call,
           std::optional<host::TileCounter>& counter) {
    const GemmParams& gemm = params.gemm;
    const int64_t row_tiles = ceil_div(gemm.slots, kernel_->block_m) + std::min(gemm.experts, gemm.slots);
    const int64_t tiles = row_tiles * ceil_div(gemm.n, kernel_->block_n);
    const int64_t grid = host::grid_for(*kernel_, tiles, call.gpu);
    if (tiles > grid) {
      if (!counter.has_value()) counter = host::tile_counter(call);
      params.gemm.tile_counter = counter->address;
    }
    if (kernel_->num_tensor_maps > 0) make_tensor_maps(product_, params, *kernel_, maps_.data());
    list.add({kernel_, grid, &params, maps_.data(), is_dependent});
  }

 private:
  Product product_;
  const Kernel* kernel_;
  std::array<CUtensorMap, 3> maps_{};
};

// One conversion of rows to e4m3 with scales.
class QuantizePart {
 public:
  QuantizePart(const Kernel& kernel, int64_t rows, int64_t columns, host::Workspace& workspace)
      : kernel_(kernel),
        values_(workspace.add<uint8_t>(rows * columns)),
        scales_(workspace.add<float>(rows * columns / kScaleBlock)) {
    params_.rows = static_cast<int32_t>(rows);
    params_.columns = static_cast<int32_t>(columns);
  }

  // is_early: what is in front in the list does not write x.
  void add(host::LaunchList& list, const host::Workspace& workspace, const void* x, int64_t stride, bool is_early) {
    params_.x = x;
    params_.x_stride = stride;
    params_.values = workspace.address<void>(values_);
    params_.scales = workspace.address<float>(scales_);
    params_.is_early = is_early ? 1 : 0;
    const int64_t blocks = int64_t{params_.rows} * params_.columns / kScaleBlock;
    list.add({&kernel_, ceil_div(blocks, kernel_.threads / 16), &params_, nullptr, /*is_dependent=*/true});
  }

  // After add.
  const void* values() const { return params_.values; }
  const float* scales() const { return params_.scales; }

 private:
  const Kernel& kernel_;
  int64_t values_;
  int64_t scales_;
  QuantizeParams params_{};
};

// The choices of at most so many slots, as in set_gated: the weights of few rows are requested by them.
void set_choices(GemmParams& gemm, const SortArguments& routing, int64_t slots) {
  constexpr int64_t kMostEarlySlots = 32;
  if (slots > kMostEarlySlots || routing.expert_map.get() != nullptr) return;
  gemm.ids = routing.ids.data();
  gemm.id_bytes = scalar_of(routing.ids) == Scalar::kInt64 ? 8 : 4;
}

void run(const ScaledArguments& arguments, const Tensor& out) {
  const host::Device& gpu = host::device(out.device_index());
  const host::KernelRequest request = host::make_request(gpu, arguments.dtype);
  const LayerShape& shape = arguments.shape;
  const bool quantizes = arguments.x_scale.get() == nullptr;
  const Tensor x = quantizes ? loadable_tokens(arguments.x) : loadable_e4m3(arguments.x);
  const Tensor w13 = loadable_e4m3(arguments.w13), w2 = loadable_e4m3(arguments.w2);
  const Tensor w13_scale = host::contiguous(arguments.w13_scale), w2_scale = host::contiguous(arguments.w2_scale);
  const Tensor x_scale = quantizes ? Tensor() : host::contiguous(arguments.x_scale);
  const Tensor shared = loadable_tokens(arguments.shared);

  host::Workspace workspace;
  SortPart sort(arguments.routing, request, workspace);
  ScaledPart gated(Product::kScaledGated, request, shape, w13, w13_scale);
  ScaledPart down(Product::kScaled, request, shape, w2, w2_scale);
  const Kernel& combine = select_step(request, Step::kCombine);
  const bool has_few_rows = is_for_few_rows(gated.kernel());  // then h comes as float32

  const host::CudaCall call(gpu);
  const SortedRoom room(workspace, shape.slots, shape.experts);
  std::optional<QuantizePart> of_x, of_h;
  if (quantizes) of_x.emplace(select_step(request, Step::kQuantize), shape.tokens, shape.hidden, workspace);
  if (has_few_rows) {
    of_h.emplace(select_step(request, Step::kQuantizeFloat), shape.slots, shape.intermediate, workspace);
  }
  const int64_t h_numbers = shape.slots * shape.intermediate;
  const int64_t h = has_few_rows ? workspace.add<float>(h_numbers) : workspace.add<uint8_t>(h_numbers);
  const int64_t h_scales = workspace.add<float>(has_few_rows ? 0 : h_numbers / kScaleBlock);
  const int64_t down_rows = workspace.add<uint16_t>(shape.slots * shape.hidden);
  workspace.allocate(call);
  const Sorted sorted = room.pointers(workspace);

  host::LaunchList list;
  std::optional<host::TileCounter> counter;
  sort.add(list, sorted, workspace);

  if (of_x.has_value()) {
    of_x->add(list, workspace, x.data(), x.strides()[0], /*is_early=*/true);
    gated.set_rows(of_x->values(), shape.hidden, of_x->scales(), sorted);
  } else {
    gated.set_rows(x.data(), x.strides()[0], static_cast<const float*>(x_scale.data()), sorted);
  }
  gated.params.gemm.a_slots = sorted.row_slots;
  gated.params.gemm.d = workspace.address<void>(h);
  gated.params.gemm.d_stride = has_few_rows ? shape.intermediate : shape.intermediate / 2;
  gated.params.d_scale = workspace.address<float>(h_scales);
  if (has_few_rows) set_choices(gated.params.gemm, arguments.routing, shape.slots);
  gated.add(list, /*is_dependent=*/true, call, counter);

  if (of_h.has_value()) {
    of_h->add(list, workspace, gated.params.gemm.d, shape.intermediate, /*is_early=*/false);
    down.set_rows(of_h->values(), shape.intermediate, of_h->scales(), sorted);
  } else {
    down.set_rows(gated.params.gemm.d, shape.intermediate, gated.params.d_scale, sorted);
  }
  down.params.gemm.d = workspace.address<void>(down_rows);
  down.params.gemm.d_stride = shape.hidden;
  // As ProductPart::may_follow: few rows read the sort's results before they wait.
  down.add(list, /*is_dependent=*/has_few_rows || !is_for_few_rows(down.kernel()), call, counter);

  const CombineParams combined = combine_params(shape, sorted, shared, out, down.params.gemm.d);
  const int64_t grid = combine_grid(combine, shape.tokens, shape.hidden, gpu.num_multiprocessors);
  list.add({&combine, grid, &combined, nullptr, /*is_dependent=*/true});
  list.run(call);
  host::set_last_kernel(gated.kernel().symbol);
}

}  // namespace

void boxed_scaled(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("_fused_moe_scaled", num_arguments, 11, num_outputs, 1);
  ScaledArguments arguments;
  arguments.x = host::take_tensor(stack[0]);
  arguments.w13 = host::take_tensor(stack[1]);
  arguments.w2 = host::take_tensor(stack[2]);
  arguments.w13_scale = host::take_tensor(stack[3]);
  arguments.w2_scale = host::take_tensor(stack[4]);
  arguments.routing.topk_weights = host::take_tensor(stack[5]);
  arguments.routing.ids = host::take_tensor(stack[6]);
  arguments.x_scale = host::take_optional_tensor(stack[7]);
  arguments.routing.expert_map = host::take_optional_tensor(stack[8]);
  arguments.shared = host::take_optional_tensor(stack[9]);
  const auto activation = host::take_text(stack[10]);
  arguments.shape.activation = activation_of(activation);
  check(arguments);
  const LayerShape& shape = arguments.shape;
  Tensor out = host::empty({shape.tokens, shape.hidden}, arguments.torch_dtype, arguments.x.device_type(),
                           arguments.x.device_index());
  host::set_last_kernel("");
  if (shape.slots > 0) run(arguments, out);
  stack[0] = host::give(std::move(out));
}

}  // namespace moe
}  // namespace flashmoe

STABLE_TORCH_LIBRARY_FRAGMENT(flashmoe, library) {
  library.def(
      "_fused_moe_scaled(Tensor x, Tensor w13, Tensor w2, Tensor w13_scale, Tensor w2_scale, Tensor topk_weights, "
      "Tensor "
      "topk_ids, Tensor? x_scale, Tensor? expert_map, Tensor? shared, str activation) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CUDA, library) { library.impl("_fused_moe_scaled", &flashmoe::moe::boxed_scaled); }
