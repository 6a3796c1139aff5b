// Dropout of attention's probabilities, and the parameter blocks of the kernels that have it. Plain C types only.
//
// Whether key j is dropped from row i depends on seed, offset, sequence, query head, i and j alone. One Philox4x32-10 (Salmon et al., Parallel
// Random Numbers: As Easy as 1, 2, 3) serves rows r and r + 8 of 16, and keys k, k + 8, k + 16 and k + 24 of 32, which one thread has in the
// accumulators of mma.sync and wgmma:
//   key      words 0 and 1 of Philox at counter (offset, offset >> 32, 0, 0) under the key (seed, seed >> 32)
//   counter  (j / 32 * 8 + j % 8, i / 16 * 8 + i % 8, query head, sequence)
//   value    word j / 8 % 4: its low 16 bits where i / 8 is even, else the high ones
// A value below `threshold` drops the key. Rows and keys count from the first of their sequence.
#pragma once

#include "attention/params/backward.h"
#include "attention/params/forward.h"

namespace flashmoe {
namespace attention {

struct Dropout {
  const int64_t* rng_state;  // [2]: seed and offset, where the kernel runs
  int32_t threshold;         // p in units of 2^-16, to the nearest, at most 65535
  float scale;               // 1 / (1 - p): what is kept is multiplied by it
};

// The log-sum-exp is that of the scores, without dropout.
struct DropoutForwardParams {
  ForwardParams forward;
  Dropout dropout;
};

// With D = scale where a key is kept and 0 where it is dropped: dv = (P * D)^T dout, dS = P * (D * dout v^T - row_dot).
struct DropoutBackwardParams {
  BackwardParams backward;
  Dropout dropout;
};

}  // namespace attention
}  // namespace flashmoe
