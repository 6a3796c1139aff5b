// Dropout of attention probabilities, and the parameter structs of the kernels that apply it. Plain C types only.
//
// Whether key j is dropped from row i depends only on seed, offset, sequence, query head, i and j. One Philox4x32-7
// (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3) covers 16 positions, one byte each: rows r and r + 8 of
// a block of 16, and keys k, k + 1 and those 8, 16 and 24 further on of a block of 32. One thread holds these in the
// accumulators of mma.sync and wgmma:
//   key      words 0 and 1 of Philox at counter (offset, offset >> 32, 0, 0) under the key (seed, seed >> 32)
//   counter  (J, query head, I, sequence) with J = j / 32 * 4 + j % 8 / 2 and I = i / 16 * 8 + i % 8
//   value    byte 2 * (j / 8 % 2) + i / 8 % 2 of word 2 * (j / 16 % 2) + j % 2
//   limit    threshold / 256, and 1 more if the lattice point of the 16 positions is below threshold % 256 * 2^24. The
//            point is word 2 of the Philox that gives the key, plus
//            0xDB4F0B91 I + 0xBBE05633 J + 0xA0F2EC75 head + 0x89E18285 sequence, modulo 2^32
// A value below the limit drops the key. So p is a multiple of 2^-16 although each position has only eight random bits:
// word 2 is uniform, so each position is dropped with exactly probability p, and the lattice (Kronecker's, of the
// powers of 1 / 1.16730) keeps the dropped share of any range of positions close to p. Rows and keys count from the
// start of their sequence.
#pragma once

#include "attention/params/backward.h"
#include "attention/params/forward.h"

namespace flashmoe::attention {

struct Dropout {
  const int64_t* rng_state;  // [2]: seed and offset, on the kernel's device
  int32_t threshold;         // p in units of 2^-16, rounded to nearest, at most 65535
  float scale;               // 1 / (1 - p), the factor of kept probabilities
};

// The log-sum-exp is that of the scores, without dropout.
struct DropoutForwardParams {
  ForwardParams forward;
  Dropout dropout;
};

// With D = scale if a key is kept and 0 if it is dropped: dv = (P * D)^T dout, dS = P * (D * dout v^T - row_dot).
struct DropoutBackwardParams {
  BackwardParams backward;
  Dropout dropout;
};

}  // namespace flashmoe::attention
