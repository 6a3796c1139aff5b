// Names for what the kernel table says of attention's kernels, in the order of csrc/attention/operations.toml, which the
// generated kernel table asserts.
#pragma once

#include <cstdint>

namespace flashmoe {
namespace attention {

// Index into Kernel::axes.
namespace axis {
enum : int32_t { kHeadDim, kMask };
}

// Value of the axis kMask; kernels of the combining pass have none.
enum class Mask : int32_t { kCausal, kFull };

// Index into Kernel::cost: microseconds of an H100, of a block for a whole tile by a key and at its ends; and of a kernel that
// divides a tile's keys, those of the partial results and the second pass, and by share.
namespace cost {
enum : int32_t { kKey, kEnds, kSplit, kShare };
}

}  // namespace attention
}  // namespace flashmoe
