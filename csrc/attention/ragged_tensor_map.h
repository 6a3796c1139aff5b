// Tensor maps whose copies end at the end of any sequence of a batch: rows past the sequence's last read as zeros and
// are not written. For kernels of MaskKind::kRuntime, ragged and dense. Plain C++, included by the host and the
// kernels.
//
// TMA checks each coordinate against its dimension and sums coordinate * stride modulo 2^64. With s bytes between rows,
// and a sequence of n rows whose first is row f of the tensor, row r of the sequence is at the coordinates
//
//   column, kRaggedRows - n + r, head, f + n, kRaggedRows     strides 2, s, head's, s, 2^35 - s
//
// The terms of the second and the last two coordinates add up to (f + r) s, because kRaggedRows * 2^35 is 2^65. The
// second coordinate is inside its dimension, which has kRaggedRows elements, as long as r < n.
#pragma once

#include "attention/params/forward.h"

namespace flashmoe::attention {

constexpr int kRaggedRows = 1 << 30;
constexpr int kRaggedMapRank = 5;

// TMA coordinates of a sequence.
struct RaggedCoordinates {
  int head;
  int length;  // n
  int end;     // f + n
};

}  // namespace flashmoe::attention
