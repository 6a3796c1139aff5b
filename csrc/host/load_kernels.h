// Loads embedded kernels onto a GPU, each on first use.
#pragma once

#include <cuda.h>

#include "host/driver.h"
#include "host/kernel_table.h"

namespace flashmoe::host {

// The loaded function; loads only the binary that holds it, once per device. Safe during stream capture.
CUfunction load_kernel(const Kernel& kernel, const Device& device);

}  // namespace flashmoe::host
