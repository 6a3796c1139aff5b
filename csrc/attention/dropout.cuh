// Dropout of a warp's probabilities in the accumulator layout of mma.sync and wgmma; params/dropout.h defines the
// dropout mask. A thread holds rows lane / 4 and lane / 4 + 8, and columns 2 * (lane % 4) and the next of every eight.
#pragma once

#include "attention/params/dropout.h"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/multiply.cuh"
#include "ptx/permute.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/types.cuh"

namespace flashmoe::attention {

// Only for kernels with dropout: `params` is the first member of their parameter struct.
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

// Philox4x32-7. Replaces the counter with the random words.
__device__ __forceinline__ void philox(uint32_t (&counter)[4], PhiloxKey key) {
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    uint32_t first[2], second[2];
    ptx::multiply_wide(first[0], first[1], counter[0], 0xD2511F53);
    ptx::multiply_wide(second[0], second[1], counter[2], 0xCD9E8D57);
    counter[0] = second[1] ^ counter[1] ^ key.left;
    counter[1] = second[0];
    counter[2] = first[1] ^ counter[3] ^ key.right;
    counter[3] = first[0];
    key.left += 0x9E3779B9;
    key.right += 0xBB67AE85;
  }
}

// Which of two adjacent columns in one of a thread's rows are kept: bit 7 of byte `byte` of each word.
struct KeptPair {
  uint32_t left;
  uint32_t right;
  int byte;

  // All ones for a kept column: the left one in the low half, the right one in the high half.
  __device__ __forceinline__ uint32_t halves() const {
    return ptx::permute_bytes(left, right, (8u + byte) * 0x11u + (12u + byte) * 0x1100u);
  }
  // Returns the value if the column is kept, otherwise zero.
  __device__ __forceinline__ float keep(float value, int column) const {
    const uint32_t word = column == 0 ? left : right;
    return ptx::bits_float(ptx::float_bits(value) & ptx::permute_bytes(word, word, (8u + byte) * 0x1111u));
  }
};

// The coordinates of a draw that enter the Philox counter, and its lattice point.
constexpr uint32_t kRowStep = 0xDB4F0B91, kKeyStep = 0xBBE05633;
struct Draw {
  uint32_t keys;
  uint32_t rows;
  uint32_t point;

  // The draw that is 16 * times_rows rows and 32 * times_keys keys further on. Uses only additions, which the draws of
  // a loop share.
  __device__ __forceinline__ Draw further(uint32_t times_rows, uint32_t times_keys) const {
    const uint32_t more_rows = 8 * times_rows, more_keys = 4 * times_keys;
    return {keys + more_keys, rows + more_rows, point + more_rows * kRowStep + more_keys * kKeyStep};
  }
};

// Dropout of one sequence and query head.
struct HeadDropout {
  const Dropout& dropout;
  PhiloxKey key;
  uint32_t head;
  uint32_t sequence;
  uint32_t start;  // lattice offset

  __device__ __forceinline__ HeadDropout(const Dropout& dropout_, int head_, int sequence_)
      : dropout(dropout_), head(static_cast<uint32_t>(head_)), sequence(static_cast<uint32_t>(sequence_)) {
    uint32_t state[4];  // seed and offset
    ptx::ld_global_128(state, dropout.rng_state);
    uint32_t counter[4] = {state[2], state[3], 0, 0};
    philox(counter, PhiloxKey{state[0], state[1]});
    key = PhiloxKey{counter[0], counter[1]};
    start = counter[2];
  }

  // The draw for rows `row` and `row` + 8 of a block of 16, and for eight keys of a block of 32: `key` (even) and the
  // next, and those 8, 16 and 24 further on.
  __device__ __forceinline__ Draw draw(int row, int key_) const {
    const auto keys = static_cast<uint32_t>(key_ / 32 * 4 + key_ % 8 / 2);
    const auto rows = static_cast<uint32_t>(row / 16 * 8 + row % 8);
    return {keys, rows, start + rows * kRowStep + keys * kKeyStep + head * 0xA0F2EC75 + sequence * 0x89E18285};
  }
  // Computes the random words of a draw. Returns the `addend` of kept().
  __device__ __forceinline__ uint32_t words_of(const Draw& draw, uint32_t (&words)[4]) const {
    words[0] = draw.keys;
    words[1] = head;
    words[2] = draw.rows;
    words[3] = sequence;
    philox(words, key);
    const auto limit = static_cast<uint32_t>(dropout.threshold) >> 8;
    const uint32_t addend = (128 - limit % 128) * 0x01010101;
    return draw.point < static_cast<uint32_t>(dropout.threshold) << 24 ? addend - 0x01010101 : addend;
  }

  // Sets bit 7 of each byte whose value in `word` is not below the limit. Adding 128 - limit % 128 to the low seven
  // bits sets bit 7 if they are not below limit % 128.
  __device__ __forceinline__ uint32_t kept(uint32_t word, uint32_t addend) const {
    const uint32_t low = (word & 0x7F7F7F7F) + addend;
    const uint32_t either = dropout.threshold < 128 << 8 ? 0xFFFFFFFF : 0;  // else both must be set
    return (word & low) | ((word | low) & either);
  }
};

// Which of a thread's columns among kColumns keys are kept in its two rows. Pair i: columns 8 * (i / 2) and the next in
// row i % 2.
template <int kColumns>
struct KeptPairs {
  static_assert(kColumns % 32 == 0, "a draw serves eight of 32 keys");
  uint32_t kept[kColumns / 32][4];

  // row: the first of the thread's two rows. key: the key of the tile's first column, a multiple of 32.
  __device__ __forceinline__ void draw(const HeadDropout& dropout, int row, int key) {
    const Draw first = dropout.draw(row, key + ptx::lane_index() % 4 * 2);
#pragma unroll
    for (int i = 0; i < kColumns / 32; ++i) {
      const uint32_t addend = dropout.words_of(first.further(0, i), kept[i]);
#pragma unroll
      for (int w = 0; w < 4; ++w) kept[i][w] = dropout.kept(kept[i][w], addend);
    }
  }
  __device__ __forceinline__ KeptPair pair(int i) const {
    const int b = i / 2 % 4;  // block of eight keys
    const auto& words = kept[i / 8];
    return {words[b / 2 * 2], words[b / 2 * 2 + 1], b % 2 * 2 + i % 2};
  }
};

// Calls visit(n, half, pair) for scores[n][2 * half] and the next one, of 16 rows (queries) and kColumns columns
// (keys). row, key: of the first score, multiples of 16; key is a multiple of 32 if kColumns is. (With kColumns = 16
// half of each draw is used.)
template <int kColumns, typename Visit>
__device__ __forceinline__ void for_each_pair(const HeadDropout& dropout, int row, int key, Visit visit) {
  constexpr int kBlocks = kColumns % 32 == 0 ? 4 : 2;  // blocks of eight keys that one draw covers
  static_assert(kBlocks == 4 || kColumns == 16, "whole draws, or half of one");
  const int lane = ptx::lane_index();
  const Draw first = dropout.draw(row + lane / 4, key + lane % 4 * 2);
#pragma unroll
  for (int n = 0; n < kColumns / 8; n += kBlocks) {
    uint32_t words[4];
    const uint32_t addend = dropout.words_of(first.further(0, n / 4), words);
    if (kBlocks == 2 && key % 32 != 0) {
      words[0] = words[2];
      words[1] = words[3];
    }
#pragma unroll
    for (int w = 0; w < kBlocks / 2; ++w) {
      const uint32_t left = dropout.kept(words[2 * w], addend);
      const uint32_t right = dropout.kept(words[2 * w + 1], addend);
#pragma unroll
      for (int b = 0; b < 2; ++b)
#pragma unroll
        for (int half = 0; half < 2; ++half) visit(n + 2 * w + b, half, KeptPair{left, right, 2 * b + half});
    }
  }
}

// The same for S^T: rows are keys, columns are queries. Two lanes with adjacent keys hold the same pair of columns:
// each draws the words of one column and passes the other lane the word of that lane's key.
template <int kColumns, typename Visit>
__device__ __forceinline__ void for_each_pair_transposed(const HeadDropout& dropout, int row, int key, Visit visit) {
  const int lane = ptx::lane_index();
  const bool is_odd = lane / 4 % 2 != 0;  // this lane's key
  const bool is_upper = key % 32 != 0;
  const Draw first = dropout.draw(row + lane % 4 * 2 + lane / 4 % 2, key + lane / 4);
#pragma unroll
  for (int n = 0; n < kColumns / 8; n += 2) {
    uint32_t words[4];
    const uint32_t addend = dropout.words_of(first.further(n / 2, 0), words);
    const uint32_t even = dropout.kept(is_upper ? words[2] : words[0], addend);
    const uint32_t odd = dropout.kept(is_upper ? words[3] : words[1], addend);
    const uint32_t own = is_odd ? odd : even;
    const uint32_t other = ptx::shuffle_xor(is_odd ? even : odd, 4);
#pragma unroll
    for (int b = 0; b < 2; ++b)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        visit(n + b, half, KeptPair{is_odd ? other : own, is_odd ? own : other, 2 * half + b});
      }
  }
}

}  // namespace flashmoe::attention
