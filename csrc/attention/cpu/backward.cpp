// Cuts the backward pass into tasks and hands them to the threads of the caller's pool.
//
// Fused: a task is a (batch, key head) and makes all three gradients in one pass, with dq in fp32 in its scratch memory: five
// products a block. With too few of them for the threads it is split: some tasks make dk and dv of a block of keys (four
// products), others dq of some rows (three). Both add the same blocks in the same order, so the bits are the same.
#include "attention/cpu/backward.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <new>

#include "attention/cpu/backward_kernel.h"
#include "cpu/isa.h"

namespace flashmoe {
namespace cpu {
namespace {

constexpr int32_t kSplitRows = 4 * kBackwardRows;  // of a task that makes dq: so many share a packed block of K and V
constexpr size_t kKeptBytes = size_t{8} << 20;     // scratch memory that a thread keeps for its next call

const BackwardKernel& kernel_in_use() {
  static constexpr std::array<const BackwardKernel*, kIsaCount> kKernels = {
      &kBackwardBaselineKernel, &kBackwardAvx2Kernel, &kBackwardAvx512Kernel, &kBackwardAvx512Bf16Kernel,
      &kBackwardAvx512Bf16Kernel};
  return *kKernels[static_cast<size_t>(current_isa())];
}

int32_t divide_up(int32_t a, int32_t b) { return a / b + (a % b != 0); }

struct BackwardPlan {
  BackwardPlan(const BackwardTask& whole, int num_threads)
      : whole(whole),
        params(*whole.params),
        kernel(kernel_in_use()),
        group(params.heads_q / params.heads_kv),
        heads_kv(int64_t{params.batch} * params.heads_kv),
        is_fused(is_fused_faster(num_threads)),
        key_tasks(whole.with_dkv ? divide_up(params.seq_k, kBackwardKeys) : 0),
        row_tasks(whole.with_dq ? divide_up(params.seq_q, kSplitRows) : 0),
        head_tasks(is_fused ? 1 : key_tasks + int64_t{group} * row_tasks),
        threads(std::min<int64_t>(num_threads, heads_kv * head_tasks)),
        queues(heads_kv, head_tasks, threads) {}

  // Products a block, times the blocks that the busiest thread gets.
  bool is_fused_faster(int num_threads) const {
    const int64_t rounds = (heads_kv + num_threads - 1) / num_threads;
    const int64_t fused = whole.with_dq ? (whole.with_dkv ? 5 : 3) : 4;
    const int64_t split = whole.with_dq && whole.with_dkv ? 7 : fused;
    return rounds * fused * num_threads <= split * heads_kv;
  }

  // Of a causal problem the longest tasks come first: the first keys, the last rows.
  BackwardTask task(TaskQueues::Task position) const {
    BackwardTask task = whole;
    task.batch = static_cast<int32_t>(position.group / params.heads_kv);
    task.head_kv = static_cast<int32_t>(position.group % params.heads_kv);
    task.head_begin = task.head_kv * group;
    task.head_end = task.head_begin + group;
    if (is_fused) return task;
    if (position.index < key_tasks) {
      task.with_dq = false;
      task.key_begin = static_cast<int32_t>(position.index) * kBackwardKeys;
      task.key_end = std::min(params.seq_k, task.key_begin + kBackwardKeys);
    } else {
      const int64_t index = position.index - key_tasks;
      task.with_dkv = false;
      task.head_begin += static_cast<int32_t>(index % group);
      task.head_end = task.head_begin + 1;
      task.row_begin = (row_tasks - 1 - static_cast<int32_t>(index / group)) * kSplitRows;
      task.row_end = std::min(params.seq_q, task.row_begin + kSplitRows);
    }
    return task;
  }

  const BackwardTask& whole;
  const attention::BackwardParams& params;
  const BackwardKernel& kernel;
  const int32_t group;     // query heads of a key head
  const int64_t heads_kv;  // batch * heads_kv
  const bool is_fused;
  const int32_t key_tasks;   // of one key head, where it is split
  const int32_t row_tasks;   // of one query head, where it is split
  const int64_t head_tasks;  // of one key head
  const int64_t threads;
  TaskQueues queues;
  std::atomic<bool> out_of_memory{false};
};

// As the forward pass's: each index of [begin, end) is a thread, which takes tasks until none is left.
void work(int64_t begin, int64_t, void* context) noexcept {
  BackwardPlan& plan = *static_cast<BackwardPlan*>(context);
  thread_local Scratch kept;
  Scratch once;
  try {
    // No task needs more than a fused one has, or than one of dq and one of dk and dv.
    const int64_t last = plan.head_tasks - 1;
    const size_t bytes =
        std::max(plan.kernel.scratch_bytes(plan.task({0, 0})), plan.kernel.scratch_bytes(plan.task({0, last})));
    void* memory = (bytes > kKeptBytes ? once : kept).reserve(bytes);
    TaskQueues::Cursor cursor = plan.queues.cursor(begin);
    TaskQueues::Task position;
    while (plan.queues.take(&cursor, &position)) plan.kernel.run(plan.task(position), memory);
  } catch (const std::bad_alloc&) {
    plan.out_of_memory = true;
  }
}

}  // namespace

void attention_backward(const attention::BackwardParams& params, ScalarType type, bool causal, ParallelFor parallel_for,
                        int num_threads) {
  BackwardTask whole{};
  whole.params = &params;
  whole.type = type;
  whole.causal = causal;
  whole.with_dq = params.dq != nullptr;
  whole.with_dkv = params.dk != nullptr || params.dv != nullptr;
  whole.row_end = params.seq_q;
  whole.key_end = params.seq_k;
  if (params.batch == 0 || params.heads_q == 0 || !(whole.with_dq || whole.with_dkv)) return;
  BackwardPlan plan(whole, num_threads);
  if (plan.threads == 1) {
    work(0, 1, &plan);
  } else if (plan.threads > 1) {
    parallel_for(0, plan.threads, 1, work, &plan);
  }
  // Without memory a thread leaves its tasks to the others; only when none could work is anything left undone.
  if (plan.out_of_memory && !plan.queues.all_taken()) throw std::bad_alloc();
}

}  // namespace cpu
}  // namespace flashmoe
