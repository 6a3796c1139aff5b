// What a CPU backend needs besides its own code: torch's thread pool, the instruction set, the element type.
#pragma once

#include <cstdint>

#include "cpu/scalar_types.h"
#include "host/kernel_table.h"

namespace flashmoe::host {

cpu::ScalarType scalar_type(Dtype dtype);

// The width of torch's pool.
int num_cpu_threads();

// A cpu::ParallelFor on torch's pool.
void torch_parallel(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);

// The instruction set in use, for set_last_isa() once the call is done. Throws code `argument` if FLASHMOE_CPU_ISA,
// read at the first call, names one that does not exist here.
const char* checked_isa();

}  // namespace flashmoe::host
