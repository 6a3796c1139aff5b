#include "moe/host/arguments.h"

#include <initializer_list>
#include <limits>
#include <optional>

#include "host/copies.h"

namespace flashmoe {
namespace moe {
namespace {

using host::describe_device;
using host::describe_dtype;
using host::describe_sizes;
using host::ErrorCode;
using host::fail;

constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();
constexpr int64_t kGpuMultiple = 8;  // of every size that a product sums over or gives: 16 bytes

std::string sizes_of(const Tensor& tensor) { return describe_sizes(tensor.sizes(), tensor.dim()); }

bool is_given(const Tensor& tensor) { return tensor.get() != nullptr; }

bool is_cuda(const Common& common) { return common.device_type == aoti_torch_device_type_cuda(); }

void check_defined(const Tensor& tensor, const char* name) {
  if (!is_given(tensor) || !tensor.is_defined()) {
    fail(ErrorCode::kArgument, name, " is None; a tensor is needed");
  }
}

void check_device(const Tensor& tensor, const char* name, const Tensor& first, const char* first_name) {
  if (tensor.device_type() == first.device_type() && tensor.device_index() == first.device_index()) return;
  fail(ErrorCode::kDevice, "all tensors must be on one device; found ", first_name, " on ", describe_device(first),
       " and ", name, " on ", describe_device(tensor), "; move it with .to(", first_name, ".device)");
}

void check_dtype(const Tensor& tensor, const char* name, int32_t dtype, const char* like) {
  if (tensor.dtype() == dtype) return;
  fail(ErrorCode::kDtype, name, " is ", describe_dtype(tensor.dtype()), "; ", describe_dtype(dtype), " is needed", like,
       "; convert it with .to()");
}

// `axes`: what the dimensions are, as "[tokens, hidden]".
void check_rank(const Tensor& tensor, const char* name, int64_t rank, const char* axes) {
  if (tensor.dim() != rank) {
    fail(ErrorCode::kShape, name, " has shape ", sizes_of(tensor), "; ", axes, " is needed; reshape it");
  }
  for (int64_t axis = 0; axis < rank; ++axis) {
    if (tensor.sizes()[axis] > kMaxSize) {
      fail(ErrorCode::kShape, name, " has shape ", sizes_of(tensor), "; each size must be below 2^31");
    }
  }
}

void check_sizes(const Tensor& tensor, const char* name, std::initializer_list<int64_t> sizes, const char* axes) {
  const auto rank = static_cast<int64_t>(sizes.size());
  bool is_equal = tensor.dim() == rank;
  for (int64_t axis = 0; is_equal && axis < rank; ++axis) is_equal = tensor.sizes()[axis] == sizes.begin()[axis];
  if (is_equal) return;
  fail(ErrorCode::kShape, name, " has shape ", sizes_of(tensor), "; ", describe_sizes(sizes.begin(), rank), " ", axes,
       " is needed");
}

void check_between(int64_t value, const char* what, int64_t most, const char* next_step) {
  if (value >= 1 && value <= most) return;
  fail(ErrorCode::kShape, what, " is ", value, "; supported: 1 to ", most, "; ", next_step);
}

void check_gpu_multiple(int64_t value, const char* what) {
  if (value % kGpuMultiple == 0) return;
  fail(ErrorCode::kShape, what, " is ", value, "; on a GPU it must be a multiple of ", kGpuMultiple,
       "; pad the weights and x with zeros, or use CPU tensors");
}

void check_slots(int64_t tokens, int64_t top_k) {
  if (tokens * top_k > kMaxSize) {
    fail(ErrorCode::kShape, tokens, " tokens of ", top_k, " experts each are ", tokens * top_k,
         " rows; below 2^31 is needed: split the tokens");
  }
}

// Fills `common` from the tensor whose dtype the others follow.
void take_common(Common& common, const Tensor& tensor, const char* name) {
  common.device_type = tensor.device_type();
  common.device_index = tensor.device_index();
  common.torch_dtype = tensor.dtype();
  const std::optional<Dtype> dtype = host::dtype_of(common.torch_dtype);
  if (!dtype.has_value()) {
    fail(ErrorCode::kDtype, name, " is ", describe_dtype(common.torch_dtype), "; supported: float16, bfloat16",
         is_cuda(common) ? "" : ", float32", "; convert the tensors");
  }
  common.dtype = *dtype;
}

void refuse_float32_on_gpu(const Common& common, const char* name) {
  if (common.dtype == Dtype::kFloat32 && is_cuda(common)) {
    fail(ErrorCode::kDtype, name,
         " is float32, which has no CUDA kernel; supported on CUDA: float16, bfloat16; convert the tensors, or call "
         "under "
         "torch.autocast");
  }
}

void make_contiguous(Tensor& tensor) {
  if (is_given(tensor)) tensor = host::contiguous(tensor);
}

void make_rows_contiguous(Tensor& tensor) {
  if (!is_given(tensor)) return;
  const int64_t last = tensor.dim() - 1;
  if (tensor.sizes()[last] > 1 && tensor.strides()[last] != 1) tensor = host::contiguous(tensor);
}

// Of [experts, ., .]: one of the last two dimensions.
void make_weights_contiguous(Tensor& tensor) {
  const int64_t* sizes = tensor.sizes();
  const int64_t* strides = tensor.strides();
  const bool last = strides[2] == 1 || sizes[2] == 1;
  const bool second = strides[1] == 1 || sizes[1] == 1;
  if (!last && !second) tensor = host::contiguous(tensor);
}

Scalar ids_scalar(const Tensor& ids) {
  const int32_t dtype = ids.dtype();
  if (dtype == aoti_torch_dtype_int32()) return Scalar::kInt32;
  if (dtype == aoti_torch_dtype_int64()) return Scalar::kInt64;
  fail(ErrorCode::kDtype, "topk_ids is ", describe_dtype(dtype), "; int32 or int64 is needed; convert it with .to()");
}

void check_expert_map(SortArguments& arguments) {
  arguments.ids_end = arguments.experts;
  if (!is_given(arguments.expert_map)) return;
  check_device(arguments.expert_map, "expert_map", arguments.ids, "topk_ids");
  check_dtype(arguments.expert_map, "expert_map", aoti_torch_dtype_int32(), "");
  check_rank(arguments.expert_map, "expert_map", 1, "[experts of the model]");
  arguments.ids_end = arguments.expert_map.sizes()[0];
  make_contiguous(arguments.expert_map);
}

// w13 and w2 against x and each other; fills in the sizes.
void check_weights(LayerShape& shape, const Common& common, const Tensor& x, Tensor& w13, Tensor& w2) {
  check_rank(x, "x", 2, "[tokens, hidden]");
  const bool turned = shape.is_transposed;
  check_rank(w13, "w13", 3, turned ? "[experts, hidden, 2 * intermediate]" : "[experts, 2 * intermediate, hidden]");
  check_rank(w2, "w2", 3, turned ? "[experts, intermediate, hidden]" : "[experts, hidden, intermediate]");
  shape.tokens = x.sizes()[0];
  shape.hidden = x.sizes()[1];
  shape.experts = w13.sizes()[0];
  shape.intermediate = w2.sizes()[turned ? 1 : 2];
  check_between(shape.experts, "the number of experts", kMaxExperts, "divide them over several layers by expert_map");
  check_between(shape.hidden, "the hidden size", kMaxSize, "check x");
  check_between(shape.intermediate, "the intermediate size", kMaxSize / 2, "check w2");
  const int64_t both = 2 * shape.intermediate;
  if (turned) {
    check_sizes(w13, "w13", {shape.experts, shape.hidden, both}, "[experts, hidden, 2 * intermediate]");
    check_sizes(w2, "w2", {shape.experts, shape.intermediate, shape.hidden}, "[experts, intermediate, hidden]");
  } else {
    check_sizes(w13, "w13", {shape.experts, both, shape.hidden}, "[experts, 2 * intermediate, hidden]");
    check_sizes(w2, "w2", {shape.experts, shape.hidden, shape.intermediate}, "[experts, hidden, intermediate]");
  }
  if (is_cuda(common)) {
    check_gpu_multiple(shape.hidden, "the hidden size");
    check_gpu_multiple(shape.intermediate, "the intermediate size");
  }
  make_weights_contiguous(w13);
  make_weights_contiguous(w2);
}

void check_biases(const LayerShape& shape, const Common& common, const Tensor& x, Tensor& b13, Tensor& b2) {
  const auto check = [&](Tensor& bias, const char* name, int64_t columns, const char* axes) {
    if (!is_given(bias)) return;
    check_device(bias, name, x, "x");
    check_dtype(bias, name, common.torch_dtype, " as in x");
    check_sizes(bias, name, {shape.experts, columns}, axes);
    make_contiguous(bias);
  };
  check(b13, "b13", 2 * shape.intermediate, "[experts, 2 * intermediate]");
  check(b2, "b2", shape.hidden, "[experts, hidden]");
}

void check_sorted(const SortOutputs& sorted, const LayerShape& shape, const Tensor& x) {
  const auto check = [&](const Tensor& tensor, const char* name, int64_t size, int32_t dtype) {
    check_defined(tensor, name);
    check_device(tensor, name, x, "x");
    check_dtype(tensor, name, dtype, "");
    check_sizes(tensor, name, {size}, "of the forward pass with keep=True");
  };
  check(sorted.expert_offsets, "expert_offsets", shape.experts + 1, aoti_torch_dtype_int32());
  check(sorted.row_slots, "row_slots", shape.slots, aoti_torch_dtype_int32());
  check(sorted.slot_rows, "slot_rows", shape.slots, aoti_torch_dtype_int32());
  check(sorted.row_weights, "row_weights", shape.slots, aoti_torch_dtype_float32());
}

void make_sorted_contiguous(SortOutputs& sorted) {
  make_contiguous(sorted.expert_offsets);
  make_contiguous(sorted.row_slots);
  make_contiguous(sorted.slot_rows);
  make_contiguous(sorted.row_weights);
}

}  // namespace

ExpertWeights view_weights(const Tensor& tensor, bool is_transposed) {
  const int64_t* sizes = tensor.sizes();
  const int64_t* strides = tensor.strides();
  // A dimension of one element may have any stride: it counts as contiguous where the other one is not.
  const bool last = strides[2] == 1 || (sizes[2] == 1 && strides[1] != 1);
  const bool second = strides[1] == 1 || (sizes[1] == 1 && !last);
  ExpertWeights view;
  view.data = tensor.data();
  view.experts = sizes[0];
  view.n = sizes[1];
  view.k = sizes[2];
  view.stride_expert = strides[0];
  view.stride_n = second ? 1 : strides[1];
  view.stride_k = last ? 1 : strides[2];
  return is_transposed ? swapped(view) : view;
}

void check_sort(SortArguments& arguments) {
  check_defined(arguments.ids, "topk_ids");
  check_defined(arguments.topk_weights, "topk_weights");
  take_common(arguments.common, arguments.topk_weights, "topk_weights");
  check_device(arguments.ids, "topk_ids", arguments.topk_weights, "topk_weights");
  ids_scalar(arguments.ids);
  const int64_t rank = arguments.ids.dim();
  bool is_equal = arguments.topk_weights.dim() == rank;
  int64_t slots = 1;
  for (int64_t axis = 0; axis < rank; ++axis) {
    const int64_t size = arguments.ids.sizes()[axis];
    is_equal = is_equal && arguments.topk_weights.sizes()[axis] == size;
    slots *= size;
  }
  if (!is_equal) {
    fail(ErrorCode::kShape, "topk_weights has shape ", sizes_of(arguments.topk_weights), " and topk_ids ",
         sizes_of(arguments.ids), "; one shape is needed: [tokens, top_k]");
  }
  if (slots > kMaxSize) {
    fail(ErrorCode::kShape, "topk_ids has shape ", sizes_of(arguments.ids), ", ", slots,
         " elements; below 2^31 is needed: split the tokens");
  }
  arguments.slots = slots;
  check_between(arguments.experts, "the number of experts", kMaxExperts,
                "divide them over several layers by expert_map");
  check_expert_map(arguments);
  make_contiguous(arguments.ids);
  make_contiguous(arguments.topk_weights);
}

void check_layer(LayerArguments& arguments) {
  check_defined(arguments.x, "x");
  check_defined(arguments.w13, "w13");
  check_defined(arguments.w2, "w2");
  take_common(arguments.common, arguments.x, "x");
  refuse_float32_on_gpu(arguments.common, "x");
  const Common& common = arguments.common;
  SortArguments& routing = arguments.routing;
  check_defined(routing.topk_weights, "topk_weights");
  check_defined(routing.ids, "topk_ids");
  for (const auto& [tensor, name] :
       {std::pair(&arguments.w13, "w13"), std::pair(&arguments.w2, "w2"), std::pair(&arguments.shared, "shared")}) {
    if (!is_given(*tensor)) continue;
    check_device(*tensor, name, arguments.x, "x");
    check_dtype(*tensor, name, common.torch_dtype, " as in x");
  }
  check_device(routing.topk_weights, "topk_weights", arguments.x, "x");
  if (routing.topk_weights.dtype() != aoti_torch_dtype_float32() &&
      routing.topk_weights.dtype() != common.torch_dtype) {
    fail(ErrorCode::kDtype, "topk_weights is ", describe_dtype(routing.topk_weights.dtype()), "; float32 or x's ",
         describe_dtype(common.torch_dtype), " is needed; convert it with .to()");
  }
  LayerShape& shape = arguments.shape;
  check_weights(shape, common, arguments.x, arguments.w13, arguments.w2);
  check_biases(shape, common, arguments.x, arguments.b13, arguments.b2);
  if (is_given(arguments.shared)) {
    check_sizes(arguments.shared, "shared", {shape.tokens, shape.hidden}, "[tokens, hidden]");
  }
  check_rank(routing.ids, "topk_ids", 2, "[tokens, top_k]");
  shape.top_k = routing.ids.sizes()[1];
  check_sizes(routing.ids, "topk_ids", {shape.tokens, shape.top_k}, "[tokens, top_k]");
  check_between(shape.top_k, "the number of experts of a token", kMaxTopK, "split the choices over several calls");
  check_slots(shape.tokens, shape.top_k);
  shape.slots = shape.tokens * shape.top_k;
  routing.experts = shape.experts;
  check_sort(routing);
  make_rows_contiguous(arguments.x);
  make_rows_contiguous(arguments.shared);
}

void check_out(const LayerArguments& arguments, const Tensor& out) {
  check_defined(out, "out");
  check_device(out, "out", arguments.x, "x");
  check_dtype(out, "out", arguments.common.torch_dtype, " as in x");
  check_sizes(out, "out", {arguments.shape.tokens, arguments.shape.hidden}, "[tokens, hidden]");
  const int64_t* strides = out.strides();
  constexpr int64_t kAlign = host::kRowAlignElements;
  const bool has_rows = strides[1] == 1 && strides[0] >= arguments.shape.hidden;
  const bool is_aligned = strides[0] % kAlign == 0 && reinterpret_cast<uintptr_t>(out.data()) % (2 * kAlign) == 0;
  if (arguments.shape.tokens > 0 && (!has_rows || (is_cuda(arguments.common) && !is_aligned))) {
    fail(ErrorCode::kShape, "out has strides ", describe_sizes(strides, 2),
         "; rows that are contiguous, apart and, on a GPU, 16-byte aligned are needed; pass a contiguous tensor");
  }
  // Written when all but `shared` has been read; of that each element is read just before its place is written.
  const Tensor& shared = arguments.shared;
  if (is_given(shared) && !host::is_same_memory(out, shared) && host::may_overlap(out, shared)) {
    fail(ErrorCode::kShape,
         "out shares memory with a part of shared, which would change while it is read; give all of shared as out, "
         "or a tensor of its own");
  }
}

void check_layer_backward(LayerBackwardArguments& arguments) {
  check_defined(arguments.dout, "grad_out");
  check_defined(arguments.x, "x");
  check_defined(arguments.w13, "w13");
  check_defined(arguments.w2, "w2");
  check_defined(arguments.preactivation, "preactivation");
  check_defined(arguments.sorted.row_slots, "row_slots");
  take_common(arguments.common, arguments.x, "x");
  refuse_float32_on_gpu(arguments.common, "x");
  for (const auto& [tensor, name] :
       {std::pair(&arguments.dout, "grad_out"), std::pair(&arguments.w13, "w13"), std::pair(&arguments.w2, "w2"),
        std::pair(&arguments.preactivation, "preactivation")}) {
    check_device(*tensor, name, arguments.x, "x");
    check_dtype(*tensor, name, arguments.common.torch_dtype, " as in x");
  }
  LayerShape& shape = arguments.shape;
  check_weights(shape, arguments.common, arguments.x, arguments.w13, arguments.w2);
  check_biases(shape, arguments.common, arguments.x, arguments.b13, arguments.b2);
  check_sizes(arguments.dout, "grad_out", {shape.tokens, shape.hidden}, "[tokens, hidden]");
  check_rank(arguments.sorted.row_slots, "row_slots", 1, "[slots]");
  shape.slots = arguments.sorted.row_slots.sizes()[0];
  shape.top_k = shape.tokens > 0 ? shape.slots / shape.tokens : 1;
  if (shape.slots != shape.tokens * shape.top_k || (shape.tokens > 0 && shape.top_k < 1)) {
    fail(ErrorCode::kShape, "row_slots has ", shape.slots, " elements, which is no multiple of the ", shape.tokens,
         " tokens; what the forward pass returned with keep=True is needed");
  }
  check_sorted(arguments.sorted, shape, arguments.x);
  check_sizes(arguments.preactivation, "preactivation", {shape.slots, 2 * shape.intermediate},
              "[slots, 2 * intermediate]");
  make_rows_contiguous(arguments.x);
  make_rows_contiguous(arguments.dout);
  make_contiguous(arguments.preactivation);
  make_sorted_contiguous(arguments.sorted);
}

void check_route(RouteArguments& arguments) {
  check_defined(arguments.logits, "logits");
  take_common(arguments.common, arguments.logits, "logits");
  check_rank(arguments.logits, "logits", 2, "[tokens, experts]");
  arguments.tokens = arguments.logits.sizes()[0];
  arguments.experts = arguments.logits.sizes()[1];
  check_between(arguments.experts, "the number of experts", kMaxExperts, "use torch.topk");
  if (is_given(arguments.bias)) {
    check_device(arguments.bias, "bias", arguments.logits, "logits");
    check_dtype(arguments.bias, "bias", aoti_torch_dtype_float32(), "");
    check_sizes(arguments.bias, "bias", {arguments.experts}, "[experts]");
    make_contiguous(arguments.bias);
  }
  const int64_t groups = arguments.groups;
  const int64_t kept = arguments.topk_groups;
  if (groups < 1 || groups > kMaxGroups || arguments.experts % groups != 0) {
    fail(ErrorCode::kArgument, "groups is ", groups, "; a divisor of the ", arguments.experts,
         " experts is needed, at most ", kMaxGroups);
  }
  if (kept < 1 || kept > groups) {
    fail(ErrorCode::kArgument, "topk_groups is ", kept, "; 1 to the number of groups, ", groups, ", is needed");
  }
  const int64_t eligible = arguments.experts / groups * kept;
  if (arguments.top_k < 1 || arguments.top_k > eligible || arguments.top_k > kMaxTopK) {
    fail(ErrorCode::kArgument, "k is ", arguments.top_k, "; supported: 1 to ", kMaxTopK, ", and at most the ", eligible,
         " experts that can be chosen");
  }
  check_slots(arguments.tokens, arguments.top_k);
  make_rows_contiguous(arguments.logits);
}

void check_grouped(GroupedArguments& arguments, Tensor b) {
  check_defined(arguments.a, "a");
  check_defined(b, "b");
  check_defined(arguments.offsets, "offsets");
  take_common(arguments.common, arguments.a, "a");
  refuse_float32_on_gpu(arguments.common, "a");
  check_device(b, "b", arguments.a, "a");
  check_device(arguments.offsets, "offsets", arguments.a, "a");
  check_dtype(b, "b", arguments.common.torch_dtype, " as in a");
  check_dtype(arguments.offsets, "offsets", aoti_torch_dtype_int32(), "");
  check_rank(arguments.a, "a", 2, "[rows, k]");
  check_rank(b, "b", 3, "[experts, k, n]");
  arguments.rows = arguments.a.sizes()[0];
  check_sizes(b, "b", {b.sizes()[0], arguments.a.sizes()[1], b.sizes()[2]}, "[experts, k, n]");
  check_between(b.sizes()[0], "the number of experts", kMaxExperts, "divide them over several calls");
  check_between(b.sizes()[1], "k", kMaxSize, "check a");
  check_between(b.sizes()[2], "n", kMaxSize, "check b");
  check_sizes(arguments.offsets, "offsets", {b.sizes()[0]}, "[experts]");
  if (is_cuda(arguments.common)) {
    check_gpu_multiple(b.sizes()[1], "k");
    check_gpu_multiple(b.sizes()[2], "n");
  }
  make_rows_contiguous(arguments.a);
  make_weights_contiguous(b);
  make_contiguous(arguments.offsets);
  arguments.b = view_weights(b, /*is_transposed=*/true);
  arguments.b_owner = std::move(b);
}

void check_grouped_gradient(GroupedGradientArguments& arguments) {
  check_defined(arguments.a, "a");
  check_defined(arguments.b, "b");
  check_defined(arguments.offsets, "offsets");
  take_common(arguments.common, arguments.a, "a");
  refuse_float32_on_gpu(arguments.common, "a");
  check_device(arguments.b, "b", arguments.a, "a");
  check_device(arguments.offsets, "offsets", arguments.a, "a");
  check_dtype(arguments.b, "b", arguments.common.torch_dtype, " as in a");
  check_dtype(arguments.offsets, "offsets", aoti_torch_dtype_int32(), "");
  check_rank(arguments.a, "a", 2, "[n, rows]");
  check_rank(arguments.b, "b", 2, "[rows, k]");
  check_rank(arguments.offsets, "offsets", 1, "[experts]");
  const int64_t sizes[] = {arguments.a.sizes()[1], arguments.a.sizes()[0]};
  const int64_t strides[] = {arguments.a.strides()[1], arguments.a.strides()[0]};
  arguments.a = host::view_of(arguments.a, sizes, strides);
  arguments.rows = sizes[0];
  arguments.experts = arguments.offsets.sizes()[0];
  check_sizes(arguments.b, "b", {arguments.rows, arguments.b.sizes()[1]}, "[rows, k]");
  check_between(arguments.experts, "the number of experts", kMaxExperts, "divide them over several calls");
  check_between(sizes[1], "n", kMaxSize, "check a");
  check_between(arguments.b.sizes()[1], "k", kMaxSize, "check b");
  if (is_cuda(arguments.common)) {
    check_gpu_multiple(sizes[1], "n");
    check_gpu_multiple(arguments.b.sizes()[1], "k");
  }
  make_rows_contiguous(arguments.a);
  make_rows_contiguous(arguments.b);
  make_contiguous(arguments.offsets);
}

Activation activation_of(const std::string& word) {
  if (word == "swiglu") return Activation::kSwiglu;
  if (word == "geglu") return Activation::kGeglu;
  if (word == "geglu_tanh") return Activation::kGegluTanh;
  if (word == "reglu") return Activation::kReglu;
  if (word == "clamped_swiglu") return Activation::kClampedSwiglu;
  fail(ErrorCode::kArgument, "activation is '", word,
       "'; supported: swiglu, geglu, geglu_tanh, reglu, clamped_swiglu; use one of them");
}

Scoring scoring_of(const std::string& word) {
  if (word == "softmax") return Scoring::kSoftmax;
  if (word == "topk_softmax") return Scoring::kTopkSoftmax;
  if (word == "sigmoid") return Scoring::kSigmoid;
  fail(ErrorCode::kArgument, "scoring is '", word, "'; supported: softmax, topk_softmax, sigmoid; use one of them");
}

bool is_interleaved_of(const std::string& layout_word) {
  if (layout_word == "concat") return false;
  if (layout_word == "interleaved") return true;
  fail(ErrorCode::kArgument, "layout is '", layout_word, "'; supported: concat, interleaved; use one of them");
}

Scalar scalar_of(const Tensor& tensor) {
  const int32_t dtype = tensor.dtype();
  if (dtype == aoti_torch_dtype_float32()) return Scalar::kFloat32;
  if (dtype == aoti_torch_dtype_float16()) return Scalar::kFloat16;
  if (dtype == aoti_torch_dtype_bfloat16()) return Scalar::kBFloat16;
  if (dtype == aoti_torch_dtype_int32()) return Scalar::kInt32;
  if (dtype == aoti_torch_dtype_int64()) return Scalar::kInt64;
  fail(ErrorCode::kInternal, "a tensor of ", describe_dtype(dtype), " where its dtype was checked before");
}

}  // namespace moe
}  // namespace flashmoe
