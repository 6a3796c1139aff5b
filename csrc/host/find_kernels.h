// Which of the library's kernels a GPU can run, and the refusal where none fits. Pure: looks at the kernel table alone, and needs
// neither driver nor torch. Which of several to take is each operation's own question.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "host/kernel_table.h"

namespace flashmoe::host {

// What every operation's selection starts from: the GPU, and what the call asks whatever the operation.
struct KernelRequest {
  int32_t capability;  // of the GPU, 10 * major + minor
  int32_t num_multiprocessors;
  const char* gpu_name;
  const char* forced_family;  // null: the best that the GPU has
  Dtype dtype;
};

// What FLASHMOE_KERNEL names; null where it is unset or empty.
const char* forced_family();

// Whether that environment variable is 1; a broken rule where it is neither that nor 0 nor empty.
bool is_switched_on(const char* variable);

// FLASHMOE_CONSISTENT: every operator chooses such kernels alone as give a row the same bits in any call.
inline bool wants_consistency() { return is_switched_on("FLASHMOE_CONSISTENT"); }

using KernelList = std::vector<const Kernel*>;

// Whether a GPU of this capability can load the binary: machine code runs on its own major version from its minor
// version on, arch-specific code on exactly its capability, PTX on everything from its capability on.
bool can_load(const DeviceBinary& binary, int32_t capability);

// What a GPU of this capability can run, of all operations: of each kernel the best binary (machine code made for it, then for
// an older minor version, then PTX). Remembered by each thread for the capability that it asked for last.
const KernelList& loadable_kernels(int32_t capability);

// The families that a GPU of this capability runs, best first, null-terminated. Of a GPU that the table lacks, those of the
// newest one below it.
const char* const* families_of(int32_t capability);

constexpr int32_t kNoAxis = -1;

struct KernelName {
  const char* operation;
  const char* family;
  const char* variant;  // "" for the family's standard tile
  Dtype dtype;
  std::initializer_list<int32_t> axes;  // of the operation's descriptor, in its order; as in Kernel::axes
};

// The kernel of that name; null where there is none. `size_axis`: index of an axis of which a larger value does as well (the
// smallest is taken), or kNoAxis.
const Kernel* find_kernel(const KernelName& name, int32_t size_axis, const KernelList& kernels);

// Throws why no kernel serves the request: code `dtype` for bf16 below compute capability 8.0, `argument` for a forced family that
// does not exist or does not run here, `gpu` when no embedded kernel runs on this GPU. `problem`: what else was asked for, as
// "head_dim 64".
[[noreturn]] void refuse(const KernelRequest& request, const std::string& problem);

}  // namespace flashmoe::host
