// Registers the operators of a mixture-of-experts layer with torch.

#include <string>
#include <utility>

#include "host/arguments.h"
#include "host/boxed.h"
#include "host/last_kernel.h"
#include "moe/host/backends.h"

namespace flashmoe::moe {
namespace {

using host::box;

// The backend that an operator is registered for.
struct Cpu {
  static constexpr auto route = &route_cpu;
  static constexpr auto sort = &sort_cpu;
  static constexpr auto layer = &layer_cpu;
  static constexpr auto layer_backward = &layer_backward_cpu;
  static constexpr auto mxfp4 = &mxfp4_cpu;
  static constexpr auto grouped = &grouped_cpu;
  static constexpr auto grouped_gradient = &grouped_gradient_cpu;
};
struct Cuda {
  static constexpr auto route = &route_cuda;
  static constexpr auto sort = &sort_cuda;
  static constexpr auto layer = &layer_cuda;
  static constexpr auto layer_backward = &layer_backward_cuda;
  static constexpr auto mxfp4 = &mxfp4_cuda;
  static constexpr auto grouped = &grouped_cuda;
  static constexpr auto grouped_gradient = &grouped_gradient_cuda;
};

Tensor empty_ints(const Common& common, std::initializer_list<int64_t> sizes) {
  return empty_on(common, sizes, aoti_torch_dtype_int32());
}
Tensor empty_floats(const Common& common, std::initializer_list<int64_t> sizes) {
  return empty_on(common, sizes, aoti_torch_dtype_float32());
}
// With the layer's dtype.
Tensor empty_rows(const Common& common, std::initializer_list<int64_t> sizes) {
  return empty_on(common, sizes, common.torch_dtype);
}

SortOutputs allocate_sorted(const Common& common, int64_t slots, int64_t experts) {
  return {empty_ints(common, {experts + 1}), empty_ints(common, {slots}), empty_ints(common, {slots}),
          empty_floats(common, {slots})};
}

template <class Backend>
void boxed_route(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("topk_route", num_arguments, 8, num_outputs, 3);
  host::Arguments inputs(stack);
  const RouteArguments arguments = parse_route(inputs);
  RouteOutputs outputs{empty_floats(arguments.common, {arguments.tokens, arguments.top_k}),
                       empty_ints(arguments.common, {arguments.tokens, arguments.top_k}),
                       empty_ints(arguments.common, {arguments.experts})};
  host::set_last_kernel("");
  if (arguments.tokens > 0) {
    Backend::route(arguments, outputs);
  } else {
    zero(outputs.counts);
  }
  stack[0] = box(std::move(outputs.weights));
  stack[1] = box(std::move(outputs.ids));
  stack[2] = box(std::move(outputs.counts));
}

void give_sorted(StableIValue* stack, SortOutputs sorted) {
  stack[0] = box(std::move(sorted.expert_offsets));
  stack[1] = box(std::move(sorted.row_slots));
  stack[2] = box(std::move(sorted.slot_rows));
  stack[3] = box(std::move(sorted.row_weights));
}

template <class Backend>
void boxed_sort(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("moe_sort", num_arguments, 4, num_outputs, 4);
  host::Arguments inputs(stack);
  const SortArguments arguments = parse_sort(inputs);
  SortOutputs sorted = allocate_sorted(arguments.common, arguments.slots, arguments.experts);
  host::set_last_kernel("");
  if (arguments.slots > 0) {
    Backend::sort(arguments, sorted);
  } else {
    zero(sorted.expert_offsets);
  }
  give_sorted(stack, std::move(sorted));
}

constexpr uint64_t kLayerArguments = 12;  // shared by the forward operators

template <class Backend>
void run_layer(const LayerArguments& arguments, const LayerOutputs& outputs) {
  host::set_last_kernel("");
  if (arguments.shape.slots > 0) {
    Backend::layer(arguments, outputs);
  } else {
    zero(outputs.sorted.expert_offsets);
  }
}

template <class Backend>
void boxed_layer(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("_fused_moe", num_arguments, kLayerArguments + 1, num_outputs, 6);
  host::Arguments inputs(stack);
  const LayerArguments arguments = parse_layer(inputs);
  const Common& common = arguments.common;
  const LayerShape& shape = arguments.shape;
  LayerOutputs outputs;
  outputs.out = empty_rows(common, {shape.tokens, shape.hidden});
  const bool keep = inputs.flag();
  if (keep) {
    outputs.preactivation = empty_rows(common, {shape.slots, 2 * shape.intermediate});
    outputs.sorted = allocate_sorted(common, shape.slots, shape.experts);
  }
  run_layer<Backend>(arguments, outputs);
  if (!keep) {
    outputs.preactivation = empty_rows(common, {0});
    outputs.sorted = {empty_ints(common, {0}), empty_ints(common, {0}), empty_ints(common, {0}),
                      empty_floats(common, {0})};
  }
  stack[0] = box(std::move(outputs.out));
  stack[1] = box(std::move(outputs.preactivation));
  give_sorted(stack + 2, std::move(outputs.sorted));
}

template <class Backend>
void boxed_inference(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("_fused_moe_inference", num_arguments, kLayerArguments, num_outputs, 1);
  host::Arguments inputs(stack);
  const LayerArguments arguments = parse_layer(inputs);
  LayerOutputs outputs;
  outputs.out = empty_rows(arguments.common, {arguments.shape.tokens, arguments.shape.hidden});
  run_layer<Backend>(arguments, outputs);
  stack[0] = box(std::move(outputs.out));
}

template <class Backend>
void boxed_out(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("_fused_moe_out", num_arguments, 1 + kLayerArguments, num_outputs, 0);
  host::Arguments inputs(stack);
  LayerOutputs outputs;
  outputs.out = inputs.tensor();
  const LayerArguments arguments = parse_layer(inputs);
  check_out(arguments, outputs.out);
  run_layer<Backend>(arguments, outputs);
}

LayerGradients allocate_gradients(const LayerBackwardArguments& arguments) {
  const Common& common = arguments.common;
  const LayerShape& shape = arguments.shape;
  const auto like = [](const Tensor& weights) {
    return host::empty(weights.dim(), weights.sizes(), weights.dtype(), weights.device_type(), weights.device_index());
  };
  LayerGradients gradients;
  if (arguments.needs & kNeedX) gradients.dx = empty_rows(common, {shape.tokens, shape.hidden});
  if (arguments.needs & kNeedW13) gradients.dw13 = like(arguments.w13);
  if (arguments.needs & kNeedW2) gradients.dw2 = like(arguments.w2);
  if (arguments.needs & kNeedWeights) gradients.dweights = empty_floats(common, {shape.tokens, shape.top_k});
  if (arguments.needs & kNeedB13) gradients.db13 = empty_rows(common, {shape.experts, 2 * shape.intermediate});
  if (arguments.needs & kNeedB2) gradients.db2 = empty_rows(common, {shape.experts, shape.hidden});
  return gradients;
}

template <class Backend, bool kConsumes>
void boxed_layer_backward(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts(kConsumes ? "_fused_moe_backward_consuming" : "_fused_moe_backward", num_arguments, 15,
                     num_outputs, 6);
  host::Arguments inputs(stack);
  LayerBackwardArguments arguments = parse_layer_backward(inputs);
  arguments.consumes = kConsumes;
  LayerGradients gradients = allocate_gradients(arguments);
  host::set_last_kernel("");
  if (arguments.shape.slots > 0) {
    if (arguments.needs != 0) Backend::layer_backward(arguments, gradients);
  } else {  // sums over no rows
    for (const Tensor* sum : {&gradients.dw13, &gradients.dw2, &gradients.db13, &gradients.db2}) zero(*sum);
  }
  for (Tensor* gradient :
       {&gradients.dx, &gradients.dw13, &gradients.dw2, &gradients.dweights, &gradients.db13, &gradients.db2}) {
    *stack++ = gradient->is_given() ? host::box_optional(std::move(*gradient)) : host::box_none();
  }
}

template <class Backend>
void boxed_mxfp4(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("_fused_moe_mxfp4", num_arguments, 13, num_outputs, 1);
  host::Arguments inputs(stack);
  Mxfp4Arguments arguments = parse_mxfp4(inputs);
  Tensor out = empty_rows(arguments.common, {arguments.shape.tokens, arguments.shape.hidden});
  host::set_last_kernel("");
  if (arguments.shape.slots > 0) Backend::mxfp4(std::move(arguments), out);
  stack[0] = box(std::move(out));
}

template <class Backend>
void boxed_grouped(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("grouped_mm", num_arguments, 3, num_outputs, 1);
  host::Arguments inputs(stack);
  const GroupedArguments arguments = parse_grouped(inputs);
  Tensor out = empty_rows(arguments.common, {arguments.rows, arguments.b.n});
  host::set_last_kernel("");
  if (arguments.rows > 0) Backend::grouped(arguments, out);
  stack[0] = box(std::move(out));
}

template <class Backend>
void boxed_grouped_gradient(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("_grouped_mm_2d2d", num_arguments, 3, num_outputs, 1);
  host::Arguments inputs(stack);
  const GroupedGradientArguments arguments = parse_grouped_gradient(inputs);
  Tensor out = empty_rows(arguments.common, {arguments.experts, arguments.a.sizes()[1], arguments.b.sizes()[1]});
  host::set_last_kernel("");
  if (arguments.rows > 0) {
    Backend::grouped_gradient(arguments, out);
  } else {
    zero(out);
  }
  stack[0] = box(std::move(out));
}

// Argument checks for tracers.
template <auto kParse>
void parse_only(host::Arguments& inputs) {
  kParse(inputs);
}
const host::ArgumentCheck kChecks[] = {
    {"topk_route", parse_only<parse_route>},
    {"moe_sort", parse_only<parse_sort>},
    {"_fused_moe_inference", parse_only<parse_layer>},
    {"_fused_moe_out",
     [](host::Arguments& inputs) {
       const Tensor out = inputs.tensor();
       check_out(parse_layer(inputs), out);
     }},
    {"grouped_mm", parse_only<parse_grouped>},
    {"_grouped_mm_2d2d", parse_only<parse_grouped_gradient>},
    {"_fused_moe_scaled", [](host::Arguments& inputs) { check_blocks(parse_scaled(inputs).shape); }},
    {"_fused_moe_scaled_torch", parse_only<parse_scaled>},
    {"_fused_moe_mxfp4", parse_only<parse_mxfp4>},
    {"_fused_moe_mxfp4_out",  // as the next one
     [](host::Arguments& inputs) {
       const Tensor out = inputs.tensor();
       check_out(parse_mxfp4(inputs), out);
     }},
    {"_fused_moe_scaled_out",  // not an operator: checks the out to which fused_moe copies its result
     [](host::Arguments& inputs) {
       const Tensor out = inputs.tensor();
       check_out(parse_scaled(inputs), out);
     }},
};

template <class Backend, class Library>
void register_backend(Library& library) {
  library.impl("topk_route", &boxed_route<Backend>);
  library.impl("moe_sort", &boxed_sort<Backend>);
  library.impl("_fused_moe", &boxed_layer<Backend>);
  library.impl("_fused_moe_inference", &boxed_inference<Backend>);
  library.impl("_fused_moe_out", &boxed_out<Backend>);
  library.impl("_fused_moe_backward", &boxed_layer_backward<Backend, false>);
  library.impl("_fused_moe_backward_consuming", &boxed_layer_backward<Backend, true>);
  library.impl("_fused_moe_mxfp4", &boxed_mxfp4<Backend>);
  library.impl("grouped_mm", &boxed_grouped<Backend>);
  library.impl("_grouped_mm_2d2d", &boxed_grouped_gradient<Backend>);
}

}  // namespace

void boxed_scaled(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("_fused_moe_scaled", num_arguments, 11, num_outputs, 1);
  host::Arguments inputs(stack);
  const ScaledArguments arguments = parse_scaled(inputs);
  check_blocks(arguments.shape);
  LayerOutputs outputs;
  outputs.out = empty_rows(arguments.common, {arguments.shape.tokens, arguments.shape.hidden});
  host::set_last_kernel("");
  if (arguments.shape.slots > 0) scaled_cuda(arguments, outputs);
  stack[0] = box(std::move(outputs.out));
}

}  // namespace flashmoe::moe

STABLE_TORCH_LIBRARY_FRAGMENT(flashmoe, library) {
  const std::string layer =
      "Tensor x, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, Tensor? b13, Tensor? b2, Tensor? "
      "expert_map, "
      "Tensor? shared, str activation, str layout, bool transposed";
  const std::string sorted = "Tensor expert_offsets, Tensor row_slots, Tensor slot_rows, Tensor row_weights";
  const auto backward = [&](const std::string& name, const std::string& preactivation) {
    return name + "(Tensor grad_out, Tensor x, Tensor w13, Tensor w2, Tensor? b13, Tensor? b2, " + preactivation +
           " preactivation, " + sorted +
           ", str activation, str layout, bool transposed, int needs) -> (Tensor? dx, Tensor? dw13, Tensor? dw2, "
           "Tensor? dtopk_weights, Tensor? db13, Tensor? db2)";
  };
  library.def(
      "topk_route(Tensor logits, int k, str scoring, Tensor? bias, int groups, int topk_groups, bool renormalize, "
      "float "
      "scale) -> (Tensor weights, Tensor ids, Tensor counts)");
  const std::string sort =
      "moe_sort(Tensor ids, Tensor topk_weights, Tensor? expert_map, int experts) -> (" + sorted + ")";
  library.def(sort.c_str());
  // The last five results are for the backward pass, and have size 0 if keep is false.
  library.def(("_fused_moe(" + layer + ", bool keep) -> (Tensor out, Tensor preactivation, " + sorted + ")").c_str());
  // Called when no gradient can be needed: one result, and no autograd rule in Python.
  library.def(("_fused_moe_inference(" + layer + ") -> Tensor").c_str());
  library.def(("_fused_moe_out(Tensor(a!) out, " + layer + ") -> ()").c_str());
  // needs: bit i for gradient i; None for the others. The gradient of shared is grad_out.
  library.def(backward("_fused_moe_backward", "Tensor").c_str());
  // The same; it overwrites preactivation with values that have no meaning.
  library.def(backward("_fused_moe_backward_consuming", "Tensor(a!)").c_str());
  // a [M, K], b [E, K, N], offsets [E]: the end of each expert's rows; rows past the last end become zeros. [M, N].
  library.def("grouped_mm(Tensor a, Tensor b, Tensor offsets) -> Tensor");
  // a [N, M], b [M, K], offsets [E]: for each expert the product of its columns of a and rows of b, [E, N, K].
  library.def("_grouped_mm_2d2d(Tensor a, Tensor b, Tensor offsets) -> Tensor");
  // e2m1 weights, two per byte, with a power of two per 32 of a row.
  library.def(
      "_fused_moe_mxfp4(Tensor x, Tensor w13, Tensor w2, Tensor? w13_scale, Tensor? w2_scale, Tensor topk_weights, "
      "Tensor "
      "topk_ids, Tensor? b13, Tensor? b2, Tensor? expert_map, Tensor? shared, str activation, str layout) -> Tensor");
  // e4m3 weights with one scale per 128 by 128 of them; GPU only.
  library.def(
      "_fused_moe_scaled(Tensor x, Tensor w13, Tensor w2, Tensor w13_scale, Tensor w2_scale, Tensor topk_weights, "
      "Tensor "
      "topk_ids, Tensor? x_scale, Tensor? expert_map, Tensor? shared, str activation) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CPU, library) { flashmoe::moe::register_backend<flashmoe::moe::Cpu>(library); }

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CUDA, library) {
  flashmoe::moe::register_backend<flashmoe::moe::Cuda>(library);
  library.impl("_fused_moe_scaled", &flashmoe::moe::boxed_scaled);
}
