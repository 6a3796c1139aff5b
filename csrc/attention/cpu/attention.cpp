// Cuts the problem into tasks (batch x query head x block of rows) and hands them to the threads of the caller's pool.
#include "attention/cpu/attention.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

#include "attention/cpu/kernel.h"
#include "cpu/isa.h"

namespace flashmoe {
namespace cpu {
namespace {

constexpr int32_t kMaxHeadDim = 256;
// So that the end of a block of rows or keys is an int32_t too.
constexpr int32_t kMaxRows = std::numeric_limits<int32_t>::max() - 1024;
// A tall task packs each block of K and V once for many rows; a low one balances. At 256 rows the packing is under a
// tenth of the time, and the state of a task (rows x head_dim x 4 bytes, thrice) stays inside a 1 MiB L2 cache.
constexpr int32_t kMaxTaskRows = 256;
// Fewest tasks a thread should have, where the rows allow it.
constexpr int64_t kTasksPerThread = 2;

void check(bool condition, const char* what, int64_t value) {
  if (!condition) {
    throw std::invalid_argument(std::string("flashmoe::cpu::attention_forward: ") + what + ", got " +
                                std::to_string(value));
  }
}

void validate(const attention::ForwardParams& params, int num_threads) {
  check(params.batch >= 0, "batch must not be negative", params.batch);
  check(params.heads_q >= 0, "heads_q must not be negative", params.heads_q);
  check(params.seq_q >= 0 && params.seq_q <= kMaxRows, "seq_q must be in 0..2^31-1025", params.seq_q);
  check(params.seq_k >= 0 && params.seq_k <= kMaxRows, "seq_k must be in 0..2^31-1025", params.seq_k);
  check(params.head_dim >= 1 && params.head_dim <= kMaxHeadDim, "head_dim must be in 1..256", params.head_dim);
  check(params.heads_q == 0 || (params.heads_kv > 0 && params.heads_q % params.heads_kv == 0),
        "heads_kv must divide heads_q", params.heads_kv);
  check(num_threads >= 1, "num_threads must be at least 1", num_threads);
}

const Kernel& kernel_of(Isa isa) {
  static constexpr std::array<const Kernel*, kIsaCount> kKernels = {&kBaselineKernel, &kAvx2Kernel, &kAvx512Kernel,
                                                                    &kAvx512Kernel, &kAmxKernel};
  return *kKernels[static_cast<size_t>(isa)];
}

int32_t divide_up(int32_t a, int32_t b) { return a / b + (a % b != 0); }

int32_t choose_task_rows(const attention::ForwardParams& params, const Kernel& kernel, int num_threads) {
  const int64_t heads = int64_t{params.batch} * params.heads_q;
  int32_t rows = kMaxTaskRows;
  while (rows > kernel.row_granularity && heads * divide_up(params.seq_q, rows) < kTasksPerThread * num_threads) {
    rows /= 2;
  }
  return std::max(rows, kernel.row_granularity);
}

struct Plan {
  Plan(const attention::ForwardParams& params, ScalarType type, bool causal, int num_threads)
      : params(params),
        kernel(kernel_of(current_isa())),
        type(type),
        causal(causal),
        task_rows(choose_task_rows(params, kernel, num_threads)),
        row_tasks(divide_up(params.seq_q, task_rows)),
        heads(int64_t{params.batch} * params.heads_q),
        threads(std::min<int64_t>(num_threads, heads * row_tasks)),
        queues(heads, row_tasks, threads) {}

  // The longest tasks of a causal problem (the last rows) come first, so that no thread starts one when the others end.
  Task task(TaskQueues::Task position) const {
    Task task;
    task.params = &params;
    task.type = type;
    task.causal = causal;
    task.batch = static_cast<int32_t>(position.group / params.heads_q);
    task.head_q = static_cast<int32_t>(position.group % params.heads_q);
    task.row_begin = (row_tasks - 1 - static_cast<int32_t>(position.index)) * task_rows;
    task.row_end = static_cast<int32_t>(std::min<int64_t>(params.seq_q, int64_t{task.row_begin} + task_rows));
    return task;
  }

  const attention::ForwardParams& params;
  const Kernel& kernel;
  const ScalarType type;
  const bool causal;
  const int32_t task_rows;
  const int32_t row_tasks;  // of one head
  const int64_t heads;      // batch * heads_q
  const int64_t threads;
  TaskQueues queues;
  std::atomic<bool> out_of_memory{false};
};

// Body of the parallel loop. Each index of [begin, end) is a thread, which takes tasks until none is left. It must not
// throw: the pool may be C code.
void work(int64_t begin, int64_t, void* context) noexcept {
  Plan& plan = *static_cast<Plan*>(context);
  thread_local Scratch scratch;
  try {
    void* memory = scratch.reserve(plan.kernel.scratch_bytes(plan.type, plan.params.head_dim, plan.task_rows));
    TaskQueues::Cursor cursor = plan.queues.cursor(begin);
    TaskQueues::Task position;
    while (plan.queues.take(&cursor, &position)) plan.kernel.run(plan.task(position), memory);
  } catch (const std::bad_alloc&) {
    plan.out_of_memory = true;
  }
}

size_t element_size(ScalarType type) { return type == ScalarType::kFloat32 ? 4 : 2; }

// No key at all: every row is fully masked.
void fill_empty(const attention::ForwardParams& params, ScalarType type) {
  const size_t size = element_size(type);
  const int64_t heads = int64_t{params.batch} * params.heads_q;
  for (int64_t head = 0; head < heads; ++head) {
    const int64_t offset =
        head / params.heads_q * params.out_stride.batch + head % params.heads_q * params.out_stride.head;
    for (int64_t row = 0; row < params.seq_q; ++row) {
      char* out = static_cast<char*>(params.out) + (offset + row * params.out_stride.row) * static_cast<int64_t>(size);
      std::fill_n(out, size * static_cast<size_t>(params.head_dim), '\0');
    }
  }
  if (params.lse == nullptr) return;
  std::fill_n(params.lse, heads * params.seq_q, -std::numeric_limits<float>::infinity());
}

}  // namespace

void attention_forward(const attention::ForwardParams& params, ScalarType type, bool causal, ParallelFor parallel_for,
                       int num_threads) {
  validate(params, num_threads);
  if (params.batch == 0 || params.heads_q == 0 || params.seq_q == 0) return;
  if (params.seq_k == 0) {
    fill_empty(params, type);
    return;
  }
  Plan plan(params, type, causal, num_threads);
  if (plan.threads == 1) {
    work(0, 1, &plan);
  } else {
    parallel_for(0, plan.threads, 1, work, &plan);
  }
  // Without memory a thread leaves its tasks to the others; only when none could work is anything left undone.
  if (plan.out_of_memory && !plan.queues.all_taken()) throw std::bad_alloc();
}

}  // namespace cpu
}  // namespace flashmoe
