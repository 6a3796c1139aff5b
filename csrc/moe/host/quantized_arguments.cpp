#include <initializer_list>
#include <string>
#include <utility>

#include "moe/host/argument_checks.h"
#include "moe/params/mxfp4.h"
#include "moe/params/scaled.h"

namespace flashmoe::moe {
namespace {

void parse_weights(Needed& needed, LayerArguments& arguments) {
  arguments.x = needed.take("x");
  arguments.w13 = needed.take("w13");
  arguments.w2 = needed.take("w2");
}

void parse_routing(Needed& needed, LayerArguments& arguments) {
  arguments.routing.topk_weights = needed.take("topk_weights");
  arguments.routing.ids = needed.take("topk_ids");
}

using Sizes = std::initializer_list<int64_t>;

void check_bytes(Tensor& tensor, const char* name, const First& x, Sizes sizes, const char* axes) {
  if (!tensor.is_given()) violate("tensor.missing", {{"name", name}});
  check_kind(tensor, name, x, uint8());
  check_sizes(tensor, name, sizes, axes);
}

void check_mxfp4_sizes(const LayerShape& shape, int64_t multiple, const char* rule) {
  check_experts(shape.experts, "moe.experts");
  for (const auto& [size, what] :
       {std::pair(shape.hidden, "the hidden size"), std::pair(shape.intermediate, "the intermediate size")}) {
    check_size(size, what, kMaxSize / 2);
    if (size % multiple != 0) violate(rule, {{"what", what}, {"value", size}, {"multiple", multiple}});
  }
}

void check_codes(Mxfp4Arguments& arguments, const First& x) {
  LayerShape& shape = arguments.shape;
  check_rank(arguments.w13, "w13", 3, "[experts, 2 * intermediate, hidden / 2]");
  check_rank(arguments.w2, "w2", 3, "[experts, hidden, intermediate / 2]");
  shape.experts = arguments.w13.sizes()[0];
  shape.intermediate = 2 * arguments.w2.sizes()[2];
  check_mxfp4_sizes(shape, kMxfp4Block, "moe.mxfp4_multiple");
  const int64_t both = 2 * shape.intermediate;
  check_bytes(arguments.w2, "w2", x, {shape.experts, shape.hidden, shape.intermediate / 2},
              "[experts, hidden, intermediate / 2]");
  check_bytes(arguments.w13, "w13", x, {shape.experts, both, shape.hidden / 2},
              "[experts, 2 * intermediate, hidden / 2]");
  check_bytes(arguments.w13_scale, "w13_scale", x, {shape.experts, both, shape.hidden / kMxfp4Block},
              "[experts, 2 * intermediate, hidden / 32]");
  check_bytes(arguments.w2_scale, "w2_scale", x, {shape.experts, shape.hidden, shape.intermediate / kMxfp4Block},
              "[experts, hidden, intermediate / 32]");
  make_rows_contiguous(arguments.w13);
  make_rows_contiguous(arguments.w2);
  make_contiguous(arguments.w13_scale);
  make_contiguous(arguments.w2_scale);
}

// As flashmoe.pack_mxfp4 returns them.
void check_packed(Mxfp4Arguments& arguments, const First& x) {
  LayerShape& shape = arguments.shape;
  constexpr const char* kAxes13 = "[experts, 2 * intermediate / 64, hidden / 64, 2176]";
  constexpr const char* kAxes2 = "[experts, hidden / 64, intermediate / 64, 2176]";
  check_rank(arguments.w13, "w13", 4, kAxes13);
  check_rank(arguments.w2, "w2", 4, kAxes2);
  shape.experts = arguments.w13.sizes()[0];
  shape.intermediate = kMxfp4PackedK * arguments.w2.sizes()[2];
  check_mxfp4_sizes(shape, kMxfp4PackedK, "moe.mxfp4_packed_multiple");
  const int64_t hidden = shape.hidden / kMxfp4PackedK, inner = shape.intermediate / kMxfp4PackedK;
  check_bytes(arguments.w2, "w2", x, {shape.experts, hidden, inner, kMxfp4PackedBytes}, kAxes2);
  check_bytes(arguments.w13, "w13", x, {shape.experts, 2 * inner, hidden, kMxfp4PackedBytes}, kAxes13);
  if (arguments.common.device_type == aoti_torch_device_type_cpu()) violate("moe.mxfp4_packed_cpu");
  make_contiguous(arguments.w13);
  make_contiguous(arguments.w2);
}

}  // namespace

ScaledArguments parse_scaled(host::Arguments& given) {
  ScaledArguments arguments;
  Needed needed(given);
  SortArguments& routing = arguments.routing;
  LayerShape& shape = arguments.shape;
  parse_weights(needed, arguments);
  arguments.w13_scale = needed.take("w13_scale");
  arguments.w2_scale = needed.take("w2_scale");
  parse_routing(needed, arguments);
  given.optional_tensors(arguments.x_scale, routing.expert_map, arguments.shared);
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
    refuse_dtype(routing.topk_weights, "topk_weights", "float32, float16 or bfloat16", "torch.float32");
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

Mxfp4Arguments parse_mxfp4(host::Arguments& given) {
  Mxfp4Arguments arguments;
  Needed needed(given);
  SortArguments& routing = arguments.routing;
  LayerShape& shape = arguments.shape;
  parse_weights(needed, arguments);
  given.optional_tensors(arguments.w13_scale, arguments.w2_scale);
  parse_routing(needed, arguments);
  given.optional_tensors(arguments.b13, arguments.b2, routing.expert_map, arguments.shared);
  const std::string activation = given.text(), layout = given.text();
  shape.activation = activation_of(activation);
  shape.is_interleaved = is_interleaved_of(layout);
  needed.check();
  const First x{arguments.x, "x"};
  const int32_t dtype = arguments.x.dtype();
  if (dtype != aoti_torch_dtype_bfloat16()) violate("moe.mxfp4_x", {{"found", describe_dtype(dtype)}});
  const Common& common =
      arguments.common = {Dtype::kBFloat16, dtype, arguments.x.device_type(), arguments.x.device_index()};
  if (arguments.shared.is_given()) check_kind(arguments.shared, "shared", x, dtype);
  if (routing.topk_weights.dtype() != float32() && routing.topk_weights.dtype() != dtype) {
    refuse_dtype(routing.topk_weights, "topk_weights", "float32 or " + quoted("x", dtype), "torch.float32");
  }
  check_rank(arguments.x, "x", 2, "[tokens, hidden]");
  shape.tokens = arguments.x.sizes()[0];
  shape.hidden = arguments.x.sizes()[1];
  arguments.is_packed = !arguments.w13_scale.is_given() && !arguments.w2_scale.is_given();
  if (arguments.is_packed) {
    check_packed(arguments, x);
  } else {
    check_codes(arguments, x);
  }
  check_biases(shape, common, x, arguments.b13, arguments.b2);
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

}  // namespace flashmoe::moe
