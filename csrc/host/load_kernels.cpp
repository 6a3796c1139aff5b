#include "host/load_kernels.h"

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

namespace flashmoe::host {
namespace {

constexpr std::size_t kJitLogBytes = 8192;

struct DeviceFunctions {
  explicit DeviceFunctions(const KernelTable& table)
      : functions(static_cast<std::size_t>(table.num_kernels)), modules(static_cast<std::size_t>(table.num_binaries)) {}
  std::vector<std::atomic<CUfunction>> functions;
  std::vector<CUmodule> modules;  // guarded by g_mutex
};

std::mutex g_mutex;

DeviceFunctions& functions_of(int32_t device_index) {
  static std::array<std::atomic<DeviceFunctions*>, kMaxDevices> devices{};
  auto& slot = devices[static_cast<std::size_t>(device_index)];
  DeviceFunctions* known = slot.load(std::memory_order_acquire);
  if (known == nullptr) {
    auto fresh = std::make_unique<DeviceFunctions>(kernel_table());
    if (slot.compare_exchange_strong(known, fresh.get())) known = fresh.release();
  }
  return *known;
}

CUmodule load_module(const DeviceBinary& binary, const Device& device) {
  std::array<char, kJitLogBytes> log{};
  std::array<CUjit_option, 2> options{CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  std::array<void*, 2> values{log.data(), reinterpret_cast<void*>(log.size())};
  CUmodule module = nullptr;
  check_driver(driver().cuModuleLoadDataEx(&module, embedded_binaries() + binary.offset,
                                           static_cast<unsigned>(options.size()), options.data(), values.data()),
               "cuModuleLoadDataEx", "binary ", binary.name, " for ", binary.target, " on ", device.name,
               " (compute capability ", device.capability / 10, ".", device.capability % 10, ") ", log.data());
  return module;
}

CUfunction load_locked(const Kernel& kernel, const Device& device, DeviceFunctions& loaded) {
  const RelaxedCapture relaxed("before loading a kernel");
  const auto index = static_cast<std::size_t>(kernel.binary);
  const DeviceBinary& binary = kernel_table().binaries[index];
  if (loaded.modules[index] == nullptr) loaded.modules[index] = load_module(binary, device);
  CUfunction function = nullptr;
  check_driver(driver().cuModuleGetFunction(&function, loaded.modules[index], kernel.symbol), "cuModuleGetFunction",
               "kernel ", kernel.symbol, " in ", binary.name, " for ", binary.target);
  check_driver(
      driver().cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.shared_bytes),
      "cuFuncSetAttribute", "kernel ", kernel.symbol, " needs ", kernel.shared_bytes,
      " bytes of shared memory; a block on ", device.name, " has at most ", device.shared_bytes_optin);
  return function;
}

}  // namespace

CUfunction load_kernel(const Kernel& kernel, const Device& device) {
  DeviceFunctions& loaded = functions_of(device.index);
  auto& slot = loaded.functions[static_cast<std::size_t>(&kernel - kernel_table().kernels)];
  if (CUfunction function = slot.load(std::memory_order_acquire)) return function;
  const std::lock_guard<std::mutex> lock(g_mutex);
  if (CUfunction function = slot.load(std::memory_order_acquire)) return function;
  CUfunction function = load_locked(kernel, device, loaded);
  slot.store(function, std::memory_order_release);
  return function;
}

}  // namespace flashmoe::host
