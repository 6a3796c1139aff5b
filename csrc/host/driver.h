// The CUDA driver API, found at run time in libcuda.so.1. Every call is checked; an error names it and its purpose.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

#include "host/error.h"

namespace flashmoe::host {

// Entry points, with the names under which libcuda exports their current versions.
#define FLASHMOE_DRIVER_CALLS(call)                                                                                   \
  call(cuInit, "cuInit") call(cuDriverGetVersion, "cuDriverGetVersion") call(cuGetErrorName, "cuGetErrorName")        \
      call(cuGetErrorString, "cuGetErrorString") call(cuDeviceGet, "cuDeviceGet")                                     \
          call(cuDeviceGetAttribute, "cuDeviceGetAttribute") call(cuDeviceGetName, "cuDeviceGetName")                 \
              call(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain") call(cuCtxGetCurrent, "cuCtxGetCurrent")     \
                  call(cuCtxPushCurrent, "cuCtxPushCurrent_v2") call(cuCtxPopCurrent, "cuCtxPopCurrent_v2")           \
                      call(cuModuleLoadDataEx, "cuModuleLoadDataEx") call(cuModuleGetFunction, "cuModuleGetFunction") \
                          call(cuFuncSetAttribute, "cuFuncSetAttribute") call(cuLaunchKernel, "cuLaunchKernel")       \
                              call(cuMemsetD8Async, "cuMemsetD8Async") call(cuMemsetD32Async, "cuMemsetD32Async")     \
                                  call(cuMemAlloc, "cuMemAlloc_v2") call(cuStreamIsCapturing, "cuStreamIsCapturing")  \
                                      call(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode")

struct Driver {
#define FLASHMOE_DRIVER_MEMBER(name, symbol) decltype(&::name) name = nullptr;
  FLASHMOE_DRIVER_CALLS(FLASHMOE_DRIVER_MEMBER)
#undef FLASHMOE_DRIVER_MEMBER
  decltype(&::cuTensorMapEncodeTiled) cuTensorMapEncodeTiled = nullptr;  // null before driver 12.0
  decltype(&::cuLaunchKernelEx) cuLaunchKernelEx = nullptr;              // null before driver 12.3, see driver.cpp
};

// The loaded driver. Throws code `driver` when libcuda.so.1 is absent or too old.
const Driver& driver();

std::string describe(CUresult result);

template <typename... Context>
void check_driver(CUresult result, const char* call, const Context&... context) {
  if (result == CUDA_SUCCESS) return;
  std::ostringstream text{std::ios_base::out};  // the default constructor needs GLIBCXX_3.4.26
  (text << ... << context);
  fail(ErrorCode::kDriver, call, " failed: ", describe(result), "; ", text.str());
}

// Makes the device's primary context (torch's) current on this thread for the guard's lifetime.
class ContextGuard {
 public:
  explicit ContextGuard(CUcontext context);
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;
  ~ContextGuard();

 private:
  bool pushed_ = false;
};

// Allows this thread what CUDA forbids while a stream is being captured in the global mode, but cannot disturb the
// capture: loading a kernel, allocating memory.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const char* before) {
    check_driver(driver().cuThreadExchangeStreamCaptureMode(&mode_), "cuThreadExchangeStreamCaptureMode", before);
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture() { driver().cuThreadExchangeStreamCaptureMode(&mode_); }

 private:
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

constexpr int32_t kMaxDevices = 64;

struct Device {
  int32_t index = 0;
  CUcontext context = nullptr;
  int32_t capability = 0;  // 10 * major + minor
  int32_t num_multiprocessors = 0;
  int32_t shared_bytes_optin = 0;
  int32_t l2_bytes = 0;
  int32_t memory_bandwidth = 0;  // bytes per ns, from the memory's clock and bus width; 0: not reported by the driver
  std::string name;
};

// Properties of CUDA device `index`, read once.
const Device& device(int32_t index);

// torch's current stream on the device.
CUstream current_stream(int32_t device_index);

// What one operator call on a GPU needs while its work is being queued: the context, current on this thread, and the
// stream to queue it on.
struct CudaCall {
  explicit CudaCall(const Device& device) : gpu(device), guard(device.context), stream(current_stream(device.index)) {}
  const Device& gpu;
  const ContextGuard guard;
  const CUstream stream;
};

// Fills `count` bytes, or 32-bit words, on the stream; `context` names them in an error.
template <typename... Context>
void fill_bytes(void* address, unsigned char value, int64_t count, CUstream stream, const Context&... context) {
  check_driver(
      driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(address), value, static_cast<std::size_t>(count), stream),
      "cuMemsetD8Async", context...);
}
template <typename... Context>
void fill_words(void* address, uint32_t value, int64_t count, CUstream stream, const Context&... context) {
  check_driver(
      driver().cuMemsetD32Async(reinterpret_cast<CUdeviceptr>(address), value, static_cast<std::size_t>(count), stream),
      "cuMemsetD32Async", context...);
}

}  // namespace flashmoe::host
