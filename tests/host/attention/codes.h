// float8_e4m3fn as the loops that replace kernels read and write it, and the scales of its codes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "attention/params/e4m3.h"

namespace flashmoe::attention {
namespace {

// Four bits of exponent, three of fraction; all ones are NaN.
inline float value_of(uint8_t code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  if ((code & 0x7f) == 0x7f) return NAN;
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                   : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
  return (code & 0x80) != 0 ? -size : size;
}

// The nearest code, ties to even; the largest one for larger values.
inline uint8_t code_of(float value) {
  if (std::isnan(value)) return 0x7f;
  uint8_t best = 0;
  const float size = std::min(std::abs(value), value_of(0x7e));
  for (uint8_t code = 1; code < 0x7f; ++code) {
    const float change = std::abs(value_of(code) - size) - std::abs(value_of(best) - size);
    if (change < 0 || (change == 0 && code % 2 == 0)) best = code;
  }
  return std::signbit(value) ? best | 0x80 : best;
}

inline float scale_of(const CacheScale& scale, int64_t number, int64_t page, int64_t head) {
  if (scale.values == nullptr) return scale.factor;
  return scale.factor *
         scale.values[(scale.is_of_pages != 0 ? page : number) * scale.stride + head * scale.head_stride];
}

template <class Sequence>
float scaled(const void* codes, int64_t at, const CacheScale& scale, const Sequence& s, int32_t head, int32_t page) {
  return value_of(static_cast<const uint8_t*>(codes)[at]) * scale_of(scale, s.number_, page, head);
}

// A row's value; its block may have a scale.
template <class Sequence>
float scaled(const void* codes, int64_t at, const BlockScale& scale, const Sequence& s, int32_t head, int32_t row) {
  const int64_t block = scale.block_shift != 0 ? row >> scale.block_shift : 0;
  const float factor =
      scale.values == nullptr
          ? 1.0F
          : scale.values[s.number_ * scale.stride + head * scale.head_stride + block * scale.block_stride];
  return value_of(static_cast<const uint8_t*>(codes)[at]) * factor * scale.factor;
}

constexpr int64_t kKeysOfBlock = 128;

template <class Sequence>
int64_t transposed(const E4m3AttentionParams& p, const Sequence& s, int32_t head, int32_t key, int32_t column) {
  const int32_t* ends = p.forward.sequences.cu_seqlens_k;  // ragged: the blocks of one sequence follow those of another
  const int64_t all_heads = ends != nullptr ? head : int64_t{s.number_} * p.forward.heads_kv + head;
  const int64_t first = ends != nullptr ? ends[s.number_] / kKeysOfBlock + s.number_ : 0;
  const int64_t block = all_heads * p.value_blocks + first + key / kKeysOfBlock;
  return (block * p.value_rows + column) * kKeysOfBlock + key % kKeysOfBlock;
}

inline void transpose(const TransposeParams& p) {
  const int32_t* ends = p.sequences.cu_seqlens_k;
  const int32_t batch = ends != nullptr ? 1 : p.batch;
  for (int64_t at = 0; at < int64_t{batch} * p.heads_kv * p.value_blocks * p.value_rows * kKeysOfBlock; ++at) {
    const int64_t column = at / kKeysOfBlock % p.value_rows, block = at / kKeysOfBlock / p.value_rows;
    const int64_t head = block / p.value_blocks;
    int64_t key = block % p.value_blocks * kKeysOfBlock + at % kKeysOfBlock, first = 0, length = p.seq_k;
    if (ends != nullptr) {
      int32_t number = p.batch - 1;
      while (number > 0 && ends[number] / kKeysOfBlock + number > block % p.value_blocks) --number;
      first = ends[number];
      length = p.sequences.seqused_k != nullptr ? p.sequences.seqused_k[number] : ends[number + 1] - first;
      key -= (first / kKeysOfBlock + number) * kKeysOfBlock;
    }
    const int64_t from = head / p.heads_kv * p.v_stride.batch + head % p.heads_kv * p.v_stride.head +
                         (first + key) * p.v_stride.row + column;
    const bool is_there = key < length && column < p.head_dim_v;
    static_cast<uint8_t*>(p.out)[at] = is_there ? static_cast<const uint8_t*>(p.v)[from] : 0;
  }
}

}  // namespace
}  // namespace flashmoe::attention
