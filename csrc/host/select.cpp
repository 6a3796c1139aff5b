#include "host/select.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
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

// Families that compute a tile in one block and leave the order to the grid: sm75 and sm80.
//
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

Choice choose_for_grid(const SelectorInput& input, const FamilyKernels& family) {
  if (family.split != nullptr && family.combine != nullptr) {
    const int64_t splits = wanted_splits(input, *family.split);
    if (splits > 1) return {family.split, family.combine, static_cast<int32_t>(splits)};
  }
  const bool is_small = family.small != nullptr && query_tiles(input, *family.standard) < input.num_multiprocessors;
  return {is_small ? family.small : family.standard, nullptr, 1};
}

// Families whose blocks stay and draw tiles: sm90. The kernel and the number of splits with the least estimated time. The
// constants are nanoseconds on an H100, fitted to 115 cells with 8 to 2048 tiles and 512 to 32768 keys
// (docs/kernels/attention-sm90.md says how far the choice is from the fastest).
constexpr double kRowKeyNs = 0.054;             // a query row and a key, on one multiprocessor ...
constexpr double kRowKeyColumnNs = 0.00025;     // ... and what each column of the head adds
constexpr double kTileNs = 4000.0;              // the start and the end of a work item
constexpr double kSecondPassNs = 6500.0;        // the combining kernel's launch and its first loads
constexpr double kPartialBytesPerNs = 16000.0;  // partial results, to the second-level cache and back
constexpr double kDeviceMemoryBytesPerNs = 2600.0;
// A row of a 128-row tile costs this much of one of a taller tile: it reads keys and values more often (1.02 to 1.18).
constexpr double kShortTileCost = 1.15;
constexpr int32_t kTallRows = 192;
constexpr int64_t kMaxShares = 32;  // one for each lane of the combining warp
constexpr int64_t kMaxWaves = 8;    // more leave nothing to gain by splitting

double estimated_ns(const SelectorInput& input, const Kernel& kernel, double row_cost, int64_t splits) {
  const double row_key = (kRowKeyNs + kRowKeyColumnNs * kernel.head_dim) * row_cost;
  const auto waves = static_cast<double>(ceil_div(query_tiles(input, kernel) * splits, input.num_multiprocessors));
  const auto keys = static_cast<double>(ceil_div(input.seq_k, splits));
  const double products = waves * (keys * kernel.block_m * row_key + kTileNs);
  const double heads_kv = static_cast<double>(input.batch) * static_cast<double>(input.heads_kv);
  const double bytes = 4.0 * input.head_dim * heads_kv * static_cast<double>(input.seq_k);
  const double loads = bytes / kDeviceMemoryBytesPerNs;
  // The two overlap, but neither hides the other whole.
  const double pass = std::sqrt(products * products + loads * loads);
  if (splits == 1) return pass;
  const double rows = static_cast<double>(input.batch * input.heads_q) * static_cast<double>(input.seq_q * splits);
  return pass + kSecondPassNs + 8.0 * input.head_dim * rows / kPartialBytesPerNs;
}

Choice choose_for_persistent(const SelectorInput& input, const FamilyKernels& family) {
  const double short_cost = family.standard->block_m >= kTallRows ? kShortTileCost : 1.0;
  Choice best{family.standard, nullptr, 1};
  double least = estimated_ns(input, *family.standard, 1.0, 1);
  const auto consider = [&](const Kernel* kernel, const Kernel* combine, int64_t splits) {
    const double time = estimated_ns(input, *kernel, short_cost, splits);
    if (time >= least) return;
    least = time;
    best = {kernel, combine, static_cast<int32_t>(splits)};
  };
  const auto serves = [&family](const Kernel* kernel) {
    return kernel != nullptr && kernel->head_dim == family.standard->head_dim;
  };
  if (serves(family.shorter)) consider(family.shorter, nullptr, 1);
  if (serves(family.split) && family.combine != nullptr) {
    const int64_t tiles = query_tiles(input, *family.split);
    const int64_t most = std::min(kMaxShares, input.seq_k / kMinKeysPerSplit);
    for (int64_t waves = 1; waves <= kMaxWaves && tiles > 0; ++waves) {
      const int64_t splits = std::min(most, waves * input.num_multiprocessors / tiles);  // as many as fit these waves
      if (splits > 1) consider(family.split, family.combine, splits);
      if (splits == most) break;
    }
  }
  // Its blocks of 64 keys follow the diagonal; without many tiles the wider blocks of the others are faster.
  constexpr int64_t kMaxKeysOfNarrow = 1024;
  if (best.num_splits == 1 && serves(family.narrow) && input.seq_k <= kMaxKeysOfNarrow &&
      input.seq_k <= 2 * input.seq_q && query_tiles(input, *family.narrow) >= 2 * input.num_multiprocessors) {
    best.forward = family.narrow;
  }
  return best;
}

// Whether an older family's 64-row kernel beats a persistent one: it starts 1 to 2 us sooner, and takes longer a key.
bool is_small_faster(const SelectorInput& input, const Kernel& small) {
  const int64_t most_keys = small.head_dim <= 64 ? 1024 : 192;
  return query_tiles(input, small) <= input.num_multiprocessors && input.seq_k <= most_keys;
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
  const Kernel* combine = nullptr;  // partial results look alike in all families, and one of them has the second pass
  for (int position = 0; gpu != nullptr && combine == nullptr && gpu->families[position] != nullptr; ++position) {
    combine = find("attention_combine", gpu->families[position], "", Mask::kNone, input, loadable);
  }
  for (int position = 0; gpu != nullptr && gpu->families[position] != nullptr; ++position) {
    const char* family = gpu->families[position];
    const auto forward = [&](const char* variant) {
      return find("attention_forward", family, variant, input.mask, input, loadable);
    };
    const FamilyKernels kernels{family,         forward(""),      forward("m128"), forward("n64"),
                                forward("m64"), forward("split"), combine};
    if (kernels.standard != nullptr) result.push_back(kernels);
  }
  return result;
}

Choice select_forward(const SelectorInput& input, const FamilyList& families, const KernelTable& table) {
  const auto is_allowed = [&input](const FamilyKernels& family) {
    return input.forced_family == nullptr || equal(family.family, input.forced_family);
  };
  const auto first = std::find_if(families.begin(), families.end(), is_allowed);
  if (first != families.end()) {
    if (!first->standard->is_persistent) return choose_for_grid(input, *first);
    for (auto family = std::next(first); family != families.end(); ++family) {
      const bool is_usable = is_allowed(*family) && family->small != nullptr;
      if (is_usable && is_small_faster(input, *family->small)) return {family->small, nullptr, 1};
    }
    return choose_for_persistent(input, *first);
  }
  if (input.forced_family != nullptr) check_forced(input, table);
  refuse(input, table);
}

}  // namespace host
}  // namespace flashmoe
