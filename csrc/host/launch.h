// What an operator call runs on a GPU: a list of kernels, launched in order on one stream, with every call checked.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>

#include "host/driver.h"
#include "host/find_kernels.h"
#include "host/kernel_table.h"

namespace flashmoe::host {

// One kernel of a list. Its pointers must stay valid until run() returns.
struct Launch {
  const Kernel* kernel = nullptr;
  int64_t grid = 0;              // thread blocks, one dimension
  const void* params = nullptr;  // the kernel's parameter block
  const CUtensorMap* tensor_maps =
      nullptr;  // kernel->num_tensor_maps of them, in the order of the operation's descriptor
  // The kernel begins with ptx::grid_dependency_wait() and directly follows the one that it depends on: if GPU and
  // driver can, it is scheduled before that one has ended.
  bool is_dependent = false;
};

class LaunchList {
 public:
  void add(const Launch& launch);

  // Loads all kernels, then launches them in order; an error names kernel, grid, block and shared memory.
  void run(const CudaCall& call) const;

 private:
  static constexpr std::size_t kMaxLaunches = 9;
  std::array<Launch, kMaxLaunches> launches_;
  std::size_t size_ = 0;
};

// Thread blocks for `tiles`: one per tile, or for a persistent kernel at most as many as the GPU holds at once. If that
// is fewer than the tiles, the kernel needs a tile counter (host/tile_counters.h).
int64_t grid_for(const Kernel& kernel, int64_t tiles, const Device& gpu);

// What selection on this GPU starts from; reads FLASHMOE_KERNEL.
KernelRequest make_request(const Device& gpu, Dtype dtype);

}  // namespace flashmoe::host
