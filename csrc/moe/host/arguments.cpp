#include "moe/host/arguments.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>

#include "host/copies.h"
#include "moe/host/argument_checks.h"

namespace flashmoe::moe {

ExpertWeights view_weights(const Tensor& tensor, bool is_transposed) {
  const int64_t* sizes = tensor.sizes();
  const int64_t* strides = tensor.strides();
  // A dimension of one element may have any stride: it counts as contiguous if the other one is not.
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

SortArguments parse_sort(host::Arguments& given) {
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

LayerArguments parse_layer(host::Arguments& given) {
  LayerArguments arguments;
  Needed needed(given);
  SortArguments& routing = arguments.routing;
  arguments.x = needed.take("x");
  arguments.w13 = needed.take("w13");
  arguments.w2 = needed.take("w2");
  routing.topk_weights = needed.take("topk_weights");
  routing.ids = needed.take("topk_ids");
  given.optional_tensors(arguments.b13, arguments.b2, routing.expert_map, arguments.shared);
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
  if (is_integer(routing.topk_weights.dtype()) && !is_integer(routing.ids.dtype())) {
    violate("moe.swapped_routing",
            {{"weights", describe_dtype(routing.topk_weights.dtype())}, {"ids", describe_dtype(routing.ids.dtype())}});
  }
  if (routing.topk_weights.dtype() != float32() && routing.topk_weights.dtype() != common.torch_dtype) {
    refuse_dtype(routing.topk_weights, "topk_weights", "float32 or " + quoted("x", common.torch_dtype),
                 "torch.float32");
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
  // out is written when everything but `shared` has been read; each element of `shared` is read just before its address
  // is written.
  const Tensor& shared = arguments.shared;
  if (has_memory && shared.is_given() && !host::is_same_memory(out, shared) && host::may_overlap(out, shared)) {
    violate("moe.out_overlap");
  }
}

LayerBackwardArguments parse_layer_backward(host::Arguments& given) {
  LayerBackwardArguments arguments;
  Needed needed(given);
  SortOutputs& sorted = arguments.sorted;
  LayerShape& shape = arguments.shape;
  arguments.dout = needed.take("grad_out");
  arguments.x = needed.take("x");
  arguments.w13 = needed.take("w13");
  arguments.w2 = needed.take("w2");
  given.optional_tensors(arguments.b13, arguments.b2);
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

RouteArguments parse_route(host::Arguments& given) {
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

Scalar scalar_of(const Tensor& tensor) {
  const int32_t dtype = tensor.dtype();
  if (dtype == aoti_torch_dtype_float32()) return Scalar::kFloat32;
  if (dtype == aoti_torch_dtype_float16()) return Scalar::kFloat16;
  if (dtype == aoti_torch_dtype_bfloat16()) return Scalar::kBFloat16;
  if (dtype == aoti_torch_dtype_int32()) return Scalar::kInt32;
  if (dtype == aoti_torch_dtype_int64()) return Scalar::kInt64;
  host::fail(host::ErrorCode::kInternal, "a tensor of ", describe_dtype(dtype), " where its dtype was checked before");
}

}  // namespace flashmoe::moe
