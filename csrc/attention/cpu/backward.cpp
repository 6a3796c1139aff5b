// Divides the backward pass into tasks and runs them on the threads of the caller's pool.
//
// Fused: a task is a (batch, key head) and computes all three gradients in one pass, with dq in fp32 in its scratch
// memory: five products per block. If there are too few such tasks for the threads, the pass is split: some tasks
// compute dk and dv of a block of keys (four products), others dq of some rows (three). Both add the same blocks in the
// same order, so the bits are the same.
#include "attention/cpu/backward.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <new>
#include <vector>

#include "attention/cpu/backward_kernel.h"
#include "attention/cpu/offsets.h"
#include "cpu/isa.h"

namespace flashmoe::cpu {
namespace {

constexpr int32_t kSplitRows = 4 * kBackwardRows;  // rows of a dq task, which share a packed block of K and V
constexpr size_t kKeptBytes = size_t{8} << 20;     // scratch memory that a thread keeps for its next call

const BackwardKernel& kernel_in_use() {
  static constexpr std::array<const BackwardKernel*, kIsaCount> kKernels = {
      FLASHMOE_CPU_KERNELS(&kBackwardBaselineKernel, &kBackwardAvx2Kernel, &kBackwardAvx512Kernel,
                           &kBackwardAvx512Bf16Kernel, &kBackwardAvx512Bf16Kernel)};
  return *kKernels[static_cast<size_t>(current_isa())];
}

int32_t divide_up(int32_t a, int32_t b) { return a / b + (a % b != 0); }

using Sequences = std::vector<attention::BackwardParams>;

struct BackwardPlan {
  // sequences: null for a dense batch.
  BackwardPlan(const BackwardTask& whole, const Sequences* sequences, int num_threads)
      : whole(whole),
        sequences(sequences),
        params(*whole.params),
        kernel(kernel_in_use()),
        group(params.heads_q / params.heads_kv),
        heads_kv(int64_t{params.batch} * params.heads_kv),
        is_fused(is_fused_faster(num_threads)),
        key_tasks(whole.with_dkv ? divide_up(params.seq_k, kBackwardKeys) : 0),
        row_tasks(whole.with_dq ? divide_up(params.seq_q, kSplitRows) : 0),
        head_tasks(is_fused ? 1 : key_tasks + int64_t{group} * row_tasks),
        exact_bytes(most_exact_bytes()),
        threads(std::min<int64_t>(num_threads, heads_kv * head_tasks)),
        queues(heads_kv, head_tasks, threads) {}

  // Products per block, times the blocks of the busiest thread.
  bool is_fused_faster(int num_threads) const {
    const int64_t rounds = (heads_kv + num_threads - 1) / num_threads;
    const int64_t fused = whole.with_dq ? (whole.with_dkv ? 5 : 3) : 4;
    const int64_t split = whole.with_dq && whole.with_dkv ? 7 : fused;
    return rounds * fused * num_threads <= split * heads_kv && !is_one_too_long(fused, split, num_threads);
  }
  // Whether the fused task of the longest sequence would outlast the others.
  bool is_one_too_long(int64_t fused, int64_t split, int num_threads) const {
    if (sequences == nullptr) return false;
    int64_t longest = 0, sum = 0;
    for (const attention::BackwardParams& sequence : *sequences) {
      const int64_t scores = int64_t{sequence.seq_q} * sequence.seq_k;
      longest = std::max(longest, scores);
      sum += scores;
    }
    return longest * fused * num_threads > sum * params.heads_kv * split;
  }

  // In a causal problem the longest tasks come first: the first keys, the last rows. Returns false if a short sequence
  // has no such task.
  bool make_task(TaskQueues::Task position, BackwardTask* result) const {
    BackwardTask& task = *result = whole;
    const auto batch = static_cast<int32_t>(position.group / params.heads_kv);
    task.sequence = batch;
    if (sequences == nullptr) {
      task.batch = batch;
    } else {
      task.params = &(*sequences)[static_cast<size_t>(batch)];
      task.row_end = task.params->seq_q;
      task.key_end = task.params->seq_k;
    }
    task.head_kv = static_cast<int32_t>(position.group % params.heads_kv);
    task.head_begin = task.head_kv * group;
    task.head_end = task.head_begin + group;
    if (may_be_exact(*task.params) && is_exact(task)) {
      task.is_exact = true;
      return position.index == 0;
    }
    if (is_fused) return true;
    if (position.index < key_tasks) {
      task.with_dq = false;
      task.key_begin = static_cast<int32_t>(position.index) * kBackwardKeys;
      task.key_end = std::min(task.key_end, task.key_begin + kBackwardKeys);
      return task.key_begin < task.key_end;
    }
    const int64_t index = position.index - key_tasks;
    task.with_dkv = false;
    task.head_begin += static_cast<int32_t>(index % group);
    task.head_end = task.head_begin + 1;
    task.row_begin = (divide_up(task.row_end, kSplitRows) - 1 - static_cast<int32_t>(index / group)) * kSplitRows;
    if (task.row_begin < 0) return false;
    task.row_end = std::min(task.row_end, task.row_begin + kSplitRows);
    return true;
  }

  // No task needs more than the fused task with the most rows, or than one dq task and one dk, dv task.
  size_t scratch_bytes() const {
    BackwardTask task = whole;
    task.head_end = is_fused ? group : 1;
    if (!is_fused) task.row_end = std::min(task.row_end, kSplitRows);
    return std::max(kernel.scratch_bytes(task), exact_bytes);
  }

  bool may_be_exact(const attention::BackwardParams& sizes) const {
    const int64_t rows = int64_t{group} * sizes.seq_q;
    return whole.type == ScalarType::kFloat32 && !whole.has_options && rows <= kMostExactRows &&
           rows * sizes.seq_k > 0 && rows * sizes.seq_k <= kMostExactScores;
  }
  // Whether a key head for which may_be_exact() holds is computed in double. The inputs of this choice are the same for
  // all tasks of the head.
  bool is_exact(const BackwardTask& head) const {
    const attention::BackwardParams& sizes = *head.params;
    if (sizes.seq_k > kBackwardKeys || int64_t{group} * sizes.seq_q * sizes.seq_k < kExactScores) return true;
    for (int32_t index = head.head_begin; index < head.head_end; ++index) {
      const float* lse = sizes.lse + (int64_t{head.batch} * sizes.heads_q + index) * head.lse_stride;
      if (std::any_of(lse, lse + sizes.seq_q, [](float x) { return std::isfinite(x) && std::abs(x) > kLargeLse; })) {
        return true;
      }
    }
    return false;
  }
  // The largest need of any key head that may be computed in double.
  size_t most_exact_bytes() const {
    size_t most = 0;
    for (size_t i = 0; i < (sequences == nullptr ? 1 : sequences->size()); ++i) {
      BackwardTask task = whole;
      if (sequences != nullptr) task.params = &(*sequences)[i];
      if (!may_be_exact(*task.params)) continue;
      task.row_end = task.params->seq_q;
      task.head_end = group;
      task.is_exact = true;
      most = std::max(most, kernel.scratch_bytes(task));
    }
    return most;
  }

  const BackwardTask& whole;
  const Sequences* sequences;
  const attention::BackwardParams& params;
  const BackwardKernel& kernel;
  const int32_t group;     // query heads per key head
  const int64_t heads_kv;  // batch * heads_kv
  const bool is_fused;
  const int32_t key_tasks;   // per key head, if split
  const int32_t row_tasks;   // per query head, if split
  const int64_t head_tasks;  // per key head
  const size_t exact_bytes;  // scratch memory if a key head may be computed in double
  const int64_t threads;
  TaskQueues queues;
  std::atomic<bool> out_of_memory{false};
};

// As in the forward pass: each index in [begin, end) is a thread, which takes tasks until none is left.
void work(int64_t begin, int64_t, void* context) noexcept {
  BackwardPlan& plan = *static_cast<BackwardPlan*>(context);
  thread_local Scratch kept;
  Scratch once;
  try {
    const size_t bytes = plan.scratch_bytes();
    void* memory = (bytes > kKeptBytes ? once : kept).reserve(bytes);
    TaskQueues::Cursor cursor = plan.queues.cursor(begin);
    TaskQueues::Task position;
    BackwardTask task;
    while (plan.queues.take(&cursor, &position)) {
      if (plan.make_task(position, &task)) plan.kernel.run(task, memory);
    }
  } catch (const std::bad_alloc&) {
    plan.out_of_memory = true;
  }
}

void compute(BackwardTask whole, const Sequences* sequences, ParallelFor parallel_for, int num_threads) {
  const attention::BackwardParams& params = *whole.params;
  whole.with_dq = params.dq != nullptr;
  whole.with_dkv = params.dk != nullptr || params.dv != nullptr;
  whole.row_end = params.seq_q;
  whole.key_end = params.seq_k;
  if (params.batch == 0 || params.heads_q == 0 || !(whole.with_dq || whole.with_dkv)) return;
  BackwardPlan plan(whole, sequences, num_threads);
  if (plan.threads == 1) {
    work(0, 1, &plan);
  } else if (plan.threads > 1) {
    parallel_for(0, plan.threads, 1, work, &plan);
  }
  // A thread without memory leaves its tasks to the others; tasks remain only if no thread had memory.
  if (plan.out_of_memory && !plan.queues.all_taken()) throw std::bad_alloc();
}

Sequences make_sequences(const attention::BackwardParams& params, ScalarType type) {
  Sequences sequences(static_cast<size_t>(params.batch), params);
  const int64_t stride = statistic_stride(params);
  for (int32_t index = 0; index < params.batch; ++index) {
    attention::BackwardParams& sequence = sequences[static_cast<size_t>(index)];
    const SequenceOffset at(params, type, index);
    sequence.batch = 1;
    sequence.seq_q = at.rows().length;
    sequence.seq_k = at.keys().length;
    sequence.q = at.row(params.q, params.q_stride);
    sequence.k = at.key(params.k, params.k_stride);
    sequence.v = at.key(params.v, params.v_stride);
    sequence.out = at.row(params.out, params.out_stride);
    sequence.dout = at.row(params.dout, params.dout_stride);
    sequence.lse = at.statistic(params.lse, stride);
    sequence.dlse = at.statistic(params.dlse, stride);
    sequence.dq = at.row(params.dq, params.dq_stride);
    sequence.dk = at.key(params.dk, params.dk_stride);
    sequence.dv = at.key(params.dv, params.dv_stride);
    sequence.score_options = at.options(params.score_options);
  }
  return sequences;
}

}  // namespace

void attention_backward(const attention::BackwardParams& params, ScalarType type, bool causal, ParallelFor parallel_for,
                        int num_threads) {
  BackwardTask whole{};
  whole.params = &params;
  whole.type = type;
  whole.causal = causal;
  whole.head_dim_v = params.head_dim;
  whole.lse_stride = params.seq_q;
  compute(whole, nullptr, parallel_for, num_threads);
}

void attention_backward_varlen(const attention::BackwardParams& params, ScalarType type,
                               const attention::Dropout* dropout, ParallelFor parallel_for, int num_threads) {
  const Sequences sequences = make_sequences(params, type);
  BackwardTask whole{};
  whole.params = &params;
  whole.type = type;
  whole.causal = params.score_options.right == 0;
  whole.head_dim_v = params.head_dim_v;
  whole.lse_stride = statistic_stride(params);
  whole.has_options = dropout != nullptr || needs_options(params);
  whole.dropout = dropout;
  compute(whole, &sequences, parallel_for, num_threads);
}

}  // namespace flashmoe::cpu
