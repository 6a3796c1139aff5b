#include "mla/host/checks.h"

#include <string>

#include "mla/params/fp8.h"

namespace flashmoe::mla {

using host::describe_device;
using host::describe_dtype;
using host::describe_sizes;
using host::describe_strides;
using host::violate;

void check_last_stride(const Tensor& tensor, const char* name) {
  const int64_t last = tensor.dim() - 1;
  if (tensor.sizes()[last] > 1 && tensor.strides()[last] != 1) {
    violate("tensor.stride", {{"name", name}, {"strides", describe_strides(tensor)}});
  }
}

void check_device(const Tensor& tensor, const char* name, const Tensor& base, const char* base_name) {
  if (tensor.device_type() != base.device_type() || tensor.device_index() != base.device_index()) {
    violate(
        "mla.devices",
        {{"name", name}, {"base", base_name}, {"found", describe_device(tensor)}, {"needed", describe_device(base)}});
  }
}

void check_companion(const Tensor& tensor, const char* name, const Tensor& base, const char* base_name, int32_t dtype,
                     int64_t rank, int64_t length) {
  if (!tensor.is_defined()) violate("tensor.missing", {{"name", name}});
  check_device(tensor, name, base, base_name);
  if (tensor.dtype() != dtype) {
    violate("mla.companion_dtype",
            {{"name", name}, {"found", describe_dtype(tensor.dtype())}, {"needed", describe_dtype(dtype)}});
  }
  if (tensor.dim() != rank || tensor.sizes()[0] != length) {
    const std::string needed = "[" + std::to_string(length) + (rank == 2 ? ", pages]" : "]");
    violate("mla.companion_shape", {{"name", name}, {"found", describe_sizes(tensor)}, {"needed", needed}});
  }
  check_last_stride(tensor, name);
}

bool is_fp8_dtype(const Tensor& cache) {
  return cache.dtype() == aoti_torch_dtype_uint8() || cache.dtype() == aoti_torch_dtype_float8_e4m3fn();
}

void check_fp8_cache(const Tensor& cache, bool has_pages, int64_t batch) {
  if (cache.dim() != 3 || cache.sizes()[2] != kFp8KeyBytes || (!has_pages && cache.sizes()[0] != batch)) {
    violate(has_pages ? "mla.coded_pages" : "mla.coded_cache", {{"found", describe_sizes(cache)}, {"batch", batch}});
  }
  check_last_stride(cache, "kv_cache");
  constexpr int64_t kAlign = 16;
  const bool is_described = cache.description() != nullptr;
  const auto address = is_described ? 0 : reinterpret_cast<std::uintptr_t>(cache.data());
  if (cache.strides()[0] % kAlign != 0 || cache.strides()[1] % kAlign != 0 || address % kAlign != 0) {
    violate("mla.coded_alignment", {{"strides", describe_strides(cache)}, {"address", address % kAlign}});
  }
}

void check_page_size(const Tensor& cache) {
  constexpr int64_t kPageUnit = 16;
  const int64_t page_size = cache.sizes()[1];
  if (page_size < kPageUnit || page_size % kPageUnit != 0) {
    violate("mla.page_size", {{"found", page_size}, {"unit", kPageUnit}});
  }
}

}  // namespace flashmoe::mla
