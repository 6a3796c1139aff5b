// The items of a task of the fp32 tile kernel: a group of rows and a block of keys each. Include after vector_avx512.h.
// Internal linkage.
#pragma once

#include <cstdint>

#include "amx_tiles.h"
#include "forward_simd.h"

namespace flashmoe {
namespace cpu {
namespace {

class F32Items {
 public:
  explicit F32Items(const Task& task)
      : task_(task),
        params_(*task.params),
        head_dim_(params_.head_dim),
        padded_dim_(round_up(head_dim_, kStep)),
        groups_(group_count(task.row_end - task.row_begin)),
        key_end_(clamp(round_up(visible_end(task), kStep), 0, params_.seq_k)) {}

 protected:
  struct Item {
    bool exists;
    int32_t group;
    int32_t begin;       // the block's first key
    int32_t block_keys;  // of the block
    VisibleKeys visible;
    int32_t keys;  // visible.end in whole steps
    bool opens_block;
  };

  Item& item(int32_t i) { return items_[i & (kItems - 1)]; }
  bool exists(int32_t i) { return item(i).exists; }
  bool is_single_block() const { return key_end_ <= kBlockKeys; }
  int32_t group_row(int32_t group) const { return task_.row_begin + group * kGroupRows; }
  int32_t group_height(int32_t group) const { return clamp(task_.row_end - group_row(group), 0, kGroupRows); }
  // The last key visible to the group's first row, and one more each row.
  int64_t diagonal(int32_t group) const { return int64_t{group_row(group)} + params_.seq_k - params_.seq_q; }
  bool sees_keys(int32_t group) const { return !task_.causal || diagonal(group) + kGroupRows > 0; }
  bool is_last_block(const Item& x) const {
    return visible_keys(task_.causal, diagonal(x.group), 0, key_end_).end <= x.begin + kBlockKeys;
  }
  int64_t group_elements() const { return int64_t{padded_dim_} * kGroupRows; }
  int32_t dim_steps() const { return padded_dim_ / kStep; }

  // -inf for what the mask hides and for the keys that fill up the last step, in some rows of a panel of scores.
  void hide_scores(const Item& x, int32_t panel, int32_t first, int32_t rows, float* scores, int64_t row_floats) const {
    const int32_t key = panel * kPanelColumns;
    if (x.visible.full >= key + kPanelColumns) return;
    const __m512 hidden = Vector::broadcast(kMinusInfinity);
    const int64_t last = diagonal(x.group) - x.begin;
    for (int32_t row = first; row < first + rows; ++row, scores += row_floats) {
      const int32_t end = task_.causal ? clamp(last + row + 1, 0, x.visible.end) : x.visible.end;
      Vector::store(scores, Vector::from_lane(end - key, hidden, Vector::load(scores)));
      float* right = scores + Vector::kWidth;
      Vector::store(right, Vector::from_lane(end - key - Vector::kWidth, hidden, Vector::load(right)));
    }
  }

  // Finds item i, the one after item i - 1.
  bool advance(int32_t i) {
    Item& next = item(i);
    next.exists = false;
    int32_t begin = i == 0 ? 0 : item(i - 1).begin;
    int32_t group = i == 0 ? groups_ : item(i - 1).group;
    if (i > 0 && !item(i - 1).exists) return false;
    for (; begin < key_end_; begin += kBlockKeys, group = groups_) {
      const int32_t block_keys = clamp(int64_t{key_end_} - begin, 0, kBlockKeys);
      while (--group >= 0) {
        const VisibleKeys visible = visible_keys(task_.causal, diagonal(group), begin, block_keys);
        if (visible.end == 0) continue;
        const bool opens_block = i == 0 || item(i - 1).begin != begin;
        next = {true, group, begin, block_keys, visible, round_up(visible.end, kStep), opens_block};
        return true;
      }
    }
    return false;
  }

  const Task& task_;
  const attention::ForwardParams& params_;
  const int32_t head_dim_;
  const int32_t padded_dim_;  // a multiple of 32
  const int32_t groups_;
  // Whole steps, so that what a group's last step holds does not depend on the task's height.
  const int32_t key_end_;

 private:
  static constexpr int32_t kItems = 4;  // an item, the one before, and the next ones
  Item items_[kItems];
};

}  // namespace
}  // namespace cpu
}  // namespace flashmoe
