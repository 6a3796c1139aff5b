#include "host/tensor_map.h"

#include <ostream>

#include "host/driver.h"

namespace flashmoe::host {
namespace {

// Prints values outermost first, as torch prints sizes.
template <class Number>
struct Reversed {
  const Number* values;
  int32_t count;
  friend std::ostream& operator<<(std::ostream& out, const Reversed& list) {
    for (int32_t axis = list.count - 1; axis >= 0; --axis) out << list.values[axis] << (axis > 0 ? ", " : "");
    return out;
  }
};

// The rank without the leading axes along which a box has one element.
int32_t box_rank(const uint32_t* box, int32_t rank) {
  while (rank > 2 && box[rank - 1] == 1) --rank;
  return rank;
}

}  // namespace

CUtensorMap encode_tensor_map(Dtype dtype, int32_t rank, void* address, const uint64_t* dims,
                              const uint64_t* strides_bytes, const uint32_t* box, const uint32_t* element_strides,
                              const char* name, CUtensorMapL2promotion promotion) {
  static_assert(sizeof(cuuint64_t) == sizeof(uint64_t) && sizeof(cuuint32_t) == sizeof(uint32_t),
                "the driver's integer types and ours");
  if (driver().cuTensorMapEncodeTiled == nullptr) {
    fail(ErrorCode::kDriver,
         "libcuda.so.1 has no cuTensorMapEncodeTiled; the sm90 kernels need driver 525 (CUDA 12.0) or "
         "newer: update it, or set FLASHMOE_KERNEL=sm80");
  }
  const auto type = dtype == Dtype::kBFloat16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                    : dtype == Dtype::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                               : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  CUtensorMap map{};
  check_driver(
      driver().cuTensorMapEncodeTiled(
          &map, type, static_cast<cuuint32_t>(rank), address, reinterpret_cast<const cuuint64_t*>(dims),
          reinterpret_cast<const cuuint64_t*>(strides_bytes), box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
          CU_TENSOR_MAP_SWIZZLE_128B, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
      "cuTensorMapEncodeTiled", "tensor ", name, ", sizes [", Reversed<uint64_t>{dims, rank}, "], byte strides [",
      Reversed<uint64_t>{strides_bytes, rank - 1}, "], box [", Reversed<uint32_t>{box, box_rank(box, rank)}, "]");
  return map;
}

}  // namespace flashmoe::host
