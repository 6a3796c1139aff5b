// Loading an embedded kernel on first use, and launching it with every call checked.
#pragma once

#include <cuda.h>

#include "host/driver.h"
#include "host/kernel_table.h"

namespace flashmoe {
namespace host {

struct LaunchShape {
  int64_t grid = 0;   // thread blocks, one dimension
  int64_t tiles = 0;  // what they work on; more than blocks for a persistent kernel
  int32_t threads = 0;
  int32_t shared_bytes = 0;
};

// The loaded function; loads only the binary that holds it, once per device. Safe during stream capture.
CUfunction load_kernel(const Kernel& kernel, const Device& device, int32_t device_index);

// Launches with `arguments` (pointers to each kernel parameter); an error names kernel, grid, block, shared memory.
void launch(const Kernel& kernel, CUfunction function, const LaunchShape& shape, CUstream stream, void** arguments);

// The same for a kernel that begins with ptx::grid_dependency_wait(), directly behind the one it depends on: where GPU and
// driver can, it is scheduled before that one has ended.
void launch_dependent(const Kernel& kernel, CUfunction function, const LaunchShape& shape, CUstream stream,
                      void** arguments);

// What the last call on this thread ran: a kernel symbol, "cpu:<isa>", or "".
void set_last_kernel(const char* name);
void set_last_isa(const char* name);  // a call on the CPU; made into text when somebody asks
const char* last_kernel();

}  // namespace host
}  // namespace flashmoe
