// Finds, loads and launches a kernel of the table as the library does, on a driver without a GPU that writes down what it
// is asked.
#include <cstdio>
#include <cstring>
#include <string>

#include "attention/host/select.h"
#include "host/launch.h"

namespace flashmoe {
namespace host {
namespace {

std::string g_asked;

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
  g_asked = std::string(is_elf ? "machine code" : "PTX") + ", grid " + std::to_string(grid) + ", block " +
            std::to_string(block) + ", shared " + std::to_string(shared) + ", parameters " +
            std::to_string(*static_cast<const int*>(parameters[0]));
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

}  // namespace host
}  // namespace flashmoe

using namespace flashmoe::host;

// Launches the kernel of that symbol that a GPU of this capability loads; `answer` is what the driver was asked.
extern "C" int launch(const char* symbol, int capability, long long grid, char* answer, int length) {
  try {
    Device gpu;
    gpu.capability = capability;
    for (const Kernel* kernel : loadable_kernels(capability, kernel_table())) {
      if (std::strcmp(kernel->symbol, symbol) != 0) continue;
      int parameters = 42;
      void* arguments[] = {&parameters};
      launch(*kernel, load_kernel(*kernel, gpu, 0), {grid, grid, kernel->threads, kernel->shared_bytes}, nullptr, arguments);
      std::snprintf(answer, length, "%s, %s", last_kernel(), g_asked.c_str());
      return 0;
    }
    std::snprintf(answer, length, "no kernel %s for %d", symbol, capability);
  } catch (const std::exception& error) {
    std::snprintf(answer, length, "%s", error.what());
  }
  return 1;
}
