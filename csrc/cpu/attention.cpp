// Cuts the problem into tasks (batch x query head x block of rows) and hands them to the workers of the caller's pool.
#include "attention.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "isa.h"
#include "kernel.h"

namespace flashmoe {
namespace cpu {
namespace {

constexpr int32_t kMaxHeadDim = 256;
// So that the end of a block of rows or keys is an int32_t too.
constexpr int32_t kMaxRows = std::numeric_limits<int32_t>::max() - 1024;
// A tall task packs each block of K and V once for many rows; a low one balances. At 256 rows the packing is under a
// tenth of the time, and the state of a task (rows x head_dim x 4 bytes, thrice) stays inside a 1 MiB L2 cache.
constexpr int32_t kMaxTaskRows = 256;
// Fewest tasks a worker should have, where the rows allow it.
constexpr int64_t kTasksPerWorker = 2;

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

// One worker's scratch memory, kept for its thread's next call: a fresh allocation of this size would be mapped and
// faulted in page by page, which takes longer than a short sequence's attention. At most about 3 MiB (head_dim 256).
class Scratch {
 public:
  void* reserve(size_t bytes) {
    if (bytes > size_) {
      memory_.reset();
      size_ = 0;
      constexpr size_t kAlignment = 64;
      memory_.reset(std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment));
      if (memory_ == nullptr) throw std::bad_alloc();
      size_ = bytes;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
  size_t size_ = 0;
};

// The tasks of some heads, in order: the longest tasks of a causal problem (the last rows) come first, so that no worker
// starts one when the others end. (The fp32 tile kernel takes a task ahead where tasks are one block of keys long.) A
// worker begins with its own queue and goes on with the others': so a head's K and V
// are read by one core as a rule, the same one in every call, whose cache may hold them.
struct alignas(64) Queue {
  std::atomic<int64_t> next;
  int64_t first_head;
  int64_t heads;
};
constexpr int64_t kMaxQueues = 64;

struct Plan {
  const attention::ForwardParams* params;
  const Kernel* kernel;
  ScalarType type;
  bool causal;
  int32_t task_rows;
  int32_t blocks;    // tasks of one head
  int64_t heads;     // batch * heads_q
  int64_t tasks;     // blocks * heads
  size_t scratch_bytes;
  int64_t workers;
  int64_t queue_count;
  std::array<Queue, kMaxQueues> queues;  // queue_count of them; the others' cache lines are not touched
  std::atomic<bool> out_of_memory{false};
};

int32_t divide_up(int32_t a, int32_t b) { return a / b + (a % b != 0); }

int32_t choose_task_rows(const attention::ForwardParams& params, const Kernel& kernel, int num_threads) {
  const int64_t heads = int64_t{params.batch} * params.heads_q;
  int32_t rows = kMaxTaskRows;
  while (rows > kernel.row_granularity && heads * divide_up(params.seq_q, rows) < kTasksPerWorker * num_threads) {
    rows /= 2;
  }
  return std::max(rows, kernel.row_granularity);
}

Task make_task(const Plan& plan, const Queue& queue, int64_t index) {
  const attention::ForwardParams& params = *plan.params;
  const int32_t block = plan.blocks - 1 - static_cast<int32_t>(index / queue.heads);
  const int64_t head = queue.first_head + index % queue.heads;
  Task task;
  task.params = &params;
  task.type = plan.type;
  task.causal = plan.causal;
  task.batch = static_cast<int32_t>(head / params.heads_q);
  task.head_q = static_cast<int32_t>(head % params.heads_q);
  task.row_begin = block * plan.task_rows;
  task.row_end = static_cast<int32_t>(std::min<int64_t>(params.seq_q, int64_t{task.row_begin} + plan.task_rows));
  return task;
}

void make_queues(Plan& plan) {
  plan.queue_count = std::min({plan.workers, plan.heads, kMaxQueues});
  for (int64_t i = 0; i < plan.queue_count; ++i) {
    Queue& queue = plan.queues[static_cast<size_t>(i)];
    queue.next.store(0, std::memory_order_relaxed);
    queue.first_head = plan.heads * i / plan.queue_count;
    queue.heads = plan.heads * (i + 1) / plan.queue_count - queue.first_head;
  }
}

// Where a worker is: it begins with its own queue.
struct Worker {
  Plan* plan;
  int64_t own;
  int64_t passed;  // queues that it found empty
};

bool take_task(void* context, Task* task) noexcept {
  Worker& worker = *static_cast<Worker*>(context);
  Plan& plan = *worker.plan;
  for (; worker.passed < plan.queue_count; ++worker.passed) {
    Queue& queue = plan.queues[static_cast<size_t>((worker.own + worker.passed) % plan.queue_count)];
    const int64_t index = queue.next.fetch_add(1, std::memory_order_relaxed);
    if (index >= queue.heads * plan.blocks) continue;
    *task = make_task(plan, queue, index);
    return true;
  }
  return false;
}

// Body of the parallel loop. Each index of [begin, end) is a worker, which takes tasks until none is left. It must not
// throw: the pool may be C code.
void work(int64_t begin, int64_t, void* context) noexcept {
  Plan& plan = *static_cast<Plan*>(context);
  thread_local Scratch scratch;
  try {
    void* memory = scratch.reserve(plan.scratch_bytes);
    Worker worker = {&plan, begin * plan.queue_count / plan.workers, 0};
    plan.kernel->run({take_task, &worker}, memory);
  } catch (const std::bad_alloc&) {
    plan.out_of_memory = true;
  }
}

bool all_taken(const Plan& plan) {
  for (int64_t i = 0; i < plan.queue_count; ++i) {
    const Queue& queue = plan.queues[static_cast<size_t>(i)];
    if (queue.next < queue.heads * plan.blocks) return false;
  }
  return true;
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
  Plan plan;
  plan.params = &params;
  plan.kernel = &selected_kernel();
  plan.type = type;
  plan.causal = causal;
  plan.task_rows = choose_task_rows(params, *plan.kernel, num_threads);
  plan.blocks = divide_up(params.seq_q, plan.task_rows);
  plan.heads = int64_t{params.batch} * params.heads_q;
  plan.tasks = plan.blocks * plan.heads;
  plan.scratch_bytes = plan.kernel->scratch_bytes(type, params.head_dim, plan.task_rows);
  plan.workers = std::min<int64_t>(num_threads, plan.tasks);
  make_queues(plan);
  if (plan.workers == 1) {
    work(0, 1, &plan);
  } else {
    parallel_for(0, plan.workers, 1, work, &plan);
  }
  // Without memory a worker leaves its tasks to the others; only when none could work is anything left undone.
  if (plan.out_of_memory && !all_taken(plan)) throw std::bad_alloc();
}

}  // namespace cpu
}  // namespace flashmoe
