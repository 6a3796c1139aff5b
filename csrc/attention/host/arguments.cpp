#include "attention/host/arguments.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

namespace flashmoe::attention {
namespace {

using host::describe_device;
using host::describe_dtype;
using host::describe_sizes;
using host::violate;

constexpr double kMaxScale = std::numeric_limits<float>::max() / kLog2E;

// The element type, if attention has kernels for it on that kind of device.
Dtype supported_dtype(const QueryKeyValue& operands) {
  const bool is_cuda = operands.device_type == aoti_torch_device_type_cuda();
  const std::optional<Dtype> dtype = host::dtype_of(operands.torch_dtype);
  if (!dtype.has_value() || (*dtype == Dtype::kFloat32 && is_cuda)) {
    violate("attention.dtype", {{"dtype", describe_dtype(operands.torch_dtype)},
                                {"device", describe_device(operands.q)},
                                {"supported", is_cuda ? "float16, bfloat16" : "float16, bfloat16, float32"}});
  }
  return *dtype;
}

}  // namespace

bool is_possible_scale(double scale) { return std::abs(scale) <= kMaxScale; }

Tensor dense_like(const Tensor& tensor, const int64_t* sizes, int32_t torch_dtype) {
  const int64_t* strides = tensor.strides();
  std::array<int, 4> order{0, 1, 2, 3};
  const bool is_expanded = std::any_of(strides, strides + 4, [](int64_t stride) { return stride == 0; });
  if (!is_expanded) {
    std::stable_sort(order.begin(), order.begin() + 3,
                     [&](int left, int right) { return strides[left] > strides[right]; });
  }
  std::array<int64_t, 4> result{};
  int64_t stride = 1;
  for (int position = 3; position >= 0; --position) {
    const auto axis = static_cast<std::size_t>(order[static_cast<std::size_t>(position)]);
    result[axis] = stride;
    stride *= std::max<int64_t>(sizes[axis], 1);
  }
  return host::empty_strided(4, sizes, result.data(), torch_dtype, tensor.device_type(), tensor.device_index());
}

Strides strides_of(const Tensor& tensor, bool is_paged) {
  const int64_t* strides = tensor.strides();
  if (tensor.dim() == 3) return {0, strides[1], strides[0]};
  return is_paged ? Strides{strides[0], strides[2], strides[1]} : Strides{strides[0], strides[1], strides[2]};
}

void check_devices(QueryKeyValue& operands) {
  const Tensor& q = operands.q;
  const Tensor& k = operands.k;
  const Tensor& v = operands.v;
  for (const auto& [tensor, name] : {std::pair(&q, "q"), std::pair(&k, "k"), std::pair(&v, "v")}) {
    if (!tensor->is_defined()) violate("tensor.missing", {{"name", name}});
  }
  operands.device_type = q.device_type();
  operands.device_index = q.device_index();
  for (const Tensor* other : {&k, &v}) {
    if (other->device_type() != operands.device_type || other->device_index() != operands.device_index) {
      violate("attention.devices", {{"q", describe_device(q)}, {"k", describe_device(k)}, {"v", describe_device(v)}});
    }
  }
  if (q.description() != nullptr && operands.device_type < 0) {
    violate("attention.device", {{"device", describe_device(q)}});
  }
}

void check_operands(QueryKeyValue& operands, bool has_codes) {
  check_devices(operands);
  const Tensor& q = operands.q;
  const Tensor& k = operands.k;
  const Tensor& v = operands.v;
  operands.torch_dtype = q.dtype();
  if (has_codes) {
    const int32_t code = aoti_torch_dtype_float8_e4m3fn();
    const std::optional<Dtype> dtype = host::dtype_of(operands.torch_dtype);
    if (k.dtype() != code || v.dtype() != code || !dtype.has_value() || *dtype == Dtype::kFloat32) {
      violate("attention.e4m3_dtypes",
              {{"q", describe_dtype(q.dtype())}, {"k", describe_dtype(k.dtype())}, {"v", describe_dtype(v.dtype())}});
    }
  } else if (k.dtype() != operands.torch_dtype || v.dtype() != operands.torch_dtype) {
    violate("attention.dtypes",
            {{"q", describe_dtype(q.dtype())}, {"k", describe_dtype(k.dtype())}, {"v", describe_dtype(v.dtype())}});
  }
  operands.dtype = supported_dtype(operands);
}

void check_layout(const Tensor& tensor, const char* name, const Layout& layout) {
  const int64_t rank = tensor.dim();
  if (rank != layout.rank) {
    const char* rule = rank < layout.rank ? "attention.too_few_dimensions" : "attention.too_many_dimensions";
    violate(rule, {{"name", name},
                   {"layout", layout.text},
                   {"sizes", describe_sizes(tensor)},
                   {"rank", rank},
                   {"merged", -layout.rank}});
  }
  const int64_t* sizes = tensor.sizes();
  if (*std::max_element(sizes, sizes + rank) > std::numeric_limits<int32_t>::max()) {
    violate("tensor.size", {{"name", name}, {"sizes", describe_sizes(tensor)}});
  }
  check_last_stride(tensor, name);
}

void check_last_stride(const Tensor& tensor, const char* name) {
  const int64_t last = tensor.dim() - 1;
  if (tensor.strides()[last] != 1 && tensor.sizes()[last] > 1) {
    violate("tensor.stride", {{"name", name}, {"strides", host::describe_strides(tensor)}});
  }
}

void check_heads(const QueryKeyValue& operands, int64_t heads_kv) {
  const auto last = [](const Tensor& tensor) { return tensor.sizes()[tensor.dim() - 1]; };
  const int64_t of_q = last(operands.q), of_k = last(operands.k), of_v = last(operands.v);
  if (of_k != of_q) violate("attention.head_dims", {{"q", of_q}, {"k", of_k}});
  for (const auto& [head_dim, name] : {std::pair(of_q, "q"), std::pair(of_v, "v")}) {
    if (head_dim < 1 || head_dim > kMaxHeadDim) {
      violate("attention.head_dim", {{"name", name}, {"head_dim", head_dim}, {"most", kMaxHeadDim}});
    }
  }
  const int64_t heads_q = operands.q.sizes()[1];
  if (heads_kv == 0 ? heads_q != 0 : heads_q % heads_kv != 0) {
    const Tensor &q = operands.q, &k = operands.k;
    const bool is_dense = q.dim() == 4 && k.dim() == 4 && k.sizes()[1] == heads_kv;
    const int64_t length_q = q.sizes()[2], length_k = is_dense ? k.sizes()[2] : 0;
    const bool fits_transposed = heads_q < heads_kv && length_k > 0 && length_q >= length_k && length_q % length_k == 0;
    violate(fits_transposed ? "attention.transposed_heads" : "attention.heads", {{"q", heads_q}, {"k", heads_kv}});
  }
}

void check_batch(int64_t of_q, int64_t of_k) {
  if (of_q != of_k) violate("attention.batch", {{"q", of_q}, {"k", of_k}});
}

namespace {

// torch treats a tensor without elements as contiguous, whatever its strides.
bool has_elements(const Tensor& tensor) {
  return std::all_of(tensor.sizes(), tensor.sizes() + tensor.dim(), [](int64_t size) { return size != 0; });
}

void check_shape(const Tensor& tensor, const char* name, const int64_t* sizes, int64_t rank) {
  if (tensor.dim() != rank || !std::equal(sizes, sizes + rank, tensor.sizes())) {
    violate("attention.backward_shape",
            {{"name", name}, {"found", describe_sizes(tensor)}, {"needed", describe_sizes(sizes, rank)}});
  }
}

}  // namespace

void check_device(const Tensor& tensor, const char* name, const QueryKeyValue& operands) {
  if (tensor.device_type() != operands.device_type || tensor.device_index() != operands.device_index) {
    violate("attention.companion_device",
            {{"name", name}, {"found", describe_device(tensor)}, {"q", describe_device(operands.q)}});
  }
}

void check_companion(const Tensor& tensor, const char* name, const QueryKeyValue& operands, int32_t dtype,
                     int64_t rank) {
  check_device(tensor, name, operands);
  if (tensor.dtype() != dtype) {
    violate("attention.companion_dtype",
            {{"name", name}, {"found", describe_dtype(tensor.dtype())}, {"needed", describe_dtype(dtype)}});
  }
  if (tensor.dim() != rank) {
    violate("attention.companion_rank", {{"name", name}, {"rank", rank}, {"found", describe_sizes(tensor)}});
  }
  if (has_elements(tensor)) check_last_stride(tensor, name);
}

void check_backward_tensors(const BackwardTensors& tensors, const QueryKeyValue& operands, const int64_t* sizes) {
  const int64_t rank = operands.q.dim();
  for (const auto& [tensor, name] : {std::pair(&tensors.out, "out"), std::pair(&tensors.dout, "grad_out")}) {
    check_companion(*tensor, name, operands, operands.torch_dtype, rank);
    check_shape(*tensor, name, sizes, rank);
  }
  int64_t rows[3] = {sizes[0], sizes[1], sizes[2]};
  if (rank == 3) std::swap(rows[0], rows[1]);
  for (const auto& [tensor, name] : {std::pair(&tensors.lse, "lse"), std::pair(&tensors.dlse, "grad_lse")}) {
    if (!tensor->is_given()) continue;
    check_companion(*tensor, name, operands, aoti_torch_dtype_float32(), rank - 1);
    check_shape(*tensor, name, rows, rank - 1);
    int64_t stride = 1;
    for (int64_t axis = rank - 2; axis >= 0; --axis) {
      if (rows[axis] > 1 && tensor->strides()[axis] != stride && has_elements(*tensor)) {
        violate("attention.backward_strides", {{"name", name}, {"strides", host::describe_strides(*tensor)}});
      }
      stride *= rows[axis];
    }
  }
}

void check_scale(double scale) {
  if (!is_possible_scale(scale)) violate("attention.scale", {{"scale", scale}});
}

void check_arguments(ForwardArguments& arguments) {
  check_operands(arguments);
  const Tensor& k = arguments.k;
  const Tensor& v = arguments.v;
  check_layout(arguments.q, "q", kDenseLayout);
  check_layout(k, "k", kDenseLayout);
  check_layout(v, "v", kDenseLayout);
  const int64_t* k_sizes = k.sizes();
  check_heads(arguments, k_sizes[1]);
  if (!std::equal(k_sizes, k_sizes + 4, v.sizes())) {
    violate("attention.key_value_sizes", {{"k", describe_sizes(k)}, {"v", describe_sizes(v)}});
  }
  check_batch(arguments.q.sizes()[0], k_sizes[0]);
  // In float32 this equals Python's head_dim ** -0.5 for every head_dim; std::pow would need GLIBC_2.29.
  if (arguments.has_default_scale) {
    arguments.scale = 1.0 / std::sqrt(static_cast<double>(arguments.q.sizes()[3]));
  }
  check_scale(arguments.scale);
}

ForwardOutputs allocate_outputs(const QueryKeyValue& operands, bool with_lse) {
  const Tensor& q = operands.q;
  const int64_t rank = q.dim();
  int64_t sizes[4] = {};
  std::copy_n(q.sizes(), rank, sizes);
  sizes[rank - 1] = operands.v.sizes()[operands.v.dim() - 1];
  ForwardOutputs outputs;
  if (rank == 4) {
    outputs.out = dense_like(q, sizes, operands.torch_dtype);
  } else {
    outputs.out = host::empty(rank, sizes, operands.torch_dtype, operands.device_type, operands.device_index);
    std::swap(sizes[0], sizes[1]);
  }
  if (with_lse) {
    outputs.lse = host::empty(rank - 1, sizes, aoti_torch_dtype_float32(), operands.device_type, operands.device_index);
  }
  return outputs;
}

ForwardParams make_operand_params(const QueryKeyValue& operands, const ForwardOutputs& outputs, bool is_paged) {
  ForwardParams params{};
  params.q = operands.q.data();
  params.k = operands.k.data();
  params.v = operands.v.data();
  params.q_stride = strides_of(operands.q);
  params.k_stride = strides_of(operands.k, is_paged);
  params.v_stride = strides_of(operands.v, is_paged);
  if (outputs.out.is_given()) {
    params.out = outputs.out.data();
    params.out_stride = strides_of(outputs.out);
  }
  if (outputs.lse.is_given()) params.lse = static_cast<float*>(outputs.lse.data());
  const int64_t* sizes = operands.q.sizes();
  params.heads_q = static_cast<int32_t>(sizes[1]);
  params.heads_kv = static_cast<int32_t>(operands.k.sizes()[is_paged ? 2 : 1]);
  params.head_dim = static_cast<int32_t>(sizes[operands.q.dim() - 1]);
  params.num_splits = 1;
  return params;
}

ForwardParams make_params(const ForwardArguments& arguments, const ForwardOutputs& outputs) {
  ForwardParams params = make_operand_params(arguments, outputs, /*is_paged=*/false);
  params.batch = static_cast<int32_t>(arguments.q.sizes()[0]);
  params.seq_q = static_cast<int32_t>(arguments.q.sizes()[2]);
  params.seq_k = static_cast<int32_t>(arguments.k.sizes()[2]);
  params.scale = static_cast<float>(arguments.scale);
  params.scale_log2 = static_cast<float>(arguments.scale * kLog2E);
  params.is_consistent = arguments.is_consistent || host::wants_consistency() ? 1 : 0;
  return params;
}

BackwardParams make_backward_params(const ForwardParams& forward, const BackwardTensors& tensors,
                                    const Gradients& gradients) {
  BackwardParams params{};
  params.q = forward.q;
  params.k = forward.k;
  params.v = forward.v;
  params.out = tensors.out.data();
  params.dout = tensors.dout.data();
  params.lse = static_cast<const float*>(tensors.lse.data());
  if (tensors.dlse.is_given()) params.dlse = static_cast<const float*>(tensors.dlse.data());
  if (gradients.row_dot.is_given()) params.row_dot = static_cast<float*>(gradients.row_dot.data());
  params.q_stride = forward.q_stride;
  params.k_stride = forward.k_stride;
  params.v_stride = forward.v_stride;
  params.out_stride = strides_of(tensors.out);
  params.dout_stride = strides_of(tensors.dout);
  const auto set = [](const Tensor& gradient, void** address, Strides* strides) {
    if (!gradient.is_given()) return;
    *address = gradient.data();
    *strides = strides_of(gradient);
  };
  set(gradients.dq, &params.dq, &params.dq_stride);
  set(gradients.dk, &params.dk, &params.dk_stride);
  set(gradients.dv, &params.dv, &params.dv_stride);
  params.batch = forward.batch;
  params.heads_q = forward.heads_q;
  params.heads_kv = forward.heads_kv;
  params.seq_q = forward.seq_q;
  params.seq_k = forward.seq_k;
  params.head_dim = forward.head_dim;
  params.head_dim_v = forward.head_dim_v;
  params.scale = forward.scale;
  params.scale_log2 = forward.scale_log2;
  params.sequences = forward.sequences;
  params.score_options = forward.score_options;
  return params;
}

}  // namespace flashmoe::attention
