// Finds, loads and launches a kernel of the toy operation as the library does, on a fake driver without a GPU that records
// its calls.
#include <cstdio>
#include <cstring>
#include <string>

#include "host/find_kernels.h"
#include "host/launch.h"

namespace flashmoe::host {
namespace {

std::string g_recorded_calls;

CUresult exchange_capture_mode(CUstreamCaptureMode*) { return CUDA_SUCCESS; }
CUresult load(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
  *module = static_cast<CUmodule>(const_cast<void*>(image));
  return CUDA_SUCCESS;
}
CUresult get_function(CUfunction* function, CUmodule module, const char*) {
  *function = reinterpret_cast<CUfunction>(module);
  return CUDA_SUCCESS;
}
CUresult set_attribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
CUresult launch_kernel(CUfunction function, unsigned grid, unsigned, unsigned, unsigned block, unsigned, unsigned,
                       unsigned shared, CUstream, void** parameters, void**) {
  const bool is_elf = std::memcmp(reinterpret_cast<const char*>(function), "\177ELF", 4) == 0;
  g_recorded_calls += std::string(is_elf ? "machine code" : "PTX") + ", grid " + std::to_string(grid) + ", block " +
                      std::to_string(block) + ", shared " + std::to_string(shared) + ", parameters " +
                      std::to_string(*static_cast<const int*>(parameters[0])) + "\n";
  return CUDA_SUCCESS;
}

}  // namespace

const Driver& driver() {
  static const Driver fake = [] {
    Driver calls;
    calls.cuThreadExchangeStreamCaptureMode = exchange_capture_mode;
    calls.cuModuleLoadDataEx = load;
    calls.cuModuleGetFunction = get_function;
    calls.cuFuncSetAttribute = set_attribute;
    calls.cuLaunchKernel = launch_kernel;
    return calls;
  }();
  return fake;
}
std::string describe(CUresult result) { return std::to_string(static_cast<int>(result)); }
CUstream current_stream(int32_t) { return nullptr; }
ContextGuard::ContextGuard(CUcontext) {}
ContextGuard::~ContextGuard() = default;

}  // namespace flashmoe::host

using namespace flashmoe::host;

// Launches both rules one after another on a GPU of this capability; `answer` receives the recorded driver calls.
extern "C" int launch(int capability, long long grid, char* answer, int length) {
  g_recorded_calls.clear();
  try {
    Device gpu;
    gpu.capability = capability;
    const int parameters[2] = {42, 43};
    LaunchList list;
    for (int rule = 0; rule < 2; ++rule) {
      const KernelName name{"toy_scale", families_of(capability)[0], "", Dtype::kFloat32, {/*per_thread=*/4, rule}};
      const Kernel* kernel = find_kernel(name, kNoAxis, loadable_kernels(capability));
      if (kernel == nullptr) fail(ErrorCode::kGpu, "no kernel of rule ", rule);
      list.add({kernel, grid, &parameters[rule]});
      g_recorded_calls += std::string(kernel->symbol) + "\n";
    }
    list.run(CudaCall(gpu));
    std::snprintf(answer, length, "%s", g_recorded_calls.c_str());
    return 0;
  } catch (const std::exception& error) {
    std::snprintf(answer, length, "%s", error.what());
    return 1;
  }
}
