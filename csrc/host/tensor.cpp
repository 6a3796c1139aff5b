#include "host/tensor.h"

namespace flashmoe {
namespace host {

Tensor empty_strided(int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device_type,
                     int32_t device_index) {
  AtenTensorHandle handle = nullptr;
  const AOTITorchError status =
      aoti_torch_empty_strided(rank, sizes, strides, dtype, device_type, device_index, &handle);
  if (status != AOTI_TORCH_SUCCESS) {
    int64_t elements = 1;
    for (int64_t axis = 0; axis < rank; ++axis) elements *= sizes[axis];
    fail(ErrorCode::kMemory, "torch could not allocate ", elements, " elements of ",
         aoti_torch_dtype_element_size(dtype), " bytes; torch wrote the reason to standard error");
  }
  return Tensor(handle);
}

Tensor empty(std::initializer_list<int64_t> sizes, int32_t dtype, int32_t device_type, int32_t device_index) {
  constexpr int64_t kMaxRank = 8;
  std::array<int64_t, kMaxRank> strides{};
  int64_t stride = 1;
  for (auto axis = static_cast<int64_t>(sizes.size()) - 1; axis >= 0; --axis) {
    strides[static_cast<std::size_t>(axis)] = stride;
    const int64_t size = sizes.begin()[axis];
    stride *= size > 1 ? size : 1;
  }
  return empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides.data(), dtype, device_type,
                       device_index);
}

}  // namespace host
}  // namespace flashmoe
