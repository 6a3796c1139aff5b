// The order in which the tiles of a problem are computed: which head and query tile a linear index means.
#pragma once

#include "attention/params/forward.h"

namespace flashmoe::attention {

// Heads that are scheduled together, and a tile among theirs.
struct Section {
  int index;  // of the tile, from the section's first
  int first_head;
  int heads;
};

struct ScheduledTile {
  int m_block;
  int head;  // over batch and heads, and splits where a family schedules them as heads
};

// Full: the row blocks of a head are neighbours, so that they share its K and V in the second-level cache. Causal: work
// grows with the row block, so the longest come first, and short ones fill the end; but only among the heads of a
// section, which fit the cache with their K and V, since every row block reads them anew. How large a section may be
// differs between persistent and other grids. Of a full schedule, which has no sections, only section.index is read.
template <MaskKind kMask>
__device__ __forceinline__ ScheduledTile schedule_tile(const Section& section, int m_blocks) {
  if constexpr (kMask == MaskKind::kFull) {
    const int head = section.index / m_blocks;
    return ScheduledTile{section.index - head * m_blocks, head};
  } else {
    const int from_longest = section.index / section.heads;
    const int head = section.first_head + section.index - from_longest * section.heads;
    return ScheduledTile{m_blocks - 1 - from_longest, head};
  }
}

}  // namespace flashmoe::attention
