// The tile kernel for fp32. Six products for one keep the tile unit busy, so all vector work (packing, softmax, output)
// is done in units beside the steps of the products (amx_work.h). An item is one group of rows and one block of keys:
//
//   tile unit   S(i) = Q K^T, panel by panel of 32 keys     O(i) = P V, panel by panel of 32 columns
//   beside it   the rest of output i - 1; weights of the    weights of the last panel; packing of what i + 1 needs;
//               panels of S(i)                              output of the first panels
//
// Steps that have no unit left take the next task's packing. A panel's weights are made when its scores are stored,
// while they are in the L1 cache: relative to the maximum of the block's first 32 scores (and of the blocks before), so
// that later weights may exceed 1. A group with scores above that by more than kMaxLog2 is computed again with vectors.
// Groups are taken from the last to the first: the causal mask leaves the last one most keys, and what nothing hides,
// at the end, is short. Include after vector_avx512.h. Internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "amx_items_f32.h"
#include "amx_output_f32.h"
#include "amx_scratch_f32.h"
#include "amx_units_f32.h"
#include "amx_work.h"

namespace flashmoe {
namespace cpu {
namespace {

class F32Forward : private F32Items {
 public:
  // copy: which of the operands' copies is this task's.
  F32Forward(const Task& task, void* memory, int copy)
      : F32Items(task),
        operands_(task),
        scale_(make_scale(params_.scale)),
        scratch_(memory, groups_, head_dim_),
        packed_(scratch_.operands[copy]),
        work_(*this) {}

  // Adds the packing of what the first block and the first item need, for run or for the run of the task before.
  void prepare() {
    if (!advance(0)) return;
    add_q(0);
    for (int32_t panel = 0; panel < kBlockSteps; ++panel) add_k(0, panel);
    find_v(0);
    for (int32_t panel = 0; panel < dim_steps(); ++panel) add_v(0, panel);
  }

  // Does next's packing, too, where nothing else is to do; next may be null. Returns a bit for each group whose output
  // is not all finite.
  uint32_t run(F32Forward* next) {
    next_ = next;
    for (int32_t group = 0; group < groups_; ++group) {
      clear_state(state(group, 0));
      if (!sees_keys(group)) fill_unseen(group);
    }
    if (!exists(0)) return 0;
    for (int32_t i = 0; exists(i); ++i) run_item(i);
    run_last();
    return bad_groups_;
  }

  void* simd_scratch() const { return scratch_.simd; }

 private:
  // Both products take the same pairs of planes.
  using F32Step = Step<kF32Planes, Product::kScores>;
  using Queue = WorkQueue<F32Forward, F32Step>;
  using F32Job = Queue::OneJob;
  // -- where things are --
  GroupState state(int32_t group, int32_t i) const {
    const int64_t rows = int64_t{group} * kGroupRows;
    return {scratch_.max_log2 + rows, scratch_.sum + rows, scratch_.alpha + (i & 1) * kGroupRows};
  }
  float* scores() const { return scratch_.scores; }
  float* out(int32_t group) const { return scratch_.out + group * group_elements(); }
  // Kept for further blocks. Where there are none, one place for all items but the first stays in the caches.
  bool has_own_q(int32_t i) const { return i == 0 && is_single_block(); }
  int64_t q_place(int32_t i) { return is_single_block() ? 0 : item(i).group; }
  int64_t q_row() const { return dim_steps() * kStepFloats; }
  float* q_planes(int32_t i) {
    return has_own_q(i) ? packed_.q_planes : scratch_.q_planes + q_place(i) * kGroupRows * q_row();
  }
  char* k_panel(int32_t panel) const { return packed_.k_tiles + panel * dim_steps() * F32Right::kF32StepBytes; }
  char* v_panel(int32_t panel) const { return packed_.v_tiles + panel * kBlockSteps * F32Right::kF32StepBytes; }

  // -- jobs --
  void add_q(int32_t i) {
    const Item& x = item(i);
    if (x.begin != 0) return;
    const int64_t stride = params_.q_stride.row;
    float* whole = has_own_q(i) ? packed_.q_whole : scratch_.q_whole + q_place(i) * group_elements();
    q_rows_ = make_whole(operands_.q + group_row(x.group) * stride, stride, group_height(x.group), kGroupRows,
                         head_dim_, padded_dim_, scale_.q_factor, whole);
    q_ready_ = work_.add<PackQ>(dim_steps(), i, 0);
  }
  struct PackQ {
    template <class Step>
    static void run(F32Forward& self, const F32Job& job, const Step& step) {
      const float* q = self.q_rows_.data + job.index * kStep;
      pack_q_step(q, job.index + 1 < job.count ? q + kStep : q, self.q_rows_.stride,
                  self.q_planes(job.item) + job.index * kStepFloats, self.q_row(), step);
    }
  };

  void find_rows(const float* src, int64_t stride, const Item& x, float* buffer,
                 WholeRows<float> (&rows)[kBlockSteps]) {
    for (int32_t key = 0; key < x.block_keys; key += kStep) {
      rows[key / kStep] =
          make_whole(src + (x.begin + key) * stride, stride, clamp(x.block_keys - key, 0, kStep), kStep, head_dim_,
                     padded_dim_, 1.0f, buffer + int64_t{key} * padded_dim_);
    }
  }

  void add_k(int32_t i, int32_t panel) {
    if (panel == 0) find_rows(operands_.k, params_.k_stride.row, item(i), packed_.k_whole, k_rows_);
    if (panel * kStep < item(i).block_keys) k_ready_[panel] = work_.add<PackK>(dim_steps(), i, panel);
  }
  struct PackK {
    template <class Step>
    static void run(F32Forward& self, const F32Job& job, const Step& step) {
      const WholeRows<float>& k = self.k_rows_[job.panel];
      const int32_t last_panel = (self.item(job.item).block_keys - 1) / kStep;
      const float* src = k.data + job.index * kStep;
      const float* next =
          job.index + 1 < job.count ? src + kStep : self.k_rows_[job.panel < last_panel ? job.panel + 1 : 0].data;
      pack_k_step(src, next, k.stride, self.k_panel(job.panel) + job.index * F32Right::kF32StepBytes, step);
    }
  };

  void find_v(int32_t i) { find_rows(operands_.v, params_.v_stride.row, item(i), packed_.v_whole, v_rows_); }
  void add_v(int32_t i, int32_t panel) {
    if (panel < dim_steps()) v_ready_[panel] = work_.add<PackV>(round_up(item(i).block_keys, kStep) / kStep, i, panel);
  }
  struct PackV {
    template <class Step>
    static void run(F32Forward& self, const F32Job& job, const Step& step) {
      const WholeRows<float>& v = self.v_rows_[job.index];
      const int32_t column = job.panel * kPanelColumns;
      const bool is_last = job.index + 1 == job.count;
      const float* next =
          is_last ? self.v_rows_[0].data + column + kPanelColumns : self.v_rows_[job.index + 1].data + column;
      pack_v_step(v.data + column, next, v.stride, self.v_panel(job.panel) + job.index * F32Right::kF32StepBytes, step);
    }
  };

  void add_softmax(int32_t i, int32_t panel) {
    if (panel == 0) work_.add<TakeMaxima>(1, i, 0);
    weights_ready_[panel] = work_.add<Weights>(2, i, panel);
  }
  struct TakeMaxima {
    template <class Step>
    static void run(F32Forward& self, const F32Job& job, const Step& step) {
      self.hide_scores(self.item(job.item), 0, 0, kGroupRows, self.scores(), kScoresRow);
      take_maxima(self.scores(), kScoresRow, self.scale_.log2, self.state(self.item(job.item).group, job.item),
                  self.minus_shift_, step);
    }
  };
  // A panel of scores of one tile's rows.
  struct Weights {
    template <class Step>
    static void run(F32Forward& self, const F32Job& job, const Step& step) {
      const int32_t row = job.index * kTileRows;
      float* scores = self.scores() + row * kScoresRow + job.panel * kStepFloats;
      if (job.panel > 0) self.hide_scores(self.item(job.item), job.panel, row, kTileRows, scores, kScoresRow);
      const bool in_range = weights_of_step(
          scores, kScoresRow, self.scale_.log2,
          self.minus_shift_ + row, self.scratch_.of_row + row * Vector::kWidth, job.panel == 0, step);
      if (!in_range) self.bad_groups_ |= 1u << self.item(job.item).group;
      if ((job.panel + 1) * kStep == self.item(job.item).keys) self.take_sums(job.item, row);
    }
  };
  // Of 16 rows.
  void take_sums(int32_t i, int32_t row) {
    const int32_t group = item(i).group;
    if (!add_sums(scratch_.of_row + row * Vector::kWidth, state(group, i), row)) bad_groups_ |= 1u << group;
  }

  // Columns of a panel of item i's product, into the output or the sums of the group.
  void add_output(int32_t i, int32_t panel) {
    if (is_last_block(item(i))) {
      work_.add<End>(1, i, panel);
    } else if (item(i).begin > 0) {
      work_.add<Accumulate>(1, i, panel);
    }
  }
  // Where weights times V go: of the first of several blocks straight into the group's sums.
  float* product(int32_t i) {
    return item(i).begin == 0 && !is_last_block(item(i)) ? out(item(i).group) : scratch_.product;
  }
  struct Accumulate {
    template <class Step>
    static void run(F32Forward& self, const F32Job& job, const Step& step) {
      const int32_t column = job.panel * kPanelColumns;
      accumulate_columns(self.scratch_.product + column, self.padded_dim_, self.state(0, job.item).alpha,
                         self.out(self.item(job.item).group) + column, step);
    }
  };
  struct End {
    template <class Step>
    static void run(F32Forward& self, const F32Job& job, const Step& step) {
      const Item& x = self.item(job.item);
      const GroupState state = self.state(x.group, job.item);
      if (job.panel == 0) self.begin_end(state);
      const int32_t column = job.panel * kPanelColumns;
      const int64_t stride = self.params_.out_stride.row;
      const OutputColumns output = {self.scratch_.product + column,
                                    x.begin > 0 ? self.out(x.group) + column : nullptr,
                                    self.padded_dim_,
                                    state.alpha,
                                    self.inverse_,
                                    self.operands_.out + self.group_row(x.group) * stride + column,
                                    stride,
                                    self.group_height(x.group),
                                    clamp(self.head_dim_ - column, 0, kPanelColumns)};
      Vector::store(self.total_, write_columns(output, Vector::load(self.total_), step));
      if (job.panel == self.dim_steps() - 1) self.end_end(x.group, state);
    }
  };
  void begin_end(GroupState state) {
    for (int c = 0; c < kGroupVectors; ++c) Vector::store(inverse_ + c * Vector::kWidth, inverse_sum(state, c));
    __m512 total = Vector::load(inverse_);  // NaN or Inf if any part is
    for (int c = 1; c < kGroupVectors; ++c) total = Vector::add(total, Vector::load(inverse_ + c * Vector::kWidth));
    Vector::store(total_, total);
  }
  void end_end(int32_t group, GroupState state) {
    const __m512 total = Vector::load(total_);
    store_lse(state, group_height(group), operands_.lse_row(group_row(group)));
    bad_groups_ |= static_cast<uint32_t>(Vector::any_differs(Vector::sub(total, total), Vector::zero())) << group;
  }
  void fill_unseen(int32_t group) {
    for (int32_t row = 0; row < group_height(group); ++row) {
      float* dst = operands_.out + (group_row(group) + row) * params_.out_stride.row;
      memset(dst, 0, static_cast<size_t>(head_dim_) * sizeof(float));
    }
    store_lse(state(group, 0), group_height(group), operands_.lse_row(group_row(group)));
  }

  // -- the pipeline --
  // A step of a panel of one of item's products.
  struct Place {
    bool is_scores;
    int32_t item;
    int32_t panel;
    int32_t step;
    bool is_last;  // of the panel
  };

  void run_item(int32_t i) {
    advance(i + 1);
    const Item& x = item(i);
    const bool packs = x.opens_block && i > 0;  // else prepare has added it
    stored_panels_ = 0;
    if (packs) find_v(i);
    for (int32_t panel = 0; panel * kPanelColumns < x.keys; ++panel) {
      if (packs) add_k(i, panel + 1);
      for (int32_t step = 0; step < dim_steps(); ++step) multiply({true, i, panel, step, step == dim_steps() - 1});
    }
    if (packs) add_v(i, 0);
    const int32_t steps = x.keys / kStep;
    for (int32_t panel = 0; panel < dim_steps(); ++panel) {
      if (packs) add_v(i, panel + 1);
      if (panel == 1) add_next(i + 1);
      for (int32_t step = 0; step < steps; ++step) multiply({false, i, panel, step, step == steps - 1});
    }
    if (dim_steps() == 1) add_next(i + 1);
  }
  void add_next(int32_t i) {
    if (!exists(i)) return;
    add_q(i);
    if (item(i).opens_block) add_k(i, 0);
  }

  // Runs the step before, which loads the first operands of this one.
  void multiply(const Place& next) {
    const F32Step after = make_step(next);
    bool is_loaded = false;
    if (has_current_) {
      is_loaded = is_ready(next);
      if (is_loaded) {
        step_.next_left = after.left;
        step_.next_left_row = after.left_row;
        step_.next_right = after.right;
      }
      run_current();
    }
    if (!is_loaded) {
      if (!is_ready(next)) {
        if (next.step == 0) store_sums();
        work_.finish(ready(next), next.step == 0);
      }
      after.load_first();
    }
    step_ = after;
    current_ = next;
    has_current_ = true;
  }

  void run_current() {
    if (step_.opens_panel && has_sums_) set_store(step_);
    (work_.is_empty() && next_ != nullptr ? next_->work_ : work_).run(step_);
    if (step_.store_to != nullptr) sums_are_stored();
    if (current_.is_last) {
      sums_ = current_;
      has_sums_ = true;
    }
  }
  // Ends the stream.
  void run_last() {
    run_current();
    store_sums();
    work_.finish(work_.last());
  }

  F32Step make_step(const Place& place) {
    F32Step step = {};
    if (place.is_scores) {
      step.left_row = q_row() * static_cast<int64_t>(sizeof(float));
      step.left = reinterpret_cast<const char*>(q_planes(place.item));
      step.right = k_panel(place.panel);
    } else {
      step.left_row = kScoresRow * static_cast<int64_t>(sizeof(float));
      step.left = reinterpret_cast<const char*>(scores());
      step.right = v_panel(place.panel);
    }
    step.left += place.step * kF32StepBytes;
    step.right += place.step * F32Right::kF32StepBytes;
    step.opens_panel = place.step == 0;
    step.is_whole = is_whole(place);
    return step;
  }
  // Else the last key that the upper sixteen rows see is left of the panel's right half.
  bool is_whole(const Place& place) {
    const Item& x = item(place.item);
    return !place.is_scores || !task_.causal ||
           diagonal(x.group) + kTileRows - 1 >= x.begin + place.panel * kPanelColumns + kTileRows;
  }

  // Whether the operands are packed; the ticket, once the scores that weights are made of are stored.
  bool is_ready(const Place& place) const { return has_scores(place) && work_.is_done(ready(place)); }
  bool has_scores(const Place& place) const { return place.is_scores || place.step < stored_panels_; }
  Queue::Ticket ready(const Place& place) const {
    if (place.is_scores) return later(q_ready_, k_ready_[place.panel]);
    return later(v_ready_[place.panel], weights_ready_[place.step]);
  }
  static Queue::Ticket later(Queue::Ticket a, Queue::Ticket b) { return static_cast<int32_t>(a - b) > 0 ? a : b; }

  void set_store(F32Step& step) {
    step.store_whole = is_whole(sums_);
    if (sums_.is_scores) {
      step.store_to = scores() + sums_.panel * kStepFloats;
      step.store_row = kScoresRow * static_cast<int64_t>(sizeof(float));
    } else {
      step.store_to = product(sums_.item) + sums_.panel * kPanelColumns;
      step.store_row = padded_dim_ * static_cast<int64_t>(sizeof(float));
    }
  }
  void store_sums() {
    if (!has_sums_) return;
    F32Step step = {};
    set_store(step);
    unrolled<4>([&](auto sum) { step.template store_sum<decltype(sum)::value>(); });
    order_memory();
    sums_are_stored();
  }
  void sums_are_stored() {
    has_sums_ = false;
    if (sums_.is_scores) {
      add_softmax(sums_.item, sums_.panel);
      stored_panels_ = sums_.panel + 1;
    } else {
      add_output(sums_.item, sums_.panel);
    }
  }

  const Operands<float> operands_;
  const Scale scale_;
  const F32Scratch scratch_;
  const F32Operands& packed_;
  F32Forward* next_ = nullptr;
  Queue work_;
  WholeRows<float> q_rows_;
  WholeRows<float> k_rows_[kBlockSteps] = {}, v_rows_[kBlockSteps] = {};
  Queue::Ticket q_ready_ = 0, k_ready_[kBlockSteps] = {}, v_ready_[8] = {}, weights_ready_[kBlockSteps] = {};
  alignas(64) float minus_shift_[kGroupRows];
  alignas(64) float inverse_[kGroupRows];
  alignas(64) float total_[Vector::kWidth];
  Place current_;  // the step to run next, and its operands
  F32Step step_;
  Place sums_;     // the last step of the panel whose sums are in the tiles
  bool has_current_ = false;
  bool has_sums_ = false;
  int32_t stored_panels_ = 0;  // of the scores of an item
  uint32_t bad_groups_ = 0;
};

}  // namespace
}  // namespace cpu
}  // namespace flashmoe
