#include "host/tensor.h"

#include <algorithm>

namespace flashmoe::host {

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

Tensor empty(int64_t rank, const int64_t* sizes, int32_t dtype, int32_t device_type, int32_t device_index) {
  std::array<int64_t, kMaxRank> strides{};
  int64_t stride = 1;
  for (int64_t axis = rank - 1; axis >= 0; --axis) {
    strides[static_cast<std::size_t>(axis)] = stride;
    stride *= sizes[axis] > 1 ? sizes[axis] : 1;
  }
  return empty_strided(rank, sizes, strides.data(), dtype, device_type, device_index);
}

Tensor empty(std::initializer_list<int64_t> sizes, int32_t dtype, int32_t device_type, int32_t device_index) {
  return empty(static_cast<int64_t>(sizes.size()), sizes.begin(), dtype, device_type, device_index);
}

Tensor alias(const Tensor& tensor) {
  if (tensor.description() != nullptr) return Tensor(tensor.description());
  AtenTensorHandle handle = nullptr;
  check_shim(aoti_torch_new_tensor_handle(tensor.get(), &handle), "new_tensor_handle");
  return Tensor(handle);
}

Tensor view_of(const Tensor& tensor, int64_t rank, const int64_t* sizes, const int64_t* strides) {
  AtenTensorHandle handle = nullptr;
  check_shim(aoti_torch__reinterpret_tensor(tensor.get(), rank, sizes, strides, 0, &handle), "_reinterpret_tensor");
  return Tensor(handle);
}

Tensor narrow(const Tensor& tensor, int64_t axis, int64_t first, int64_t count) {
  const int64_t rank = tensor.dim();
  const int64_t size = tensor.sizes()[axis];
  if (size == 1 || count == size) return alias(tensor);
  std::array<int64_t, kMaxRank> sizes{};
  std::copy_n(tensor.sizes(), rank, sizes.begin());
  sizes[static_cast<std::size_t>(axis)] = count;
  AtenTensorHandle handle = nullptr;
  check_shim(aoti_torch__reinterpret_tensor(tensor.get(), rank, sizes.data(), tensor.strides(),
                                            first * tensor.strides()[axis], &handle),
             "_reinterpret_tensor");
  return Tensor(handle);
}

namespace {

int64_t element_bytes(const Tensor& tensor) {
  return static_cast<int64_t>(aoti_torch_dtype_element_size(tensor.dtype()));
}

bool have_equal_strides(const Tensor& a, const Tensor& b) {
  const int64_t rank = a.dim();
  if (b.dim() != rank || rank > kMaxRank || a.dtype() != b.dtype()) return false;
  for (int64_t axis = 0; axis < rank; ++axis) {
    const bool counts = a.sizes()[axis] > 1 || b.sizes()[axis] > 1;
    if (counts && a.strides()[axis] != b.strides()[axis]) return false;
  }
  return true;
}

// One axis of two tensors of equal strides: from an element of the first to one of the second, -before to after steps.
struct Axis {
  int64_t stride;
  int64_t before;
  int64_t after;
};

// Whether some number of steps along the axes, in descending order of stride, covers `distance` elements.
bool is_reachable(int64_t distance, const Axis* axis, const Axis* end) {
  if (axis == end)
    return true;  // nothing is left: the axis before covered it all, or single elements are in the same place
  int64_t rest_before = 0, rest_after = 0;  // how far the remaining axes reach
  for (const Axis* rest = axis + 1; rest != end; ++rest) {
    rest_before += rest->before * rest->stride;
    rest_after += rest->after * rest->stride;
  }
  int tried = 0;
  const int64_t nearest = (distance - rest_after) / axis->stride - 1;  // division rounds towards zero
  for (int64_t steps = std::max(nearest, -axis->before); steps <= axis->after; ++steps) {
    const int64_t left = distance - steps * axis->stride;
    if (left < -rest_before) break;
    if (left > rest_after) continue;
    if (is_reachable(left, axis + 1, end)) return true;
    if (++tried == 4) return true;  // a tensor that overlaps itself: assume that it does, without searching on
  }
  return false;
}

}  // namespace

MemoryRange memory_range(const Tensor& tensor) {
  const int64_t *sizes = tensor.sizes(), *strides = tensor.strides();
  const auto begin = reinterpret_cast<intptr_t>(tensor.data());
  int64_t last = 0;
  for (int64_t axis = 0, rank = tensor.dim(); axis < rank; ++axis) {
    if (sizes[axis] == 0) return {begin, begin};
    last += (sizes[axis] - 1) * strides[axis];
  }
  return {begin, begin + (last + 1) * element_bytes(tensor)};
}

bool is_same_memory(const Tensor& a, const Tensor& b) { return a.data() == b.data() && have_equal_strides(a, b); }

bool may_overlap(const Tensor& a, const Tensor& b) {
  const MemoryRange range_a = memory_range(a), range_b = memory_range(b);
  if (!range_a.meets(range_b)) return false;
  const int64_t distance = range_b.begin - range_a.begin;
  if (distance % element_bytes(a) != 0 || !have_equal_strides(a, b)) return true;
  std::array<Axis, kMaxRank> axes{};
  Axis* end = axes.data();
  for (int64_t axis = 0, rank = a.dim(); axis < rank; ++axis) {
    const Axis found{a.strides()[axis], b.sizes()[axis] - 1, a.sizes()[axis] - 1};
    if (found.stride == 0 || found.before + found.after == 0) continue;
    Axis* place = end++;
    for (; place != axes.data() && place[-1].stride < found.stride; --place) *place = place[-1];
    *place = found;
  }
  return is_reachable(distance / element_bytes(a), axes.data(), end);
}

std::optional<Dtype> dtype_of(int32_t torch_dtype) {
  static const int32_t kHalf = aoti_torch_dtype_float16();
  static const int32_t kBFloat16 = aoti_torch_dtype_bfloat16();
  static const int32_t kFloat = aoti_torch_dtype_float32();
  if (torch_dtype == kHalf) return Dtype::kFloat16;
  if (torch_dtype == kBFloat16) return Dtype::kBFloat16;
  if (torch_dtype == kFloat) return Dtype::kFloat32;
  return std::nullopt;
}

std::string describe_sizes(const int64_t* sizes, int64_t rank) {
  std::ostringstream text{std::ios_base::out};  // the default constructor needs GLIBCXX_3.4.26
  text << '[';
  for (int64_t axis = 0; axis < rank; ++axis) text << (axis > 0 ? ", " : "") << sizes[axis];
  text << ']';
  return text.str();
}

std::string describe_sizes(const Tensor& tensor) { return describe_sizes(tensor.sizes(), tensor.dim()); }

std::string describe_strides(const Tensor& tensor) { return describe_sizes(tensor.strides(), tensor.dim()); }

namespace {

// torch's numbers for its scalar types, which its stable ABI fixes.
constexpr const char* kDtypeNames[] = {"uint8",           "int8",
                                       "int16",           "int32",
                                       "int64",           "float16",
                                       "float32",         "float64",
                                       "complex32",       "complex64",
                                       "complex128",      "bool",
                                       "qint8",           "quint8",
                                       "qint32",          "bfloat16",
                                       "quint4x2",        "quint2x4",
                                       "bits1x8",         "bits2x4",
                                       "bits4x2",         "bits8",
                                       "bits16",          "float8_e5m2",
                                       "float8_e4m3fn",   "float8_e5m2fnuz",
                                       "float8_e4m3fnuz", "uint16",
                                       "uint32",          "uint64"};
constexpr int32_t kNumDtypes = sizeof(kDtypeNames) / sizeof(kDtypeNames[0]);

}  // namespace

std::string describe_dtype(int32_t torch_dtype) {
  if (torch_dtype >= 0 && torch_dtype < kNumDtypes) return kDtypeNames[torch_dtype];
  return "torch scalar type " + std::to_string(torch_dtype);
}

int32_t dtype_named(const std::string& name) {
  for (int32_t dtype = 0; dtype < kNumDtypes; ++dtype) {
    if (name == kDtypeNames[dtype]) return dtype;
  }
  return -1;
}

std::string describe_device(const Tensor& tensor) {
  if (tensor.description() != nullptr) return tensor.description()->device;
  const int32_t type = tensor.device_type();
  if (type == aoti_torch_device_type_cpu()) return "cpu";
  const std::string name = type == aoti_torch_device_type_cuda() ? "cuda" : "device type " + std::to_string(type);
  return name + ":" + std::to_string(tensor.device_index());
}

}  // namespace flashmoe::host
