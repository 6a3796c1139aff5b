// The counters that the blocks of a persistent kernel draw tiles from: zero before a launch, and zero again after it,
// because the kernel's last draw resets it.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "host/tensor.h"

namespace flashmoe {
namespace host {

// What keeps a launch's counter alive; empty for a counter that lives as long as the process.
struct TileCounter {
  int32_t* address = nullptr;
  Tensor owner;
};

// A zeroed counter for one launch on `stream`. Launches on one stream follow each other, so a stream has one counter for
// good, cleared once. A launch that is being captured gets one of its own, cleared in the graph: replays may run beside
// whatever the stream does by then.
TileCounter tile_counter(int32_t device_type, int32_t device_index, CUstream stream);

}  // namespace host
}  // namespace flashmoe
