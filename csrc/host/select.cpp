#include "host/select.h"

#include <cstring>
#include <sstream>

#include "host/error.h"

namespace flashmoe {
namespace host {
namespace {

bool equal(const char* left, const char* right) { return std::strcmp(left, right) == 0; }

const GpuFamilies* families_of(int32_t capability, const KernelTable& table) {
  // The GPU itself, or the newest one that the table knows below it: a GPU made after this build runs that one's list.
  const GpuFamilies* best = nullptr;
  for (int32_t index = 0; index < table.num_gpus; ++index) {
    const GpuFamilies& gpu = table.gpus[index];
    if (gpu.capability <= capability && (best == nullptr || gpu.capability > best->capability)) best = &gpu;
  }
  return best;
}

// Higher is better: exact machine code, then machine code of an older minor version, then PTX.
int32_t preference(const DeviceBinary& binary, int32_t capability) {
  return (binary.is_ptx ? 0 : 10000) + (binary.capability == capability ? 1000 : 0) + binary.capability +
         (binary.is_arch_specific ? 1 : 0);
}

struct Wanted {
  const char* operation;
  const char* family;
  const char* variant;
  Dtype dtype;
  Mask mask;
  int32_t head_dim;
  int32_t capability;
};

const Kernel* find(const Wanted& wanted, const KernelTable& table) {
  const Kernel* best = nullptr;
  for (int32_t index = 0; index < table.num_kernels; ++index) {
    const Kernel& kernel = table.kernels[index];
    const DeviceBinary& binary = table.binaries[kernel.binary];
    if (kernel.dtype != wanted.dtype || kernel.mask != wanted.mask || kernel.head_dim < wanted.head_dim ||
        !equal(kernel.operation, wanted.operation) || !equal(kernel.family, wanted.family) ||
        !equal(kernel.variant, wanted.variant) || !can_load(binary, wanted.capability)) {
      continue;
    }
    if (best == nullptr || kernel.head_dim < best->head_dim ||
        (kernel.head_dim == best->head_dim && preference(binary, wanted.capability) >
                                                  preference(table.binaries[best->binary], wanted.capability))) {
      best = &kernel;
    }
  }
  return best;
}

std::string targets_held(const KernelTable& table) {
  std::ostringstream text{std::ios_base::out};  // the default constructor needs GLIBCXX_3.4.26
  for (int32_t index = 0; index < table.num_binaries; ++index) {
    const char* target = table.binaries[index].target;
    bool is_first = true;
    for (int32_t before = 0; before < index; ++before) {
      if (equal(table.binaries[before].target, target)) is_first = false;
    }
    if (is_first) text << (text.tellp() > 0 ? ", " : "") << target;
  }
  const std::string held = text.str();
  return held.empty() ? "none (a CPU-only build)" : held;
}

void check_forced(const SelectorInput& input, const KernelTable& table) {
  for (int32_t index = 0; index < table.num_kernels; ++index) {
    if (equal(table.kernels[index].family, input.forced_family)) return;
  }
  fail(ErrorCode::kArgument, "FLASHMOE_KERNEL=", input.forced_family,
       " names no kernel family of this build; families: sm75, sm80, sm90 as far as they were built");
}

[[noreturn]] void refuse(const SelectorInput& input, const KernelTable& table) {
  const int32_t major = input.capability / 10;
  const int32_t minor = input.capability % 10;
  if (input.dtype == Dtype::kBFloat16 && input.capability < 80) {
    fail(ErrorCode::kDtype, "BF16 needs compute capability 8.0; this is ", major, ".", minor, "; use float16");
  }
  if (input.forced_family != nullptr) {
    fail(ErrorCode::kArgument, "FLASHMOE_KERNEL=", input.forced_family, ": this family has no kernel for ",
         input.dtype == Dtype::kBFloat16 ? "bfloat16" : "float16", ", head_dim ", input.head_dim, " on ",
         input.gpu_name, " (compute capability ", major, ".", minor, "); unset it or name another family");
  }
  fail(ErrorCode::kGpu, "no kernel for ", input.gpu_name, " (compute capability ", major, ".", minor,
       ") in this build, which holds ", targets_held(table), "; rebuild with FLASHMOE_ARCHS=native or all, or use CPU tensors");
}

}  // namespace

bool can_load(const DeviceBinary& binary, int32_t capability) {
  if (binary.is_ptx) return capability >= binary.capability;
  if (binary.is_arch_specific) return capability == binary.capability;
  return capability / 10 == binary.capability / 10 && capability >= binary.capability;
}

Choice select_forward(const SelectorInput& input, const KernelTable& table) {
  if (input.forced_family != nullptr) check_forced(input, table);
  const GpuFamilies* families = families_of(input.capability, table);
  for (int position = 0; families != nullptr && families->families[position] != nullptr; ++position) {
    const char* family = families->families[position];
    if (input.forced_family != nullptr && !equal(family, input.forced_family)) continue;
    Wanted wanted{"attention_forward", family, "", input.dtype, input.mask, input.head_dim, input.capability};
    Choice choice;
    choice.forward = find(wanted, table);
    if (choice.forward != nullptr) return choice;
  }
  refuse(input, table);
}

}  // namespace host
}  // namespace flashmoe
