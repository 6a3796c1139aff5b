// The counters that the blocks of a persistent kernel draw tiles from: zero before a launch, and zero again after it,
// because the kernel's last draw resets it.
#pragma once

#include <cstdint>

#include "host/driver.h"
#include "host/tensor.h"

namespace flashmoe {
namespace host {

// What keeps a launch's counter alive; empty for a counter that lives as long as the process.
struct TileCounter {
  int32_t* address = nullptr;
  Tensor owner;
};

// A zeroed counter for the kernels of one call. Launches on one stream follow each other (a dependent one draws after its wait),
// so a stream has one counter for good, cleared once. A call that is being captured gets one of its own, cleared in the graph:
// replays may run beside whatever the stream does by then.
TileCounter tile_counter(const CudaCall& call);

}  // namespace host
}  // namespace flashmoe
