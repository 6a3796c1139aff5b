// Arguments of the operators that train a layer in e4m3.
#include <string>
#include <utility>

#include "moe/host/argument_checks.h"
#include "moe/params/scaled.h"

namespace flashmoe::moe {
namespace {

Common bfloat16_of(const Tensor& tensor, const char* name) {
  const int32_t dtype = tensor.dtype();
  if (dtype != aoti_torch_dtype_bfloat16())
    violate("moe.fp8_dtype", {{"name", name}, {"found", describe_dtype(dtype)}});
  return {Dtype::kBFloat16, dtype, tensor.device_type(), tensor.device_index()};
}

void check_multiple(int64_t size, const char* what) {
  check_size(size, what, kMaxSize / 2);
  if (size % kScaleBlock != 0)
    violate("moe.fp8_multiple", {{"what", what}, {"value", size}, {"multiple", kScaleBlock}});
}

}  // namespace

QuantizeWeightsArguments parse_quantize_weights(host::Arguments& given) {
  QuantizeWeightsArguments arguments;
  Needed needed(given);
  Tensor& weights = arguments.weights = needed.take("weights");
  needed.check();
  arguments.common = bfloat16_of(weights, "weights");
  check_rank(weights, "weights", 3, "[experts, n, k]");
  check_experts(weights.sizes()[0], "moe.experts");
  check_multiple(weights.sizes()[1], "the number of rows");
  check_multiple(weights.sizes()[2], "the number of columns");
  make_contiguous(weights);
  return arguments;
}

ScaledBackwardArguments parse_scaled_backward(host::Arguments& given) {
  ScaledBackwardArguments arguments;
  Needed needed(given);
  SortOutputs& sorted = arguments.sorted;
  LayerShape& shape = arguments.shape;
  arguments.dout = needed.take("grad_out");
  arguments.x = needed.take("x");
  arguments.w13 = needed.take("w13");
  arguments.w2 = needed.take("w2");
  arguments.w13_scale = needed.take("w13_scale");
  arguments.w2_scale = needed.take("w2_scale");
  arguments.preactivation = needed.take("preactivation");
  sorted.expert_offsets = needed.take("expert_offsets");
  sorted.row_slots = needed.take("row_slots");
  sorted.slot_rows = needed.take("slot_rows");
  sorted.row_weights = needed.take("row_weights");
  const std::string activation = given.text();
  arguments.needs = given.integer();
  shape.activation = activation_of(activation);
  needed.check();
  const First x{arguments.x, "x"};
  const Common& common = arguments.common = bfloat16_of(arguments.x, "x");
  check_rank(arguments.x, "x", 2, "[tokens, hidden]");
  check_rank(arguments.w2, "w2", 3, "[experts, intermediate, hidden]");
  check_rank(sorted.row_slots, "row_slots", 1, "[slots]");
  shape.tokens = arguments.x.sizes()[0];
  shape.hidden = arguments.x.sizes()[1];
  shape.experts = arguments.w2.sizes()[0];
  shape.intermediate = arguments.w2.sizes()[1];
  shape.slots = sorted.row_slots.sizes()[0];
  shape.top_k = shape.tokens > 0 ? shape.slots / shape.tokens : 1;
  if (shape.slots != shape.tokens * shape.top_k || (shape.tokens > 0 && shape.top_k < 1)) {
    violate("moe.saved_slots", {{"slots", shape.slots}, {"tokens", shape.tokens}});
  }
  check_experts(shape.experts, "moe.experts");
  check_multiple(shape.hidden, "the hidden size");
  check_multiple(shape.intermediate, "the intermediate size");
  const int64_t hidden = shape.hidden, both = 2 * shape.intermediate, inner = shape.intermediate;
  const auto check = [&](Tensor& tensor, const char* name, int32_t dtype, std::initializer_list<int64_t> sizes,
                         const char* axes) {
    check_kind(tensor, name, x, dtype);
    check_sizes(tensor, name, sizes, axes);
    make_contiguous(tensor);
  };
  check(arguments.w13, "w13", e4m3(), {shape.experts, hidden, both}, "[experts, hidden, 2 * intermediate]");
  check(arguments.w2, "w2", e4m3(), {shape.experts, inner, hidden}, "[experts, intermediate, hidden]");
  check(arguments.w13_scale, "w13_scale", float32(), {shape.experts, hidden / kScaleBlock, both / kScaleBlock},
        "[experts, hidden / 128, 2 * intermediate / 128]");
  check(arguments.w2_scale, "w2_scale", float32(), {shape.experts, inner / kScaleBlock, hidden / kScaleBlock},
        "[experts, intermediate / 128, hidden / 128]");
  check(arguments.preactivation, "preactivation", common.torch_dtype, {shape.slots, both}, "[slots, 2 * intermediate]");
  constexpr const char* kKept = "of the forward pass";
  check(sorted.expert_offsets, "expert_offsets", int32(), {shape.experts + 1}, kKept);
  check(sorted.row_slots, "row_slots", int32(), {shape.slots}, kKept);
  check(sorted.slot_rows, "slot_rows", int32(), {shape.slots}, kKept);
  check(sorted.row_weights, "row_weights", float32(), {shape.slots}, kKept);
  check_kind(arguments.dout, "grad_out", x, common.torch_dtype);
  check_sizes(arguments.dout, "grad_out", {shape.tokens, hidden}, "[tokens, hidden]");
  make_rows_contiguous(arguments.x);
  make_rows_contiguous(arguments.dout);
  return arguments;
}

}  // namespace flashmoe::moe
