#include "host/launch.h"

#include <algorithm>
#include <limits>

#include "host/load_kernels.h"

namespace flashmoe::host {
namespace {

constexpr int32_t kMaxTensorMaps = 15;

void check_grid(int64_t grid) {
  if (grid <= std::numeric_limits<int32_t>::max()) return;
  fail(ErrorCode::kShape, "the problem needs ", grid,
       " thread blocks; at most 2^31 - 1 are supported: split the batch");
}

void check_launch(CUresult result, const char* call, const Kernel& kernel, int64_t grid) {
  check_driver(result, call, "kernel ", kernel.symbol, ", grid ", grid, ", block ", kernel.threads, " threads, ",
               kernel.shared_bytes, " bytes of dynamic shared memory");
}

// Depends on the code's target, not on the GPU: PTX for an older one, assembled for a newer one, does not wait.
bool can_depend(const Kernel& kernel) {
  constexpr int32_t kFirstToWait = 90;
  const DeviceBinary& binary = kernel_table().binaries[static_cast<std::size_t>(kernel.binary)];
  return binary.virtual_capability >= kFirstToWait && driver().cuLaunchKernelEx != nullptr;
}

void launch_dependent(const Kernel& kernel, CUfunction function, int64_t grid, CUstream stream, void** arguments) {
  CUlaunchAttribute attribute{};
  attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  attribute.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config{};
  config.gridDimX = static_cast<unsigned>(grid);
  config.gridDimY = 1;
  config.gridDimZ = 1;
  config.blockDimX = static_cast<unsigned>(kernel.threads);
  config.blockDimY = 1;
  config.blockDimZ = 1;
  config.sharedMemBytes = static_cast<unsigned>(kernel.shared_bytes);
  config.hStream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check_launch(driver().cuLaunchKernelEx(&config, function, arguments, nullptr), "cuLaunchKernelEx", kernel, grid);
}

void launch(const Launch& entry, const CudaCall& call) {
  const Kernel& kernel = *entry.kernel;
  CUfunction function = load_kernel(kernel, call.gpu);
  std::array<void*, 1 + kMaxTensorMaps> arguments;
  arguments[0] = const_cast<void*>(entry.params);  // the driver reads them only
  for (int32_t map = 0; map < kernel.num_tensor_maps; ++map) {
    arguments[static_cast<std::size_t>(1 + map)] = const_cast<CUtensorMap*>(entry.tensor_maps + map);
  }
  if (entry.is_dependent && can_depend(kernel)) {
    launch_dependent(kernel, function, entry.grid, call.stream, arguments.data());
    return;
  }
  check_launch(
      driver().cuLaunchKernel(function, static_cast<unsigned>(entry.grid), 1, 1, static_cast<unsigned>(kernel.threads),
                              1, 1, static_cast<unsigned>(kernel.shared_bytes), call.stream, arguments.data(), nullptr),
      "cuLaunchKernel", kernel, entry.grid);
}

}  // namespace

void LaunchList::add(const Launch& launch) {
  if (size_ == kMaxLaunches || launch.kernel->num_tensor_maps > kMaxTensorMaps) {
    fail(ErrorCode::kInternal, "kernel ", launch.kernel->symbol,
         " is one too many, or takes too many tensor maps: host/launch.h "
         "has room for ",
         kMaxLaunches, " kernels, and for ", kMaxTensorMaps, " maps of each");
  }
  launches_[size_] = launch;
  ++size_;
}

void LaunchList::run(const CudaCall& call) const {
  for (std::size_t index = 0; index < size_; ++index) {  // first, so that nothing runs if one of them cannot
    check_grid(launches_[index].grid);
    load_kernel(*launches_[index].kernel, call.gpu);
  }
  for (std::size_t index = 0; index < size_; ++index) launch(launches_[index], call);
}

int64_t grid_for(const Kernel& kernel, int64_t tiles, const Device& gpu) {
  const int64_t resident = static_cast<int64_t>(gpu.num_multiprocessors) * kernel.min_blocks;
  return kernel.is_persistent ? std::min(tiles, resident) : tiles;
}

KernelRequest make_request(const Device& gpu, Dtype dtype) {
  return {gpu.capability, gpu.num_multiprocessors, gpu.name.c_str(), forced_family(), dtype};
}

}  // namespace flashmoe::host
