// Whether numbers that kernels only clamp (lengths, pages, expert ids) are read and checked.
#pragma once

#include <cstdint>

#include "host/tensor.h"

namespace flashmoe::host {

// Whether $FLASHMOE_CHECK_VALUES is 1 ($FLASHMOE_CHECK_LENGTHS is its former name). Throws for any value but 0 and 1,
// and if values on a GPU would be read while a CUDA graph is captured.
bool are_values_checked(int32_t device_type, int32_t device_index);

// A CPU tensor itself; for a GPU tensor a copy, for which the host waits.
Tensor in_cpu_memory(const Tensor& tensor);

}  // namespace flashmoe::host
