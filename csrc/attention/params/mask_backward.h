// What the host passes to the fused backward kernel with a streamed mask. Plain C types only.
#pragma once

#include "attention/params/backward.h"
#include "attention/params/bool_mask.h"

namespace flashmoe::attention {

// scores_gradient: dS of the scores after the softcap, [batch, heads_q, seq_q, scores_gradient_row]; keys past seq_k
// are not written. Null if not needed. If the mask has one matrix per sequence and head, this is its gradient.
struct MaskBackwardParams {
  BackwardParams backward;
  void* scores_gradient;
  int64_t scores_gradient_row;  // elements, a multiple of eight
  VisibleTiles visible;
};

}  // namespace flashmoe::attention
