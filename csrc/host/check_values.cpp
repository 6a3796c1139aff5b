#include "host/check_values.h"

#include <cstdlib>

#include "host/find_kernels.h"
#include "host/tile_counters.h"

namespace flashmoe::host {

bool are_values_checked(int32_t device_type, int32_t device_index) {
  const char* name = "FLASHMOE_CHECK_VALUES";
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') name = "FLASHMOE_CHECK_LENGTHS";
  if (!is_switched_on(name)) return false;
  if (device_type == aoti_torch_device_type_cuda() && is_capturing(CudaCall(device(device_index)).stream)) {
    violate("variable.captured", {{"name", name}});
  }
  return true;
}

Tensor in_cpu_memory(const Tensor& tensor) {
  const int32_t cpu = aoti_torch_device_type_cpu();
  if (tensor.device_type() == cpu) return alias(tensor);
  Tensor copy = empty(tensor.dim(), tensor.sizes(), tensor.dtype(), cpu, 0);
  check_shim(aoti_torch_copy_(copy.get(), tensor.get(), 0), "copy_");
  return copy;
}

}  // namespace flashmoe::host
