// Block barriers, warp barriers, mbarriers, and cp.async, whose groups are waited for in the same way.
#include <algorithm>
#include <cstring>

#include "emulation/internal.h"

namespace flashmoe::emulation {

namespace {

// Joins what the thread knows into the view that others will take over; its next accesses get a newer clock.
void release(Fiber& fiber, View& into) {
  fiber.view.passed[static_cast<size_t>(fiber.thread)] = own_clock(fiber);
  into.join(fiber.view, fiber.block->agents.size());
  ++own_clock(fiber);
}

void acquire(Fiber& fiber, const View& from) { fiber.view.join(from, fiber.block->agents.size()); }

}  // namespace

void barrier(int id, int threads, bool waits, const Site& site, const char* what) {
  Fiber& fiber = *machine.current;
  Block& block = *fiber.block;
  ++machine.statistics.barriers;
  if (id < 0 || id > 15) fail(FailureKind::kBarrierMisuse, site, what, "barrier %d; there are 0 to 15", id);
  const int expected = threads == kWholeBlock ? (block.threads + kWarpSize - 1) / kWarpSize * kWarpSize : threads;
  if (threads != kWholeBlock && (threads <= 0 || threads % kWarpSize != 0 || threads > block.threads)) {
    fail(FailureKind::kBarrierMisuse, site, what, "%d threads at barrier %d of a block of %d; it takes whole warps",
         threads, id, block.threads);
  }
  NamedBarrier& barrier = block.barriers[id];
  if (barrier.arrived == 0) {
    barrier.expected = expected;
    barrier.first_site = site;
    barrier.gathered.reset(block.agent_capacity);  // what threads of an earlier round knew does not count in this one
  } else if (barrier.expected != expected) {
    fail(FailureKind::kBarrierMisuse, site, what, "barrier %d expects %d threads here and %d at %s:%d", id, expected,
         barrier.expected, barrier.first_site.file, barrier.first_site.line);
  }
  if (std::find(barrier.waiting.begin(), barrier.waiting.end(), &fiber) != barrier.waiting.end()) {
    fail(FailureKind::kBarrierMisuse, site, what, "this thread waits at barrier %d already", id);
  }
  release(fiber, barrier.gathered);
  ++barrier.arrived;
  if (barrier.arrived < expected) {
    if (!waits) return;
    barrier.waiting.push_back(&fiber);
    fiber.waits_for = "barrier " + std::to_string(id) + " (" + std::to_string(barrier.arrived) + " of " +
                      std::to_string(expected) + " threads were there)";
    block_current(what, site);
    return;
  }
  for (Fiber* waiting : barrier.waiting) {
    acquire(*waiting, barrier.gathered);
    wake(*waiting);
  }
  if (waits) acquire(fiber, barrier.gathered);
  barrier.waiting.clear();
  barrier.arrived = 0;
}

void warp_barrier(const Site& site, const char* what) {
  gather(what, site, nullptr, [](Warp& warp) {
    static View together;
    const size_t agents = warp.block->agents.size();
    together.reset(warp.block->agent_capacity);
    for (Fiber* lane : warp.lanes) release(*lane, together);
    for (Fiber* lane : warp.lanes) lane->view.join(together, agents);
    return true;
  });
}

// ---- cp.async ------------------------------------------------------------------------------------------------------
namespace {

void perform(Block& block, const Copy& copy) {
  unsigned char* to = block.shared.data() + copy.offset;
  std::memset(to, 0, copy.bytes);
  if (copy.source != nullptr) std::memcpy(to, copy.source, copy.source_bytes);
}

}  // namespace

void make_due_arrivals(Fiber& fiber);

void copy_async(uint32_t smem, const void* gmem, int bytes, int source_bytes, const Site& site, const char* what) {
  maybe_switch();
  Fiber& fiber = *machine.current;
  Block& block = *fiber.block;
  ++machine.statistics.copies;
  const uint32_t size = static_cast<uint32_t>(bytes);
  const uint32_t offset = shared_offset(block, smem, size, size, site, what);
  if (source_bytes < 0 || source_bytes > bytes) {
    fail(FailureKind::kOutOfBounds, site, what, "source_bytes is %d; it is 0 to %d", source_bytes, bytes);
  }
  if (reinterpret_cast<uint64_t>(gmem) % size != 0) {
    fail(FailureKind::kMisaligned, site, what, "global address is not a multiple of %u", size);
  }
  const unsigned char* source = nullptr;
  if (source_bytes > 0) {
    source = global_storage(gmem, static_cast<uint32_t>(source_bytes), 1, false, &fiber, site, what);
  }
  if (fiber.copy_agent < 0) fiber.copy_agent = add_agent(block, AgentKind::kCopies, fiber.thread);
  const uint32_t group = fiber.copies_committed + 1;
  record_write(block, offset, size, fiber, fiber.copy_agent, group, false, site, what);
  const Copy copy{group, offset, source, static_cast<uint8_t>(bytes), static_cast<uint8_t>(source_bytes)};
  if (machine.policy == AsyncPolicy::kEager) {
    perform(block, copy);
    return;
  }
  if (machine.policy == AsyncPolicy::kLazy) std::memset(block.shared.data() + offset, kPoison, size);
  fiber.copies.push_back(copy);
  ++block.copies_in_flight;
}

void copy_async_commit(const Site&, const char*) { ++machine.current->copies_committed; }

void copy_async_wait(int pending, const Site&, const char*) {
  Fiber& fiber = *machine.current;
  fiber.waits_for_groups = true;
  const uint32_t left = static_cast<uint32_t>(pending);
  const uint32_t through = fiber.copies_committed > left ? fiber.copies_committed - left : 0;
  finish_copies(fiber, through);
  if (fiber.copy_agent >= 0) {
    uint32_t& seen = fiber.view.seen[static_cast<size_t>(fiber.copy_agent)];
    seen = std::max(seen, through);
  }
}

void finish_copies(Fiber& fiber, uint32_t through_group) {
  size_t kept = 0;
  for (size_t i = 0; i < fiber.copies.size(); ++i) {
    if (fiber.copies[i].group <= through_group) {
      perform(*fiber.block, fiber.copies[i]);
      --fiber.block->copies_in_flight;
    } else {
      fiber.copies[kept++] = fiber.copies[i];
    }
  }
  fiber.copies.resize(kept);
  make_due_arrivals(fiber);
}

bool complete_random_copy(Block& block) {
  if (block.copies_in_flight == 0) return false;
  const uint32_t threads = static_cast<uint32_t>(block.threads);
  const uint32_t first = machine.random.below(threads);
  for (uint32_t i = 0; i < threads; ++i) {
    std::vector<Copy>& copies = block.fibers[(first + i) % threads]->copies;
    if (copies.empty()) continue;
    const size_t choice = machine.random.below(static_cast<uint32_t>(copies.size()));
    perform(block, copies[choice]);
    copies[choice] = copies.back();
    copies.pop_back();
    --block.copies_in_flight;
    make_due_arrivals(*block.fibers[(first + i) % threads]);
    return true;
  }
  return false;
}

// ---- mbarrier ------------------------------------------------------------------------------------------------------
namespace {

constexpr int kMaxTransactionBytes = (1 << 20) - 1;

// A parity names every other phase. Phase n may end only when every thread that waits for phase n - 1 has done so: a
// late thread would take n - 1 for unfinished and wait for n + 1.
void check_waits(const Mbarrier& barrier, const Site& site, const char* what) {
  for (const Access& wait : barrier.waits) {
    if (barrier.gathered.seen[wait.agent] >= wait.clock || barrier.gathered.passed[wait.agent] >= wait.clock) continue;
    fail(FailureKind::kPhaseLapped, site, what,
         "phase %u of the mbarrier at shared byte %u ends, and nothing orders that after thread %u's wait for phase "
         "%d, %s: "
         "a thread that polled later would wait for another phase",
         barrier.phase, barrier.offset, wait.agent, static_cast<int>(barrier.phase) - 1, site_text(wait.site).c_str());
  }
}

void end_phase_if_complete(Mbarrier& barrier, const Site& site, const char* what) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  if (machine.launch.check_races) check_waits(barrier, site, what);
  barrier.waits.clear();
  ++barrier.phase;
  barrier.pending = barrier.arrivals;
  barrier.gathered.seen[barrier.agent] = barrier.phase;
  barrier.done = barrier.gathered;
  for (Fiber* fiber : barrier.waiting) wake(*fiber);
  barrier.waiting.clear();
}

std::string state_text(const Mbarrier& barrier) {
  return "mbarrier at shared byte " + std::to_string(barrier.offset) + " (phase " + std::to_string(barrier.phase) +
         " waits for " + std::to_string(barrier.pending) + " of " + std::to_string(barrier.arrivals) +
         " arrivals and " + std::to_string(barrier.bytes) + " bytes)";
}

}  // namespace

Mbarrier& find_mbarrier(Block& block, uint32_t address, const Site& site, const char* what) {
  const uint32_t offset = shared_offset(block, address, 8, 8, site, what);
  for (const auto& barrier : block.mbarriers) {
    if (barrier->offset != offset) continue;
    if (machine.current->view.seen[barrier->init.agent] < barrier->init.clock && machine.launch.check_races) {
      fail(FailureKind::kRace, site, what,
           "nothing orders this use of the mbarrier at shared byte %u after its init, %s", offset,
           site_text(barrier->init.site).c_str());
    }
    return *barrier;
  }
  fail(FailureKind::kMbarrierMisuse, site, what, "no mbarrier was initialised at shared byte %u", offset);
}

void mbarrier_init(uint32_t address, int arrivals, const Site& site, const char* what) {
  maybe_switch();
  Fiber& fiber = *machine.current;
  Block& block = *fiber.block;
  const uint32_t offset = shared_offset(block, address, 8, 8, site, what);
  if (arrivals < 1 || arrivals > kMaxTransactionBytes) {
    fail(FailureKind::kMbarrierMisuse, site, what, "an arrival count of %d; it is 1 to %d", arrivals,
         kMaxTransactionBytes);
  }
  for (const auto& other : block.mbarriers) {
    if (other->offset == offset) {
      fail(FailureKind::kMbarrierMisuse, site, what, "the mbarrier at shared byte %u is initialised twice", offset);
    }
  }
  record_write(block, offset, 8, fiber, fiber.thread, own_clock(fiber), false, site, what);
  for (uint32_t word = offset / 4; word < offset / 4 + 2; ++word) block.words[word].flags |= kBarrierWord;
  auto barrier = std::make_unique<Mbarrier>();
  barrier->offset = offset;
  barrier->arrivals = barrier->pending = arrivals;
  barrier->agent =
      static_cast<uint16_t>(add_agent(block, AgentKind::kMbarrier, static_cast<int>(block.mbarriers.size())));
  barrier->init = block.words[offset / 4].write;
  barrier->gathered.reset(block.agent_capacity);
  barrier->done.reset(block.agent_capacity);
  block.mbarriers.push_back(std::move(barrier));
}

void mbarrier_init_fence(const Site&, const char*) {
  Fiber& fiber = *machine.current;
  for (const auto& barrier : fiber.block->mbarriers) {
    if (barrier->init.agent == fiber.thread) barrier->init_fenced = true;
  }
}

void mbarrier_arrive(uint32_t address, int expect_bytes, const Site& site, const char* what) {
  maybe_switch();
  Fiber& fiber = *machine.current;
  Mbarrier& barrier = find_mbarrier(*fiber.block, address, site, what);
  if (expect_bytes < 0 || expect_bytes > kMaxTransactionBytes) {
    fail(FailureKind::kTransactionCount, site, what, "%d bytes announced; at most %d", expect_bytes,
         kMaxTransactionBytes);
  }
  if (barrier.pending == 0) {
    fail(FailureKind::kMbarrierMisuse, site, what, "more arrivals than the count of the %s",
         state_text(barrier).c_str());
  }
  for (const uint32_t index : fiber.loads) fiber.block->words[index].flags |= kLoading;
  fiber.loads.clear();
  release(fiber, barrier.gathered);
  barrier.bytes += expect_bytes;
  --barrier.pending;
  end_phase_if_complete(barrier, site, what);
}

void mbarrier_arrive_copies(uint32_t address, const Site& site, const char* what) {
  maybe_switch();
  Fiber& fiber = *machine.current;
  Block& block = *fiber.block;
  const Mbarrier& barrier = find_mbarrier(block, address, site, what);
  if (fiber.waits_for_groups) {
    fail(FailureKind::kMbarrierMisuse, site, what, "a thread that also uses cp_async_wait is not modelled");
  }
  size_t index = 0;
  while (block.mbarriers[index].get() != &barrier) ++index;
  fiber.view.passed[static_cast<size_t>(fiber.thread)] = own_clock(fiber);
  std::vector<uint32_t> passed = fiber.view.passed;
  for (size_t i = 0; i < passed.size(); ++i) passed[i] = std::max(passed[i], fiber.view.seen[i]);
  fiber.copy_arrivals.push_back({++fiber.copies_committed, index, std::move(passed), site});
  ++own_clock(fiber);
  make_due_arrivals(fiber);
}

bool mbarrier_try_wait(uint32_t address, int phase_parity, const Site& site, const char* what) {
  maybe_switch();
  Fiber& fiber = *machine.current;
  Mbarrier& barrier = find_mbarrier(*fiber.block, address, site, what);
  if (phase_parity != 0 && phase_parity != 1) {
    fail(FailureKind::kMbarrierMisuse, site, what, "phase parity %d; it is 0 or 1", phase_parity);
  }
  if ((barrier.phase & 1) != static_cast<uint32_t>(phase_parity)) {
    barrier.waits.push_back({own_clock(fiber), static_cast<uint16_t>(fiber.thread), site_number(site, what)});
    acquire(fiber, barrier.done);
    return true;
  }
  fiber.waits_for = "parity " + std::to_string(phase_parity) + " of the " + state_text(barrier);
  barrier.waiting.push_back(&fiber);
  block_current(what, site);
  return false;
}

// Makes the arrivals whose copies are complete, in the order in which the thread requested them. They make the copies
// visible, and nothing else that the thread did.
void make_due_arrivals(Fiber& fiber) {
  constexpr const char* kWhat = "mbarrier_arrive_cp_async";
  while (!fiber.copy_arrivals.empty()) {
    const CopyArrival arrival = fiber.copy_arrivals.front();
    for (const Copy& copy : fiber.copies) {
      if (copy.group <= arrival.group) return;
    }
    fiber.copy_arrivals.erase(fiber.copy_arrivals.begin());
    Fiber* const before = machine.current;
    machine.current = &fiber;
    Mbarrier& barrier = *fiber.block->mbarriers[arrival.mbarrier];
    if (barrier.pending == 0) {
      fail(FailureKind::kMbarrierMisuse, arrival.site, kWhat, "more arrivals than the count of the %s",
           state_text(barrier).c_str());
    }
    if (fiber.copy_agent >= 0) {
      uint32_t& seen = barrier.gathered.seen[static_cast<size_t>(fiber.copy_agent)];
      seen = std::max(seen, arrival.group);
    }
    for (size_t i = 0; i < arrival.passed.size(); ++i) {
      barrier.gathered.passed[i] = std::max(barrier.gathered.passed[i], arrival.passed[i]);
    }
    --barrier.pending;
    end_phase_if_complete(barrier, arrival.site, kWhat);
    machine.current = before;
  }
}

void transaction_complete(Mbarrier& barrier, uint32_t bytes, uint32_t issue_phase, const Site& site, const char* what) {
  if (barrier.phase != issue_phase) {
    fail(FailureKind::kTransactionCount, site, what,
         "%u bytes of a copy issued in phase %u arrive in phase %u of the %s: fewer bytes were announced than copied",
         bytes, issue_phase, barrier.phase, state_text(barrier).c_str());
  }
  barrier.bytes -= bytes;
  end_phase_if_complete(barrier, site, what);
}

void fence_proxy_async(const Site&, const char*) {
  Fiber& fiber = *machine.current;
  fiber.loads.clear();
  for (size_t i = 0; i < fiber.block->agents.size(); ++i) {
    fiber.view.fenced[i] = std::max(fiber.view.fenced[i], fiber.view.seen[i]);
  }
  ++own_clock(fiber);  // the fence does not cover what this thread writes after it
}

void check_at_exit(Block& block) {
  for (const auto& fiber : block.fibers) finish_copies(*fiber, ~0u);
  machine.current = block.fibers[0].get();
  const Site nowhere{"", 0, ""};
  if (!block.tensor_copies.empty()) {
    const TensorCopy& copy = block.tensor_copies.front();
    fail(FailureKind::kAsyncAtExit, copy.site, copy.is_store ? "tma_store" : "tma_load",
         "block %d ended while this copy still used its shared memory", block.index);
  }
  for (const auto& fiber : block.fibers) {
    if (fiber->last_store_group > fiber->stores_waited) {
      machine.current = fiber.get();
      fail(FailureKind::kAsyncAtExit, nowhere, "tma_store_wait",
           "this thread ended without a wait for its last bulk stores, which may still read shared memory");
    }
  }
  for (const auto& barrier : block.mbarriers) {
    if (barrier->bytes != 0) {
      fail(FailureKind::kTransactionCount, nowhere, "exit", "block %d ended with the %s", block.index,
           state_text(*barrier).c_str());
    }
  }
  for (const Warpgroup& group : block.warpgroups) {
    if (!group.products.empty()) {
      fail(FailureKind::kAsyncAtExit, group.products.front().site, "Wgmma",
           "block %d ended before this product was waited for", block.index);
    }
  }
  for (const NamedBarrier& barrier : block.barriers) {
    if (barrier.arrived != 0) {
      fail(FailureKind::kBarrierMisuse, barrier.first_site, "exit",
           "block %d ended with %d of %d threads arrived at a barrier", block.index, barrier.arrived, barrier.expected);
    }
  }
  for (size_t w = 0; w + 1 < block.warps.size(); ++w) {
    if (w / 4 == (w + 1) / 4 && block.warps[w]->registers != block.warps[w + 1]->registers) {
      fail(FailureKind::kRegisterBudget, nowhere, "exit",
           "warps %zu and %zu of one warpgroup ended with %d and %d registers", w, w + 1, block.warps[w]->registers,
           block.warps[w + 1]->registers);
    }
  }
  machine.current = nullptr;
}

}  // namespace flashmoe::emulation
