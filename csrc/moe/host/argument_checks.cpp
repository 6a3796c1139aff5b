#include "moe/host/argument_checks.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "host/check_values.h"
#include "host/copies.h"

namespace flashmoe::moe {

using host::describe_device;

void check_device(const Tensor& tensor, const char* name, const First& first) {
  if (tensor.device_type() == first.tensor.device_type() && tensor.device_index() == first.tensor.device_index())
    return;
  violate("moe.devices", {{"first", first.name},
                          {"first_device", describe_device(first.tensor)},
                          {"name", name},
                          {"device", describe_device(tensor)}});
}

[[noreturn]] void refuse_dtype(const Tensor& tensor, const char* name, const std::string& needed,
                               const std::string& target) {
  violate("moe.dtype",
          {{"name", name}, {"found", describe_dtype(tensor.dtype())}, {"needed", needed}, {"target", target}});
}

void check_kind(const Tensor& tensor, const char* name, const First& first, int32_t dtype, bool is_like_first) {
  check_device(tensor, name, first);
  if (tensor.dtype() == dtype) return;
  if (is_like_first) refuse_dtype(tensor, name, quoted(first.name, dtype), std::string(first.name) + ".dtype");
  refuse_dtype(tensor, name, describe_dtype(dtype), "torch." + describe_dtype(dtype));
}

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

void check_size(int64_t value, const char* what, int64_t max) {
  if (value < 1 || value > max) violate("moe.size", {{"what", what}, {"value", value}, {"most", max}});
}

void check_experts(int64_t experts, const char* rule) {
  if (experts < 1 || experts > kMaxExperts) violate(rule, {{"experts", experts}, {"most", kMaxExperts}});
}

void check_gpu_multiple(const Common& common, int64_t value, const char* what, int64_t multiple) {
  if (!is_cuda(common) || value % multiple == 0) return;
  violate("moe.gpu_multiple", {{"what", what}, {"value", value}, {"multiple", multiple}});
}

void check_slots(int64_t tokens, int64_t top_k) {
  if (tokens * top_k <= kMaxSize) return;
  violate("moe.slots", {{"tokens", tokens}, {"top_k", top_k}, {"slots", tokens * top_k}});
}

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

void make_contiguous(Tensor& tensor) {
  if (tensor.is_given() && tensor.description() == nullptr) tensor = host::contiguous(tensor);
}

void make_rows_contiguous(Tensor& tensor) {
  if (!tensor.is_given()) return;
  const int64_t last = tensor.dim() - 1;
  if (tensor.sizes()[last] > 1 && tensor.strides()[last] != 1) make_contiguous(tensor);
}

void make_weights_contiguous(Tensor& tensor) {
  const int64_t* sizes = tensor.sizes();
  const int64_t* strides = tensor.strides();
  if (strides[2] != 1 && sizes[2] != 1 && strides[1] != 1 && sizes[1] != 1) make_contiguous(tensor);
}

namespace {

// The index of `value` among those that the argument `name` allows.
template <std::size_t kCount>
int32_t index_of(const std::string& value, const char* name, const char* const (&values)[kCount]) {
  const auto* const found = std::find(std::begin(values), std::end(values), value);
  if (found != std::end(values)) return static_cast<int32_t>(found - std::begin(values));
  std::string supported = values[0];
  for (std::size_t i = 1; i < kCount; ++i) supported += std::string(", ") + values[i];
  violate("moe.word", {{"name", name}, {"found", value}, {"supported", supported}});
}

}  // namespace

// In the order of the enumerations.
Activation activation_of(const std::string& value) {
  static constexpr const char* kValues[] = {"swiglu", "geglu", "geglu_tanh", "reglu", "clamped_swiglu"};
  return static_cast<Activation>(index_of(value, "activation", kValues));
}

bool is_interleaved_of(const std::string& value) {
  static constexpr const char* kValues[] = {"concat", "interleaved"};
  return index_of(value, "layout", kValues) == 1;
}

Scoring scoring_of(const std::string& value) {
  static constexpr const char* kValues[] = {"softmax", "topk_softmax", "sigmoid"};
  return static_cast<Scoring>(index_of(value, "scoring", kValues));
}

namespace {

// An id outside the experts contributes nothing. Padding wants that; a wrong router would go unnoticed.
void check_ids(const SortArguments& arguments) {
  if (arguments.expert_map.is_given() || arguments.ids.description() != nullptr) return;
  if (!host::are_values_checked(arguments.ids.device_type(), arguments.ids.device_index())) return;
  const Tensor ids = host::in_cpu_memory(arguments.ids);
  const bool is_wide = ids.dtype() != int32();
  const int64_t columns = ids.dim() > 0 ? ids.sizes()[ids.dim() - 1] : 1;
  for (int64_t slot = 0; slot < arguments.slots; ++slot) {
    const int64_t id =
        is_wide ? static_cast<const int64_t*>(ids.data())[slot] : static_cast<const int32_t*>(ids.data())[slot];
    if (id < 0 || id >= arguments.experts) {
      violate("moe.expert_id",
              {{"row", slot / columns}, {"column", slot % columns}, {"id", id}, {"last", arguments.experts - 1}});
    }
  }
}

}  // namespace

void check_sort(SortArguments& arguments, const First& first) {
  check_device(arguments.ids, "topk_ids", first);
  check_device(arguments.topk_weights, "topk_weights", first);
  if (!is_integer(arguments.ids.dtype())) {
    refuse_dtype(arguments.ids, "topk_ids", "int32 or int64", "torch.int32");
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
  check_ids(arguments);
}

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
  // `hidden_axis`: for weights that are not transposed.
  const auto check = [&](const Tensor& weights, const char* name, int64_t rows, int64_t columns, int hidden_axis,
                         const char* axes) {
    const int64_t* sizes = weights.sizes();
    if (transposed) {
      std::swap(rows, columns);
      hidden_axis = 3 - hidden_axis;
    }
    if (sizes[hidden_axis] != shape.hidden && sizes[3 - hidden_axis] == shape.hidden) {
      const int64_t needed[] = {shape.experts, rows, columns};
      violate("moe.transposed", {{"name", name},
                                 {"sizes", describe_sizes(weights)},
                                 {"needed", describe_sizes(needed, 3)},
                                 {"axes", axes},
                                 {"other", transposed ? "False" : "True"}});
    }
    check_sizes(weights, name, {shape.experts, rows, columns}, axes);
  };
  check(w2, "w2", shape.hidden, shape.intermediate, 1, w2_axes);
  const int64_t rows = w13.sizes()[transposed ? 2 : 1];
  if (rows != 2 * shape.intermediate && w13.sizes()[0] == shape.experts &&
      w13.sizes()[transposed ? 1 : 2] == shape.hidden) {  // which of the two is wrong is unknown
    violate("moe.intermediate", {{"w13", describe_sizes(w13)},
                                 {"w2", describe_sizes(w2)},
                                 {"rows", rows},
                                 {"intermediate", shape.intermediate},
                                 {"w13_axes", w13_axes},
                                 {"w2_axes", w2_axes}});
  }
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

void check_grouped_sizes(const Common& common, int64_t experts, int64_t n, int64_t k) {
  check_experts(experts, "moe.grouped_experts");
  check_size(k, "k");
  check_size(n, "n");
  check_gpu_multiple(common, k, "k");
  check_gpu_multiple(common, n, "n");
}

}  // namespace flashmoe::moe
