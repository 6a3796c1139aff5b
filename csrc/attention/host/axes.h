// Names for the columns of attention's kernel table, in the order of csrc/attention/operations.toml, which the
// generated kernel table asserts.
#pragma once

#include <cstdint>

namespace flashmoe {
namespace attention {

// Index into Kernel::axes.
namespace axis {
enum : int32_t { kHeadDim, kMask };
}

// Value of the axis kMask; combine kernels have none.
enum class Mask : int32_t { kCausal, kFull };

// Index into Kernel::cost, in microseconds on an H100: a block's time per key for a whole tile, and its time at the
// start and end; for a kernel that splits a tile's keys, also the time of the partial results and the second pass, and
// the time per split (for chunks per 1000 partial rows).
namespace cost {
enum : int32_t { kKey, kEnds, kSplit, kShare };
}

}  // namespace attention
}  // namespace flashmoe
