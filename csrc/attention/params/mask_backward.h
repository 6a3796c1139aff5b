// What the host passes to the fused backward kernel of a streamed mask. Plain C types only.
#pragma once

#include "attention/params/backward.h"

namespace flashmoe::attention {

// scores_gradient: dS of the scores behind a softcap, [batch, heads_q, seq_q, scores_gradient_row], of which keys past seq_k are not written; null where
// nobody needs it. Of a mask of every sequence and head it is the gradient.
struct MaskBackwardParams {
  BackwardParams backward;
  void* scores_gradient;
  int64_t scores_gradient_row;  // elements, a multiple of eight
};

}  // namespace flashmoe::attention
