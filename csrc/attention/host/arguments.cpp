#include "attention/host/arguments.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

namespace flashmoe {
namespace attention {
namespace {

using host::describe_device;
using host::describe_dtype;
using host::describe_sizes;
using host::ErrorCode;
using host::fail;

constexpr double kLog2E = 1.4426950408889634;
constexpr double kMaxScale = std::numeric_limits<float>::max() / kLog2E;

struct Shape {
  const int64_t* sizes;
  const int64_t* strides;
};

Shape check_shape(const Tensor& tensor, const char* name) {
  const int64_t rank = tensor.dim();
  const int64_t* sizes = tensor.sizes();
  if (rank != 4) {
    fail(ErrorCode::kShape, name, " has shape ", describe_sizes(sizes, rank),
         "; four dimensions are needed: [batch, heads, sequence, head_dim]; ",
         rank < 4 ? "add dimensions with unsqueeze" : "merge the leading ones with flatten");
  }
  for (int64_t axis = 0; axis < rank; ++axis) {
    if (sizes[axis] > std::numeric_limits<int32_t>::max()) {
      fail(ErrorCode::kShape, name, " has shape ", describe_sizes(sizes, rank), "; each size must be below 2^31");
    }
  }
  const int64_t* strides = tensor.strides();
  if (sizes[3] > 1 && strides[3] != 1) {
    fail(ErrorCode::kShape, name, " has stride ", strides[3],
         " in its last dimension; 1 is needed: call .contiguous() on it first");
  }
  return {sizes, strides};
}

void check_same_size(const Shape& left, const char* left_name, const Shape& right, const char* right_name, int axis,
                     const char* axis_name) {
  if (left.sizes[axis] != right.sizes[axis]) {
    fail(ErrorCode::kShape, axis_name, " differs: ", left_name, " has ", describe_sizes(left.sizes, 4), ", ",
         right_name, " has ", describe_sizes(right.sizes, 4), "; make them equal");
  }
}

// The element type, where attention has kernels for it on that kind of device.
Dtype supported_dtype(int32_t torch_dtype, bool is_cuda) {
  const std::optional<Dtype> dtype = host::dtype_of(torch_dtype);
  if (!dtype.has_value()) {
    fail(ErrorCode::kDtype, "no kernel for ", describe_dtype(torch_dtype), "; supported: float16, bfloat16",
         is_cuda ? "" : ", float32", "; convert the tensors");
  }
  if (*dtype == Dtype::kFloat32 && is_cuda) {
    fail(ErrorCode::kDtype,
         "float32 has no CUDA kernel; supported on CUDA: float16, bfloat16; convert the tensors or "
         "use torch's scaled_dot_product_attention");
  }
  return *dtype;
}

}  // namespace

bool is_possible_scale(double scale) { return std::abs(scale) <= kMaxScale; }

Tensor dense_like(const Tensor& tensor, const int64_t* sizes) {
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
  return host::empty_strided(4, sizes, result.data(), tensor.dtype(), tensor.device_type(), tensor.device_index());
}

Strides row_strides(const Tensor& tensor) {
  const int64_t* strides = tensor.strides();
  return {strides[0], strides[1], strides[2]};
}

void check_operands(QueryKeyValue& operands) {
  const Tensor& q = operands.q;
  const Tensor& k = operands.k;
  const Tensor& v = operands.v;
  for (const auto& [tensor, name] : {std::pair(&q, "q"), std::pair(&k, "k"), std::pair(&v, "v")}) {
    if (!tensor->is_defined()) fail(ErrorCode::kArgument, name, " is None; a tensor is needed");
  }
  operands.device_type = q.device_type();
  operands.device_index = q.device_index();
  for (const Tensor* other : {&k, &v}) {
    if (other->device_type() != operands.device_type || other->device_index() != operands.device_index) {
      fail(ErrorCode::kDevice, "q, k and v must be on one device; found ", describe_device(q), ", ", describe_device(k),
           " and ", describe_device(v), "; move them with .to(q.device)");
    }
  }
  operands.torch_dtype = q.dtype();
  if (k.dtype() != operands.torch_dtype || v.dtype() != operands.torch_dtype) {
    fail(ErrorCode::kDtype, "q, k and v must share one dtype; found ", describe_dtype(q.dtype()), ", ",
         describe_dtype(k.dtype()), " and ", describe_dtype(v.dtype()), "; convert them with .to(q.dtype)");
  }
  operands.dtype = supported_dtype(operands.torch_dtype, operands.device_type == aoti_torch_device_type_cuda());
}

void check_arguments(ForwardArguments& arguments) {
  check_operands(arguments);
  const Tensor& q = arguments.q;
  const Tensor& k = arguments.k;
  const Tensor& v = arguments.v;
  const Shape q_shape = check_shape(q, "q");
  const Shape k_shape = check_shape(k, "k");
  const Shape v_shape = check_shape(v, "v");
  check_same_size(q_shape, "q", k_shape, "k", 0, "the batch size");
  for (int axis = 0; axis < 4; ++axis) check_same_size(k_shape, "k", v_shape, "v", axis, "the shape of k and v");
  check_same_size(q_shape, "q", k_shape, "k", 3, "head_dim");
  const int64_t head_dim = q_shape.sizes[3];
  if (head_dim < 1 || head_dim > kMaxHeadDim) {
    fail(ErrorCode::kShape, "head_dim is ", head_dim, "; supported: 1 to ", kMaxHeadDim,
         "; use torch's scaled_dot_product_attention for larger heads");
  }
  const int64_t heads_q = q_shape.sizes[1];
  const int64_t heads_kv = k_shape.sizes[1];
  if (heads_kv == 0 ? heads_q != 0 : heads_q % heads_kv != 0) {
    fail(ErrorCode::kShape, "q has ", heads_q, " heads and k has ", heads_kv,
         "; the number of query heads must be a multiple of the number of key heads");
  }
  // In float32 what Python's head_dim ** -0.5 is, for all of them; std::pow would need GLIBC_2.29.
  if (arguments.has_default_scale) arguments.scale = 1.0 / std::sqrt(static_cast<double>(head_dim));
  if (!is_possible_scale(arguments.scale)) {
    fail(ErrorCode::kArgument, "scale is ", arguments.scale,
         "; a number is needed that is finite in float32 (default 1/sqrt(head_dim))");
  }
}

ForwardOutputs allocate_outputs(const ForwardArguments& arguments, bool with_lse) {
  const int64_t* sizes = arguments.q.sizes();
  ForwardOutputs outputs;
  outputs.out = dense_like(arguments.q, sizes);
  if (with_lse) {
    outputs.lse = host::empty({sizes[0], sizes[1], sizes[2]}, aoti_torch_dtype_float32(), arguments.device_type,
                              arguments.device_index);
  }
  return outputs;
}

ForwardParams make_params(const ForwardArguments& arguments, const ForwardOutputs& outputs) {
  const int64_t* q_sizes = arguments.q.sizes();
  const int64_t* k_sizes = arguments.k.sizes();
  ForwardParams params{};
  params.q = arguments.q.data();
  params.k = arguments.k.data();
  params.v = arguments.v.data();
  if (outputs.out.get() != nullptr) {
    params.out = outputs.out.data();
    params.out_stride = row_strides(outputs.out);
  }
  params.lse = outputs.lse.get() != nullptr ? static_cast<float*>(outputs.lse.data()) : nullptr;
  params.q_stride = row_strides(arguments.q);
  params.k_stride = row_strides(arguments.k);
  params.v_stride = row_strides(arguments.v);
  params.batch = static_cast<int32_t>(q_sizes[0]);
  params.heads_q = static_cast<int32_t>(q_sizes[1]);
  params.heads_kv = static_cast<int32_t>(k_sizes[1]);
  params.seq_q = static_cast<int32_t>(q_sizes[2]);
  params.seq_k = static_cast<int32_t>(k_sizes[2]);
  params.head_dim = static_cast<int32_t>(q_sizes[3]);
  params.num_splits = 1;
  params.scale = static_cast<float>(arguments.scale);
  params.scale_log2 = static_cast<float>(arguments.scale * kLog2E);
  return params;
}

}  // namespace attention
}  // namespace flashmoe
