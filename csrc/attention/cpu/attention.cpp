// Divides the problem into tasks (batch x query head x block of rows) and runs them on the threads of the caller's
// pool.
#include "attention/cpu/attention.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention/cpu/offsets.h"
#include "attention/cpu/kernel.h"
#include "cpu/isa.h"

namespace flashmoe::cpu {
namespace {

constexpr int32_t kMaxHeadDim = 512;
// So that the end of a block of rows or keys also fits an int32_t.
constexpr int32_t kMaxRows = std::numeric_limits<int32_t>::max() - 1024;
// A tall task packs each block of K and V once for many rows; short tasks balance the load better. At 256 rows the
// packing takes less than a tenth of the time, and the state of a task (three times rows x head_dim x 4 bytes) fits
// a 1 MiB L2 cache.
constexpr int32_t kMaxTaskRows = 256;  // a power of two, like every row_granularity, and larger
// The fewest tasks per thread, if there are enough rows.
constexpr int64_t kTasksPerThread = 2;

void check(bool condition, const char* what, int64_t value) {
  if (!condition) {
    throw std::invalid_argument(std::string("flashmoe::cpu::attention_forward: ") + what + ", got " +
                                std::to_string(value));
  }
}

// Whether there are rows to compute. Throws if a size is out of its range.
bool has_rows(const attention::ForwardParams& params, int num_threads) {
  check(params.batch >= 0, "batch must not be negative", params.batch);
  check(params.heads_q >= 0, "heads_q must not be negative", params.heads_q);
  check(params.seq_q >= 0 && params.seq_q <= kMaxRows, "seq_q must be in 0..2^31-1025", params.seq_q);
  check(params.seq_k >= 0 && params.seq_k <= kMaxRows, "seq_k must be in 0..2^31-1025", params.seq_k);
  check(params.head_dim >= 1 && params.head_dim <= kMaxHeadDim, "head_dim must be in 1..512", params.head_dim);
  check(params.heads_q == 0 || (params.heads_kv > 0 && params.heads_q % params.heads_kv == 0),
        "heads_kv must divide heads_q", params.heads_kv);
  check(num_threads >= 1, "num_threads must be at least 1", num_threads);
  return params.batch > 0 && params.heads_q > 0 && params.seq_q > 0;
}

const Kernel& kernel_of(Isa isa) {
  static constexpr std::array<const Kernel*, kIsaCount> kKernels = {
      FLASHMOE_CPU_KERNELS(&kBaselineKernel, &kAvx2Kernel, &kAvx512Kernel, &kAvx512Kernel, &kAmxKernel)};
  return *kKernels[static_cast<size_t>(isa)];
}

int32_t divide_up(int32_t a, int32_t b) { return a / b + (a % b != 0); }

// The whole problem: a dense batch, or sequences with their own parameters.
struct Problem {
  const attention::ForwardParams& params;
  ScalarType type;
  bool causal;
  bool has_options;
  int32_t head_dim_v;
  int64_t lse_stride;
  const std::vector<attention::ForwardParams>* sequences;  // null: dense
  const attention::Dropout* dropout;                       // null: none

  const attention::ForwardParams& of_sequence(int32_t sequence) const {
    return sequences == nullptr ? params : (*sequences)[static_cast<size_t>(sequence)];
  }
};

int32_t choose_task_rows(const Problem& problem, const Kernel& kernel, int num_threads) {
  const attention::ForwardParams& params = problem.params;
  const auto tasks = [&](int32_t rows) {
    if (problem.sequences == nullptr) return int64_t{params.batch} * params.heads_q * divide_up(params.seq_q, rows);
    int64_t sum = 0;
    for (const attention::ForwardParams& sequence : *problem.sequences) sum += divide_up(sequence.seq_q, rows);
    return sum * params.heads_q;
  };
  int32_t rows = kMaxTaskRows;
  while (rows > kernel.row_granularity && tasks(rows) < kTasksPerThread * num_threads) rows /= 2;
  return rows;
}

struct Plan {
  Plan(const Problem& problem, int num_threads)
      : problem(problem),
        params(problem.params),
        kernel(kernel_of(current_isa())),
        task_rows(choose_task_rows(problem, kernel, num_threads)),
        row_tasks(divide_up(params.seq_q, task_rows)),
        heads(int64_t{params.batch} * params.heads_q),
        threads(std::min<int64_t>(num_threads, heads * row_tasks)),
        queues(heads, row_tasks, threads) {}

  // The longest tasks of a causal problem (the last rows) come first, so that no thread starts one when the others
  // finish. Returns false if a short sequence has no such task.
  bool make_task(TaskQueues::Task position, Task* task) const {
    const auto sequence = static_cast<int32_t>(position.group / params.heads_q);
    task->params = &problem.of_sequence(sequence);
    const int32_t rows = task->params->seq_q;
    const int32_t index = divide_up(rows, task_rows) - 1 - static_cast<int32_t>(position.index);
    if (index < 0) return false;
    task->type = problem.type;
    task->causal = problem.causal;
    task->batch = problem.sequences == nullptr ? sequence : 0;
    task->head_q = static_cast<int32_t>(position.group % params.heads_q);
    task->row_begin = index * task_rows;
    task->row_end = static_cast<int32_t>(std::min<int64_t>(rows, int64_t{task->row_begin} + task_rows));
    task->head_dim_v = problem.head_dim_v;
    task->lse_stride = problem.lse_stride;
    task->has_options = problem.has_options;
    task->dropout = problem.dropout;
    task->sequence = sequence;
    return true;
  }

  const Problem& problem;
  const attention::ForwardParams& params;
  const Kernel& kernel;
  const int32_t task_rows;
  const int32_t row_tasks;  // per head, of the longest sequence
  const int64_t heads;      // batch * heads_q
  const int64_t threads;
  TaskQueues queues;
  std::atomic<bool> out_of_memory{false};
};

// Body of the parallel loop. Each index in [begin, end) is a thread, which takes tasks until none is left. It must not
// throw: the pool may be C code.
void work(int64_t begin, int64_t, void* context) noexcept {
  Plan& plan = *static_cast<Plan*>(context);
  thread_local Scratch scratch;
  try {
    const int32_t head_dim = std::max(plan.params.head_dim, plan.problem.head_dim_v);
    void* memory = scratch.reserve(plan.kernel.scratch_bytes(plan.problem.type, head_dim, plan.task_rows));
    TaskQueues::Cursor cursor = plan.queues.cursor(begin);
    TaskQueues::Task position;
    Task task;
    while (plan.queues.take(&cursor, &position)) {
      if (plan.make_task(position, &task)) plan.kernel.run(task, memory);
    }
  } catch (const std::bad_alloc&) {
    plan.out_of_memory = true;
  }
}

// Without keys every row is fully masked.
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

void compute(const Problem& problem, ParallelFor parallel_for, int num_threads) {
  Plan plan(problem, num_threads);
  if (plan.threads == 1) {
    work(0, 1, &plan);
  } else {
    parallel_for(0, plan.threads, 1, work, &plan);
  }
  // A thread without memory leaves its tasks to the others; tasks remain only if no thread had memory.
  if (plan.out_of_memory && !plan.queues.all_taken()) throw std::bad_alloc();
}

std::vector<attention::ForwardParams> make_sequences(const attention::ForwardParams& params, ScalarType type) {
  std::vector<attention::ForwardParams> sequences(static_cast<size_t>(params.batch), params);
  const int64_t lse_stride = statistic_stride(params);
  for (int32_t index = 0; index < params.batch; ++index) {
    attention::ForwardParams& sequence = sequences[static_cast<size_t>(index)];
    const SequenceOffset at(params, type, index);
    sequence.batch = 1;
    sequence.seq_q = at.rows().length;
    sequence.seq_k = at.keys().length;
    sequence.q = at.row(params.q, params.q_stride);
    sequence.k = at.key(params.k, params.k_stride);
    sequence.v = at.key(params.v, params.v_stride);
    sequence.out = at.row(params.out, params.out_stride);
    sequence.lse = at.statistic(params.lse, lse_stride);
    if (params.sequences.block_table != nullptr) {
      sequence.sequences.block_table = params.sequences.block_table + index * params.sequences.block_table_stride;
    }
    sequence.score_options = at.options(params.score_options);
  }
  return sequences;
}

}  // namespace

void attention_forward(const attention::ForwardParams& params, ScalarType type, bool causal, ParallelFor parallel_for,
                       int num_threads) {
  if (!has_rows(params, num_threads)) return;
  if (params.seq_k == 0) {
    fill_empty(params, type);
    return;
  }
  compute({params, type, causal, false, params.head_dim, params.seq_q, nullptr, nullptr}, parallel_for, num_threads);
}

void attention_forward_varlen(const attention::ForwardParams& params, ScalarType type,
                              const attention::Dropout* dropout, ParallelFor parallel_for, int num_threads) {
  check(params.head_dim_v >= 1 && params.head_dim_v <= kMaxHeadDim, "head_dim_v must be in 1..512", params.head_dim_v);
  if (!has_rows(params, num_threads)) return;
  const std::vector<attention::ForwardParams> sequences = make_sequences(params, type);
  compute({params, type, params.score_options.right == 0, dropout != nullptr || needs_options(params),
           params.head_dim_v, statistic_stride(params), &sequences, dropout},
          parallel_for, num_threads);
}

}  // namespace flashmoe::cpu
