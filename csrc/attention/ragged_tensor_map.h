// Tensor maps whose copies end where a sequence of a batch ends, wherever that is: rows past the sequence's last read as zeros and
// are not written. For kernels of MaskKind::kRuntime, ragged and dense. Plain C++: the host and the kernels read it.
//
// The copy engine checks each coordinate against its dimension and adds up coordinate * stride modulo 2^64. With s bytes
// between rows, and a sequence of n rows whose first is row f of the tensor, row r of the sequence is at the coordinates
//
//   column, kRaggedRows - n + r, head, f + n, kRaggedRows     strides 2, s, head's, s, 2^35 - s
//
// The last three terms but the head's cancel all but (f + r) s, as kRaggedRows * 2^35 is 2^65; and the second coordinate is
// inside its dimension, which has kRaggedRows elements, as long as r < n.
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
