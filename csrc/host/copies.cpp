#include "host/copies.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>

namespace flashmoe::host {
namespace {

void copy(const Tensor& from, const Tensor& to) {
  check_shim(aoti_torch_copy_(to.get(), from.get(), /*non_blocking=*/0), "copy_");
}

}  // namespace

bool is_loadable(const Tensor& tensor, const Kernel& kernel) {
  constexpr int64_t kAlignBytes = kRowAlignElements * kElementBytes;
  const int64_t last = tensor.dim() - 1;
  const int64_t* sizes = tensor.sizes();
  const int64_t* strides = tensor.strides();
  if (sizes[last] % kRowAlignElements != 0 || reinterpret_cast<uintptr_t>(tensor.data()) % kAlignBytes != 0)
    return false;
  for (int64_t axis = 0; axis < last; ++axis) {
    if (sizes[axis] > 1 && strides[axis] % kRowAlignElements != 0) return false;
    if (sizes[axis] > 1 && strides[axis] <= 0 && kernel.num_tensor_maps > 0) return false;
  }
  return true;
}

Sizes padded_sizes(const Tensor& tensor) {
  Sizes result;
  result.rank = tensor.dim();
  const int64_t* sizes = tensor.sizes();
  for (int64_t axis = 0; axis < result.rank; ++axis) result.values[static_cast<std::size_t>(axis)] = sizes[axis];
  int64_t& last = result.values[static_cast<std::size_t>(result.rank - 1)];
  last = (last + kRowAlignElements - 1) / kRowAlignElements * kRowAlignElements;
  return result;
}

Tensor empty_like(const Tensor& tensor, const Sizes& sizes) {
  return empty(sizes.rank, sizes.values.data(), tensor.dtype(), tensor.device_type(), tensor.device_index());
}

Tensor padded_copy(const Tensor& tensor) {
  const Sizes sizes = padded_sizes(tensor);
  const auto last = static_cast<std::size_t>(sizes.rank - 1);
  Tensor result = empty_like(tensor, sizes);
  if (sizes.values[last] != tensor.sizes()[last]) check_shim(aoti_torch_zero_(result.get()), "zero_");
  copy(tensor, view_of(result, tensor.sizes(), result.strides()));
  return result;
}

Tensor loadable(const Tensor& tensor, const Kernel& kernel) {
  return is_loadable(tensor, kernel) ? alias(tensor) : padded_copy(tensor);
}

Tensor contiguous(const Tensor& tensor) {
  const int64_t* sizes = tensor.sizes();
  const int64_t* strides = tensor.strides();
  int64_t stride = 1;
  bool is_contiguous = true;
  for (int64_t axis = tensor.dim() - 1; axis >= 0; --axis) {
    is_contiguous = is_contiguous && (sizes[axis] <= 1 || strides[axis] == stride);
    stride *= sizes[axis];
  }
  if (is_contiguous) return alias(tensor);
  Tensor result = empty(tensor.dim(), sizes, tensor.dtype(), tensor.device_type(), tensor.device_index());
  copy(tensor, result);
  return result;
}

void copy_unpadded(const Tensor& padded, const Tensor& tensor) {
  copy(view_of(padded, tensor.sizes(), padded.strides()), tensor);
}

}  // namespace flashmoe::host
