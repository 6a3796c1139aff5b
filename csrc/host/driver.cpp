#include "host/driver.h"

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>

// dlopen and dlsym moved into libc with a new version in glibc 2.34. The old version is what manylinux_2_28 has, and
// every later glibc still exports it.
#if defined(__x86_64__)
#define FLASHMOE_BIND_OLDEST(name) __asm__(".symver " #name "," #name "@GLIBC_2.2.5")
#else
#define FLASHMOE_BIND_OLDEST(name) __asm__(".symver " #name "," #name "@GLIBC_2.17")
#endif
FLASHMOE_BIND_OLDEST(dlopen);
FLASHMOE_BIND_OLDEST(dlsym);
FLASHMOE_BIND_OLDEST(dlerror);
#undef FLASHMOE_BIND_OLDEST

namespace flashmoe::host {
namespace {

Driver load_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    fail(ErrorCode::kDriver, "the CUDA driver library libcuda.so.1 cannot be loaded (",
         reason != nullptr ? reason : "no reason given",
         "); install the NVIDIA driver, or call with CPU tensors; `python -m flashmoe doctor` says more");
  }
  Driver loaded;
#define FLASHMOE_DRIVER_LOAD(name, symbol)                                                                             \
  loaded.name = reinterpret_cast<decltype(loaded.name)>(dlsym(library, symbol));                                       \
  if (loaded.name == nullptr) {                                                                                        \
    fail(ErrorCode::kDriver, "libcuda.so.1 has no ", symbol, "; the driver is too old: CUDA 11.0 or newer is needed"); \
  }
  FLASHMOE_DRIVER_CALLS(FLASHMOE_DRIVER_LOAD)
#undef FLASHMOE_DRIVER_LOAD
  loaded.cuTensorMapEncodeTiled =
      reinterpret_cast<decltype(loaded.cuTensorMapEncodeTiled)>(dlsym(library, "cuTensorMapEncodeTiled"));
  // Used only for dependent launches, which CUDA graphs cannot hold before 12.3.
  constexpr int kGraphsHoldDependentLaunches = 12030;
  int version = 0;
  if (loaded.cuDriverGetVersion(&version) == CUDA_SUCCESS && version >= kGraphsHoldDependentLaunches) {
    loaded.cuLaunchKernelEx = reinterpret_cast<decltype(loaded.cuLaunchKernelEx)>(dlsym(library, "cuLaunchKernelEx"));
  }
  return loaded;
}

int32_t attribute(CUdevice handle, CUdevice_attribute which, const char* what) {
  int value = 0;
  check_driver(driver().cuDeviceGetAttribute(&value, which, handle), "cuDeviceGetAttribute", "asked for ", what);
  return value;
}

// Two transfers per clock. Only cache hints depend on it, so a driver that does not report it is no error.
int32_t memory_bandwidth(CUdevice handle) {
  int khz = 0, bits = 0;
  const auto ask = driver().cuDeviceGetAttribute;
  if (ask(&khz, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, handle) != CUDA_SUCCESS) return 0;
  if (ask(&bits, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, handle) != CUDA_SUCCESS) return 0;
  return static_cast<int32_t>(int64_t{2} * khz * bits / 8 / 1'000'000);
}

std::unique_ptr<Device> read_device(int32_t index) {
  const Driver& api = driver();
  check_driver(api.cuInit(0), "cuInit", "no GPU can be used");
  CUdevice handle = 0;
  check_driver(api.cuDeviceGet(&handle, index), "cuDeviceGet", "device index ", index);
  auto found = std::make_unique<Device>();
  found->index = index;
  check_driver(api.cuDevicePrimaryCtxRetain(&found->context, handle), "cuDevicePrimaryCtxRetain", "device ", index);
  std::array<char, 256> name{};
  check_driver(api.cuDeviceGetName(name.data(), static_cast<int>(name.size()), handle), "cuDeviceGetName", "device ",
               index);
  found->name = name.data();
  found->capability = 10 * attribute(handle, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, "compute capability") +
                      attribute(handle, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, "compute capability");
  found->num_multiprocessors = attribute(handle, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, "multiprocessors");
  found->shared_bytes_optin =
      attribute(handle, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, "shared memory per block");
  found->l2_bytes = attribute(handle, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, "L2 cache");
  found->memory_bandwidth = memory_bandwidth(handle);
  return found;
}

using StreamGetter = AOTITorchError (*)(int32_t device_index, void** stream);

StreamGetter load_stream_getter() {
  void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  void* symbol = library != nullptr ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
  if (symbol == nullptr) {
    fail(ErrorCode::kDriver,
         "torch's CUDA library (libtorch_cuda.so) is not loaded in this process or lacks "
         "aoti_torch_get_current_cuda_stream; install a CUDA build of torch 2.10 or newer");
  }
  return reinterpret_cast<StreamGetter>(symbol);
}

}  // namespace

const Driver& driver() {
  static const Driver loaded = load_driver();
  return loaded;
}

std::string describe(CUresult result) {
  const char* name = nullptr;
  const char* text = nullptr;
  driver().cuGetErrorName(result, &name);
  driver().cuGetErrorString(result, &text);
  std::ostringstream out{std::ios_base::out};
  out << (name != nullptr ? name : "unknown CUDA error") << " (" << static_cast<int>(result) << ")";
  if (text != nullptr) out << ", " << text;
  return out.str();
}

ContextGuard::ContextGuard(CUcontext context) {
  CUcontext current = nullptr;
  check_driver(driver().cuCtxGetCurrent(&current), "cuCtxGetCurrent", "before a launch");
  if (current != context) {
    check_driver(driver().cuCtxPushCurrent(context), "cuCtxPushCurrent", "before a launch");
    pushed_ = true;
  }
}

ContextGuard::~ContextGuard() {
  CUcontext popped = nullptr;
  if (pushed_) driver().cuCtxPopCurrent(&popped);
}

const Device& device(int32_t index) {
  static std::array<std::atomic<const Device*>, kMaxDevices> devices{};
  static std::mutex mutex;
  if (index < 0 || index >= kMaxDevices) {
    fail(ErrorCode::kDevice, "CUDA device index ", index, "; supported: 0 to ", kMaxDevices - 1);
  }
  auto& slot = devices[static_cast<std::size_t>(index)];
  if (const Device* known = slot.load(std::memory_order_acquire)) return *known;
  const std::lock_guard<std::mutex> lock(mutex);
  if (const Device* known = slot.load(std::memory_order_acquire)) return *known;
  const Device* fresh = read_device(index).release();  // lives as long as the process, like the primary context
  slot.store(fresh, std::memory_order_release);
  return *fresh;
}

CUstream current_stream(int32_t device_index) {
  static const StreamGetter getter = load_stream_getter();
  void* stream = nullptr;
  if (getter(device_index, &stream) != AOTI_TORCH_SUCCESS) {
    fail(ErrorCode::kDriver, "torch gave no current stream for CUDA device ", device_index);
  }
  return static_cast<CUstream>(stream);
}

}  // namespace flashmoe::host
