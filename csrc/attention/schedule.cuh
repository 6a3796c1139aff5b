// The order in which the tiles of a problem are computed: maps a linear index to a head and a query tile.
#pragma once

#include "attention/params/forward.h"

namespace flashmoe::attention {

// A group of heads that are scheduled together, and one of its tiles.
struct Section {
  int index;  // of the tile within the section
  int first_head;
  int heads;
};

struct ScheduledTile {
  int m_block;
  int head;  // over batch and heads, and splits if a family schedules them as heads
};

// Full: the row blocks of a head are adjacent, so that they share its K and V in the L2 cache. Causal: work grows with
// the row block, so the longest blocks come first and short ones fill the end. This holds only among the heads of a
// section, whose K and V fit the cache, because every row block reads them again. The size limit of a section differs
// between persistent and other grids. A full schedule has no sections and reads only section.index.
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
