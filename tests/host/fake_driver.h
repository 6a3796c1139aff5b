// A driver without a GPU: "CUDA" memory is the CPU's, and the including file defines what a launch does. For one file
// of a library.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "host/driver.h"
#include "host/find_kernels.h"

#define FAKE_EXPORT extern "C" __attribute__((visibility("default")))

extern "C" const unsigned char flashmoe_binaries[1] = {0};
extern "C" const char flashmoe_index[1] = {0};
// CPU tensors are the GPU's here; with `g_is_gpu_alone` no tensor is reported as the CPU's.
static bool g_is_gpu_alone = false;
extern "C" int32_t aoti_torch_device_type_cuda() { return 0; }
extern "C" int32_t aoti_torch_device_type_cpu() { return g_is_gpu_alone ? 1 : 0; }

namespace flashmoe::host {
namespace {

Device g_gpu;
bool g_is_capturing = false;
std::string g_log;      // one JSON object per line
std::string g_missing;  // part of the symbols that are not found in any module
bool g_refuses_maps = false;

// Among this GPU's kernels: those for others have the same symbols.
const Kernel& kernel_of(CUfunction function) {
  for (const Kernel* kernel : loadable_kernels(g_gpu.capability)) {
    if (kernel->symbol == reinterpret_cast<const char*>(function)) return *kernel;
  }
  fail(ErrorCode::kInternal, "a function that was not loaded");
}

// One block per tile, or for a persistent kernel at most as many as the GPU holds.
inline int64_t grid_of(const Kernel& kernel, int64_t tiles) {
  const int64_t held = int64_t{g_gpu.num_multiprocessors} * kernel.min_blocks;
  return kernel.is_persistent ? std::min(tiles, held) : tiles;
}

CUresult launch(CUfunction function, unsigned grid, unsigned block, unsigned shared, bool is_dependent,
                void** arguments);

// Like the driver: no grid without blocks.
CUresult launch_some(CUfunction function, unsigned grid, unsigned block, unsigned shared, bool is_dependent,
                     void** arguments) {
  return grid == 0 ? CUDA_ERROR_INVALID_VALUE : launch(function, grid, block, shared, is_dependent, arguments);
}

Driver make_driver() {
  Driver calls;
  calls.cuThreadExchangeStreamCaptureMode = [](CUstreamCaptureMode*) { return CUDA_SUCCESS; };
  calls.cuModuleLoadDataEx = [](CUmodule* module, const void*, unsigned, CUjit_option*, void**) {
    *module = reinterpret_cast<CUmodule>(1);
    return CUDA_SUCCESS;
  };
  calls.cuModuleGetFunction = [](CUfunction* function, CUmodule, const char* symbol) {
    if (!g_missing.empty() && std::strstr(symbol, g_missing.c_str()) != nullptr) return CUDA_ERROR_NOT_FOUND;
    *function = reinterpret_cast<CUfunction>(const_cast<char*>(symbol));
    return CUDA_SUCCESS;
  };
  calls.cuFuncSetAttribute = [](CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; };
  calls.cuStreamIsCapturing = [](CUstream, CUstreamCaptureStatus* status) {
    *status = g_is_capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
  };
  calls.cuMemAlloc = [](CUdeviceptr* memory, std::size_t bytes) {
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    static std::deque<std::vector<char>> allocations;
    *memory = reinterpret_cast<CUdeviceptr>(allocations.emplace_back(bytes).data());
    return CUDA_SUCCESS;
  };
  calls.cuMemsetD8Async = [](CUdeviceptr address, unsigned char value, std::size_t count, CUstream) {
    std::memset(reinterpret_cast<void*>(address), value, count);
    return CUDA_SUCCESS;
  };
  calls.cuMemsetD32Async = [](CUdeviceptr address, unsigned value, std::size_t count, CUstream) {
    for (std::size_t word = 0; word < count; ++word) reinterpret_cast<unsigned*>(address)[word] = value;
    return CUDA_SUCCESS;
  };
  // Like the driver: 16-byte aligned memory and strides, where 0 is allowed (a shared cache of codes on an H200), and
  // sizes and strides within limits.
  calls.cuTensorMapEncodeTiled = [](CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* address,
                                    const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                                    const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                    CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill) {
    if (g_refuses_maps || reinterpret_cast<uintptr_t>(address) % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
    for (cuuint32_t axis = 0; axis < rank; ++axis) {
      if (dims[axis] == 0 || box[axis] == 0 || box[axis] > 256) return CUDA_ERROR_INVALID_VALUE;
      if (dims[axis] > cuuint64_t{1} << 32) return CUDA_ERROR_INVALID_VALUE;
      if (axis > 0 && (strides[axis - 1] % 16 != 0 || strides[axis - 1] >> 40 != 0)) return CUDA_ERROR_INVALID_VALUE;
    }
    std::memcpy(map, &address, sizeof(address));
    std::memcpy(reinterpret_cast<char*>(map) + sizeof(address), &promotion, sizeof(promotion));
    return CUDA_SUCCESS;
  };
  calls.cuLaunchKernel = [](CUfunction function, unsigned grid, unsigned, unsigned, unsigned block, unsigned, unsigned,
                            unsigned shared, CUstream, void** arguments,
                            void**) { return launch_some(function, grid, block, shared, false, arguments); };
  calls.cuLaunchKernelEx = [](const CUlaunchConfig* config, CUfunction function, void** arguments, void**) {
    return launch_some(function, config->gridDimX, config->blockDimX, config->sharedMemBytes,
                       config->attrs[0].value.programmaticStreamSerializationAllowed == 1, arguments);
  };
  return calls;
}

// Begins a call on such a GPU, with an empty log.
void begin_call(int capability, int multiprocessors, bool is_capturing) {
  g_gpu.capability = capability;
  g_gpu.num_multiprocessors = multiprocessors;
  g_gpu.name = "a GPU";
  g_is_capturing = is_capturing;
  g_log.clear();
}

}  // namespace

const Driver& driver() {
  static const Driver fake = make_driver();
  return fake;
}
const Device& device(int32_t) { return g_gpu; }
std::string describe(CUresult result) { return std::to_string(static_cast<int>(result)); }
CUstream current_stream(int32_t) { return nullptr; }
ContextGuard::ContextGuard(CUcontext) {}
ContextGuard::~ContextGuard() = default;

}  // namespace flashmoe::host

FAKE_EXPORT void fake_missing_kernels(const char* symbols) { flashmoe::host::g_missing = symbols; }
FAKE_EXPORT void fake_refused_maps(int refuses) { flashmoe::host::g_refuses_maps = refuses != 0; }
FAKE_EXPORT void fake_gpu_alone(int is_alone) { g_is_gpu_alone = is_alone != 0; }
FAKE_EXPORT const char* fake_log() { return flashmoe::host::g_log.c_str(); }
