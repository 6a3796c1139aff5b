// The AMX kernel: both products on the bf16 tile unit, the softmax with AVX-512. Query rows are tile rows and keys lie in
// the lanes (S = Q K^T, O = P V), unlike in forward_simd.h: so Q and the weights are tile operands as they lie, V is one
// after interleaving rows, only K is transposed, and the output is written as it comes. Rejected: rows in the lanes here
// too, which transposes Q, V and the output. docs/kernels/cpu.md has the measurements.
//
// Types of more digits than bf16 are cut into planes of 8 significant bits, x = x0 + x1 + x2, and the products of
// planes that matter are added: fp16 in two planes (exact), three or four products; fp32 in three planes (exact), six
// products; what is left out is 2^-16 and 2^-24 of the whole. fp32 has a kernel of its own, amx_forward_f32.h.
//
// Inf - Inf would arise between planes, and 0 * Inf where the weight of a hidden key meets V: a group whose output is not
// all finite is computed again by forward_simd.h, which knows which keys a row sees.
//
// The target is set here, not by compiler flags, so that all files of this folder are compiled alike; it must come
// before the intrinsics' header. Nothing but this kernel's table entry may leave the translation unit.
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,amx-tile,amx-bf16")

#include "vector_avx512.h"

#include <new>

#include "amx_forward_bf16.h"
#include "amx_forward_f32.h"
#include "amx_pack.h"
#include "amx_softmax.h"
#include "amx_tiles.h"
#include "forward_simd.h"
#include "run_simd.h"

namespace flashmoe {
namespace cpu {
namespace {

struct AmxScratch {
  float* scores;       // [group, kBlockKeys], see ScoresLayout
  float* product;      // [group, padded_dim]
  uint16_t* q_planes;  // [groups][planes][group, padded_dim], for types of more planes than one
  void* q_whole;       // [groups][group, padded_dim] of the element type, where Q is not whole
  float* max_log2;     // [groups, group]
  float* sum;          // [groups, group]
  float* alpha;        // [group]
  void* whole;         // [kStep, padded_dim] of the element type, for rows that are not whole steps
  uint32_t* k_tiles;   // [kBlockKeys / 32 panels][padded_dim / 32 steps][planes][2] tiles
  uint32_t* v_tiles;   // [padded_dim / 32 panels][kBlockKeys / 32 steps][planes][2] tiles
  float* out;          // [groups][group, padded_dim], where there are several blocks
  size_t bytes;

  AmxScratch(void* base, int planes, int32_t groups, int32_t padded_dim) {
    Arena arena(base);
    const int64_t group_elements = int64_t{kGroupRows} * padded_dim;
    const int64_t block_elements = int64_t{kBlockKeys} * padded_dim;
    scores = arena.take<float>(planes > 2 ? ScoresLayout<3>::kFloats : ScoresLayout<2>::kFloats);
    product = arena.take<float>(group_elements);
    q_planes = arena.take<uint16_t>(groups * planes * group_elements);
    q_whole = arena.take<float>(groups * group_elements);
    max_log2 = arena.take<float>(int64_t{groups} * kGroupRows);
    sum = arena.take<float>(int64_t{groups} * kGroupRows);
    alpha = arena.take<float>(kGroupRows);
    whole = arena.take<float>(int64_t{kStep} * padded_dim);
    k_tiles = arena.take<uint32_t>(planes * block_elements / 2);
    v_tiles = arena.take<uint32_t>(planes * block_elements / 2);
    out = arena.take<float>(groups * group_elements);
    bytes = arena.used();
  }

  GroupState state(int32_t group) const {
    return {max_log2 + int64_t{group} * kGroupRows, sum + int64_t{group} * kGroupRows, alpha};
  }
};

template <class T>
class AmxForward {
 public:
  // wanted: a bit for each group to compute.
  AmxForward(const Task& task, void* memory, uint32_t wanted)
      : task_(task),
        params_(*task.params),
        operands_(task),
        head_dim_(params_.head_dim),
        padded_dim_(round_up(head_dim_, kStep)),
        groups_(group_count(task.row_end - task.row_begin)),
        key_end_(clamp(round_up(visible_end(task), kStep), 0, params_.seq_k)),
        scale_(make_scale(params_.scale)),
        wanted_(wanted),
        scratch_(memory, kPlanes, groups_, padded_dim_) {}

  // Returns a bit for each group whose output is not all finite.
  uint32_t run() {
    for (int32_t group = 0; group < groups_; ++group) begin_group(group);
    for (int32_t key = 0; key < key_end_; key += kBlockKeys) {
      attend(key, clamp(int64_t{key_end_} - key, 0, kBlockKeys));
    }
    for (int32_t group = 0; group < groups_; ++group) {
      if (is_wanted(group) && (!is_single_block() || !sees_keys(group))) end_group(group, out(group));
    }
    return bad_groups_;
  }

 private:
  static constexpr int kPlanes = Planes<T>::value;
  using Layout = ScoresLayout<kPlanes>;

  bool is_wanted(int32_t group) const { return (wanted_ >> group & 1) != 0; }
  bool is_single_block() const { return key_end_ <= kBlockKeys; }
  int32_t group_row(int32_t group) const { return task_.row_begin + group * kGroupRows; }
  int32_t group_height(int32_t group) const { return clamp(task_.row_end - group_row(group), 0, kGroupRows); }
  // The last key visible to the group's first row, and one more each row.
  int64_t diagonal(int32_t group) const { return int64_t{group_row(group)} + params_.seq_k - params_.seq_q; }
  bool sees_keys(int32_t group) const { return !task_.causal || diagonal(group) + kGroupRows > 0; }
  int64_t group_elements() const { return int64_t{padded_dim_} * kGroupRows; }
  float* out(int32_t group) const { return scratch_.out + group * group_elements(); }

  void begin_group(int32_t group) const {
    clear_state(scratch_.state(group));
    if (!sees_keys(group)) memset(out(group), 0, static_cast<size_t>(group_elements()) * sizeof(float));
  }

  // Q as a left operand. Kept for further blocks; where there are none, one place for all groups stays in the L1 cache.
  LeftOperand load_q(int32_t group, bool is_first_block) const {
    const int64_t stride = params_.q_stride.row;
    const int64_t place = is_single_block() ? 0 : group;
    T* buffer = static_cast<T*>(scratch_.q_whole) + place * group_elements();
    WholeRows<T> q = {buffer, padded_dim_};
    const bool is_whole = rows_are_whole(group_height(group), kGroupRows, head_dim_, padded_dim_, scale_.q_factor);
    if (is_first_block || is_whole) {
      q = make_whole(operands_.q + group_row(group) * stride, stride, group_height(group), kGroupRows, head_dim_,
                     padded_dim_, scale_.q_factor, buffer);
    }
    if (kPlanes == 1) {
      return {reinterpret_cast<const char*>(q.data), 0, q.stride * static_cast<int64_t>(sizeof(T))};
    }
    uint16_t* planes = scratch_.q_planes + place * kPlanes * group_elements();
    keep_awake();
    if (is_first_block) pack_q(q, padded_dim_, planes);
    const int64_t row_bytes = padded_dim_ * static_cast<int64_t>(sizeof(uint16_t));
    return {reinterpret_cast<const char*>(planes), kGroupRows * row_bytes, row_bytes};
  }

  static int64_t panel_words(int32_t summed) { return summed / kStep * kPlanes * 2 * kTileWords; }
  static int64_t panel_bytes(int32_t summed) { return panel_words(summed) * static_cast<int64_t>(sizeof(uint32_t)); }

  void load_k(int32_t begin, int32_t keys) const {
    const int64_t stride = params_.k_stride.row;
    for (int32_t key = 0; key < keys; key += kStep) {
      const WholeRows<T> rows = make_whole(operands_.k + (begin + key) * stride, stride, clamp(keys - key, 0, kStep),
                                           kStep, head_dim_, padded_dim_, 1.0f, static_cast<T*>(scratch_.whole));
      keep_awake();
      pack_k(rows, padded_dim_, scratch_.k_tiles + key / kPanelColumns * panel_words(padded_dim_));
    }
  }

  void load_v(int32_t begin, int32_t keys) const {
    const int64_t stride = params_.v_stride.row;
    for (int32_t key = 0; key < keys; key += kStep) {
      const WholeRows<T> rows = make_whole(operands_.v + (begin + key) * stride, stride, clamp(keys - key, 0, kStep),
                                           kStep, head_dim_, padded_dim_, 1.0f, static_cast<T*>(scratch_.whole));
      keep_awake();
      pack_v(rows, padded_dim_, panel_words(kBlockKeys), scratch_.v_tiles + panel_words(key));
    }
  }

  // Keys [begin, begin + block_keys) for all groups.
  void attend(int32_t begin, int32_t block_keys) {
    load_k(begin, block_keys);
    load_v(begin, block_keys);
    const RightOperand k = {reinterpret_cast<const char*>(scratch_.k_tiles), panel_bytes(padded_dim_)};
    const RightOperand v = {reinterpret_cast<const char*>(scratch_.v_tiles), panel_bytes(kBlockKeys)};
    const LeftOperand weights = {reinterpret_cast<const char*>(scratch_.scores), Layout::kPlaneBytes,
                                 Layout::kRowFloats * static_cast<int64_t>(sizeof(float))};
    for (int32_t group = 0; group < groups_; ++group) {
      const VisibleKeys visible = visible_keys(task_.causal, diagonal(group), begin, block_keys);
      if (!is_wanted(group) || visible.end == 0) continue;
      const int32_t keys = round_up(visible.end, kStep);
      multiply_tiles<kPlanes, Product::kScores>(load_q(group, begin == 0), k, padded_dim_ / kStep, keys / kPanelColumns,
                                                scratch_.scores, Layout::kRowFloats);
      hide_scores(diagonal(group) - begin, visible, keys);
      softmax_to_weights<T>(scratch_.scores, keys, scale_.log2, scratch_.state(group));
      multiply_tiles<kPlanes, Product::kOutput>(weights, v, keys / kStep, padded_dim_ / kPanelColumns,
                                                product(group, begin), padded_dim_);
      if (is_single_block()) {
        end_group(group, scratch_.product);
      } else if (begin > 0) {
        accumulate(scratch_.state(group).alpha, scratch_.product, out(group));
      }
    }
  }

  // Where weights times V go: of the first of several blocks straight into the output.
  float* product(int32_t group, int32_t begin) const {
    return begin == 0 && !is_single_block() ? out(group) : scratch_.product;
  }

  // -inf for what the mask hides and for the keys that fill up the last step. diagonal: the last key, counted from the
  // block's first, that is visible to the group's first row.
  void hide_scores(int64_t diagonal, VisibleKeys visible, int32_t keys) const {
    if (visible.full >= keys) return;
    const __m512 hidden = Vector::broadcast(kMinusInfinity);
    for (int32_t row = 0; row < kGroupRows; ++row) {
      const int32_t end = task_.causal ? clamp(diagonal + row + 1, 0, visible.end) : visible.end;
      float* s = scratch_.scores + row * Layout::kRowFloats;
      int32_t key = end / Vector::kWidth * Vector::kWidth;
      if (key < keys) Vector::store(s + key, Vector::from_lane(end - key, hidden, Vector::load(s + key)));
      for (key += Vector::kWidth; key < keys; key += Vector::kWidth) Vector::store(s + key, hidden);
    }
  }

  // out = out * alpha + product. A block's product starts from zero, which rounds less than a running sum.
  void accumulate(const float* alpha, const float* product, float* out) const {
    for (int32_t row = 0; row < kGroupRows; ++row) {
      const __m512 factor = Vector::broadcast(alpha[row]);
      for (int32_t dim = 0; dim < padded_dim_; dim += Vector::kWidth) {
        Vector::store(out, Vector::fma(Vector::load(out), factor, Vector::load(product)));
        out += Vector::kWidth;
        product += Vector::kWidth;
      }
    }
  }

  // Writes sums [group, padded_dim] divided by the weights' sum, and lse. Notes whether all of it is finite.
  void end_group(int32_t group, const float* sums) {
    const GroupState state = scratch_.state(group);
    const int32_t first = group_row(group), rows = group_height(group);
    alignas(64) float inverse[kGroupRows];
    for (int c = 0; c < kGroupVectors; ++c) Vector::store(inverse + c * Vector::kWidth, inverse_sum(state, c));
    __m512 total = Vector::load(inverse);  // NaN or Inf if any part is
    for (int c = 1; c < kGroupVectors; ++c) total = Vector::add(total, Vector::load(inverse + c * Vector::kWidth));
    keep_awake();
    for (int32_t row = 0; row < rows; ++row, sums += padded_dim_) {
      const __m512 factor = Vector::broadcast(inverse[row]);
      for (int32_t dim = 0; dim < padded_dim_; dim += Vector::kWidth) {
        total = Vector::add(total, Vector::load(sums + dim));
      }
      store_row(sums, head_dim_, factor, operands_.out + (first + row) * params_.out_stride.row);
    }
    const __m512 finite = Vector::sub(total, total);
    store_lse(state, rows, operands_.lse_row(first));
    bool is_bad = Vector::any_differs(finite, Vector::zero());
    for (int c = 0; c < kGroupVectors; ++c) is_bad |= any_is_far(Vector::load(state.max_log2 + c * Vector::kWidth));
    bad_groups_ |= static_cast<uint32_t>(is_bad) << group;
  }

  const Task& task_;
  const attention::ForwardParams& params_;
  const Operands<T> operands_;
  const int32_t head_dim_;
  const int32_t padded_dim_;  // a multiple of 32
  const int32_t groups_;
  // Whole steps, so that what a group's last step holds does not depend on the task's height.
  const int32_t key_end_;
  const Scale scale_;
  const uint32_t wanted_;
  const AmxScratch scratch_;
  uint32_t bad_groups_ = 0;
};

// A bit for each group that is left to do by subtracting maxima.
template <class T>
inline uint32_t forward_in_window(const Task&, void*) {
  return ~0u;
}
template <>
inline uint32_t forward_in_window<BFloat16>(const Task& task, void* memory) {
  return WindowForward(task, memory).run();
}

// Computes groups of a task again, a bit for each.
template <class T>
void repeat_groups(const Task& task, uint32_t bad, void* memory) {
  for (int32_t row = task.row_begin; bad != 0; bad >>= 1, row += kGroupRows) {
    if ((bad & 1) == 0) continue;
    Task group = task;
    group.row_begin = row;
    group.row_end = clamp(int64_t{row} + kGroupRows, 0, task.row_end);
    forward_simd<T>(group, memory);
  }
}

template <class T>
void forward_amx(const Task& task, void* memory) {
  configure_tiles();
  const uint32_t left = forward_in_window<T>(task, memory);
  const uint32_t bad = left == 0 ? 0 : AmxForward<T>(task, memory, left).run();
  _tile_release();
  repeat_groups<T>(task, bad, memory);
}

// Whether the tile unit beats the vectors. For fp32, at six products, it does by 1.1 to 1.5 where the rows are enough
// to pay for packing K and V in planes, and little of head_dim is padding (measured at 16 and 200 rows, head_dim 40:
// 0.8).
inline bool tiles_win(const Task& task) {
  constexpr int32_t kFewestRows = 64;
  const int32_t head_dim = task.params->head_dim;
  return task.type != ScalarType::kFloat32 ||
         (task.params->seq_q >= kFewestRows && 8 * head_dim >= 7 * round_up(head_dim, kStep));
}

// fp32, from the given task on. Where a task is short the next one's operands are packed while it runs.
void forward_f32(const Task& first, const TaskSource& source, void* memory) {
  const bool is_short = first.params->seq_k <= kBlockKeys;
  Task tasks[2] = {first, first};
  alignas(F32Forward) unsigned char storage[2][sizeof(F32Forward)];
  const auto prepared = [&](int place) {
    F32Forward* forward = new (storage[place]) F32Forward(tasks[place], memory, place);
    forward->prepare();
    return forward;
  };
  configure_tiles();
  F32Forward* current = prepared(0);
  for (int place = 1; current != nullptr; place ^= 1) {
    F32Forward* next = is_short && source.take(source.context, &tasks[place]) ? prepared(place) : nullptr;
    const uint32_t bad = current->run(next);
    repeat_groups<float>(tasks[place ^ 1], bad, current->simd_scratch());
    current = is_short ? next : source.take(source.context, &tasks[place]) ? prepared(place) : nullptr;
  }
  _tile_release();
}

void run_amx(const TaskSource& source, void* memory) {
  Task task;
  while (source.take(source.context, &task)) {
    if (task.params->seq_q <= kFewRows || !tiles_win(task)) {
      run_simd(task, memory);
    } else if (task.type == ScalarType::kFloat32) {
      forward_f32(task, source, memory);
    } else if (task.type == ScalarType::kFloat16) {
      forward_amx<Half>(task, memory);
    } else {
      forward_amx<BFloat16>(task, memory);
    }
  }
}

size_t amx_scratch_bytes(ScalarType type, int32_t head_dim, int32_t rows) {
  const int32_t groups = group_count(rows), padded_dim = round_up(head_dim, kStep);
  size_t bytes = 0;
  switch (type) {
    case ScalarType::kFloat32:
      bytes = F32Scratch(nullptr, groups, head_dim).bytes;
      break;
    case ScalarType::kFloat16:
      bytes = AmxScratch(nullptr, Planes<Half>::value, groups, padded_dim).bytes;
      break;
    case ScalarType::kBFloat16: {
      bytes = AmxScratch(nullptr, Planes<BFloat16>::value, groups, padded_dim).bytes;
      const size_t window_bytes = WindowScratch(nullptr, groups, padded_dim).bytes;
      bytes = window_bytes > bytes ? window_bytes : bytes;
      break;
    }
  }
  const size_t simd_bytes = simd_scratch_bytes(type, head_dim, rows);
  return bytes > simd_bytes ? bytes : simd_bytes;
}

}  // namespace

extern const Kernel kAmxKernel = {"amx", kGroupRows, amx_scratch_bytes, run_amx};

}  // namespace cpu
}  // namespace flashmoe
