#include "host/select.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <string>

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

bool is_same_kernel(const Kernel& left, const Kernel& right) {
  return left.dtype == right.dtype && left.mask == right.mask && left.head_dim == right.head_dim &&
         equal(left.operation, right.operation) && equal(left.family, right.family) &&
         equal(left.variant, right.variant);
}

// The smallest kernel of (operation, family, variant) whose head_dim holds the tensor's.
const Kernel* find(const char* operation, const char* family, const char* variant, Mask mask,
                   const SelectorInput& input, const KernelList& kernels) {
  const Kernel* best = nullptr;
  for (const Kernel* kernel : kernels) {
    if (kernel->dtype == input.dtype && kernel->mask == mask && kernel->head_dim >= input.head_dim &&
        (best == nullptr || kernel->head_dim < best->head_dim) && equal(kernel->variant, variant) &&
        equal(kernel->family, family) && equal(kernel->operation, operation)) {
      best = kernel;
    }
  }
  return best;
}

int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

int64_t query_tiles(const SelectorInput& input, const Kernel& kernel) {
  return ceil_div(input.seq_q, kernel.block_m) * input.heads_q * input.batch;
}

// Measured on an H100, 64-row query tiles, D = 64 and 128, 8 to 128 tiles, 512 to 8192 keys: below 1024 keys the second pass
// costs more than the idle multiprocessors; the best number of splits is then one block for each of them, at most 16, and
// at least 128 keys a block. With a tile for every multiprocessor splitting gains 10% at most (4096 keys and more) or loses.
constexpr int64_t kMinKeysToSplit = 1024;
constexpr int64_t kMinKeysPerSplit = 128;
constexpr int64_t kMaxSplits = 16;  // the combining warp would take 32

// How many blocks should share the keys of one query tile so that all multiprocessors have work; 1 for not at all.
int64_t wanted_splits(const SelectorInput& input, const Kernel& split) {
  if (input.seq_k < kMinKeysToSplit) return 1;
  const int64_t by_machine = input.num_multiprocessors / query_tiles(input, split);
  const int64_t by_keys = input.seq_k / kMinKeysPerSplit;
  return std::max<int64_t>(1, std::min({by_machine, by_keys, kMaxSplits}));
}

// Kernels for problems with fewer query tiles than multiprocessors; an empty choice where none applies.
Choice choose_for_few_tiles(const SelectorInput& input, const FamilyKernels& family) {
  if (family.split != nullptr && family.combine != nullptr) {
    const int64_t splits = wanted_splits(input, *family.split);
    if (splits > 1) return {family.split, family.combine, static_cast<int32_t>(splits)};
  }
  Choice choice;
  if (family.small != nullptr && query_tiles(input, *family.standard) < input.num_multiprocessors) {
    choice.forward = family.small;
  }
  return choice;
}

// A row of a 128-row tile costs this much of one of the standard, taller tile: it reads keys and values more often
// (H100, head dims 64 and 128, large problems: 1.02 to 1.18).
constexpr double kShortTileCost = 1.15;

// The family's standard kernel, or its 128-row variant where that leaves fewer multiprocessors idle in the last wave or
// fewer rows empty.
const Kernel* choose_tile(const SelectorInput& input, const FamilyKernels& family) {
  if (family.shorter == nullptr || family.shorter->head_dim != family.standard->head_dim) return family.standard;
  const auto cost = [&input](const Kernel& kernel) {
    return static_cast<double>(ceil_div(query_tiles(input, kernel), input.num_multiprocessors) * kernel.block_m);
  };
  return cost(*family.shorter) * kShortTileCost < cost(*family.standard) ? family.shorter : family.standard;
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

KernelList loadable_kernels(int32_t capability, const KernelTable& table) {
  KernelList best;
  for (int32_t index = 0; index < table.num_kernels; ++index) {
    const Kernel& kernel = table.kernels[index];
    const DeviceBinary& binary = table.binaries[kernel.binary];
    if (!can_load(binary, capability)) continue;
    const auto known = std::find_if(best.begin(), best.end(),
                                    [&kernel](const Kernel* other) { return is_same_kernel(*other, kernel); });
    if (known == best.end()) {
      best.push_back(&kernel);
    } else if (preference(binary, capability) > preference(table.binaries[(*known)->binary], capability)) {
      *known = &kernel;
    }
  }
  return best;
}

FamilyList resolve_families(const SelectorInput& input, const KernelList& loadable, const KernelTable& table) {
  FamilyList result;
  const GpuFamilies* gpu = families_of(input.capability, table);
  for (int position = 0; gpu != nullptr && gpu->families[position] != nullptr; ++position) {
    const char* family = gpu->families[position];
    const auto forward = [&](const char* variant) {
      return find("attention_forward", family, variant, input.mask, input, loadable);
    };
    const FamilyKernels kernels{family,          forward(""),      forward("m128"),
                                forward("m64"), forward("split"), find("attention_combine", family, "", Mask::kNone, input, loadable)};
    if (kernels.standard != nullptr) result.push_back(kernels);
  }
  return result;
}

Choice select_forward(const SelectorInput& input, const FamilyList& families, const KernelTable& table) {
  const auto is_allowed = [&input](const FamilyKernels& family) {
    return input.forced_family == nullptr || equal(family.family, input.forced_family);
  };
  for (const FamilyKernels& family : families) {
    if (!is_allowed(family)) continue;
    const Choice choice = choose_for_few_tiles(input, family);
    if (choice.forward != nullptr) return choice;
  }
  for (const FamilyKernels& family : families) {
    if (is_allowed(family)) return {choose_tile(input, family), nullptr, 1};
  }
  if (input.forced_family != nullptr) check_forced(input, table);
  refuse(input, table);
}

}  // namespace host
}  // namespace flashmoe
