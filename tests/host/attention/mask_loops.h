// What the kernels around streamed masks do, as loops on the host.
#pragma once

#include <string>

#include "attention/params/bool_mask.h"
#include "attention/params/mask_backward.h"
#include "attention/params/scores_sum.h"
#include "loops.h"

namespace flashmoe::attention {
namespace {

// Written by the fused kernel if its caller needs it.
void scores_gradient(const MaskBackwardParams& p, const host::Kernel& kernel) {
  if (p.scores_gradient == nullptr) return;
  for_heads(p.backward, kernel, [&](const auto& s, int32_t head, int32_t head_kv) {
    for (int32_t row = 0; row < s.rows; ++row) {
      for (int32_t key = 0; key < s.keys; ++key) {
        const int64_t at_row = (int64_t{s.number_} * p.backward.heads_q + head) * s.rows + row;
        store(p.scores_gradient, at_row * p.scores_gradient_row + key,
              differentiate(p.backward, nullptr, s, head, head_kv, row, key, p.backward.head_dim_v).of_score);
      }
    }
  });
}

void scores_sum(const ScoresSumParams& p) {
  for (int64_t at = 0; at < p.num_sums * p.size; ++at) {
    float sum = 0.0F;
    for (int64_t i = 0; i < p.count; ++i) {
      sum += load(p.scores, (at / p.size * p.first + i * p.step) * p.size + at % p.size);
    }
    store(p.sums, at, sum);
  }
}

// Whether a byte of VisibleBlocks::words is not zero.
bool is_visible(const VisibleBlocks& p, int64_t matrix, int64_t row_block, int64_t key_block) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(p.words + (matrix * p.row_blocks + row_block) * p.key_words);
  return bytes[key_block] != 0;
}

void bool_mask(const BoolMaskParams& p, int64_t grid) {
  const int64_t row_blocks = ceil_div(p.rows, kMaskBlock), key_words = ceil_div(p.keys, kMaskBlock * kMaskWordBlocks);
  auto* bytes = reinterpret_cast<uint8_t*>(p.words);
  std::memset(bytes, 0, grid * sizeof(int32_t));
  const int64_t matrices = grid / (row_blocks * key_words);
  for (int64_t matrix = 0; matrix < matrices; ++matrix) {
    const auto* mask =
        static_cast<const uint8_t*>(p.mask) + matrix / p.heads * p.stride_batch + matrix % p.heads * p.stride_head;
    for (int64_t row = 0; row < p.rows; ++row) {
      const int64_t word = (matrix * row_blocks + row / kMaskBlock) * key_words;
      for (int64_t key = 0; key < p.additive_row; ++key) {
        const bool sees = key < p.keys && mask[row * p.stride_row + key * p.stride_key] != 0;
        store(p.additive, (matrix * p.rows + row) * p.additive_row + key, sees ? 0.0F : -INFINITY);
        if (sees) bytes[word * int64_t{sizeof(int32_t)} + key / kMaskBlock] = 1;
      }
    }
  }
}

// Returns what is wrong.
std::string bool_mask_tiles(const BoolMaskTilesParams& p, int64_t grid) {
  const VisibleBlocks& blocks = p.blocks;
  if (p.tiles > kMaxMaskTiles || grid % p.tiles != 0) return "more tiles than fit, or not a block for each";
  if (ceil_div(blocks.key_words * kMaskWordBlocks * kMaskBlock, int64_t{kMaskTileKeys}) < p.tiles) return "few words";
  for (int64_t at = 0; at < grid; ++at) {
    const int64_t matrix = at / p.tiles, tile = at % p.tiles;
    int32_t begin = blocks.row_blocks, end = begin;
    for (int32_t block = blocks.row_blocks - 1; block >= 0; --block) {
      if (!is_visible(blocks, matrix, block, 2 * tile) && !is_visible(blocks, matrix, block, 2 * tile + 1)) continue;
      if (begin == blocks.row_blocks) end = block + 1;
      begin = block;
    }
    p.ranges[2 * at] = begin;
    p.ranges[2 * at + 1] = end;
  }
  for (int64_t at = 0; at < grid; ++at) {
    const int64_t last = at / p.tiles * p.tiles + p.tiles;
    for (int32_t block = 0; block < blocks.row_blocks; ++block) {
      int32_t rank = 0;
      for (int64_t later = at + 1; later < last; ++later)
        rank += block >= p.ranges[2 * later] && block < p.ranges[2 * later + 1];
      p.ranks[at * blocks.row_blocks + block] = rank;
    }
  }
  return "";
}

// What is wrong with what a kernel that streams `options.mask` [batch, heads, rows, keys] is told of its blocks.
std::string check_visible(const VisibleBlocks& p, const ForwardParams& of) {
  const ScoreOptions& options = of.score_options;
  if (p.words == nullptr) return "";
  for (int64_t batch = 0; batch < of.batch; ++batch) {
    for (int64_t head = 0; head < of.heads_q; ++head) {
      const int64_t matrix = batch * p.per_sequence + head * p.per_head;
      const int64_t first = batch * options.mask_stride_batch + head * options.mask_stride_head;
      for (int64_t row = 0; row < of.seq_q; ++row) {
        for (int64_t key = 0; key < of.seq_k; ++key) {
          const float value = load(options.mask, first + row * options.mask_stride_row + key);
          if (value == 0.0F && !is_visible(p, matrix, row / kMaskBlock, key / kMaskBlock)) return "a hidden block";
        }
      }
    }
  }
  return "";
}

// The same of its tiles: a rank for every sequence and head.
std::string check_visible(const VisibleTiles& p, const BackwardParams& of) {
  if (p.ranges == nullptr) return "";
  if (p.tiles != ceil_div(of.seq_k, int64_t{kMaskTileKeys}) || p.row_blocks != ceil_div(of.seq_q, int64_t{kMaskBlock}))
    return "tiles of other lengths";
  if (of.score_options.left != kUnbounded || of.score_options.right != kUnbounded) return "tiles of a window";
  if (of.sequences.seqused_k != nullptr) return "tiles of unknown lengths";
  return p.per_head != 0 && of.heads_q != of.heads_kv ? "a tile of several heads' masks" : "";
}

}  // namespace
}  // namespace flashmoe::attention
