// An owning tensor handle over torch's C shims. torch::stable::Tensor costs more, and the reference count of its
// std::shared_ptr pulls in __libc_single_threaded (GLIBC_2.32), above the manylinux_2_28 floor.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "host/error.h"
#include "host/kernel_table.h"

namespace flashmoe::host {

// A shim reports failure only by a code, after torch has written the reason to stderr.
inline void check_shim(AOTITorchError status, const char* what) {
  if (status != AOTI_TORCH_SUCCESS) {
    fail(ErrorCode::kInternal, "torch's ", what, " failed; torch wrote the reason to standard error");
  }
}

// What a tracer knows about a tensor without memory: enough to check arguments (see host/arguments.h).
struct TensorDescription {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int32_t dtype = 0;
  int32_t device_type = 0;
  int32_t device_index = 0;
  std::string device;  // as torch prints it
};

class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}                         // takes ownership
  explicit Tensor(const TensorDescription* description) : description_(description) {}  // borrowed
  Tensor(Tensor&& other) noexcept
      : handle_(std::exchange(other.handle_, nullptr)), description_(std::exchange(other.description_, nullptr)) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(description_, other.description_);
    return *this;
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }

  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

  // False for an optional tensor that is None.
  bool is_given() const { return handle_ != nullptr || description_ != nullptr; }
  // Not null for a tensor without memory: neither data() nor any operation of torch may be called on it.
  const TensorDescription* description() const { return description_; }

  bool is_defined() const {  // false for a None that torch passed as a tensor, and if not given
    if (!is_given()) return false;
    if (description_ != nullptr) return true;
    bool value = false;
    check_shim(aoti_torch_is_defined(handle_, &value), "is_defined");
    return value;
  }
  int64_t dim() const {
    if (description_ != nullptr) return static_cast<int64_t>(description_->sizes.size());
    int64_t value = 0;
    check_shim(aoti_torch_get_dim(handle_, &value), "get_dim");
    return value;
  }
  const int64_t* sizes() const {  // borrowed, dim() values
    if (description_ != nullptr) return description_->sizes.data();
    int64_t* value = nullptr;
    check_shim(aoti_torch_get_sizes(handle_, &value), "get_sizes");
    return value;
  }
  const int64_t* strides() const {  // borrowed, dim() values, in elements
    if (description_ != nullptr) return description_->strides.data();
    int64_t* value = nullptr;
    check_shim(aoti_torch_get_strides(handle_, &value), "get_strides");
    return value;
  }
  int32_t dtype() const {
    if (description_ != nullptr) return description_->dtype;
    int32_t value = 0;
    check_shim(aoti_torch_get_dtype(handle_, &value), "get_dtype");
    return value;
  }
  int32_t device_type() const {
    if (description_ != nullptr) return description_->device_type;
    int32_t value = 0;
    check_shim(aoti_torch_get_device_type(handle_, &value), "get_device_type");
    return value;
  }
  int32_t device_index() const {
    if (description_ != nullptr) return description_->device_index;
    int32_t value = 0;
    check_shim(aoti_torch_get_device_index(handle_, &value), "get_device_index");
    return value;
  }
  void* data() const {
    void* value = nullptr;
    check_shim(aoti_torch_get_data_ptr(handle_, &value), "get_data_ptr");
    return value;
  }

 private:
  AtenTensorHandle handle_ = nullptr;
  const TensorDescription* description_ = nullptr;
};

constexpr int64_t kMaxRank = 8;

struct Sizes {
  int64_t rank = 0;
  std::array<int64_t, kMaxRank> values{};
};

// Uninitialised memory on `device`; strides in elements.
Tensor empty_strided(int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device_type,
                     int32_t device_index);

// Contiguous uninitialised memory.
Tensor empty(int64_t rank, const int64_t* sizes, int32_t dtype, int32_t device_type, int32_t device_index);
Tensor empty(std::initializer_list<int64_t> sizes, int32_t dtype, int32_t device_type, int32_t device_index);

// A second handle on the same tensor.
Tensor alias(const Tensor& tensor);

// A view of the tensor's memory from its first element on; `rank`, or tensor.dim(), sizes and strides.
Tensor view_of(const Tensor& tensor, int64_t rank, const int64_t* sizes, const int64_t* strides);
inline Tensor view_of(const Tensor& tensor, const int64_t* sizes, const int64_t* strides) {
  return view_of(tensor, tensor.dim(), sizes, strides);
}

// `count` indices of an axis from `first` on; if the axis has size 1, which broadcasts, the tensor itself.
Tensor narrow(const Tensor& tensor, int64_t axis, int64_t first, int64_t count);

// Addresses from the first element to the end of the last.
struct MemoryRange {
  intptr_t begin = 0;
  intptr_t end = 0;  // begin if there are no elements

  bool meets(const MemoryRange& other) const {
    return begin < other.end && other.begin < end && begin < end && other.begin < other.end;
  }
};
MemoryRange memory_range(const Tensor& tensor);

// Whether both have the same elements, for tensors of equal sizes.
bool is_same_memory(const Tensor& a, const Tensor& b);

// Whether an element of one is in the memory of the other: exact for tensors of equal strides, otherwise by the whole
// range from a tensor's first to its last element.
bool may_overlap(const Tensor& a, const Tensor& b);

// The kernel table's type; nothing if no kernel has it.
std::optional<Dtype> dtype_of(int32_t torch_dtype);

// For error messages: "[2, 8, 128, 64]", "float64", "cuda:1".
std::string describe_sizes(const int64_t* sizes, int64_t rank);
std::string describe_sizes(const Tensor& tensor);
std::string describe_strides(const Tensor& tensor);
std::string describe_dtype(int32_t torch_dtype);
// The inverse, for a tensor that torch's Python side described; -1 for a type that has no name here.
int32_t dtype_named(const std::string& name);
std::string describe_device(const Tensor& tensor);

}  // namespace flashmoe::host
