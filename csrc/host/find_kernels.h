// Which of the library's kernels a GPU can run, and the error if none fits. Pure: reads only the kernel table, and
// needs neither driver nor torch. Each operation chooses among several itself.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "host/kernel_table.h"

namespace flashmoe::host {

// What every operation's selection starts from: the GPU, and what any call requests.
struct KernelRequest {
  int32_t capability;  // of the GPU, 10 * major + minor
  int32_t num_multiprocessors;
  const char* gpu_name;
  const char* forced_family;  // null: the best that the GPU has
  Dtype dtype;
};

// The value of FLASHMOE_KERNEL; null if it is unset or empty.
const char* forced_family();

// Whether that environment variable is 1; throws a broken rule if it is neither 1 nor 0 nor empty.
bool is_switched_on(const char* variable);

// FLASHMOE_CONSISTENT: every operator chooses only kernels that give a row the same bits in any call.
inline bool wants_consistency() { return is_switched_on("FLASHMOE_CONSISTENT"); }

using KernelList = std::vector<const Kernel*>;

// Whether a GPU of this capability can load the binary: machine code runs on its own major version from its minor
// version on, arch-specific code on exactly its capability, PTX on everything from its capability on.
bool can_load(const DeviceBinary& binary, int32_t capability);

// All kernels that a GPU of this capability can run, each in its best binary (machine code made for the GPU, then for
// an older minor version, then PTX). Each thread remembers them for the capability that it requested last.
const KernelList& loadable_kernels(int32_t capability);

// The families that a GPU of this capability runs, best first, null-terminated. For a GPU that the table lacks, those
// of the newest one below it.
const char* const* families_of(int32_t capability);

constexpr int32_t kNoAxis = -1;

struct KernelName {
  const char* operation;
  const char* family;
  const char* variant;  // "" for the family's standard tile
  Dtype dtype;
  std::initializer_list<int32_t> axes;  // of the operation's descriptor, in its order; as in Kernel::axes
};

// The kernel of that name; null if there is none. `size_axis`: index of an axis for which a larger value also works
// (the smallest is taken), or kNoAxis.
const Kernel* find_kernel(const KernelName& name, int32_t size_axis, const KernelList& kernels);

// Throws why no kernel can run the request: code `dtype` for bf16 below compute capability 8.0, `argument` for a forced
// family that does not exist or does not run here, `gpu` if no embedded kernel runs on this GPU. `problem`: what else
// was requested, such as "head_dim 64".
[[noreturn]] void refuse(const KernelRequest& request, const std::string& problem);

}  // namespace flashmoe::host
