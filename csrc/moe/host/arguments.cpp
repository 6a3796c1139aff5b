#include "moe/host/arguments.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "host/copies.h"
#include "moe/params/scaled.h"

namespace flashmoe {
namespace moe {
namespace {

using host::describe_device;
using host::describe_dtype;
using host::describe_sizes;
using host::violate;

constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();
constexpr int64_t kGpuMultiple = 8;  // of every size that a product sums over or gives: 16 bytes

int32_t float32() { return aoti_torch_dtype_float32(); }
int32_t int32() { return aoti_torch_dtype_int32(); }
int32_t e4m3() { return aoti_torch_dtype_float8_e4m3fn(); }

bool is_cuda(const Common& common) { return common.device_type == aoti_torch_device_type_cuda(); }

std::string quoted(const char* name, int32_t dtype) { return std::string(name) + "'s " + describe_dtype(dtype); }

// Tensors that must be there. What is not taken from the stack is not freed, so all is taken before the first complaint.
class Needed {
 public:
  explicit Needed(host::Arguments& given) : given_(given) {}

  Tensor take(const char* name) {
    Tensor tensor = given_.tensor();
    if (missing_ == nullptr && (!tensor.is_given() || !tensor.is_defined())) missing_ = name;
    return tensor;
  }
  void check() const {
    if (missing_ != nullptr) violate("tensor.missing", {{"name", missing_}});
  }

 private:
  host::Arguments& given_;
  const char* missing_ = nullptr;
};

// The tensor that a call's others must be on one device with; its name is for messages.
struct First {
  const Tensor& tensor;
  const char* name;
};

void check_device(const Tensor& tensor, const char* name, const First& first) {
  if (tensor.device_type() == first.tensor.device_type() && tensor.device_index() == first.tensor.device_index())
    return;
  violate("moe.devices", {{"first", first.name},
                          {"first_device", describe_device(first.tensor)},
                          {"name", name},
                          {"device", describe_device(tensor)}});
}

[[noreturn]] void refuse_dtype(const Tensor& tensor, const char* name, const std::string& needed) {
  violate("moe.dtype", {{"name", name}, {"found", describe_dtype(tensor.dtype())}, {"needed", needed}});
}

// On the first tensor's device and of `dtype`, which is the first one's where `is_like_first`.
void check_kind(const Tensor& tensor, const char* name, const First& first, int32_t dtype, bool is_like_first = false) {
  check_device(tensor, name, first);
  if (tensor.dtype() == dtype) return;
  refuse_dtype(tensor, name, is_like_first ? quoted(first.name, dtype) : describe_dtype(dtype));
}

// `axes`: what the dimensions are, as "[tokens, hidden]".
void check_rank(const Tensor& tensor, const char* name, int64_t rank, const char* axes) {
  if (tensor.dim() != rank) {
    violate("moe.rank", {{"name", name}, {"sizes", describe_sizes(tensor)}, {"axes", axes}});
  }
  if (std::any_of(tensor.sizes(), tensor.sizes() + rank, [](int64_t size) { return size > kMaxSize; })) {
    violate("tensor.size", {{"name", name}, {"sizes", describe_sizes(tensor)}});
  }
}

void check_sizes(const Tensor& tensor, const char* name, std::initializer_list<int64_t> sizes, const char* axes) {
  const auto rank = static_cast<int64_t>(sizes.size());
  if (tensor.dim() == rank && std::equal(sizes.begin(), sizes.end(), tensor.sizes())) return;
  violate("moe.shape", {{"name", name},
                        {"sizes", describe_sizes(tensor)},
                        {"needed", describe_sizes(sizes.begin(), rank)},
                        {"axes", axes}});
}

void check_size(int64_t value, const char* what, int64_t most = kMaxSize) {
  if (value < 1 || value > most) violate("moe.size", {{"what", what}, {"value", value}, {"most", most}});
}

// `rule` says what to do with more.
void check_experts(int64_t experts, const char* rule) {
  if (experts < 1 || experts > kMaxExperts) violate(rule, {{"experts", experts}, {"most", kMaxExperts}});
}

void check_gpu_multiple(const Common& common, int64_t value, const char* what, int64_t multiple = kGpuMultiple) {
  if (!is_cuda(common) || value % multiple == 0) return;
  violate("moe.gpu_multiple", {{"what", what}, {"value", value}, {"multiple", multiple}});
}

void check_slots(int64_t tokens, int64_t top_k) {
  if (tokens * top_k <= kMaxSize) return;
  violate("moe.slots", {{"tokens", tokens}, {"top_k", top_k}, {"slots", tokens * top_k}});
}

// What the others follow. `has_float32`: on a GPU too.
Common common_of(const Tensor& tensor, const char* name, bool has_float32) {
  Common common;
  common.device_type = tensor.device_type();
  common.device_index = tensor.device_index();
  common.torch_dtype = tensor.dtype();
  if (tensor.description() != nullptr && common.device_type < 0) {
    violate("moe.device", {{"device", describe_device(tensor)}});
  }
  has_float32 = has_float32 || !is_cuda(common);
  const std::optional<Dtype> dtype = host::dtype_of(common.torch_dtype);
  if (!dtype.has_value() || (*dtype == Dtype::kFloat32 && !has_float32)) {
    violate("moe.kernel_dtype", {{"name", name},
                                 {"found", describe_dtype(common.torch_dtype)},
                                 {"device", describe_device(tensor)},
                                 {"supported", has_float32 ? "float16, bfloat16, float32" : "float16, bfloat16"}});
  }
  common.dtype = *dtype;
  return common;
}

// Nothing is copied of a tensor without memory, in whose place a tracer asks.
void make_contiguous(Tensor& tensor) {
  if (tensor.is_given() && tensor.description() == nullptr) tensor = host::contiguous(tensor);
}

void make_rows_contiguous(Tensor& tensor) {
  if (!tensor.is_given()) return;
  const int64_t last = tensor.dim() - 1;
  if (tensor.sizes()[last] > 1 && tensor.strides()[last] != 1) make_contiguous(tensor);
}

// Of [experts, ., .]: one of the last two dimensions.
void make_weights_contiguous(Tensor& tensor) {
  const int64_t* sizes = tensor.sizes();
  const int64_t* strides = tensor.strides();
  if (strides[2] != 1 && sizes[2] != 1 && strides[1] != 1 && sizes[1] != 1) make_contiguous(tensor);
}

// The position of `word` among those that the argument may be.
template <std::size_t kCount>
int32_t index_of(const std::string& word, const char* name, const char* const (&words)[kCount]) {
  const auto* const found = std::find(std::begin(words), std::end(words), word);
  if (found != std::end(words)) return static_cast<int32_t>(found - std::begin(words));
  std::string supported = words[0];
  for (std::size_t i = 1; i < kCount; ++i) supported += std::string(", ") + words[i];
  violate("moe.word", {{"name", name}, {"found", word}, {"supported", supported}});
}

// In the order of the enumerations. Words are taken from the stack before any is judged: what is not taken is not freed.
Activation activation_of(const std::string& word) {
  static constexpr const char* kWords[] = {"swiglu", "geglu", "geglu_tanh", "reglu", "clamped_swiglu"};
  return static_cast<Activation>(index_of(word, "activation", kWords));
}

bool is_interleaved_of(const std::string& word) {
  static constexpr const char* kWords[] = {"concat", "interleaved"};
  return index_of(word, "layout", kWords) == 1;
}

Scoring scoring_of(const std::string& word) {
  static constexpr const char* kWords[] = {"softmax", "topk_softmax", "sigmoid"};
  return static_cast<Scoring>(index_of(word, "scoring", kWords));
}

void check_sort(SortArguments& arguments, const First& first) {
  check_device(arguments.ids, "topk_ids", first);
  check_device(arguments.topk_weights, "topk_weights", first);
  if (arguments.ids.dtype() != int32() && arguments.ids.dtype() != aoti_torch_dtype_int64()) {
    refuse_dtype(arguments.ids, "topk_ids", "int32 or int64");
  }
  const int64_t rank = arguments.ids.dim();
  const int64_t* sizes = arguments.ids.sizes();
  if (arguments.topk_weights.dim() != rank || !std::equal(sizes, sizes + rank, arguments.topk_weights.sizes())) {
    violate("moe.topk_shapes",
            {{"weights", describe_sizes(arguments.topk_weights)}, {"ids", describe_sizes(arguments.ids)}});
  }
  arguments.slots = 1;
  for (int64_t axis = 0; axis < rank; ++axis) arguments.slots *= sizes[axis];
  check_slots(arguments.slots, 1);
  check_experts(arguments.experts, "moe.experts");
  arguments.ids_end = arguments.experts;
  if (arguments.expert_map.is_given()) {
    check_kind(arguments.expert_map, "expert_map", first, int32());
    check_rank(arguments.expert_map, "expert_map", 1, "[experts of the model]");
    arguments.ids_end = arguments.expert_map.sizes()[0];
  }
  make_contiguous(arguments.expert_map);
  make_contiguous(arguments.ids);
  make_contiguous(arguments.topk_weights);
}

// w13 and w2 against x and each other; fills in the sizes.
void check_weights(LayerShape& shape, const Common& common, const Tensor& x, Tensor& w13, Tensor& w2) {
  const bool transposed = shape.is_transposed;
  const char* w13_axes = transposed ? "[experts, hidden, 2 * intermediate]" : "[experts, 2 * intermediate, hidden]";
  const char* w2_axes = transposed ? "[experts, intermediate, hidden]" : "[experts, hidden, intermediate]";
  check_rank(x, "x", 2, "[tokens, hidden]");
  check_rank(w13, "w13", 3, w13_axes);
  check_rank(w2, "w2", 3, w2_axes);
  shape.tokens = x.sizes()[0];
  shape.hidden = x.sizes()[1];
  shape.experts = w13.sizes()[0];
  shape.intermediate = w2.sizes()[transposed ? 1 : 2];
  check_experts(shape.experts, "moe.experts");
  check_size(shape.hidden, "the hidden size");
  check_size(shape.intermediate, "the intermediate size", kMaxSize / 2);
  // `hidden_axis`: of weights that are not transposed.
  const auto check = [&](const Tensor& weights, const char* name, int64_t rows, int64_t columns, int hidden_axis,
                         const char* axes) {
    const int64_t* sizes = weights.sizes();
    if (transposed) {
      std::swap(rows, columns);
      hidden_axis = 3 - hidden_axis;
    }
    if (sizes[hidden_axis] != shape.hidden && sizes[3 - hidden_axis] == shape.hidden) {
      const int64_t needed[] = {shape.experts, rows, columns};
      violate(
          "moe.transposed",
          {{"name", name}, {"sizes", describe_sizes(weights)}, {"needed", describe_sizes(needed, 3)}, {"axes", axes}});
    }
    check_sizes(weights, name, {shape.experts, rows, columns}, axes);
  };
  check(w2, "w2", shape.hidden, shape.intermediate, 1, w2_axes);
  check(w13, "w13", 2 * shape.intermediate, shape.hidden, 2, w13_axes);
  check_gpu_multiple(common, shape.hidden, "the hidden size");
  check_gpu_multiple(common, shape.intermediate, "the intermediate size");
  make_weights_contiguous(w13);
  make_weights_contiguous(w2);
}

void check_biases(const LayerShape& shape, const Common& common, const First& x, Tensor& b13, Tensor& b2) {
  const auto check = [&](Tensor& bias, const char* name, int64_t columns, const char* axes) {
    if (!bias.is_given()) return;
    check_kind(bias, name, x, common.torch_dtype, /*is_like_first=*/true);
    check_sizes(bias, name, {shape.experts, columns}, axes);
    make_contiguous(bias);
  };
  check(b13, "b13", 2 * shape.intermediate, "[experts, 2 * intermediate]");
  check(b2, "b2", shape.hidden, "[experts, hidden]");
}

// What stands beside the weights, once check_weights has filled in the sizes.
void check_tokens(LayerArguments& arguments, const First& x) {
  LayerShape& shape = arguments.shape;
  SortArguments& routing = arguments.routing;
  if (arguments.shared.is_given()) {
    check_sizes(arguments.shared, "shared", {shape.tokens, shape.hidden}, "[tokens, hidden]");
  }
  check_rank(routing.ids, "topk_ids", 2, "[tokens, top_k]");
  shape.top_k = routing.ids.sizes()[1];
  check_sizes(routing.ids, "topk_ids", {shape.tokens, shape.top_k}, "[tokens, top_k]");
  if (shape.top_k < 1 || shape.top_k > kMaxTopK) {
    violate("moe.top_k", {{"top_k", shape.top_k}, {"most", kMaxTopK}});
  }
  check_slots(shape.tokens, shape.top_k);
  shape.slots = shape.tokens * shape.top_k;
  routing.experts = shape.experts;
  check_sort(routing, x);
  make_rows_contiguous(arguments.x);
  make_rows_contiguous(arguments.shared);
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

SortArguments take_sort(host::Arguments& given) {
  SortArguments arguments;
  Needed needed(given);
  arguments.ids = needed.take("topk_ids");
  arguments.topk_weights = needed.take("topk_weights");
  arguments.expert_map = given.optional_tensor();
  arguments.experts = given.integer();
  needed.check();
  arguments.common = common_of(arguments.topk_weights, "topk_weights", /*has_float32=*/true);
  check_sort(arguments, {arguments.topk_weights, "topk_weights"});
  return arguments;
}

LayerArguments take_layer(host::Arguments& given) {
  LayerArguments arguments;
  Needed needed(given);
  SortArguments& routing = arguments.routing;
  arguments.x = needed.take("x");
  arguments.w13 = needed.take("w13");
  arguments.w2 = needed.take("w2");
  routing.topk_weights = needed.take("topk_weights");
  routing.ids = needed.take("topk_ids");
  arguments.b13 = given.optional_tensor();
  arguments.b2 = given.optional_tensor();
  routing.expert_map = given.optional_tensor();
  arguments.shared = given.optional_tensor();
  const std::string activation = given.text(), layout = given.text();
  arguments.shape.is_transposed = given.flag();
  arguments.shape.activation = activation_of(activation);
  arguments.shape.is_interleaved = is_interleaved_of(layout);
  needed.check();
  const First x{arguments.x, "x"};
  const Common& common = arguments.common = common_of(arguments.x, "x", /*has_float32=*/false);
  for (const auto& [tensor, name] :
       {std::pair(&arguments.w13, "w13"), std::pair(&arguments.w2, "w2"), std::pair(&arguments.shared, "shared")}) {
    if (tensor->is_given()) check_kind(*tensor, name, x, common.torch_dtype, /*is_like_first=*/true);
  }
  if (routing.topk_weights.dtype() != float32() && routing.topk_weights.dtype() != common.torch_dtype) {
    refuse_dtype(routing.topk_weights, "topk_weights", "float32 or " + quoted("x", common.torch_dtype));
  }
  check_weights(arguments.shape, common, arguments.x, arguments.w13, arguments.w2);
  check_biases(arguments.shape, common, x, arguments.b13, arguments.b2);
  check_tokens(arguments, x);
  return arguments;
}

void check_out(const LayerArguments& arguments, const Tensor& out) {
  if (!out.is_given() || !out.is_defined()) violate("tensor.missing", {{"name", "out"}});
  check_kind(out, "out", {arguments.x, "x"}, arguments.common.torch_dtype);
  check_sizes(out, "out", {arguments.shape.tokens, arguments.shape.hidden}, "[tokens, hidden]");
  const int64_t* strides = out.strides();
  const bool has_rows = (strides[1] == 1 || arguments.shape.hidden == 1) && strides[0] >= arguments.shape.hidden;
  const bool has_memory = out.description() == nullptr;
  constexpr int64_t kAlign = host::kRowAlignElements;
  const bool is_aligned =
      strides[0] % kAlign == 0 && (!has_memory || reinterpret_cast<uintptr_t>(out.data()) % (2 * kAlign) == 0);
  if (arguments.shape.tokens > 0 && (!has_rows || (is_cuda(arguments.common) && !is_aligned))) {
    violate("moe.out_strides", {{"strides", host::describe_strides(out)}});
  }
  // Written when all but `shared` has been read; each element of that is read just before its address is written.
  const Tensor& shared = arguments.shared;
  if (has_memory && shared.is_given() && !host::is_same_memory(out, shared) && host::may_overlap(out, shared)) {
    violate("moe.out_overlap");
  }
}

LayerBackwardArguments take_layer_backward(host::Arguments& given) {
  LayerBackwardArguments arguments;
  Needed needed(given);
  SortOutputs& sorted = arguments.sorted;
  LayerShape& shape = arguments.shape;
  arguments.dout = needed.take("grad_out");
  arguments.x = needed.take("x");
  arguments.w13 = needed.take("w13");
  arguments.w2 = needed.take("w2");
  arguments.b13 = given.optional_tensor();
  arguments.b2 = given.optional_tensor();
  arguments.preactivation = needed.take("preactivation");
  sorted.expert_offsets = needed.take("expert_offsets");
  sorted.row_slots = needed.take("row_slots");
  sorted.slot_rows = needed.take("slot_rows");
  sorted.row_weights = needed.take("row_weights");
  const std::string activation = given.text(), layout = given.text();
  shape.is_transposed = given.flag();
  arguments.needs = given.integer();
  shape.activation = activation_of(activation);
  shape.is_interleaved = is_interleaved_of(layout);
  needed.check();
  const First x{arguments.x, "x"};
  const Common& common = arguments.common = common_of(arguments.x, "x", /*has_float32=*/false);
  for (const auto& [tensor, name] :
       {std::pair(&arguments.dout, "grad_out"), std::pair(&arguments.w13, "w13"), std::pair(&arguments.w2, "w2"),
        std::pair(&arguments.preactivation, "preactivation")}) {
    check_kind(*tensor, name, x, common.torch_dtype, /*is_like_first=*/true);
  }
  check_weights(shape, common, arguments.x, arguments.w13, arguments.w2);
  check_biases(shape, common, x, arguments.b13, arguments.b2);
  check_sizes(arguments.dout, "grad_out", {shape.tokens, shape.hidden}, "[tokens, hidden]");
  check_rank(sorted.row_slots, "row_slots", 1, "[slots]");
  shape.slots = sorted.row_slots.sizes()[0];
  shape.top_k = shape.tokens > 0 ? shape.slots / shape.tokens : 1;
  if (shape.slots != shape.tokens * shape.top_k || (shape.tokens > 0 && shape.top_k < 1)) {
    violate("moe.saved_slots", {{"slots", shape.slots}, {"tokens", shape.tokens}});
  }
  const auto check = [&](Tensor& tensor, const char* name, int64_t size, int32_t dtype) {
    check_kind(tensor, name, x, dtype);
    check_sizes(tensor, name, {size}, "of the forward pass with keep=True");
    make_contiguous(tensor);
  };
  check(sorted.expert_offsets, "expert_offsets", shape.experts + 1, int32());
  check(sorted.row_slots, "row_slots", shape.slots, int32());
  check(sorted.slot_rows, "slot_rows", shape.slots, int32());
  check(sorted.row_weights, "row_weights", shape.slots, float32());
  check_sizes(arguments.preactivation, "preactivation", {shape.slots, 2 * shape.intermediate},
              "[slots, 2 * intermediate]");
  make_rows_contiguous(arguments.x);
  make_rows_contiguous(arguments.dout);
  make_contiguous(arguments.preactivation);
  return arguments;
}

ScaledArguments take_scaled(host::Arguments& given) {
  ScaledArguments arguments;
  Needed needed(given);
  SortArguments& routing = arguments.routing;
  LayerShape& shape = arguments.shape;
  arguments.x = needed.take("x");
  arguments.w13 = needed.take("w13");
  arguments.w2 = needed.take("w2");
  arguments.w13_scale = needed.take("w13_scale");
  arguments.w2_scale = needed.take("w2_scale");
  routing.topk_weights = needed.take("topk_weights");
  routing.ids = needed.take("topk_ids");
  arguments.x_scale = given.optional_tensor();
  routing.expert_map = given.optional_tensor();
  arguments.shared = given.optional_tensor();
  shape.activation = activation_of(given.text());
  needed.check();
  const First x{arguments.x, "x"};
  for (const auto& [tensor, name] : {std::pair(&arguments.w13, "w13"), std::pair(&arguments.w2, "w2")}) {
    check_device(*tensor, name, x);
    if (tensor->dtype() != e4m3()) {
      violate("moe.scaled_weights", {{"name", name}, {"found", describe_dtype(tensor->dtype())}});
    }
  }
  const bool is_scaled = arguments.x.dtype() == e4m3();
  const int32_t dtype = is_scaled ? aoti_torch_dtype_bfloat16() : arguments.x.dtype();
  if (dtype != aoti_torch_dtype_bfloat16() && dtype != aoti_torch_dtype_float16()) {
    violate("moe.scaled_x", {{"found", describe_dtype(dtype)}});
  }
  arguments.common = {*host::dtype_of(dtype), dtype, arguments.x.device_type(), arguments.x.device_index()};
  if (is_scaled && !arguments.x_scale.is_given()) violate("moe.no_x_scale");
  if (!is_scaled && arguments.x_scale.is_given()) violate("moe.x_scale", {{"found", describe_dtype(dtype)}});
  if (arguments.shared.is_given()) check_kind(arguments.shared, "shared", x, dtype);
  if (!host::dtype_of(routing.topk_weights.dtype()).has_value()) {
    refuse_dtype(routing.topk_weights, "topk_weights", "float32, float16 or bfloat16");
  }
  check_weights(shape, arguments.common, arguments.x, arguments.w13, arguments.w2);
  const auto check = [&](Tensor& scales, const char* name, std::initializer_list<int64_t> sizes, const char* axes) {
    check_kind(scales, name, x, float32());
    check_sizes(scales, name, sizes, axes);
    make_contiguous(scales);
  };
  const auto blocks = [](int64_t size) { return (size + kScaleBlock - 1) / kScaleBlock; };
  const int64_t hidden = blocks(shape.hidden), inner = blocks(shape.intermediate);
  check(arguments.w13_scale, "w13_scale", {shape.experts, blocks(2 * shape.intermediate), hidden},
        "[experts, ceil(2 * intermediate / 128), ceil(hidden / 128)]");
  check(arguments.w2_scale, "w2_scale", {shape.experts, hidden, inner},
        "[experts, ceil(hidden / 128), ceil(intermediate / 128)]");
  if (is_scaled) check(arguments.x_scale, "x_scale", {shape.tokens, hidden}, "[tokens, ceil(hidden / 128)]");
  check_tokens(arguments, x);
  return arguments;
}

void check_blocks(const LayerShape& shape) {
  for (const auto& [size, what] :
       {std::pair(shape.hidden, "the hidden size"), std::pair(shape.intermediate, "the intermediate size")}) {
    if (size % kScaleBlock != 0)
      violate("moe.scaled_multiple", {{"what", what}, {"value", size}, {"multiple", kScaleBlock}});
  }
}

RouteArguments take_route(host::Arguments& given) {
  RouteArguments arguments;
  Needed needed(given);
  arguments.logits = needed.take("logits");
  arguments.top_k = given.integer();
  const std::string scoring = given.text();
  arguments.bias = given.optional_tensor();
  const int64_t groups = arguments.groups = given.integer();
  const int64_t topk_groups = arguments.topk_groups = given.integer();
  arguments.renormalize = given.flag();
  arguments.scale = given.number();
  arguments.scoring = scoring_of(scoring);
  needed.check();
  const First logits{arguments.logits, "logits"};
  arguments.common = common_of(arguments.logits, "logits", /*has_float32=*/true);
  if (!(arguments.scale >= -std::numeric_limits<float>::max() &&
        arguments.scale <= std::numeric_limits<float>::max())) {
    violate("moe.scale", {{"scale", arguments.scale}});
  }
  check_rank(arguments.logits, "logits", 2, "[tokens, experts]");
  arguments.tokens = arguments.logits.sizes()[0];
  arguments.experts = arguments.logits.sizes()[1];
  check_experts(arguments.experts, "moe.route_experts");
  if (arguments.bias.is_given()) {
    check_kind(arguments.bias, "bias", logits, float32());
    check_sizes(arguments.bias, "bias", {arguments.experts}, "[experts]");
  }
  if (groups < 1 || groups > kMaxGroups || arguments.experts % groups != 0) {
    violate("moe.groups", {{"groups", groups}, {"experts", arguments.experts}, {"most", kMaxGroups}});
  }
  if (topk_groups < 1 || topk_groups > groups) {
    violate("moe.topk_groups", {{"topk_groups", topk_groups}, {"groups", groups}});
  }
  const int64_t eligible = arguments.experts / groups * topk_groups;
  if (arguments.top_k < 1 || arguments.top_k > eligible || arguments.top_k > kMaxTopK) {
    violate("moe.k", {{"k", arguments.top_k}, {"most", kMaxTopK}, {"eligible", eligible}});
  }
  check_slots(arguments.tokens, arguments.top_k);
  make_contiguous(arguments.bias);
  make_rows_contiguous(arguments.logits);
  return arguments;
}

namespace {

Common check_grouped_kinds(const Tensor& a, const Tensor& b, const Tensor& offsets) {
  const Common common = common_of(a, "a", /*has_float32=*/false);
  check_kind(b, "b", {a, "a"}, common.torch_dtype, /*is_like_first=*/true);
  check_kind(offsets, "offsets", {a, "a"}, int32());
  return common;
}

void check_grouped_sizes(const Common& common, int64_t experts, int64_t n, int64_t k) {
  check_experts(experts, "moe.grouped_experts");
  check_size(k, "k");
  check_size(n, "n");
  check_gpu_multiple(common, k, "k");
  check_gpu_multiple(common, n, "n");
}

}  // namespace

GroupedArguments take_grouped(host::Arguments& given) {
  GroupedArguments arguments;
  Needed needed(given);
  Tensor &a = arguments.a, &b = arguments.b_owner;
  a = needed.take("a");
  b = needed.take("b");
  arguments.offsets = needed.take("offsets");
  needed.check();
  arguments.common = check_grouped_kinds(a, b, arguments.offsets);
  check_rank(a, "a", 2, "[rows, k]");
  check_rank(b, "b", 3, "[experts, k, n]");
  arguments.rows = a.sizes()[0];
  const int64_t experts = b.sizes()[0], n = b.sizes()[2];
  check_sizes(b, "b", {experts, a.sizes()[1], n}, "[experts, k, n]");
  check_grouped_sizes(arguments.common, experts, n, b.sizes()[1]);
  check_sizes(arguments.offsets, "offsets", {experts}, "[experts]");
  make_rows_contiguous(a);
  make_weights_contiguous(b);
  make_contiguous(arguments.offsets);
  if (b.description() == nullptr) arguments.b = view_weights(b, /*is_transposed=*/true);
  return arguments;
}

GroupedGradientArguments take_grouped_gradient(host::Arguments& given) {
  GroupedGradientArguments arguments;
  Needed needed(given);
  Tensor &a = arguments.a, &b = arguments.b;
  a = needed.take("a");
  b = needed.take("b");
  arguments.offsets = needed.take("offsets");
  needed.check();
  arguments.common = check_grouped_kinds(a, b, arguments.offsets);
  check_rank(a, "a", 2, "[n, rows]");
  check_rank(b, "b", 2, "[rows, k]");
  check_rank(arguments.offsets, "offsets", 1, "[experts]");
  const int64_t sizes[] = {a.sizes()[1], a.sizes()[0]}, strides[] = {a.strides()[1], a.strides()[0]};
  arguments.rows = sizes[0];
  arguments.experts = arguments.offsets.sizes()[0];
  check_sizes(b, "b", {arguments.rows, b.sizes()[1]}, "[rows, k]");
  check_grouped_sizes(arguments.common, arguments.experts, sizes[1], b.sizes()[1]);
  if (a.description() == nullptr) a = host::view_of(a, sizes, strides);
  make_rows_contiguous(a);
  make_rows_contiguous(b);
  make_contiguous(arguments.offsets);
  return arguments;
}

Scalar scalar_of(const Tensor& tensor) {
  const int32_t dtype = tensor.dtype();
  if (dtype == aoti_torch_dtype_float32()) return Scalar::kFloat32;
  if (dtype == aoti_torch_dtype_float16()) return Scalar::kFloat16;
  if (dtype == aoti_torch_dtype_bfloat16()) return Scalar::kBFloat16;
  if (dtype == aoti_torch_dtype_int32()) return Scalar::kInt32;
  if (dtype == aoti_torch_dtype_int64()) return Scalar::kInt64;
  host::fail(host::ErrorCode::kInternal, "a tensor of ", describe_dtype(dtype), " where its dtype was checked before");
}

}  // namespace moe
}  // namespace flashmoe
