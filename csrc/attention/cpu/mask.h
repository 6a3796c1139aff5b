// The mask rule of the CPU kernels: which keys a query row sees. Include after a vector_*.h. Internal linkage.
//
// Causal masks are aligned bottom right: key j is visible to row i if j <= i + seq_k - seq_q. A window's keys begin and
// end at a distance from that diagonal. Both kinds have the same interface, and only this file knows the rules.
#pragma once

#include <cstdint>

#include "attention/cpu/kernel.h"
#include "cpu/rows.h"

namespace flashmoe::cpu {
namespace {

// Keys [begin, end); an empty range has end = 0.
struct KeyRange {
  int32_t begin;
  int32_t end;
};

// A block of rows against a block of keys, both numbered from the block's first.
class BlockMask {
 public:
  // first_end: keys of the block that row 0 sees, if the block were unbounded in both directions; each further row sees
  // one more.
  BlockMask(int64_t first_end, int32_t keys) : first_end_(first_end), keys_(keys) {}

  // Keys that the row sees.
  KeyRange keys_of(int32_t row) const { return {0, clamp(first_end_ + row, 0, keys_)}; }
  // Keys that all of `rows` rows see: scores outside this range must be masked.
  KeyRange keys_of_all(int32_t) const { return keys_of(0); }
  // Keys that any of `rows` rows sees: no other scores are needed.
  KeyRange keys_of_any(int32_t rows) const { return keys_of(rows - 1); }
  // The first row that sees the key; all later rows see it too. At most 0 if all rows do, past the last if none does.
  int32_t first_row(int32_t key) const { return clamp(key + 1 - first_end_, -1, INT32_MAX); }

 private:
  int64_t first_end_;
  int32_t keys_;
};

// The same for a window, in which rows also stop seeing keys: each row's range begins and ends one key after the
// previous row's.
class WindowBlockMask {
 public:
  // first_begin, first_end: keys of the block that row 0 sees, if the block were unbounded in both directions.
  WindowBlockMask(int64_t first_begin, int64_t first_end, int32_t keys)
      : first_begin_(first_begin), first_end_(first_end), keys_(keys) {}

  KeyRange keys_of(int32_t row) const { return range(row, row); }
  // May be empty, with begin = end anywhere.
  KeyRange keys_of_all(int32_t rows) const {
    const int32_t begin = clamp(first_begin_ + rows - 1, 0, keys_), end = clamp(first_end_, 0, keys_);
    return {begin, end > begin ? end : begin};
  }
  KeyRange keys_of_any(int32_t rows) const { return range(0, rows - 1); }
  int32_t first_row(int32_t key) const { return clamp(key + 1 - first_end_, -1, INT32_MAX); }
  // The row after the last one that sees the key.
  int32_t end_row(int32_t key) const { return clamp(key + 1 - first_begin_, -1, INT32_MAX); }
  // Restricted to keys [begin, end) of the block.
  WindowBlockMask restricted_to(KeyRange keys) const {
    return {first_begin_ - keys.begin, first_end_ - keys.begin, keys.end - keys.begin};
  }

 private:
  KeyRange range(int32_t first_row, int32_t last_row) const {
    const int32_t begin = clamp(first_begin_ + first_row, 0, keys_), end = clamp(first_end_ + last_row, 0, keys_);
    return begin < end ? KeyRange{begin, end} : KeyRange{0, 0};
  }

  int64_t first_begin_;
  int64_t first_end_;
  int32_t keys_;
};

struct Mask {
  static constexpr bool kHasOptions = false;
  bool causal;
  int64_t seq_q;
  int32_t seq_k;

  template <class AnyTask>
  explicit Mask(const AnyTask& task) : causal(task.causal), seq_q(task.params->seq_q), seq_k(task.params->seq_k) {}

  // Rows from `row` on against keys [key, key + keys).
  BlockMask block(int64_t row, int32_t key, int32_t keys) const {
    return {causal ? row + 1 + seq_k - seq_q - key : int64_t{keys}, keys};
  }
  // Keys that any of rows [row, row + rows) sees.
  KeyRange keys(int64_t row, int32_t rows) const { return block(row, 0, seq_k).keys_of_any(rows); }
};

struct WindowMask {
  static constexpr bool kHasOptions = true;
  static constexpr int64_t kFar = int64_t{1} << 40;  // further than any row or key
  int64_t left;
  int64_t right;
  int64_t seq_q;
  int32_t seq_k;

  template <class AnyTask>
  explicit WindowMask(const AnyTask& task)
      : left(task.params->score_options.left >= attention::kUnbounded ? kFar : task.params->score_options.left),
        right(task.params->score_options.right >= attention::kUnbounded ? kFar : task.params->score_options.right),
        seq_q(task.params->seq_q),
        seq_k(task.params->seq_k) {}

  WindowBlockMask block(int64_t row, int32_t key, int32_t keys) const {
    const int64_t diagonal = row + seq_k - seq_q - key;
    return {diagonal - left, diagonal + right + 1, keys};
  }
  KeyRange keys(int64_t row, int32_t rows) const { return block(row, 0, seq_k).keys_of_any(rows); }
};

}  // namespace
}  // namespace flashmoe::cpu
