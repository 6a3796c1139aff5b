// Registers the operators that train a layer in e4m3 with torch; GPU only.
#include <utility>

#include "host/arguments.h"
#include "host/boxed.h"
#include "host/last_kernel.h"
#include "moe/host/argument_checks.h"
#include "moe/host/backends.h"
#include "moe/params/scaled.h"

namespace flashmoe::moe {
namespace {

using host::box;

ScaledArguments parse_scaled_kept(host::Arguments& inputs) {
  ScaledArguments arguments = parse_scaled(inputs);
  check_blocks(arguments.shape);
  const int32_t dtype = arguments.x.dtype();
  if (dtype != aoti_torch_dtype_bfloat16()) violate("moe.fp8_dtype", {{"name", "x"}, {"found", describe_dtype(dtype)}});
  return arguments;
}

// Argument checks for tracers.
const host::ArgumentCheck kChecks[] = {
    {"_fused_moe_scaled_kept", [](host::Arguments& inputs) { parse_scaled_kept(inputs); }},
    {"_fused_moe_scaled_backward", [](host::Arguments& inputs) { parse_scaled_backward(inputs); }},
    {"_quantize_weights", [](host::Arguments& inputs) { parse_quantize_weights(inputs); }},
};

}  // namespace

void boxed_scaled_kept(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("_fused_moe_scaled_kept", num_arguments, 11, num_outputs, 6);
  host::Arguments inputs(stack);
  const ScaledArguments arguments = parse_scaled_kept(inputs);
  const Common& common = arguments.common;
  const LayerShape& shape = arguments.shape;
  LayerOutputs outputs;
  outputs.out = empty_on(common, {shape.tokens, shape.hidden}, common.torch_dtype);
  outputs.preactivation = empty_on(common, {shape.slots, 2 * shape.intermediate}, common.torch_dtype);
  outputs.sorted = {empty_on(common, {shape.experts + 1}, int32()), empty_on(common, {shape.slots}, int32()),
                    empty_on(common, {shape.slots}, int32()), empty_on(common, {shape.slots}, float32())};
  host::set_last_kernel("");
  if (shape.slots > 0) {
    scaled_cuda(arguments, outputs);
  } else {
    zero(outputs.sorted.expert_offsets);
  }
  for (Tensor* output : {&outputs.out, &outputs.preactivation, &outputs.sorted.expert_offsets,
                         &outputs.sorted.row_slots, &outputs.sorted.slot_rows, &outputs.sorted.row_weights}) {
    *stack++ = box(std::move(*output));
  }
}

void boxed_scaled_backward(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("_fused_moe_scaled_backward", num_arguments, 13, num_outputs, 4);
  host::Arguments inputs(stack);
  const ScaledBackwardArguments arguments = parse_scaled_backward(inputs);
  const Common& common = arguments.common;
  const LayerShape& shape = arguments.shape;
  const int32_t dtype = common.torch_dtype;
  LayerGradients gradients;
  if (arguments.needs & kNeedX) gradients.dx = empty_on(common, {shape.tokens, shape.hidden}, dtype);
  if (arguments.needs & kNeedW13) {
    gradients.dw13 = empty_on(common, {shape.experts, 2 * shape.intermediate, shape.hidden}, dtype);
  }
  if (arguments.needs & kNeedW2) {
    gradients.dw2 = empty_on(common, {shape.experts, shape.hidden, shape.intermediate}, dtype);
  }
  if (arguments.needs & kNeedWeights) gradients.dweights = empty_on(common, {shape.tokens, shape.top_k}, float32());
  host::set_last_kernel("");
  if (shape.slots > 0) {
    if (arguments.needs != 0) scaled_backward_cuda(arguments, gradients);
  } else {  // sums over no rows
    zero(gradients.dw13);
    zero(gradients.dw2);
  }
  for (Tensor* gradient : {&gradients.dx, &gradients.dw13, &gradients.dw2, &gradients.dweights}) {
    *stack++ = gradient->is_given() ? host::box_optional(std::move(*gradient)) : host::box_none();
  }
}

void boxed_quantize_weights(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("_quantize_weights", num_arguments, 1, num_outputs, 4);
  host::Arguments inputs(stack);
  const QuantizeWeightsArguments arguments = parse_quantize_weights(inputs);
  const Common& common = arguments.common;
  const int64_t experts = arguments.weights.sizes()[0], n = arguments.weights.sizes()[1],
                k = arguments.weights.sizes()[2];
  QuantizedWeights outputs{empty_on(common, {experts, n, k}, e4m3()),
                           empty_on(common, {experts, n / kScaleBlock, k / kScaleBlock}, float32()),
                           empty_on(common, {experts, k, n}, e4m3()),
                           empty_on(common, {experts, k / kScaleBlock, n / kScaleBlock}, float32())};
  quantize_weights_cuda(arguments, outputs);
  for (Tensor* output : {&outputs.values, &outputs.scales, &outputs.transposed, &outputs.transposed_scales}) {
    *stack++ = box(std::move(*output));
  }
}

}  // namespace flashmoe::moe

STABLE_TORCH_LIBRARY_FRAGMENT(flashmoe, library) {
  // As _fused_moe_scaled with x in bfloat16; the last five results are for the backward pass.
  library.def(
      "_fused_moe_scaled_kept(Tensor x, Tensor w13, Tensor w2, Tensor w13_scale, Tensor w2_scale, Tensor topk_weights, "
      "Tensor topk_ids, Tensor? x_scale, Tensor? expert_map, Tensor? shared, str activation) -> (Tensor out, Tensor "
      "preactivation, Tensor expert_offsets, Tensor row_slots, Tensor slot_rows, Tensor row_weights)");
  // Weights are transposed. needs: bit i for gradient i; None for the others.
  library.def(
      "_fused_moe_scaled_backward(Tensor grad_out, Tensor x, Tensor w13, Tensor w2, Tensor w13_scale, Tensor w2_scale, "
      "Tensor preactivation, Tensor expert_offsets, Tensor row_slots, Tensor slot_rows, Tensor row_weights, str "
      "activation, int needs) -> (Tensor? dx, Tensor? dw13, Tensor? dw2, Tensor? dtopk_weights)");
  // e4m3 values and scales of blocks of 128 by 128, and the same for the transpose.
  library.def(
      "_quantize_weights(Tensor weights) -> (Tensor values, Tensor scales, Tensor transposed, Tensor "
      "transposed_scales)");
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CUDA, library) {
  library.impl("_fused_moe_scaled_kept", &flashmoe::moe::boxed_scaled_kept);
  library.impl("_fused_moe_scaled_backward", &flashmoe::moe::boxed_scaled_backward);
  library.impl("_quantize_weights", &flashmoe::moe::boxed_quantize_weights);
}
