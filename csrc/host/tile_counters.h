// The counters that the blocks of a persistent kernel draw tiles from: zero before a launch, and zero again after it,
// because the kernel's last draw resets it.
#pragma once

#include <cstdint>

#include "host/driver.h"
#include "host/tensor.h"

namespace flashmoe::host {

// Whether work queued on the stream becomes part of a CUDA graph.
bool is_capturing(CUstream stream);

// The address of a launch's counters, and what keeps them alive: nothing for those that live as long as the process.
struct TileCounter {
  int32_t* address = nullptr;
  Tensor owner;
};

constexpr int64_t kMaxCounters = 1024;

// `count` adjacent zeroed counters for the kernels of one call. Launches on one stream follow each other (a dependent
// one draws after its wait), so a stream keeps its counters, which are cleared once. A captured call gets its own,
// because replays may run beside whatever the stream does by then. They come from memory that an earlier, uncaptured
// call has cleared on its own stream, whose work a capture waits for before it begins; if none is left, they are
// cleared in the graph.
TileCounter tile_counter(const CudaCall& call, int64_t count = 1);

}  // namespace flashmoe::host
