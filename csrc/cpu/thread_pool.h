// Distributes an operation's work over the caller's thread pool. For the dispatchers, which are compiled once.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace flashmoe::cpu {

// Calls body(begin, end, context) on disjoint ranges that cover [begin, end), on as many threads as it likes, and
// returns when all are done. Torch's own pool is passed in, so that this library starts no thread of its own.
using ParallelFor = void (*)(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*),
                             void* context);

// One thread's scratch memory, kept for its next call: a fresh allocation of this size would be mapped and faulted in
// page by page, which takes longer than a short sequence's attention.
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

// `groups` x `group_tasks` tasks, where the tasks of a group read the same data (a head's K and V). Each thread starts
// with its own queue of some groups, then helps with the others: a group's data are usually read by one core, the same
// one in every call, whose cache may still hold them. A queue hands out task 0 of all its groups first.
class TaskQueues {
 public:
  struct Task {
    int64_t group;
    int64_t index;  // in its group
  };
  // A thread's position in the queues.
  struct Cursor {
    int64_t own;
    int64_t drained;  // queues that it found empty
  };

  TaskQueues(int64_t groups, int64_t group_tasks, int64_t threads)
      : group_tasks_(group_tasks), threads_(threads), count_(std::min({threads, groups, kMaxQueues})) {
    for (int64_t i = 0; i < count_; ++i) {
      Queue& queue = queues_[static_cast<size_t>(i)];
      queue.next.store(0, std::memory_order_relaxed);
      queue.first_group = groups * i / count_;
      queue.groups = groups * (i + 1) / count_ - queue.first_group;
    }
  }

  Cursor cursor(int64_t thread) const { return {thread * count_ / threads_, 0}; }

  // Takes the thread's next task; false when none is left.
  bool take(Cursor* cursor, Task* task) noexcept {
    for (; cursor->drained < count_; ++cursor->drained) {
      Queue& queue = queues_[static_cast<size_t>((cursor->own + cursor->drained) % count_)];
      const int64_t index = queue.next.fetch_add(1, std::memory_order_relaxed);
      if (index >= queue.groups * group_tasks_) continue;
      *task = {queue.first_group + index % queue.groups, index / queue.groups};
      return true;
    }
    return false;
  }

  bool all_taken() const {
    for (int64_t i = 0; i < count_; ++i) {
      const Queue& queue = queues_[static_cast<size_t>(i)];
      if (queue.next < queue.groups * group_tasks_) return false;
    }
    return true;
  }

 private:
  struct alignas(64) Queue {
    std::atomic<int64_t> next;
    int64_t first_group;
    int64_t groups;
  };
  static constexpr int64_t kMaxQueues = 64;

  const int64_t group_tasks_;
  const int64_t threads_;
  const int64_t count_;
  std::array<Queue, kMaxQueues> queues_;  // count_ of them; the others' cache lines are not touched
};

}  // namespace flashmoe::cpu
