#include "host/find_kernels.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>

#include "host/error.h"

namespace flashmoe::host {
namespace {

bool equal(const char* left, const char* right) { return std::strcmp(left, right) == 0; }

// Higher is better: exact machine code, then machine code of an older minor version, then PTX.
int32_t preference(const DeviceBinary& binary, int32_t capability) {
  return (binary.is_ptx ? 0 : 10000) + (binary.capability == capability ? 1000 : 0) + binary.capability +
         (binary.is_arch_specific ? 1 : 0);
}

bool is_same_kernel(const Kernel& left, const Kernel& right) {
  return left.dtype == right.dtype && std::equal(left.axes, left.axes + kMaxAxes, right.axes) &&
         equal(left.operation, right.operation) && equal(left.family, right.family) &&
         equal(left.variant, right.variant);
}

KernelList find_loadable(int32_t capability) {
  const KernelTable& table = kernel_table();
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

// The capability that a thread requested last, its kernels, and find_kernel's answers from them. A search through all
// takes 2 to 3 us, and a backward call makes up to 15.
struct Known {
  int32_t capability = 0;
  KernelList kernels;
  std::map<std::string, const Kernel*> answers;  // not unordered: its buckets need a symbol of GLIBCXX_3.4.29
};

Known& known() {
  thread_local Known known;
  return known;
}

std::string key_of(const KernelName& name, int32_t size_axis) {
  std::string key(name.operation);
  for (const char* text : {name.family, name.variant}) (key += ' ') += text;
  key += static_cast<char>('0' + static_cast<int32_t>(name.dtype));
  key += static_cast<char>('1' + size_axis);
  for (const int32_t axis : name.axes) (key += ' ') += std::to_string(axis);
  return key;
}

const Kernel* search(const KernelName& name, int32_t size_axis, const KernelList& kernels) {
  const auto holds = [&](const Kernel& kernel) {
    int32_t axis = 0;
    for (const int32_t asked : name.axes) {
      if (axis == size_axis ? kernel.axes[axis] < asked : kernel.axes[axis] != asked) return false;
      ++axis;
    }
    return true;
  };
  const Kernel* best = nullptr;
  for (const Kernel* kernel : kernels) {
    if (kernel->dtype == name.dtype && holds(*kernel) && equal(kernel->variant, name.variant) &&
        equal(kernel->family, name.family) && equal(kernel->operation, name.operation) &&
        (best == nullptr || (size_axis != kNoAxis && kernel->axes[size_axis] < best->axes[size_axis]))) {
      best = kernel;
    }
  }
  return best;
}

// The distinct texts of text_of(0) to text_of(count - 1), in order, separated by commas.
template <class TextOf>
std::string joined(int32_t count, const TextOf& text_of) {
  std::ostringstream text{std::ios_base::out};  // the default constructor needs GLIBCXX_3.4.26
  for (int32_t index = 0; index < count; ++index) {
    bool is_first = true;
    for (int32_t before = 0; before < index; ++before) is_first = is_first && !equal(text_of(before), text_of(index));
    if (is_first) text << (text.tellp() > 0 ? ", " : "") << text_of(index);
  }
  return text.str();
}

std::string targets_held() {
  const KernelTable& table = kernel_table();
  const std::string held = joined(table.num_binaries, [&table](int32_t index) { return table.binaries[index].target; });
  return held.empty() ? "none (a CPU-only build)" : held;
}

void check_forced(const char* forced) {
  const KernelTable& table = kernel_table();
  for (int32_t index = 0; index < table.num_kernels; ++index) {
    if (equal(table.kernels[index].family, forced)) return;
  }
  const std::string families =
      joined(table.num_gpus, [&table](int32_t index) { return table.gpus[index].families[0]; });
  fail(ErrorCode::kArgument, "FLASHMOE_KERNEL=", forced, " is not a kernel family of this build; supported: ", families,
       " as far as they were built");
}

}  // namespace

const char* forced_family() {
  const char* forced = std::getenv("FLASHMOE_KERNEL");
  return forced != nullptr && forced[0] != '\0' ? forced : nullptr;
}

bool is_switched_on(const char* variable) {
  const char* value = std::getenv(variable);
  if (value == nullptr || *value == '\0' || equal(value, "0")) return false;
  if (equal(value, "1")) return true;
  violate("variable.switch", {{"name", variable}, {"found", value}});
}

bool can_load(const DeviceBinary& binary, int32_t capability) {
  if (binary.is_ptx) return capability >= binary.capability;
  if (binary.is_arch_specific) return capability == binary.capability;
  return capability / 10 == binary.capability / 10 && capability >= binary.capability;
}

const KernelList& loadable_kernels(int32_t capability) {
  Known& mine = known();
  if (mine.capability != capability) mine = Known{capability, find_loadable(capability), {}};
  return mine.kernels;
}

const char* const* families_of(int32_t capability) {
  static constexpr const char* kNone[] = {nullptr};
  const KernelTable& table = kernel_table();
  const GpuFamilies* best = nullptr;
  for (int32_t index = 0; index < table.num_gpus; ++index) {
    const GpuFamilies& gpu = table.gpus[index];
    if (gpu.capability <= capability && (best == nullptr || gpu.capability > best->capability)) best = &gpu;
  }
  return best != nullptr ? best->families : kNone;
}

const Kernel* find_kernel(const KernelName& name, int32_t size_axis, const KernelList& kernels) {
  Known& mine = known();
  if (&kernels != &mine.kernels) return search(name, size_axis, kernels);
  const auto [answer, is_new] = mine.answers.try_emplace(key_of(name, size_axis), nullptr);
  if (is_new) answer->second = search(name, size_axis, kernels);
  return answer->second;
}

void refuse(const KernelRequest& request, const std::string& problem) {
  const int32_t major = request.capability / 10;
  const int32_t minor = request.capability % 10;
  if (request.forced_family != nullptr) check_forced(request.forced_family);
  if (request.dtype == Dtype::kBFloat16 && request.capability < 80) {
    fail(ErrorCode::kDtype, "BF16 needs compute capability 8.0; this is ", major, ".", minor, "; use float16");
  }
  if (request.forced_family != nullptr) {
    fail(ErrorCode::kArgument, "FLASHMOE_KERNEL=", request.forced_family, ": this family has no kernel for ",
         request.dtype == Dtype::kBFloat16 ? "bfloat16" : "float16", ", ", problem, " on ", request.gpu_name,
         " (compute capability ", major, ".", minor, "); unset it or name another family");
  }
  fail(ErrorCode::kGpu, "no kernel for ", request.gpu_name, " (compute capability ", major, ".", minor,
       ") in this build, which holds ", targets_held(),
       "; rebuild with FLASHMOE_ARCHS=native or all, or use CPU tensors");
}

}  // namespace flashmoe::host
