// The operators on the CPU: the same steps as on a GPU, on torch's thread pool.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstring>

#include "host/cpu_call.h"
#include "host/last_kernel.h"
#include "moe/cpu/moe.h"
#include "moe/host/backends.h"
#include "moe/host/prepare.h"
#include "moe/params/mxfp4.h"

namespace flashmoe::moe {
namespace {

using cpu::MoeProduct;

// The start and the end of each call on the CPU.
class CpuCall {
 public:
  explicit CpuCall(const Common& common)
      : common_(common), pool_{host::torch_parallel, host::num_cpu_threads()}, isa_(host::checked_isa()) {}

  const cpu::Pool& pool() const { return pool_; }
  cpu::ScalarType type() const { return host::scalar_type(common_.dtype); }
  // Uninitialised, with the call's dtype or another one.
  Tensor rows(int64_t count, int64_t columns) const { return empty({count, columns}, common_.torch_dtype); }
  Tensor weights(int64_t experts, int64_t n, int64_t k) const { return empty({experts, n, k}, common_.torch_dtype); }
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

bool is_kn(const ExpertWeights& weights) { return layout_of(weights, /*is_interleaved=*/false) != WeightLayout::kNk; }

// The product of `a` and the weights; the caller fills in the rest.
GemmParams make_product(const LayerShape& shape, const Sorted& sorted, const Rows& a, const ExpertWeights& weights,
                        const Tensor& d) {
  GemmParams params{};
  set_weights(params, weights);
  set_layer(params, shape, sorted);
  set_operands(params, a, d.data(), d.sizes()[1]);
  return params;
}

void compute_layer(const CpuCall& call, const LayerArguments& arguments, const SortOutputs& sorted_tensors,
                   const LayerOutputs& outputs) {
  const LayerShape& shape = arguments.shape;
  const Sorted sorted = pointers_of(sorted_tensors);
  cpu::moe_sort(sort_params(arguments.routing, sorted));
  const Tensor activation = call.rows(shape.slots, shape.intermediate), rows = call.rows(shape.slots, shape.hidden);

  const ExpertWeights w13 = view_weights(arguments.w13, shape.is_transposed);
  GemmParams gated = make_product(shape, sorted, token_rows(arguments.x, sorted.row_slots), w13, activation);
  gated.bias = data_or_null(arguments.b13);
  gated.preactivation = data_or_null(outputs.preactivation);
  call.multiply(gated, MoeProduct::kGated, is_kn(w13));

  const ExpertWeights w2 = view_weights(arguments.w2, shape.is_transposed);
  GemmParams down = make_product(shape, sorted, sorted_rows(activation.data(), shape.intermediate), w2, rows);
  down.bias = data_or_null(arguments.b2);
  call.multiply(down, MoeProduct::kPlain, is_kn(w2));

  cpu::moe_combine(combine_params(shape, sorted, arguments.shared, outputs.out, rows.data()), call.type(), call.pool());
}

// One backward pass: first dz and the weighted activation, from which all gradients but db2 follow.
class Backward {
 public:
  Backward(const CpuCall& call, const LayerBackwardArguments& arguments, const LayerGradients& gradients)
      : call_(call),
        arguments_(arguments),
        gradients_(gradients),
        shape_(arguments.shape),
        sorted_(pointers_of(arguments.sorted)) {}

  void run() {
    const Rows dout = token_rows(arguments_.dout, sorted_.row_slots);
    if (needs_dz(arguments_)) {
      differentiate_activation(dout);
      const Rows dz = sorted_rows(dz_.data(), 2 * shape_.intermediate);
      add_up_weights(dout, sorted_rows(weighted_activation_.data(), shape_.intermediate), gradients_.dw2);
      add_up_weights(dz, token_rows(arguments_.x, sorted_.row_slots), gradients_.dw13);
      add_up_bias(dz, nullptr, gradients_.db13);
      if (needs_rows(arguments_)) differentiate_rows(dz);
    }
    add_up_bias(dout, sorted_.row_weights, gradients_.db2);
  }

 private:
  void differentiate_activation(const Rows& dout) {
    dz_ = call_.rows(shape_.slots, 2 * shape_.intermediate);
    weighted_activation_ = call_.rows(shape_.slots, shape_.intermediate);
    row_dots_ = call_.floats(ceil_div(shape_.intermediate, cpu::moe_dot_columns()) * shape_.slots);
    const ExpertWeights w2 = swapped(view_weights(arguments_.w2, shape_.is_transposed));
    GemmParams params = make_product(shape_, sorted_, dout, w2, dz_);
    params.preactivation = arguments_.preactivation.data();
    params.weighted_activation = weighted_activation_.data();
    params.row_dots = static_cast<float*>(row_dots_.data());
    call_.multiply(params, MoeProduct::kGatedBackward, is_kn(w2));
  }

  void add_up_weights(const Rows& n_rows, const Rows& k_rows, const Tensor& gradient) {
    if (!gradient.is_given()) return;
    GemmParams params{};
    set_layer(params, shape_, sorted_);
    set_weight_gradient(params, shape_, n_rows, k_rows, gradient);
    call_.multiply(params, MoeProduct::kWeightGradient, /*is_kn=*/false);
  }

  void add_up_bias(const Rows& rows, const float* row_weights, const Tensor& gradient) {
    if (!gradient.is_given()) return;
    cpu::moe_bias_gradient(bias_gradient_params(shape_, sorted_, rows, row_weights, gradient), call_.type(),
                           call_.pool());
  }

  // dx and the gradient of the slots' weights.
  void differentiate_rows(const Rows& dz) {
    Tensor rows;
    if (gradients_.dx.is_given()) {
      rows = call_.rows(shape_.slots, shape_.hidden);
      const ExpertWeights w13 = swapped(view_weights(arguments_.w13, shape_.is_transposed));
      call_.multiply(make_product(shape_, sorted_, dz, w13, rows), MoeProduct::kPlain, is_kn(w13));
    }
    cpu::moe_combine(
        combine_backward_params(shape_, sorted_, gradients_, arguments_.b2, arguments_.dout, data_or_null(rows),
                                static_cast<const float*>(row_dots_.data()), cpu::moe_dot_columns()),
        call_.type(), call_.pool());
  }

  const CpuCall& call_;
  const LayerBackwardArguments& arguments_;
  const LayerGradients& gradients_;
  const LayerShape& shape_;
  const Sorted sorted_;
  Tensor dz_;                   // [slots, 2 * intermediate]
  Tensor weighted_activation_;  // [slots, intermediate]
  Tensor row_dots_;             // [dot_tiles][slots]
};

// [experts + 1] offsets from the ends passed to grouped_mm, which must be ascending and inside [0, rows].
Tensor offsets_of_ends(const CpuCall& call, const Tensor& ends, int64_t experts, int64_t rows) {
  Tensor offsets = call.ints(experts + 1);
  int32_t* values = static_cast<int32_t*>(offsets.data());
  values[0] = 0;
  for (int64_t i = 0; i < experts; ++i) {
    const int32_t end = static_cast<const int32_t*>(ends.data())[i];
    if (end < values[i] || end > rows) {
      host::violate("moe.offsets", {{"index", i}, {"end", end}, {"least", values[i]}, {"most", rows}});
    }
    values[i + 1] = end;
  }
  return offsets;
}

}  // namespace

void route_cpu(const RouteArguments& arguments, const RouteOutputs& outputs) {
  const CpuCall call(arguments.common);
  cpu::moe_route(route_params(arguments, outputs));
  call.done();
}

void sort_cpu(const SortArguments& arguments, const SortOutputs& outputs) {
  const CpuCall call(arguments.common);
  cpu::moe_sort(sort_params(arguments, pointers_of(outputs)));
  call.done();
}

void layer_cpu(const LayerArguments& arguments, const LayerOutputs& outputs) {
  const CpuCall call(arguments.common);
  if (outputs.is_for_backward()) {
    compute_layer(call, arguments, outputs.sorted, outputs);
  } else {
    const int64_t slots = arguments.shape.slots;
    const SortOutputs sorted{call.ints(arguments.shape.experts + 1), call.ints(slots), call.ints(slots),
                             call.floats(slots)};
    compute_layer(call, arguments, sorted, outputs);
  }
  call.done();
}

// Weights of experts without rows are not written, so they take no memory.
void mxfp4_cpu(Mxfp4Arguments arguments, const Tensor& out) {
  const CpuCall call(arguments.common);
  const LayerShape& shape = arguments.shape;
  const int64_t slots = shape.slots;
  const SortOutputs sorted{call.ints(shape.experts + 1), call.ints(slots), call.ints(slots), call.floats(slots)};
  cpu::moe_sort(sort_params(arguments.routing, pointers_of(sorted)));
  const auto* const offsets = static_cast<const int32_t*>(sorted.expert_offsets.data());
  const auto expand = [&](const Tensor& codes, const Tensor& scales) {
    const int64_t* sizes = codes.sizes();
    const int64_t n = sizes[1], k = 2 * sizes[2];
    Tensor weights = call.weights(sizes[0], n, k);
    for (int64_t expert = 0; expert < sizes[0]; ++expert) {
      if (offsets[expert] == offsets[expert + 1]) continue;
      cpu::moe_expand_mxfp4(
          {static_cast<const uint8_t*>(codes.data()) + expert * codes.strides()[0], codes.strides()[1],
           static_cast<const uint8_t*>(scales.data()) + expert * n * (k / kMxfp4Block),
           static_cast<uint16_t*>(weights.data()) + expert * n * k, n, k},
          call.pool());
    }
    return weights;
  };
  arguments.w13 = expand(arguments.w13, arguments.w13_scale);
  arguments.w2 = expand(arguments.w2, arguments.w2_scale);
  LayerOutputs outputs;
  outputs.out = host::alias(out);
  compute_layer(call, arguments, sorted, outputs);
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
  const int32_t* values = static_cast<const int32_t*>(offsets.data());
  GemmParams params{};
  set_weights(params, arguments.b);
  set_grouped(params, arguments, arguments.a, values, out);
  const auto end = static_cast<size_t>(values[arguments.b.experts]);
  const size_t row_bytes = static_cast<size_t>(params.n) * (call.type() == cpu::ScalarType::kFloat32 ? 4 : 2);
  memset(static_cast<char*>(out.data()) + end * row_bytes, 0, (static_cast<size_t>(arguments.rows) - end) * row_bytes);
  call.multiply(params, MoeProduct::kPlain, is_kn(arguments.b));
  call.done();
}

void grouped_gradient_cpu(const GroupedGradientArguments& arguments, const Tensor& out) {
  const CpuCall call(arguments.common);
  const Tensor offsets = offsets_of_ends(call, arguments.offsets, arguments.experts, arguments.rows);
  GemmParams params{};
  set_grouped_gradient(params, arguments, arguments.a, arguments.b, static_cast<const int32_t*>(offsets.data()), out);
  call.multiply(params, MoeProduct::kWeightGradient, /*is_kn=*/false);
  call.done();
}

}  // namespace flashmoe::moe
