// The operators of a mixture-of-experts layer, as torch knows them.

#include <optional>
#include <string>
#include <utility>

#include "host/boxed.h"
#include "host/last_kernel.h"
#include "moe/host/backends.h"

namespace flashmoe {
namespace moe {
namespace {

using host::give;
using host::give_none;
using host::give_optional;
using host::take;
using host::take_optional_tensor;
using host::take_tensor;
using host::take_text;

// The backend that an operator is registered for.
struct Cpu {
  static constexpr auto route = &route_cpu;
  static constexpr auto sort = &sort_cpu;
  static constexpr auto layer = &layer_cpu;
  static constexpr auto layer_backward = &layer_backward_cpu;
  static constexpr auto grouped = &grouped_cpu;
  static constexpr auto grouped_gradient = &grouped_gradient_cpu;
};
struct Cuda {
  static constexpr auto route = &route_cuda;
  static constexpr auto sort = &sort_cuda;
  static constexpr auto layer = &layer_cuda;
  static constexpr auto layer_backward = &layer_backward_cuda;
  static constexpr auto grouped = &grouped_cuda;
  static constexpr auto grouped_gradient = &grouped_gradient_cuda;
};

Tensor empty_on(const Common& common, std::initializer_list<int64_t> sizes, int32_t dtype) {
  return host::empty(sizes, dtype, common.device_type, common.device_index);
}
Tensor empty_ints(const Common& common, std::initializer_list<int64_t> sizes) {
  return empty_on(common, sizes, aoti_torch_dtype_int32());
}
Tensor empty_floats(const Common& common, std::initializer_list<int64_t> sizes) {
  return empty_on(common, sizes, aoti_torch_dtype_float32());
}
Tensor empty_like_contiguous(const Tensor& tensor) {
  return host::empty(tensor.dim(), tensor.sizes(), tensor.dtype(), tensor.device_type(), tensor.device_index());
}

void zero(const Tensor& tensor) {
  if (tensor.get() != nullptr) host::check_shim(aoti_torch_zero_(tensor.get()), "zero_");
}

// Slots 0: as where nothing is kept, but for the offsets.
SortOutputs allocate_sorted(const Common& common, int64_t slots, int64_t experts) {
  return {empty_ints(common, {experts + 1}), empty_ints(common, {slots}), empty_ints(common, {slots}),
          empty_floats(common, {slots})};
}

template <class Backend>
void boxed_route(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("topk_route", num_arguments, 8, num_outputs, 3);
  RouteArguments arguments;
  arguments.logits = take_tensor(stack[0]);
  arguments.top_k = take<int64_t>(stack[1]);
  const auto scoring = take_text(stack[2]);
  arguments.bias = take_optional_tensor(stack[3]);
  arguments.groups = take<int64_t>(stack[4]);
  arguments.topk_groups = take<int64_t>(stack[5]);
  arguments.renormalize = take<bool>(stack[6]);
  arguments.scale = take<double>(stack[7]);
  arguments.scoring = scoring_of(scoring);
  check_route(arguments);
  RouteOutputs outputs{empty_floats(arguments.common, {arguments.tokens, arguments.top_k}),
                       empty_ints(arguments.common, {arguments.tokens, arguments.top_k}),
                       empty_ints(arguments.common, {arguments.experts})};
  host::set_last_kernel("");
  if (arguments.tokens > 0) {
    Backend::route(arguments, outputs);
  } else {
    zero(outputs.counts);
  }
  stack[0] = give(std::move(outputs.weights));
  stack[1] = give(std::move(outputs.ids));
  stack[2] = give(std::move(outputs.counts));
}

void give_sorted(StableIValue* stack, SortOutputs sorted) {
  stack[0] = give(std::move(sorted.expert_offsets));
  stack[1] = give(std::move(sorted.row_slots));
  stack[2] = give(std::move(sorted.slot_rows));
  stack[3] = give(std::move(sorted.row_weights));
}

template <class Backend>
void boxed_sort(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("moe_sort", num_arguments, 4, num_outputs, 4);
  SortArguments arguments;
  arguments.ids = take_tensor(stack[0]);
  arguments.topk_weights = take_tensor(stack[1]);
  arguments.expert_map = take_optional_tensor(stack[2]);
  arguments.experts = take<int64_t>(stack[3]);
  check_sort(arguments);
  SortOutputs sorted = allocate_sorted(arguments.common, arguments.slots, arguments.experts);
  host::set_last_kernel("");
  if (arguments.slots > 0) {
    Backend::sort(arguments, sorted);
  } else {
    zero(sorted.expert_offsets);
  }
  give_sorted(stack, std::move(sorted));
}

// The arguments that the forward operators share, from their first on; checked.
LayerArguments take_layer(const StableIValue* stack, bool keep) {
  LayerArguments arguments;
  arguments.x = take_tensor(stack[0]);
  arguments.w13 = take_tensor(stack[1]);
  arguments.w2 = take_tensor(stack[2]);
  arguments.routing.topk_weights = take_tensor(stack[3]);
  arguments.routing.ids = take_tensor(stack[4]);
  arguments.b13 = take_optional_tensor(stack[5]);
  arguments.b2 = take_optional_tensor(stack[6]);
  arguments.routing.expert_map = take_optional_tensor(stack[7]);
  arguments.shared = take_optional_tensor(stack[8]);
  const auto activation = take_text(stack[9]);
  const auto layout = take_text(stack[10]);
  arguments.shape.is_transposed = take<bool>(stack[11]);
  arguments.keep = keep;
  arguments.shape.activation = activation_of(activation);
  arguments.shape.is_interleaved = is_interleaved_of(layout);
  check_layer(arguments);
  return arguments;
}
constexpr uint64_t kLayerArguments = 12;

template <class Backend>
void run_layer(const LayerArguments& arguments, const LayerOutputs& outputs) {
  host::set_last_kernel("");
  if (arguments.shape.slots > 0) {
    Backend::layer(arguments, outputs);
  } else if (arguments.keep) {
    zero(outputs.sorted.expert_offsets);
  }
}

template <class Backend>
void boxed_layer(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("_fused_moe", num_arguments, kLayerArguments + 1, num_outputs, 6);
  const LayerArguments arguments = take_layer(stack, take<bool>(stack[kLayerArguments]));
  const Common& common = arguments.common;
  const LayerShape& shape = arguments.shape;
  LayerOutputs outputs;
  outputs.out = empty_on(common, {shape.tokens, shape.hidden}, common.torch_dtype);
  if (arguments.keep) {
    outputs.preactivation = empty_on(common, {shape.slots, 2 * shape.intermediate}, common.torch_dtype);
    outputs.sorted = allocate_sorted(common, shape.slots, shape.experts);
  } else {
    outputs.preactivation = empty_on(common, {0}, common.torch_dtype);
    outputs.sorted = {empty_ints(common, {0}), empty_ints(common, {0}), empty_ints(common, {0}),
                      empty_floats(common, {0})};
  }
  run_layer<Backend>(arguments, outputs);
  stack[0] = give(std::move(outputs.out));
  stack[1] = give(std::move(outputs.preactivation));
  give_sorted(stack + 2, std::move(outputs.sorted));
}

template <class Backend>
void boxed_inference(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("_fused_moe_inference", num_arguments, kLayerArguments, num_outputs, 1);
  const LayerArguments arguments = take_layer(stack, /*keep=*/false);
  LayerOutputs outputs;
  outputs.out =
      empty_on(arguments.common, {arguments.shape.tokens, arguments.shape.hidden}, arguments.common.torch_dtype);
  run_layer<Backend>(arguments, outputs);
  stack[0] = give(std::move(outputs.out));
}

template <class Backend>
void boxed_out(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("_fused_moe_out", num_arguments, 1 + kLayerArguments, num_outputs, 0);
  LayerOutputs outputs;
  outputs.out = take_tensor(stack[0]);
  const LayerArguments arguments = take_layer(stack + 1, /*keep=*/false);
  check_out(arguments, outputs.out);
  run_layer<Backend>(arguments, outputs);
}

// For no token at all: nothing is added up.
void zero_gradients(const LayerGradients& gradients) {
  zero(gradients.dw13);
  zero(gradients.dw2);
  zero(gradients.db13);
  zero(gradients.db2);
}

LayerGradients allocate_gradients(const LayerBackwardArguments& arguments, int64_t needs) {
  const Common& common = arguments.common;
  const LayerShape& shape = arguments.shape;
  LayerGradients gradients;
  if (needs & kNeedX) gradients.dx = empty_on(common, {shape.tokens, shape.hidden}, common.torch_dtype);
  if (needs & kNeedW13) gradients.dw13 = empty_like_contiguous(arguments.w13);
  if (needs & kNeedW2) gradients.dw2 = empty_like_contiguous(arguments.w2);
  if (needs & kNeedWeights) gradients.dweights = empty_floats(common, {shape.tokens, shape.top_k});
  if (needs & kNeedB13) gradients.db13 = empty_on(common, {shape.experts, 2 * shape.intermediate}, common.torch_dtype);
  if (needs & kNeedB2) gradients.db2 = empty_on(common, {shape.experts, shape.hidden}, common.torch_dtype);
  return gradients;
}

StableIValue give_if_any(Tensor tensor) {
  return tensor.get() != nullptr ? give_optional(std::move(tensor)) : give_none();
}

template <class Backend, bool kConsumes>
void boxed_layer_backward(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts(kConsumes ? "_fused_moe_backward_consuming" : "_fused_moe_backward", num_arguments, 15,
                     num_outputs, 6);
  LayerBackwardArguments arguments;
  arguments.consumes = kConsumes;
  arguments.dout = take_tensor(stack[0]);
  arguments.x = take_tensor(stack[1]);
  arguments.w13 = take_tensor(stack[2]);
  arguments.w2 = take_tensor(stack[3]);
  arguments.b13 = take_optional_tensor(stack[4]);
  arguments.b2 = take_optional_tensor(stack[5]);
  arguments.preactivation = take_tensor(stack[6]);
  arguments.sorted.expert_offsets = take_tensor(stack[7]);
  arguments.sorted.row_slots = take_tensor(stack[8]);
  arguments.sorted.slot_rows = take_tensor(stack[9]);
  arguments.sorted.row_weights = take_tensor(stack[10]);
  const auto activation = take_text(stack[11]);
  const auto layout = take_text(stack[12]);
  arguments.shape.is_transposed = take<bool>(stack[13]);
  const auto needs = take<int64_t>(stack[14]);
  arguments.shape.activation = activation_of(activation);
  arguments.shape.is_interleaved = is_interleaved_of(layout);
  check_layer_backward(arguments);
  LayerGradients gradients = allocate_gradients(arguments, needs);
  host::set_last_kernel("");
  if (arguments.shape.slots == 0) {
    zero_gradients(gradients);
  } else if (needs != 0) {
    Backend::layer_backward(arguments, gradients);
  }
  stack[0] = give_if_any(std::move(gradients.dx));
  stack[1] = give_if_any(std::move(gradients.dw13));
  stack[2] = give_if_any(std::move(gradients.dw2));
  stack[3] = give_if_any(std::move(gradients.dweights));
  stack[4] = give_if_any(std::move(gradients.db13));
  stack[5] = give_if_any(std::move(gradients.db2));
}

template <class Backend>
void boxed_grouped(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("grouped_mm", num_arguments, 3, num_outputs, 1);
  GroupedArguments arguments;
  arguments.a = take_tensor(stack[0]);
  Tensor b = take_tensor(stack[1]);
  arguments.offsets = take_tensor(stack[2]);
  check_grouped(arguments, std::move(b));
  Tensor out = empty_on(arguments.common, {arguments.rows, arguments.b.n}, arguments.common.torch_dtype);
  host::set_last_kernel("");
  if (arguments.rows > 0) Backend::grouped(arguments, out);
  stack[0] = give(std::move(out));
}

template <class Backend>
void boxed_grouped_gradient(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("_grouped_mm_2d2d", num_arguments, 3, num_outputs, 1);
  GroupedGradientArguments arguments;
  arguments.a = take_tensor(stack[0]);
  arguments.b = take_tensor(stack[1]);
  arguments.offsets = take_tensor(stack[2]);
  check_grouped_gradient(arguments);
  Tensor out = empty_on(arguments.common, {arguments.experts, arguments.a.sizes()[1], arguments.b.sizes()[1]},
                        arguments.common.torch_dtype);
  host::set_last_kernel("");
  if (arguments.rows > 0) {
    Backend::grouped_gradient(arguments, out);
  } else {
    zero(out);
  }
  stack[0] = give(std::move(out));
}

template <class Backend, class Library>
void register_backend(Library& library) {
  library.impl("topk_route", &boxed_route<Backend>);
  library.impl("moe_sort", &boxed_sort<Backend>);
  library.impl("_fused_moe", &boxed_layer<Backend>);
  library.impl("_fused_moe_inference", &boxed_inference<Backend>);
  library.impl("_fused_moe_out", &boxed_out<Backend>);
  library.impl("_fused_moe_backward", &boxed_layer_backward<Backend, false>);
  library.impl("_fused_moe_backward_consuming", &boxed_layer_backward<Backend, true>);
  library.impl("grouped_mm", &boxed_grouped<Backend>);
  library.impl("_grouped_mm_2d2d", &boxed_grouped_gradient<Backend>);
}

}  // namespace
}  // namespace moe
}  // namespace flashmoe

STABLE_TORCH_LIBRARY_FRAGMENT(flashmoe, library) {
  library.def(
      "topk_route(Tensor logits, int k, str scoring, Tensor? bias, int groups, int topk_groups, bool renormalize, "
      "float "
      "scale) -> (Tensor weights, Tensor ids, Tensor counts)");
  library.def(
      "moe_sort(Tensor ids, Tensor topk_weights, Tensor? expert_map, int experts) -> (Tensor expert_offsets, Tensor "
      "row_slots, Tensor slot_rows, Tensor row_weights)");
  // The last five results are what the backward pass needs, and have size 0 where keep is false.
  library.def(
      "_fused_moe(Tensor x, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, Tensor? b13, Tensor? b2, "
      "Tensor? "
      "expert_map, Tensor? shared, str activation, str layout, bool transposed, bool keep) -> (Tensor out, Tensor "
      "preactivation, Tensor expert_offsets, Tensor row_slots, Tensor slot_rows, Tensor row_weights)");
  // Called where no gradient can be wanted: one result, and no rule of autograd in Python.
  library.def(
      "_fused_moe_inference(Tensor x, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, Tensor? b13, "
      "Tensor? b2, "
      "Tensor? expert_map, Tensor? shared, str activation, str layout, bool transposed) -> Tensor");
  library.def(
      "_fused_moe_out(Tensor(a!) out, Tensor x, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, Tensor? "
      "b13, "
      "Tensor? b2, Tensor? expert_map, Tensor? shared, str activation, str layout, bool transposed) -> ()");
  // needs: bit i for gradient i; None for the others. The gradient of shared is grad_out.
  library.def(
      "_fused_moe_backward(Tensor grad_out, Tensor x, Tensor w13, Tensor w2, Tensor? b13, Tensor? b2, Tensor "
      "preactivation, "
      "Tensor expert_offsets, Tensor row_slots, Tensor slot_rows, Tensor row_weights, str activation, str layout, bool "
      "transposed, int needs) -> (Tensor? dx, Tensor? dw13, Tensor? dw2, Tensor? dtopk_weights, Tensor? db13, Tensor? "
      "db2)");
  // The same; what it leaves in preactivation has no meaning.
  library.def(
      "_fused_moe_backward_consuming(Tensor grad_out, Tensor x, Tensor w13, Tensor w2, Tensor? b13, Tensor? b2, "
      "Tensor(a!) preactivation, "
      "Tensor expert_offsets, Tensor row_slots, Tensor slot_rows, Tensor row_weights, str activation, str layout, bool "
      "transposed, int needs) -> (Tensor? dx, Tensor? dw13, Tensor? dw2, Tensor? dtopk_weights, Tensor? db13, Tensor? "
      "db2)");
  // a [M, K], b [E, K, N], offsets [E]: the end of each expert's rows; rows past the last end give zeros. [M, N].
  library.def("grouped_mm(Tensor a, Tensor b, Tensor offsets) -> Tensor");
  // a [N, M], b [M, K], offsets [E]: of each expert's columns of a and rows of b the product, [E, N, K].
  library.def("_grouped_mm_2d2d(Tensor a, Tensor b, Tensor offsets) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CPU, library) { flashmoe::moe::register_backend<flashmoe::moe::Cpu>(library); }

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CUDA, library) { flashmoe::moe::register_backend<flashmoe::moe::Cuda>(library); }
