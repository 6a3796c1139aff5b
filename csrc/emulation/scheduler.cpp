// Launch, seeded scheduling of the fibers, failures and the report.
#include <signal.h>
#include <time.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "emulation/internal.h"

namespace flashmoe::emulation {

Machine machine;

namespace {

constexpr int kMeanSlice = 96;  // shared and global accesses between two voluntary switches of a thread

std::string json_text(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\')
      out += '\\', out += c;
    else if (c == '\n')
      out += "\\n";
    else if (static_cast<unsigned char>(c) < 0x20)
      out += ' ';
    else
      out += c;
  }
  return out + "\"";
}

void set_slice() { machine.slice = 1 + static_cast<int>(machine.random.below(2 * kMeanSlice)); }

void fiber_main(void* argument) {
  Fiber& fiber = *static_cast<Fiber*>(argument);
  arrived(fiber.context);
  machine.launch.entry(machine.launch.arguments);
  fiber.state = FiberState::kDone;
  fiber.warp->ready &= ~(1u << fiber.lane);
  --fiber.block->live;
  switch_context(fiber.context, machine.scheduler);
  std::abort();
}

std::unique_ptr<Block> make_block(int index, unsigned char* stacks) {
  const Launch& launch = machine.launch;
  auto block = std::make_unique<Block>();
  block->index = index;
  block->threads = block->live = launch.block;
  block->stacks = stacks;
  block->shared.assign(static_cast<size_t>(launch.shared_bytes), kPoison);
  block->words.resize(static_cast<size_t>(launch.shared_bytes + 3) / 4);
  block->agent_capacity = static_cast<size_t>(2 * launch.block + 192);
  for (int t = 0; t < launch.block; ++t) block->agents.push_back({AgentKind::kThread, t});
  block->warpgroups.resize(static_cast<size_t>(launch.block + 127) / 128);
  for (int w = 0; w * kWarpSize < launch.block; ++w) {
    auto warp = std::make_unique<Warp>();
    warp->block = block.get();
    warp->index = w;
    warp->registers = launch.registers;
    block->warps.push_back(std::move(warp));
  }
  for (int t = 0; t < launch.block; ++t) {
    auto fiber = std::make_unique<Fiber>();
    fiber->block = block.get();
    fiber->warp = block->warps[static_cast<size_t>(t / kWarpSize)].get();
    fiber->thread = t;
    fiber->lane = t % kWarpSize;
    fiber->state = FiberState::kReady;
    fiber->view.reset(block->agent_capacity);
    own_clock(*fiber) = 1;
    fiber->warp->lanes[fiber->lane] = fiber.get();
    fiber->warp->ready |= 1u << fiber->lane;
    ++fiber->warp->size;
    prepare(fiber->context, stacks + static_cast<size_t>(t) * kStackBytes, kStackBytes, fiber_main, fiber.get());
    block->fibers.push_back(std::move(fiber));
  }
  return block;
}

// The threads of a block as text, grouped by what they wait for.
std::string waiting_threads(const Block& block) {
  std::map<std::string, std::vector<int>> groups;
  for (const auto& fiber : block.fibers) {
    if (fiber->state == FiberState::kDone) {
      groups["have exited"].push_back(fiber->thread);
      continue;
    }
    std::string reason = "wait in " + std::string(fiber->waits_in != nullptr ? fiber->waits_in : "nothing");
    if (fiber->waits_in != nullptr) {
      reason += " at " + std::string(fiber->waits_at.file) + ":" + std::to_string(fiber->waits_at.line);
    }
    if (!fiber->waits_for.empty()) reason += " " + fiber->waits_for;
    groups[reason].push_back(fiber->thread);
  }
  std::string text;
  for (const auto& [reason, threads] : groups) {
    text += text.empty() ? "block " + std::to_string(block.index) + ": threads " : "; threads ";
    for (size_t i = 0; i < threads.size();) {
      size_t j = i;
      while (j + 1 < threads.size() && threads[j + 1] == threads[j] + 1) ++j;
      text += (i ? "," : "") + std::to_string(threads[i]) + (j > i ? "-" + std::to_string(threads[j]) : "");
      i = j + 1;
    }
    text += " " + reason;
  }
  return text;
}

bool complete_something() {
  const uint32_t count = static_cast<uint32_t>(machine.resident.size());
  const uint32_t first = machine.random.below(count);
  for (uint32_t i = 0; i < count; ++i) {
    Block& block = *machine.resident[(first + i) % count];
    const uint32_t start = machine.random.below(3);
    for (uint32_t k = 0; k < 3; ++k) {
      const uint32_t choice = (start + k) % 3;
      if (choice == 0 && complete_random_copy(block)) return true;
      if (choice == 1 && complete_random_tensor_copy(block)) return true;
      if (choice == 2 && execute_random_product(block)) return true;
    }
  }
  return false;
}

Warp* pick_warp() {
  static thread_local std::vector<Warp*> ready;
  ready.clear();
  for (Block* block : machine.resident) {
    for (const auto& warp : block->warps) {
      if (warp->ready != 0) ready.push_back(warp.get());
    }
  }
  return ready.empty() ? nullptr : ready[machine.random.below(static_cast<uint32_t>(ready.size()))];
}

// Lets each ready lane run until it waits, yields or ends, starting with a random one.
void run_warp(Warp& warp) {
  const uint32_t first = machine.random.below(kWarpSize);
  for (uint32_t i = 0; i < kWarpSize; ++i) {
    const uint32_t lane = (first + i) % kWarpSize;
    if ((warp.ready >> lane & 1) == 0) continue;
    Fiber& fiber = *warp.lanes[lane];
    machine.current = &fiber;
    ++machine.statistics.switches;
    switch_context(machine.scheduler, fiber.context);
    machine.current = nullptr;
  }
}

void run_blocks(std::vector<int>& order, std::vector<unsigned char*>& free_stacks,
                std::vector<std::unique_ptr<Block>>& storage) {
  size_t next = 0;
  while (next < order.size() || !machine.resident.empty()) {
    while (next < order.size() && !free_stacks.empty()) {
      storage.push_back(make_block(order[next++], free_stacks.back()));
      free_stacks.pop_back();
      machine.resident.push_back(storage.back().get());
    }
    if (++machine.statistics.steps > machine.launch.step_limit) {
      fail(FailureKind::kStepLimit, Site{"", 0, ""}, "scheduler", "no end after %llu scheduling steps",
           static_cast<unsigned long long>(machine.launch.step_limit));
    }
    if (machine.policy == AsyncPolicy::kRandom) {
      for (uint32_t n = machine.random.below(6); n > 0 && complete_something(); --n) {
      }
    } else if (machine.policy == AsyncPolicy::kEager) {
      while (complete_something()) {
      }
    }
    Warp* warp = pick_warp();
    if (warp != nullptr) {
      run_warp(*warp);
    } else if (!complete_something()) {
      std::string text;
      for (Block* block : machine.resident) text += (text.empty() ? "" : " | ") + waiting_threads(*block);
      fail(FailureKind::kDeadlock, Site{"", 0, ""}, "scheduler", "every thread waits: %s", text.c_str());
    }
    for (size_t i = 0; i < machine.resident.size();) {
      Block* block = machine.resident[i];
      if (block->live != 0) {
        ++i;
        continue;
      }
      check_at_exit(*block);
      free_stacks.push_back(block->stacks);
      machine.resident.erase(machine.resident.begin() + static_cast<std::ptrdiff_t>(i));
      storage.erase(std::find_if(storage.begin(), storage.end(), [&](const auto& b) { return b.get() == block; }));
    }
  }
}

// Returns when every block has ended, or when fail() jumps here.
__attribute__((noinline)) void run_until_done(std::vector<int>& order, std::vector<unsigned char*>& free_stacks,
                                              std::vector<std::unique_ptr<Block>>& storage) {
  if (sigsetjmp(machine.escape, 1) == 0) run_blocks(order, free_stacks, storage);
}

void on_fault(int signal, siginfo_t* info, void*) {
  if (machine.running && machine.current != nullptr) {
    if (signal == SIGFPE) {
      fail(FailureKind::kUndefined, Site{"", 0, ""}, "an integer division",
           "by zero, or of the least integer by -1: the GPU gives an unspecified value");
    }
    if (signal == SIGILL || signal == SIGTRAP) {
      fail(FailureKind::kUndefined, Site{"", 0, ""}, "plain C++",
           "an index outside an array, an overflow of a signed integer, or a shift by too much; --sanitize undefined "
           "says "
           "which, and where");
    }
    if (in_windows(info->si_addr)) {
      fail(FailureKind::kPlainDereference, Site{"", 0, ""}, "a plain load or store",
           "shared or global memory was dereferenced without a wrapper of csrc/ptx");
    }
    const unsigned char* stack = machine.current->block->stacks;
    const auto* address = static_cast<unsigned char*>(info->si_addr);
    if (address >= stack && address < stack + kStackBytes * static_cast<size_t>(machine.current->block->threads)) {
      fail(FailureKind::kOutOfBounds, Site{"", 0, ""}, "a plain load or store",
           "the stack of a thread (%zu bytes) overflowed", kStackBytes);
    }
  }
  struct sigaction standard{};
  standard.sa_handler = SIG_DFL;
  sigaction(signal, &standard, nullptr);
}

// CPU time of this thread: what a run costs does not depend on what else the machine does.
double processor_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

std::string report(double seconds) {
  const Statistics& s = machine.statistics;
  std::string text = "{\"kernel\": " + json_text(machine.launch.name) +
                     ", \"seed\": " + std::to_string(machine.launch.seed) + ", \"seconds\": " + std::to_string(seconds);
  const char* const policies[] = {"lazy", "eager", "random"};
  text += ", \"async_policy\": \"" + std::string(policies[static_cast<int>(machine.policy)]) + "\"";
  const std::pair<const char*, uint64_t> counts[] = {{"steps", s.steps},
                                                     {"switches", s.switches},
                                                     {"matrix_products", s.matrix_products},
                                                     {"warpgroup_products", s.warpgroup_products},
                                                     {"multiply_adds", s.multiply_adds},
                                                     {"shared_accesses", s.shared_accesses},
                                                     {"global_accesses", s.global_accesses},
                                                     {"copies", s.copies},
                                                     {"tensor_copies", s.tensor_copies},
                                                     {"barriers", s.barriers}};
  text += ", \"statistics\": {";
  for (const auto& [name, value] : counts) {
    if (text.back() != '{') text += ", ";
    text += "\"" + std::string(name) + "\": " + std::to_string(value);
  }
  text += "}, \"failure\": ";
  if (!machine.failed) return text + "null}";
  const Failure& f = machine.failure;
  text += "{\"kind\": \"" + std::string(failure_name(f.kind)) + "\", \"message\": " + json_text(f.message) +
          ", \"what\": " + json_text(f.what) + ", \"file\": " + json_text(f.file) +
          ", \"line\": " + std::to_string(f.line) + ", \"function\": " + json_text(f.function) +
          ", \"block\": " + std::to_string(f.block) + ", \"thread\": " + std::to_string(f.thread) +
          ", \"warp\": " + std::to_string(f.thread < 0 ? -1 : f.thread / kWarpSize) +
          ", \"lane\": " + std::to_string(f.thread < 0 ? -1 : f.thread % kWarpSize) + "}}";
  return text;
}

}  // namespace

const char* failure_name(FailureKind kind) {
  static const char* const names[] = {"out_of_bounds",
                                      "misaligned",
                                      "uninitialised_read",
                                      "read_only",
                                      "plain_dereference",
                                      "undefined",
                                      "race",
                                      "global_race",
                                      "proxy_fence_missing",
                                      "divergent_collective",
                                      "barrier_misuse",
                                      "mbarrier_misuse",
                                      "phase_lapped",
                                      "transaction_count",
                                      "tensor_map",
                                      "descriptor",
                                      "wgmma_misuse",
                                      "accumulator_touched",
                                      "operand_touched",
                                      "register_budget",
                                      "async_at_exit",
                                      "deadlock",
                                      "step_limit"};
  return names[static_cast<int>(kind)];
}

void fail(FailureKind kind, const Site& site, const char* what, const char* format, ...) {
  char text[4096];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  Failure& failure = machine.failure;
  failure.kind = kind;
  failure.message = text;
  failure.what = what;
  failure.file = site.file;
  failure.line = site.line;
  failure.function = site.function;
  failure.block = machine.current != nullptr ? machine.current->block->index : -1;
  failure.thread = machine.current != nullptr ? machine.current->thread : -1;
  machine.failed = true;
  siglongjmp(machine.escape, 1);
}

void block_current(const char* what, const Site& site) {
  Fiber& fiber = *machine.current;
  fiber.state = FiberState::kBlocked;
  fiber.waits_in = what;
  fiber.waits_at = site;
  fiber.warp->ready &= ~(1u << fiber.lane);
  switch_context(fiber.context, machine.scheduler);
  fiber.waits_in = nullptr;
  fiber.waits_for.clear();
}

void wake(Fiber& fiber) {
  fiber.state = FiberState::kReady;
  fiber.warp->ready |= 1u << fiber.lane;
}

void let_others_run() {
  Fiber& fiber = *machine.current;
  complete_something();
  machine.current = &fiber;
  switch_context(fiber.context, machine.scheduler);
}

void maybe_switch() {
  if (--machine.slice > 0) return;
  set_slice();
  Fiber& fiber = *machine.current;
  switch_context(fiber.context, machine.scheduler);
}

std::string run_launch(const Launch& launch) {
  machine.launch = launch;
  machine.random.seed(launch.seed + 1);
  for (int i = 0; i < 8; ++i) machine.random.next();
  machine.policy = launch.async_policy >= 0 ? static_cast<AsyncPolicy>(launch.async_policy)
                                            : static_cast<AsyncPolicy>(launch.seed % 3);
  machine.statistics = Statistics{};
  machine.failed = false;
  machine.resident.clear();
  machine.elected_lane = static_cast<int>(machine.random.below(kWarpSize));
  set_slice();
  for (Buffer& buffer : machine.buffers) std::fill(buffer.writer.begin(), buffer.writer.end(), 0);

  const size_t slots = static_cast<size_t>(std::min(launch.resident_blocks, launch.run_blocks));
  const size_t stack_count = slots * static_cast<size_t>(launch.block);
  unsigned char* stacks = allocate_stacks(stack_count, kStackBytes);
  std::vector<unsigned char*> free_stacks;
  for (size_t i = 0; i < slots; ++i) {
    free_stacks.push_back(stacks + i * static_cast<size_t>(launch.block) * kStackBytes);
  }
  std::vector<int> order(static_cast<size_t>(launch.run_blocks));
  for (int i = 0; i < launch.run_blocks; ++i) order[static_cast<size_t>(i)] = launch.first_block + i;
  for (size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[machine.random.below(static_cast<uint32_t>(i))]);
  }
  std::vector<std::unique_ptr<Block>> storage;

  static unsigned char signal_stack[64 * 1024];
  stack_t alternate{}, previous_stack{};
  alternate.ss_sp = signal_stack;
  alternate.ss_size = sizeof signal_stack;
  sigaltstack(&alternate, &previous_stack);
  constexpr int kFaults[] = {SIGSEGV, SIGFPE, SIGILL, SIGTRAP};
  struct sigaction action{}, previous[4]{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int i = 0; i < 4; ++i) sigaction(kFaults[i], &action, &previous[i]);

  const double begin = processor_seconds();
  machine.running = true;
  run_until_done(order, free_stacks, storage);
  machine.running = false;
  machine.current = nullptr;
  const double seconds = processor_seconds() - begin;
  for (int i = 0; i < 4; ++i) sigaction(kFaults[i], &previous[i], nullptr);
  sigaltstack(&previous_stack, nullptr);
  machine.resident.clear();
  storage.clear();
  release_stacks(stacks, stack_count, kStackBytes);
  return report(seconds);
}

int thread_index() { return machine.current->thread; }
int block_index() { return machine.current->block->index; }
int block_size() { return machine.launch.block; }
int grid_size() { return machine.launch.grid; }

}  // namespace flashmoe::emulation
