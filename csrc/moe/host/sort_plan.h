// How moe_sort is launched: steps, grid and workspace. Pure.
#pragma once

#include <algorithm>
#include <cstdint>

namespace flashmoe::moe {

constexpr int64_t kOneBlockSlots = 1024;  // up to this many, one block sorts everything
constexpr int64_t kSortBlockSlots = 256;  // minimum slots per block if there are several
constexpr int64_t kMaxSortBlocks = 128;   // each block adds up the counts of all others

// 1: launch the step one. More: launch count, then place, with this grid.
inline int64_t sort_blocks(int64_t slots) {
  if (slots <= kOneBlockSlots) return 1;
  return std::min(kMaxSortBlocks, (slots + kSortBlockSlots - 1) / kSortBlockSlots);
}

// int32 elements of SortParams::block_counts; needs no initial value.
inline int64_t sort_workspace(int64_t slots, int64_t experts) {
  const int64_t blocks = sort_blocks(slots);
  return blocks == 1 ? 0 : blocks * experts;
}

}  // namespace flashmoe::moe
