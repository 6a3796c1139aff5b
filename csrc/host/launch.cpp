#include "host/launch.h"

#include <array>
#include <atomic>
#include <cstdio>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

namespace flashmoe {
namespace host {
namespace {

constexpr int32_t kMaxDevices = 64;  // as in driver.cpp, whose device() rejects larger indices
constexpr std::size_t kJitLogBytes = 8192;

thread_local const char* g_last_kernel = "";
thread_local const char* g_last_isa = nullptr;  // of the CPU backend, if that ran

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

// Loading a module allocates, which a capturing thread may not do in the default mode.
class RelaxedCapture {
 public:
  RelaxedCapture() {
    check_driver(driver().cuThreadExchangeStreamCaptureMode(&mode_), "cuThreadExchangeStreamCaptureMode",
                 "before loading a kernel");
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture() { driver().cuThreadExchangeStreamCaptureMode(&mode_); }

 private:
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

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
  const RelaxedCapture relaxed;
  const auto index = static_cast<std::size_t>(kernel.binary);
  const DeviceBinary& binary = kernel_table().binaries[index];
  if (loaded.modules[index] == nullptr) loaded.modules[index] = load_module(binary, device);
  CUfunction function = nullptr;
  check_driver(driver().cuModuleGetFunction(&function, loaded.modules[index], kernel.symbol), "cuModuleGetFunction",
               "kernel ", kernel.symbol, " in ", binary.name, " for ", binary.target);
  check_driver(driver().cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                           kernel.shared_bytes),
               "cuFuncSetAttribute", "kernel ", kernel.symbol, " needs ", kernel.shared_bytes,
               " bytes of shared memory; a block on ", device.name, " has at most ", device.shared_bytes_optin);
  return function;
}

}  // namespace

CUfunction load_kernel(const Kernel& kernel, const Device& device, int32_t device_index) {
  DeviceFunctions& loaded = functions_of(device_index);
  auto& slot = loaded.functions[static_cast<std::size_t>(&kernel - kernel_table().kernels)];
  if (CUfunction function = slot.load(std::memory_order_acquire)) return function;
  const std::lock_guard<std::mutex> lock(g_mutex);
  if (CUfunction function = slot.load(std::memory_order_acquire)) return function;
  CUfunction function = load_locked(kernel, device, loaded);
  slot.store(function, std::memory_order_release);
  return function;
}

namespace {

void check_grid(const LaunchShape& shape) {
  if (shape.grid <= std::numeric_limits<int32_t>::max()) return;
  fail(ErrorCode::kShape, "the problem needs ", shape.grid, " thread blocks; at most 2^31 - 1 are supported: split the batch");
}

void check_launch(CUresult result, const char* call, const Kernel& kernel, const LaunchShape& shape) {
  check_driver(result, call, "kernel ", kernel.symbol, ", grid ", shape.grid, ", block ", shape.threads, " threads, ",
               shape.shared_bytes, " bytes of dynamic shared memory");
  set_last_kernel(kernel.symbol);
}

}  // namespace

void launch(const Kernel& kernel, CUfunction function, const LaunchShape& shape, CUstream stream, void** arguments) {
  check_grid(shape);
  check_launch(driver().cuLaunchKernel(function, static_cast<unsigned>(shape.grid), 1, 1,
                                       static_cast<unsigned>(shape.threads), 1, 1,
                                       static_cast<unsigned>(shape.shared_bytes), stream, arguments, nullptr),
               "cuLaunchKernel", kernel, shape);
}

void launch_dependent(const Kernel& kernel, CUfunction function, const LaunchShape& shape, CUstream stream,
                      void** arguments) {
  // By what the code was compiled from, not by the GPU: PTX for an older one, assembled for a newer one, does not wait.
  constexpr int32_t kFirstToWait = 90;
  const DeviceBinary& binary = kernel_table().binaries[static_cast<std::size_t>(kernel.binary)];
  if (binary.virtual_capability < kFirstToWait || driver().cuLaunchKernelEx == nullptr) {
    launch(kernel, function, shape, stream, arguments);
    return;
  }
  check_grid(shape);
  CUlaunchAttribute attribute{};
  attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  attribute.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config{};
  config.gridDimX = static_cast<unsigned>(shape.grid);
  config.gridDimY = 1;
  config.gridDimZ = 1;
  config.blockDimX = static_cast<unsigned>(shape.threads);
  config.blockDimY = 1;
  config.blockDimZ = 1;
  config.sharedMemBytes = static_cast<unsigned>(shape.shared_bytes);
  config.hStream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check_launch(driver().cuLaunchKernelEx(&config, function, arguments, nullptr), "cuLaunchKernelEx", kernel, shape);
}

void set_last_kernel(const char* name) {
  g_last_kernel = name;
  g_last_isa = nullptr;
}
void set_last_isa(const char* name) { g_last_isa = name; }
const char* last_kernel() {
  if (g_last_isa == nullptr) return g_last_kernel;
  thread_local std::array<char, 32> label;
  std::snprintf(label.data(), label.size(), "cpu:%s", g_last_isa);
  return label.data();
}

}  // namespace host
}  // namespace flashmoe
