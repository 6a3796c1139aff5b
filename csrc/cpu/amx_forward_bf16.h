// One task of bf16 tensors with tiles, for scores of ordinary size (amx_softmax_bf16.h). Without row maxima a row's keys
// may come in any order: so K and V are packed a few panels at a time, of 32 keys or of 32 of head_dim, and all groups use
// them while they are in the L1 cache. Include after vector_avx512.h. Internal linkage.
//
// The work is a sequence of units: products of 32 x 32 elements, and what vectors do with each. That is done a unit later,
// between the instructions of the next product, for the processor works on both at once when they are some hundred
// instructions apart.
#pragma once

#include <cstdint>
#include <cstring>

#include "amx_pack_bf16.h"
#include "amx_softmax.h"
#include "amx_softmax_bf16.h"
#include "forward_simd.h"

namespace flashmoe {
namespace cpu {
namespace {

// Keys of one pass over the panels of K and then of V. With more, the sums of products come and go less often; the weights
// of a task (256 KiB) have to fit the L2 cache.
constexpr int32_t kPassKeys = 512;
// Q and the weights are read once for so many panels.
constexpr int32_t kPanelsAtOnce = 2;
constexpr int32_t kPassSteps = kPassKeys / kStep;

struct WindowScratch {
  float* product;         // [2] blocks
  uint32_t* panels;       // [kPanelsAtOnce][max(padded_dim, kPassKeys) / 32 steps][2] tiles
  uint16_t* weights;      // [groups][kPassSteps][group, 32]
  uint16_t* ones;         // a tile
  float* sum;             // [groups, group]
  float* zero;            // [group], the maxima that are not subtracted
  float* exact_sum;       // [groups, group, 16], where the log-sum-exp is wanted
  float* out;             // [groups][padded_dim / 32] blocks, where there are several passes
  BFloat16* q_whole;      // [groups][group, padded_dim], where Q is not whole
  BFloat16* whole;        // [32, padded_dim], where K or V is not
  size_t bytes;

  WindowScratch(void* base, int32_t groups, int32_t padded_dim) {
    Arena arena(base);
    const int64_t steps = (padded_dim > kPassKeys ? padded_dim : kPassKeys) / kStep;
    const int64_t group_elements = int64_t{kGroupRows} * padded_dim;
    product = arena.take<float>(2 * kBlockFloats);
    panels = arena.take<uint32_t>(kPanelsAtOnce * steps * 2 * kTileWords);
    weights = arena.take<uint16_t>(groups * kPassSteps * kBlockFloats);
    ones = arena.take<uint16_t>(kTileWords * 2);
    sum = arena.take<float>(int64_t{groups} * kGroupRows);
    zero = arena.take<float>(kGroupRows);
    exact_sum = arena.take<float>(int64_t{groups} * kGroupRows * Vector::kWidth);
    out = arena.take<float>(groups * group_elements);
    q_whole = arena.take<BFloat16>(groups * group_elements);
    whole = arena.take<BFloat16>(group_elements);
    bytes = arena.used();
  }
};

class WindowForward {
 public:
  WindowForward(const Task& task, void* memory)
      : task_(task),
        params_(*task.params),
        operands_(task),
        head_dim_(params_.head_dim),
        padded_dim_(round_up(head_dim_, kStep)),
        groups_(group_count(task.row_end - task.row_begin)),
        key_end_(clamp(round_up(visible_end(task), kStep), 0, params_.seq_k)),
        scale_log2_(params_.scale * 1.44269504088896340736f),
        scratch_(memory, groups_, padded_dim_),
        panel_words_((padded_dim_ > kPassKeys ? padded_dim_ : kPassKeys) / kStep * 2 * kTileWords) {}

  // Returns a bit for each group that is not done: scores outside the window, or an output that is not all finite.
  uint32_t run() {
    for (int32_t i = 0; i < 2 * kTileWords; ++i) scratch_.ones[i] = 0x3f80;
    memset(scratch_.sum, 0, static_cast<size_t>(groups_) * kGroupRows * sizeof(float));
    memset(scratch_.zero, 0, kGroupRows * sizeof(float));
    if (operands_.lse != nullptr) {
      memset(scratch_.exact_sum, 0, static_cast<size_t>(groups_) * kGroupRows * Vector::kWidth * sizeof(float));
    }
    for (int32_t group = 0; group < groups_; ++group) {
      if (visible_keys_of(group) == 0) store_unseeing(group);
      load_q(group);
    }
    for (int32_t key = 0; key < key_end_ && !is_all_given_up(); key += kPassKeys) {
      pass(key, clamp(int64_t{key_end_} - key, 0, kPassKeys));
    }
    return given_up_;
  }

 private:
  int32_t group_row(int32_t group) const { return task_.row_begin + group * kGroupRows; }
  int32_t group_height(int32_t group) const { return clamp(task_.row_end - group_row(group), 0, kGroupRows); }
  // Keys that the group's first row sees if they are that many, and one more each row.
  int64_t first_end(int32_t group) const {
    return task_.causal ? int64_t{group_row(group)} + params_.seq_k - params_.seq_q + 1 : int64_t{params_.seq_k};
  }
  // Keys that any of 32 rows from the group's first on would see: also of a group that is cut short by the task's end.
  int32_t visible_keys_of(int32_t group) const {
    return task_.causal ? clamp(first_end(group) + kGroupRows - 1, 0, params_.seq_k) : params_.seq_k;
  }
  bool is_given_up(int32_t group) const { return (given_up_ >> group & 1) != 0; }
  bool is_all_given_up() const { return given_up_ == (uint64_t{1} << groups_) - 1; }
  void give_up_if(bool condition, int32_t group) { given_up_ |= static_cast<uint32_t>(condition) << group; }

  LeftSteps q(int32_t group) const {
    const WholeRows<BFloat16> rows = q_rows_[group];
    return {reinterpret_cast<const char*>(rows.data), rows.stride * 2, kTileBytesPerRow};
  }

  void load_q(int32_t group) {
    const int64_t stride = params_.q_stride.row;
    q_rows_[group] = make_whole(operands_.q + group_row(group) * stride, stride, group_height(group), kGroupRows,
                                head_dim_, padded_dim_, 1.0f,
                                scratch_.q_whole + int64_t{group} * kGroupRows * padded_dim_);
  }

  struct Pass {
    int32_t begin;
    int32_t keys;
    int32_t k_panels;  // steps of 32 keys
    int32_t v_panels;  // steps of 32 of head_dim
  };
  // Steps of 32 keys of the pass that any row of the group sees.
  int32_t steps_of(const Pass& pass, int32_t group) const {
    return group_count(clamp(int64_t{visible_keys_of(group)} - pass.begin, 0, pass.keys));
  }
  bool is_last(const Pass& pass, int32_t group) const { return visible_keys_of(group) <= pass.begin + kPassKeys; }

  enum class Kind {
    kNone,
    kScores,  // of a group and a panel of K
    kSums,    // of a group's weights
    kPart,    // of the output: of a group and a panel of V, to go on in the next pass
    kOutput,
  };
  // A panel of K or V in scratch_.panels, where kPanelsAtOnce of them lie.
  uint32_t* panel_memory(int32_t panel) const { return scratch_.panels + panel % kPanelsAtOnce * panel_words_; }

  void pack_k(const Pass& pass, int32_t panel) const {
    const int64_t stride = params_.k_stride.row;
    const int32_t key = panel * kStep;
    const WholeRows<BFloat16> k =
        make_whole(operands_.k + (pass.begin + key) * stride, stride, clamp(pass.keys - key, 0, kStep), kStep, head_dim_,
                   padded_dim_, 1.0f, scratch_.whole);
    uint32_t* tile = panel_memory(panel);
    for (int32_t dim = 0; dim < padded_dim_; dim += kStep, tile += 2 * kTileWords) {
      pack_k_tile(k.data + dim, k.stride, tile);
      pack_k_tile(k.data + dim + kTileRows * k.stride, k.stride, tile + kTileWords);
    }
  }

  // Panels begin..end - 1.
  void pack_v(const Pass& pass, int32_t begin, int32_t end) const {
    const int64_t stride = params_.v_stride.row;
    for (int32_t step = 0; step < pass.k_panels; ++step) {
      const int32_t key = step * kStep;
      const WholeRows<BFloat16> v =
          make_whole(operands_.v + (pass.begin + key) * stride, stride, clamp(pass.keys - key, 0, kStep), kStep,
                     head_dim_, padded_dim_, 1.0f, scratch_.whole);
      for (int32_t panel = begin; panel < end; ++panel) {
        pack_v_step(v.data + panel * kPanelColumns, v.stride, panel_memory(panel) + step * 2 * kTileWords);
      }
    }
  }

  void pass(int32_t begin, int32_t keys) {
    const Pass pass = {begin, keys, group_count(keys), padded_dim_ / kPanelColumns};
    for (int32_t panel = 0; panel < pass.k_panels && !is_all_given_up(); panel += kPanelsAtOnce) {
      do_scores(pass, panel, clamp(panel + kPanelsAtOnce, 0, pass.k_panels));
    }
    for (int32_t group = 0; group < groups_; ++group) {
      if (!takes_part(pass, group, 0)) continue;
      if (kind_ == Kind::kScores && group_ == group) drain(pass);  // its last weights are not yet made
      do_unit(pass, Kind::kSums, group, 0, next_place(), weights_operand(group), nullptr, steps_of(pass, group), nullptr);
    }
    for (int32_t panel = 0; panel < pass.v_panels && !is_all_given_up(); panel += kPanelsAtOnce) {
      do_output(pass, panel, clamp(panel + kPanelsAtOnce, 0, pass.v_panels));
    }
    drain(pass);
  }

  // Whether the group sees a key of a panel of K.
  bool takes_part(const Pass& pass, int32_t group, int32_t panel) const {
    return !is_given_up(group) && panel < steps_of(pass, group);
  }

  void do_scores(const Pass& pass, int32_t begin, int32_t end) {
    for (int32_t panel = begin; panel < end; ++panel) pack_k(pass, panel);
    for (int32_t group = 0; group < groups_; ++group) {
      for (int32_t panel = begin; panel < end; ++panel) {
        if (!takes_part(pass, group, panel)) continue;
        do_unit(pass, Kind::kScores, group, panel, next_place(), q(group), panel_memory(panel), pass.v_panels, nullptr);
      }
    }
  }

  void do_output(const Pass& pass, int32_t begin, int32_t end) {
    pack_v(pass, begin, end);
    for (int32_t group = 0; group < groups_; ++group) {
      if (!takes_part(pass, group, 0)) continue;
      const bool ends = is_last(pass, group);
      for (int32_t panel = begin; panel < end; ++panel) {
        float* part = scratch_.out + (int64_t{group} * pass.v_panels + panel) * kBlockFloats;
        do_unit(pass, ends ? Kind::kOutput : Kind::kPart, group, panel, ends ? next_place() : part,
                weights_operand(group), panel_memory(panel), steps_of(pass, group), pass.begin == 0 ? nullptr : part);
      }
    }
  }

  uint16_t* weights(int32_t group, int32_t step) const {
    return scratch_.weights + (int64_t{group} * kPassSteps + step) * kBlockFloats;
  }
  LeftSteps weights_operand(int32_t group) const {
    return {reinterpret_cast<const char*>(weights(group, 0)), kTileBytesPerRow, kBf16StepBytes};
  }

  // Two places for products, in turn.
  float* next_place() {
    is_odd_ = !is_odd_;
    return scratch_.product + (is_odd_ ? kBlockFloats : 0);
  }

  // The product of a and b (ones if null), on top of `before` if that is not null; and what is left to do with the product
  // before. A call of its own would cost a tenth of the time.
  inline __attribute__((always_inline)) void do_unit(const Pass& pass, Kind kind, int32_t group, int32_t panel, float* product,
                               const LeftSteps& a, const uint32_t* b, int32_t steps, const float* before) {
    const int32_t middle = (steps + 1) / 2;
    order_memory();
    if (before == nullptr) {
      clear_product();
    } else {
      load_product(before);
    }
    multiply(a, b, 0, middle);
    order_memory();
    finish(pass, 0);
    order_memory();
    multiply(a, b, middle, steps);
    order_memory();
    finish(pass, kRowsAtOnce);
    order_memory();
    if (b == nullptr) {
      store_row_sums(product);
    } else {
      store_product(product);
    }
    order_memory();
    kind_ = kind;
    group_ = group;
    panel_ = panel;
    product_ = product;
  }

  void multiply(const LeftSteps& a, const uint32_t* b, int32_t begin, int32_t end) const {
    if (b == nullptr) {
      add_row_sums(a, scratch_.ones, begin, end);
    } else {
      add_products(a, b, begin, end);
    }
  }

  void drain(const Pass& pass) {
    finish(pass, 0);
    finish(pass, kRowsAtOnce);
    kind_ = Kind::kNone;
  }

  // What is left to do with rows [row, row + kRowsAtOnce) of a product; with sums all of it is done with row 0.
  inline __attribute__((always_inline)) void finish(const Pass& pass, int32_t row) {
    switch (kind_) {
      case Kind::kScores:
        return finish_scores(pass, row);
      case Kind::kSums:
        if (row == 0) finish_sums(pass);
        return;
      case Kind::kOutput:
        return finish_output(row);
      case Kind::kPart:
      case Kind::kNone:
        return;
    }
  }

  void finish_scores(const Pass& pass, int32_t row) {
    const float* product = product_ + row * kPanelColumns;
    const int32_t key = panel_ * kStep;
    const int64_t end = first_end(group_) + row - pass.begin - key;
    const int32_t last_end = clamp(pass.keys - key, 0, kStep);
    uint16_t* to = weights(group_, panel_) + row * kStep;
    const __m512i outside = end >= kStep && last_end == kStep
                                ? scores_to_weights<false>(product, scale_log2_, end, last_end, to)
                                : scores_to_weights<true>(product, scale_log2_, end, last_end, to);
    const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
    give_up_if(_mm512_test_epi32_mask(outside, upper) != 0, group_);
    if (operands_.lse != nullptr) {
      add_exact_weights(product, scale_log2_, end, last_end,
                        scratch_.exact_sum + (int64_t{group_} * kGroupRows + row) * Vector::kWidth);
    }
  }

  void finish_sums(const Pass& pass) {
    float* sum = scratch_.sum + group_ * kGroupRows;
    add_first_columns(product_, sum);
    if (!is_last(pass, group_)) return;
    if (operands_.lse != nullptr) store_exact_lse(group_);
    const __m512 least = Vector::broadcast(kLeastSumOfKey * static_cast<float>(visible_keys_of(group_)));
    const int32_t first_seeing = clamp(1 - first_end(group_), 0, kGroupRows);  // rows before it see no key
    for (int c = 0; c < kGroupVectors; ++c) {
      const GroupState state = {nullptr, sum, nullptr};
      const __m512 x = Vector::load(sum + c * Vector::kWidth);
      give_up_unless_finite(x, group_);
      const __m512 of_seeing = Vector::from_lane(first_seeing - c * Vector::kWidth, x, least);
      give_up_if(_mm512_cmp_ps_mask(of_seeing, least, _CMP_LT_OQ) != 0, group_);
      Vector::store(sum + c * Vector::kWidth, inverse_sum(state, c));
    }
  }

  void give_up_unless_finite(__m512 x, int32_t group) {
    give_up_if(Vector::any_differs(Vector::sub(x, x), Vector::zero()), group);
  }

  void finish_output(int32_t row) {
    const int32_t rows = clamp(group_height(group_) - row, 0, kRowsAtOnce), dim = panel_ * kPanelColumns;
    const int64_t stride = params_.out_stride.row;
    const __m512 total = store_output(product_ + row * kPanelColumns,
                                      scratch_.sum + group_ * kGroupRows + row, rows, head_dim_ - dim, stride,
                                      operands_.out + (group_row(group_) + row) * stride + dim);
    give_up_unless_finite(total, group_);
  }

  void store_exact_lse(int32_t group) const {
    float* lanes = scratch_.exact_sum + int64_t{group} * kGroupRows * Vector::kWidth;
    for (int c = 0; c < kGroupVectors; ++c) {
      __m512 rows[kTileRows];
#pragma GCC unroll 16
      for (int i = 0; i < kTileRows; ++i) rows[i] = Vector::load(lanes + (c * kTileRows + i) * Vector::kWidth);
      Vector::store(lanes + c * Vector::kWidth, reduce_rows<SumOf>(rows));
    }
    store_lse({scratch_.zero, lanes, nullptr}, group_height(group), operands_.lse_row(group_row(group)));
  }

  void store_unseeing(int32_t group) const {
    for (int32_t row = 0; row < group_height(group); ++row) {
      memset(operands_.out + (group_row(group) + row) * params_.out_stride.row, 0,
             static_cast<size_t>(head_dim_) * sizeof(BFloat16));
      if (operands_.lse != nullptr) operands_.lse_row(group_row(group))[row] = kMinusInfinity;
    }
  }

  static constexpr int32_t kMostGroups = 32;  // as given_up_ has bits

  const Task& task_;
  const attention::ForwardParams& params_;
  const Operands<BFloat16> operands_;
  const int32_t head_dim_;
  const int32_t padded_dim_;
  const int32_t groups_;
  // Whole steps, so that what a group's last step holds does not depend on the task's height.
  const int32_t key_end_;
  const float scale_log2_;
  const WindowScratch scratch_;
  const int64_t panel_words_;
  uint32_t given_up_ = 0;
  // The last unit, whose vector work is not yet done.
  Kind kind_ = Kind::kNone;
  int32_t group_ = 0;
  int32_t panel_ = 0;
  float* product_ = nullptr;
  bool is_odd_ = false;  // where the next product goes
  WholeRows<BFloat16> q_rows_[kMostGroups];
};

}  // namespace
}  // namespace cpu
}  // namespace flashmoe
