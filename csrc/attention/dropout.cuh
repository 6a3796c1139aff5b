// Dropout of a warp's probabilities in the accumulators of mma.sync (params/dropout.h says what the mask is made of): a thread has rows
// lane / 4 and 8 more, and of each eight columns 2 * (lane % 4) and the next.
#pragma once

#include "attention/params/dropout.h"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/types.cuh"

namespace flashmoe {
namespace attention {

// Of a kernel with dropout, which has these as the first member of its parameters.
__device__ __forceinline__ const Dropout& dropout_of(const ForwardParams& params) {
  return reinterpret_cast<const DropoutForwardParams&>(params).dropout;
}
__device__ __forceinline__ const Dropout& dropout_of(const BackwardParams& params) {
  return reinterpret_cast<const DropoutBackwardParams&>(params).dropout;
}

struct PhiloxKey {
  uint32_t left;
  uint32_t right;
};

// Philox4x32-10: the counter becomes the random words.
__device__ __forceinline__ void philox(uint32_t (&counter)[4], PhiloxKey key) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xD2511F53} * counter[0];
    const uint64_t second = uint64_t{0xCD9E8D57} * counter[2];
    counter[0] = static_cast<uint32_t>(second >> 32) ^ counter[1] ^ key.left;
    counter[1] = static_cast<uint32_t>(second);
    counter[2] = static_cast<uint32_t>(first >> 32) ^ counter[3] ^ key.right;
    counter[3] = static_cast<uint32_t>(first);
    key.left += 0x9E3779B9;
    key.right += 0xBB67AE85;
  }
}

// Of one sequence and query head.
struct HeadDropout {
  PhiloxKey key;
  uint32_t head;
  uint32_t sequence;
  uint32_t threshold;  // in the high half of a word
  float scale;

  __device__ __forceinline__ HeadDropout(const Dropout& dropout, int head_, int sequence_)
      : head(static_cast<uint32_t>(head_)),
        sequence(static_cast<uint32_t>(sequence_)),
        threshold(static_cast<uint32_t>(dropout.threshold) << 16),
        scale(dropout.scale) {
    uint32_t state[4];  // seed and offset
    ptx::ld_global_128(state, dropout.rng_state);
    uint32_t counter[4] = {state[2], state[3], 0, 0};
    philox(counter, PhiloxKey{state[0], state[1]});
    key = PhiloxKey{counter[0], counter[1]};
  }

  // Words of rows row and row + 8 of 16, and keys key, key + 8, key + 16 and key + 24 of 32.
  __device__ __forceinline__ void draw(uint32_t (&words)[4], int row, int key_) const {
    words[0] = static_cast<uint32_t>(key_ / 32 * 8 + key_ % 8);
    words[1] = static_cast<uint32_t>(row / 16 * 8 + row % 8);
    words[2] = head;
    words[3] = sequence;
    philox(words, key);
  }

  // half: 0 for the row itself, 1 for the one eight further.
  __device__ __forceinline__ bool keeps(uint32_t word, int half) const {
    return (half == 0 ? word << 16 : word) >= threshold;
  }
};

// visit(n, i, keeps) for scores[n][i] of 16 rows and kColumns columns; rows are queries, columns keys. row, key: of the first score, multiples of
// 16; of 32 where kColumns is one. (kColumns of 16 use half of what is drawn.)
template <int kColumns, typename Visit>
__device__ __forceinline__ void visit_by_query(const HeadDropout& dropout, int row, int key, Visit visit) {
  constexpr int kBlocks = kColumns % 32 == 0 ? 4 : 2;  // of eight keys that a draw serves
  const int lane = ptx::lane_index();
#pragma unroll
  for (int n = 0; n < kColumns / 8; n += kBlocks) {
    const bool is_upper = kBlocks == 2 && (key + n * 8) % 32 != 0;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      uint32_t words[4];
      dropout.draw(words, row + lane / 4, key + n * 8 + lane % 4 * 2 + c);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const uint32_t word = is_upper ? words[(2 + b) % 4] : words[b];
#pragma unroll
        for (int half = 0; half < 2; ++half) visit(n + b, 2 * half + c, dropout.keeps(word, half));
      }
    }
  }
}

// The same of S^T: rows are keys, columns queries.
template <int kColumns, typename Visit>
__device__ __forceinline__ void visit_by_key(const HeadDropout& dropout, int row, int key, Visit visit) {
  const int lane = ptx::lane_index();
  const bool is_upper = key % 32 != 0;
#pragma unroll
  for (int n = 0; n < kColumns / 8; n += 2)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      uint32_t words[4];
      dropout.draw(words, row + n * 8 + lane % 4 * 2 + c, key + lane / 4);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t word = is_upper ? words[2 + half] : words[half];
#pragma unroll
        for (int b = 0; b < 2; ++b) visit(n + b, 2 * half + c, dropout.keeps(word, b));
      }
    }
}

}  // namespace attention
}  // namespace flashmoe
