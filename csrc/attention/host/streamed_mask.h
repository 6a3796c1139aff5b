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
  Tensor mask;   // the caller's, or a new one of 0 and -inf in q's type
  Tensor words;  // of a new one: VisibleBlocks::words
  Tensor ranges;
  Tensor ranks;
  VisibleBlocks blocks{};
  VisibleTiles tiles{};
};

// For arguments with streams_mask. Launches the conversion of a bool mask.
StreamedMask streamed_mask(const VarlenArguments& arguments);
// For the backward pass: also finds what each tile of keys sees, where a tile may skip what a bool mask hides.
StreamedMask streamed_mask_of_tiles(const VarlenArguments& arguments);

}  // namespace flashmoe::attention
