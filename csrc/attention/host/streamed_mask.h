// Mask tensors that kernels load with the keys (attention_mask_forward, attention_mask_backward_fused), and bool masks
// that are converted to such.
#pragma once

#include "attention/host/varlen_arguments.h"
#include "attention/params/bool_mask.h"

namespace flashmoe::attention {

// Returns whether the only score modification is a mask of dense rows and keys that a kernel can stream: an additive
// one with an element for each row and key that a tensor map can describe, or a bool one worth converting to that.
bool streams_mask(const VarlenArguments& arguments);

// The mask that kernels get, and the memory that their parameters point to.
struct StreamedMask {
  Tensor mask;           // the caller's, or a new one of 0 and -inf in q's type
  Tensor blocks_memory;  // of a new one: the arrays of `blocks` and `tiles`
  VisibleBlocks blocks{};
  VisibleTiles tiles{};
};

// For arguments with streams_mask. Launches the conversion of a bool mask. has_tiles: for the backward pass, whose tiles
// of keys may then skip what a bool mask hides.
StreamedMask streamed_mask(const VarlenArguments& arguments, bool has_tiles);

}  // namespace flashmoe::attention
