// The operators on the CPU: the same steps as on a GPU, on torch's thread pool.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstring>
#include <utility>

#include "host/cpu_call.h"
#include "host/last_kernel.h"
#include "moe/cpu/moe.h"
#include "moe/host/backends.h"
#include "moe/host/prepare.h"

namespace flashmoe {
namespace moe {
namespace {

using cpu::MoeProduct;

// What each call on the CPU begins and ends with.
class CpuCall {
 public:
  explicit CpuCall(const Common& common)
      : common_(common), pool_{host::torch_parallel, host::num_cpu_threads()}, isa_(host::checked_isa()) {}

  const cpu::Pool& pool() const { return pool_; }
  cpu::ScalarType type() const { return host::scalar_type(common_.dtype); }
  // Uninitialised, of the call's dtype or of another one.
  Tensor rows(int64_t count, int64_t columns) const { return empty({count, columns}, common_.torch_dtype); }
  Tensor ints(int64_t count) const { return empty({count}, aoti_torch_dtype_int32()); }
  Tensor floats(int64_t count) const { return empty({count}, aoti_torch_dtype_float32()); }

  void multiply(const GemmParams& params, MoeProduct product, bool is_kn) const {
    cpu::moe_multiply(params, product, type(), is_kn, pool_);
  }
  void done() const { host::set_last_isa(isa_); }

 private:
  Tensor empty(std::initializer_list<int64_t> sizes, int32_t dtype) const {
    return host::empty(sizes, dtype, common_.device_type, common_.device_index);
  }

  const Common& common_;
  cpu::Pool pool_;
  const char* isa_;
};

const int32_t* ints_of(const Tensor& tensor) { return static_cast<const int32_t*>(tensor.data()); }
const float* floats_of(const Tensor& tensor) { return static_cast<const float*>(tensor.data()); }

// Rows of a matrix of tokens, of which each slot's is taken, or of one that has a row for each sorted slot.
struct Rows {
  const void* data;
  int64_t stride;
  int64_t columns;
  const int32_t* slots;  // null: sorted
};

Rows token_rows(const Tensor& tensor, const SortOutputs& sorted) {
  return {tensor.data(), tensor.strides()[0], tensor.sizes()[1], ints_of(sorted.row_slots)};
}
Rows sorted_rows(const Tensor& tensor) { return {tensor.data(), tensor.sizes()[1], tensor.sizes()[1], nullptr}; }

GemmParams make_params(const LayerShape& shape, const SortOutputs& sorted, const Rows& a, const Tensor& d) {
  GemmParams params{};
  params.a = a.data;
  params.a_stride = a.stride;
  params.a_slots = a.slots;
  params.d = d.data();
  params.row_weights = floats_of(sorted.row_weights);
  params.expert_offsets = ints_of(sorted.expert_offsets);
  params.experts = static_cast<int32_t>(shape.experts);
  params.slots = static_cast<int32_t>(shape.slots);
  params.tokens = static_cast<int32_t>(shape.tokens);
  params.top_k = static_cast<int32_t>(shape.top_k);
  params.activation = shape.activation;
  params.is_interleaved = shape.is_interleaved ? 1 : 0;
  return params;
}

bool is_kn(const ExpertWeights& weights) { return memory_of(weights, /*is_paired=*/false) != Memory::kNk; }

SortParams make_sort(const SortArguments& arguments, const SortOutputs& sorted) {
  SortParams params{};
  params.ids = arguments.ids.data();
  params.topk_weights = arguments.topk_weights.data();
  params.expert_map = static_cast<const int32_t*>(data_or_null(arguments.expert_map));
  params.expert_offsets = static_cast<int32_t*>(sorted.expert_offsets.data());
  params.row_slots = static_cast<int32_t*>(sorted.row_slots.data());
  params.slot_rows = static_cast<int32_t*>(sorted.slot_rows.data());
  params.row_weights = static_cast<float*>(sorted.row_weights.data());
  params.ids_dtype = scalar_of(arguments.ids);
  params.weights_dtype = scalar_of(arguments.topk_weights);
  params.slots = static_cast<int32_t>(arguments.slots);
  params.experts = static_cast<int32_t>(arguments.experts);
  params.ids_end = static_cast<int32_t>(arguments.ids_end);
  return params;
}

// out = shared + sum over choices of (weighted) rows.
CombineParams make_combine(const LayerShape& shape, const SortOutputs& sorted, const Tensor& rows, const Tensor& out) {
  CombineParams params{};
  params.rows = data_or_null(rows);
  params.out = data_or_null(out);
  params.out_stride = out.get() != nullptr ? out.strides()[0] : 0;
  params.slot_rows = ints_of(sorted.slot_rows);
  params.tokens = static_cast<int32_t>(shape.tokens);
  params.top_k = static_cast<int32_t>(shape.top_k);
  params.columns = static_cast<int32_t>(shape.hidden);
  params.experts = static_cast<int32_t>(shape.experts);
  return params;
}

void compute_layer(const CpuCall& call, const LayerArguments& arguments, const SortOutputs& sorted,
                   const LayerOutputs& outputs) {
  const LayerShape& shape = arguments.shape;
  cpu::moe_sort(make_sort(arguments.routing, sorted));
  const Tensor activation = call.rows(shape.slots, shape.intermediate), rows = call.rows(shape.slots, shape.hidden);

  const ExpertWeights w13 = view_weights(arguments.w13, shape.is_transposed);
  GemmParams gated = make_params(shape, sorted, token_rows(arguments.x, sorted), activation);
  set_weights(gated, w13);
  gated.d_stride = shape.intermediate;
  gated.bias = data_or_null(arguments.b13);
  gated.preactivation = arguments.keep ? outputs.preactivation.data() : nullptr;
  call.multiply(gated, MoeProduct::kGated, is_kn(w13));

  const ExpertWeights w2 = view_weights(arguments.w2, shape.is_transposed);
  GemmParams down = make_params(shape, sorted, sorted_rows(activation), rows);
  set_weights(down, w2);
  down.d_stride = shape.hidden;
  down.bias = data_or_null(arguments.b2);
  call.multiply(down, MoeProduct::kPlain, is_kn(w2));

  CombineParams combine = make_combine(shape, sorted, rows, outputs.out);
  combine.shared = data_or_null(arguments.shared);
  combine.shared_stride = combine.shared != nullptr ? arguments.shared.strides()[0] : 0;
  combine.row_weights = floats_of(sorted.row_weights);
  cpu::moe_combine(combine, call.type(), call.pool());
}

// One backward pass: dz and the weighted activation first, from which all but db2 follow.
class Backward {
 public:
  Backward(const CpuCall& call, const LayerBackwardArguments& arguments, const LayerGradients& gradients)
      : call_(call), arguments_(arguments), gradients_(gradients), shape_(arguments.shape), sorted_(arguments.sorted) {}

  void run() {
    const Rows dout = token_rows(arguments_.dout, sorted_), x = token_rows(arguments_.x, sorted_);
    const bool wants_rows = is_wanted(gradients_.dx) || is_wanted(gradients_.dweights);
    if (wants_rows || is_wanted(gradients_.dw13) || is_wanted(gradients_.dw2) || is_wanted(gradients_.db13)) {
      differentiate_activation(dout);
      add_up_weights(dout, sorted_rows(weighted_activation_), gradients_.dw2);
      add_up_weights(sorted_rows(dz_), x, gradients_.dw13);
      add_up_bias(sorted_rows(dz_), nullptr, gradients_.db13);
    }
    add_up_bias(dout, floats_of(sorted_.row_weights), gradients_.db2);
    if (wants_rows) differentiate_rows();
  }

 private:
  static bool is_wanted(const Tensor& gradient) { return gradient.get() != nullptr; }

  void differentiate_activation(const Rows& dout) {
    const int32_t dot_columns = cpu::moe_dot_columns();
    dot_tiles_ = static_cast<int32_t>(ceil_div(shape_.intermediate, dot_columns));
    dz_ = call_.rows(shape_.slots, 2 * shape_.intermediate);
    weighted_activation_ = call_.rows(shape_.slots, shape_.intermediate);
    row_dots_ = call_.floats(dot_tiles_ * shape_.slots);
    const ExpertWeights w2 = swapped(view_weights(arguments_.w2, shape_.is_transposed));
    GemmParams params = make_params(shape_, sorted_, dout, dz_);
    set_weights(params, w2);
    params.d_stride = 2 * shape_.intermediate;
    params.preactivation = arguments_.preactivation.data();
    params.weighted_activation = weighted_activation_.data();
    params.row_dots = static_cast<float*>(row_dots_.data());
    call_.multiply(params, MoeProduct::kGatedBackward, is_kn(w2));
  }

  // gradient[e] = sum over e's rows of n_rows^T k_rows; of transposed weights the other way round.
  void add_up_weights(Rows n_rows, Rows k_rows, const Tensor& gradient) {
    if (!is_wanted(gradient)) return;
    if (shape_.is_transposed) std::swap(n_rows, k_rows);
    GemmParams params = make_params(shape_, sorted_, n_rows, gradient);
    params.b = k_rows.data;
    params.b_stride = k_rows.stride;
    params.b_slots = k_rows.slots;
    params.n = static_cast<int32_t>(n_rows.columns);
    params.k = static_cast<int32_t>(k_rows.columns);
    params.d_stride = k_rows.columns;
    call_.multiply(params, MoeProduct::kWeightGradient, /*is_kn=*/false);
  }

  void add_up_bias(const Rows& rows, const float* row_weights, const Tensor& gradient) {
    if (!is_wanted(gradient)) return;
    BiasGradientParams params{};
    params.a = rows.data;
    params.a_stride = rows.stride;
    params.a_slots = rows.slots;
    params.d = gradient.data();
    params.row_weights = row_weights;
    params.expert_offsets = ints_of(sorted_.expert_offsets);
    params.experts = static_cast<int32_t>(shape_.experts);
    params.top_k = static_cast<int32_t>(shape_.top_k);
    params.columns = static_cast<int32_t>(rows.columns);
    cpu::moe_bias_gradient(params, call_.type(), call_.pool());
  }

  // dx and the gradient of the slots' weights.
  void differentiate_rows() {
    Tensor rows;
    if (is_wanted(gradients_.dx)) {
      rows = call_.rows(shape_.slots, shape_.hidden);
      const ExpertWeights w13 = swapped(view_weights(arguments_.w13, shape_.is_transposed));
      GemmParams params = make_params(shape_, sorted_, sorted_rows(dz_), rows);
      set_weights(params, w13);
      params.d_stride = shape_.hidden;
      call_.multiply(params, MoeProduct::kPlain, is_kn(w13));
    }
    CombineParams combine = make_combine(shape_, sorted_, rows, gradients_.dx);
    combine.row_dots = floats_of(row_dots_);
    combine.dot_tiles = dot_tiles_;
    combine.dweights = static_cast<float*>(data_or_null(gradients_.dweights));
    combine.bias = data_or_null(arguments_.b2);
    combine.dout = arguments_.dout.data();
    combine.dout_stride = arguments_.dout.strides()[0];
    combine.expert_offsets = ints_of(sorted_.expert_offsets);
    cpu::moe_combine(combine, call_.type(), call_.pool());
  }

  const CpuCall& call_;
  const LayerBackwardArguments& arguments_;
  const LayerGradients& gradients_;
  const LayerShape& shape_;
  const SortOutputs& sorted_;
  Tensor dz_;                   // [slots, 2 * intermediate]
  Tensor weighted_activation_;  // [slots, intermediate]
  Tensor row_dots_;             // [dot_tiles][slots]
  int32_t dot_tiles_ = 0;
};

// [experts + 1] offsets of the ends that grouped_mm takes: ascending and inside of [0, rows].
Tensor offsets_of_ends(const CpuCall& call, const Tensor& ends, int64_t experts, int64_t rows) {
  Tensor offsets = call.ints(experts + 1);
  int32_t* values = static_cast<int32_t*>(offsets.data());
  values[0] = 0;
  for (int64_t i = 0; i < experts; ++i) {
    const int32_t end = ints_of(ends)[i];
    if (end < values[i] || end > rows) {
      host::fail(host::ErrorCode::kArgument, "offsets[", i, "] is ", end,
                 "; the ends of the experts' rows must ascend from ", values[i], " to at most ", rows,
                 ", the number of rows");
    }
    values[i + 1] = end;
  }
  return offsets;
}

}  // namespace

void route_cpu(const RouteArguments& arguments, const RouteOutputs& outputs) {
  const CpuCall call(arguments.common);
  RouteParams params{};
  params.logits = arguments.logits.data();
  params.bias = static_cast<const float*>(data_or_null(arguments.bias));
  params.weights = static_cast<float*>(outputs.weights.data());
  params.ids = static_cast<int32_t*>(outputs.ids.data());
  params.counts = static_cast<int32_t*>(outputs.counts.data());
  params.logits_stride = arguments.logits.strides()[0];
  params.logits_dtype = scalar_of(arguments.logits);
  params.scoring = arguments.scoring;
  params.tokens = static_cast<int32_t>(arguments.tokens);
  params.experts = static_cast<int32_t>(arguments.experts);
  params.top_k = static_cast<int32_t>(arguments.top_k);
  params.groups = static_cast<int32_t>(arguments.groups);
  params.topk_groups = static_cast<int32_t>(arguments.topk_groups);
  params.renormalize = arguments.renormalize ? 1 : 0;
  params.scale = static_cast<float>(arguments.scale);
  cpu::moe_route(params);
  call.done();
}

void sort_cpu(const SortArguments& arguments, const SortOutputs& outputs) {
  const CpuCall call(arguments.common);
  cpu::moe_sort(make_sort(arguments, outputs));
  call.done();
}

void layer_cpu(const LayerArguments& arguments, const LayerOutputs& outputs) {
  const CpuCall call(arguments.common);
  if (arguments.keep) {
    compute_layer(call, arguments, outputs.sorted, outputs);
  } else {
    const int64_t slots = arguments.shape.slots;
    const SortOutputs sorted{call.ints(arguments.shape.experts + 1), call.ints(slots), call.ints(slots),
                             call.floats(slots)};
    compute_layer(call, arguments, sorted, outputs);
  }
  call.done();
}

void layer_backward_cpu(const LayerBackwardArguments& arguments, const LayerGradients& gradients) {
  const CpuCall call(arguments.common);
  Backward(call, arguments, gradients).run();
  call.done();
}

void grouped_cpu(const GroupedArguments& arguments, const Tensor& out) {
  const CpuCall call(arguments.common);
  const Tensor offsets = offsets_of_ends(call, arguments.offsets, arguments.b.experts, arguments.rows);
  GemmParams params{};
  set_weights(params, arguments.b);
  params.a = arguments.a.data();
  params.a_stride = arguments.a.strides()[0];
  params.d = out.data();
  params.d_stride = params.n;
  params.expert_offsets = ints_of(offsets);
  params.slots = static_cast<int32_t>(arguments.rows);
  params.top_k = 1;
  const int64_t end = ints_of(offsets)[arguments.b.experts];
  const size_t row_bytes = static_cast<size_t>(params.n) * (call.type() == cpu::ScalarType::kFloat32 ? 4 : 2);
  memset(static_cast<char*>(out.data()) + static_cast<size_t>(end) * row_bytes, 0,
         static_cast<size_t>(arguments.rows - end) * row_bytes);
  call.multiply(params, MoeProduct::kPlain, is_kn(arguments.b));
  call.done();
}

void grouped_gradient_cpu(const GroupedGradientArguments& arguments, const Tensor& out) {
  const CpuCall call(arguments.common);
  const Tensor offsets = offsets_of_ends(call, arguments.offsets, arguments.experts, arguments.rows);
  GemmParams params{};
  params.a = arguments.a.data();
  params.b = arguments.b.data();
  params.d = out.data();
  params.a_stride = arguments.a.strides()[0];
  params.b_stride = arguments.b.strides()[0];
  params.n = static_cast<int32_t>(arguments.a.sizes()[1]);
  params.k = static_cast<int32_t>(arguments.b.sizes()[1]);
  params.d_stride = params.k;
  params.expert_offsets = ints_of(offsets);
  params.experts = static_cast<int32_t>(arguments.experts);
  params.slots = static_cast<int32_t>(arguments.rows);
  params.top_k = 1;
  call.multiply(params, MoeProduct::kWeightGradient, /*is_kn=*/false);
  call.done();
}

}  // namespace moe
}  // namespace flashmoe
