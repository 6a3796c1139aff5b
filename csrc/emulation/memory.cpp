// Shared and global memory: bounds, alignment, what was never written, and the race detector.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unordered_map>

#include "emulation/internal.h"

namespace flashmoe {
namespace emulation {

namespace {

struct SiteEntry {
  Site site;
  const char* what;
};

std::vector<SiteEntry> sites = {{Site{"?", 0, "?"}, "?"}};

struct Window {
  uint64_t base, bytes;
};
std::vector<Window> windows;

// Address space without memory: a plain dereference faults.
unsigned char* reserve(size_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    std::perror("flashmoe emulation: address space");
    std::abort();
  }
  return static_cast<unsigned char*>(base);
}

std::string access_text(const Block& block, const Access& access) {
  return agent_text(block, access.agent) + " at " + site_text(access.site);
}

bool over(const Fiber& fiber, const Access& access, bool fenced) {
  const std::vector<uint32_t>& clocks = fenced ? fiber.view.fenced : fiber.view.seen;
  return clocks[access.agent] >= access.clock;
}

[[noreturn]] void fail_conflict(const Block& block, uint32_t offset, const Access& before, bool before_writes,
                                const Fiber& fiber, int agent, bool now_writes, bool async, const Site& site,
                                const char* what) {
  const char* now_verb = now_writes ? "writes" : "reads";
  const char* before_verb = before_writes ? "wrote" : "read";
  if (async && over(fiber, before, false)) {
    fail(FailureKind::kProxyFenceMissing, site, what,
         "shared byte %u: %s (async proxy) %s what %s %s through the generic proxy, with no fence_proxy_async_shared "
         "between them",
         offset, agent_text(block, agent).c_str(), now_verb, access_text(block, before).c_str(), before_verb);
  }
  fail(FailureKind::kRace, site, what, "shared byte %u: %s %s, and nothing orders that after %s, which %s it", offset,
       agent_text(block, agent).c_str(), now_verb, access_text(block, before).c_str(), before_verb);
}

// Drops the reads that are known to be over and returns how many remain; `out` gets a pointer to the first.
void prune_reads(Block& block, Word& word, const Fiber& fiber) {
  int kept = 0;
  for (int i = 0; i < word.read_count; ++i) {
    if (!over(fiber, word.reads[i], false)) word.reads[kept++] = word.reads[i];
  }
  word.read_count = static_cast<uint8_t>(kept);
  if (word.spill >= 0) {
    std::vector<Access>& spilled = block.spilled_reads[static_cast<size_t>(word.spill)];
    size_t remaining = 0;
    for (const Access& read : spilled) {
      if (!over(fiber, read, false)) spilled[remaining++] = read;
    }
    spilled.resize(remaining);
  }
}

void add_read(Block& block, Word& word, const Access& access, const Fiber& fiber) {
  for (int i = 0; i < word.read_count; ++i) {
    if (word.reads[i].agent == access.agent) {
      word.reads[i] = access;
      return;
    }
  }
  if (word.read_count == Word::kInlineReads) prune_reads(block, word, fiber);
  if (word.read_count < Word::kInlineReads) {
    word.reads[word.read_count++] = access;
    return;
  }
  if (word.spill < 0) {
    word.spill = static_cast<int32_t>(block.spilled_reads.size());
    block.spilled_reads.emplace_back();
  }
  std::vector<Access>& spilled = block.spilled_reads[static_cast<size_t>(word.spill)];
  for (Access& read : spilled) {
    if (read.agent == access.agent) {
      read = access;
      return;
    }
  }
  spilled.push_back(access);
}

}  // namespace

uint16_t site_number(const Site& site, const char* what) {
  static std::unordered_map<uint64_t, uint16_t> numbers;
  static const char* last_file = nullptr;
  static const char* last_what = nullptr;
  static int last_line = 0;
  static uint16_t last_number = 0;
  if (site.file == last_file && site.line == last_line && what == last_what) return last_number;
  const uint64_t key = reinterpret_cast<uint64_t>(site.file) * 31 + reinterpret_cast<uint64_t>(what) * 1000003 +
                       static_cast<uint64_t>(site.line);
  auto [entry, is_new] = numbers.try_emplace(key, static_cast<uint16_t>(sites.size()));
  if (is_new) sites.push_back({site, what});
  last_file = site.file, last_line = site.line, last_what = what, last_number = entry->second;
  return last_number;
}

std::string site_text(uint16_t number) {
  const SiteEntry& entry = sites[number];
  return std::string(entry.what) + " (" + entry.site.file + ":" + std::to_string(entry.site.line) + ")";
}

std::string agent_text(const Block& block, int number) {
  const Agent& agent = block.agents[static_cast<size_t>(number)];
  const std::string owner = std::to_string(agent.owner);
  const std::string place = " (warp " + std::to_string(agent.owner / kWarpSize) + ", lane " +
                            std::to_string(agent.owner % kWarpSize) + ")";
  switch (agent.kind) {
    case AgentKind::kThread: return "thread " + owner + place;
    case AgentKind::kCopies: return "a cp.async of thread " + owner + place;
    case AgentKind::kMbarrier:
      return "a tensor copy onto the mbarrier at shared byte " +
             std::to_string(block.mbarriers[static_cast<size_t>(agent.owner)]->offset);
    case AgentKind::kProducts: return "wgmma of warpgroup " + owner;
    case AgentKind::kStores: return "a bulk store of thread " + owner + place;
  }
  return "?";
}

int add_agent(Block& block, AgentKind kind, int owner) {
  if (block.agents.size() == block.agent_capacity) {
    fail(FailureKind::kMbarrierMisuse, Site{"", 0, ""}, "machine", "more than %zu asynchronous agents in a block",
         block.agent_capacity);
  }
  block.agents.push_back({kind, owner});
  return static_cast<int>(block.agents.size() - 1);
}

void View::join(const View& other, size_t agents) {
  uint32_t* a = seen.data();
  uint32_t* b = fenced.data();
  uint32_t* e = passed.data();
  const uint32_t* c = other.seen.data();
  const uint32_t* d = other.fenced.data();
  const uint32_t* f = other.passed.data();
  for (size_t i = 0; i < agents; ++i) {
    a[i] = a[i] > c[i] ? a[i] : c[i];
    b[i] = b[i] > d[i] ? b[i] : d[i];
    e[i] = e[i] > f[i] ? e[i] : f[i];
  }
}

// ---- shared memory -------------------------------------------------------------------------------------------------
unsigned char* shared_window() {
  static unsigned char* const window = [] {
    unsigned char* base = reserve(2 * kSharedWindowBytes);
    windows.push_back({reinterpret_cast<uint64_t>(base), 2 * kSharedWindowBytes});
    // 1024-byte aligned, as the dynamic shared memory of a kernel that asks for it.
    return base + kSharedWindowBytes / 2;
  }();
  return window;
}

void check_shared_range(const Block& block, int64_t offset, uint32_t bytes, uint32_t alignment, const Site& site,
                        const char* what) {
  if (offset < 0 || offset + bytes > static_cast<int64_t>(block.shared.size())) {
    fail(FailureKind::kOutOfBounds, site, what, "%u bytes at shared byte %lld; the block has %zu", bytes,
         static_cast<long long>(offset), block.shared.size());
  }
  if (offset % alignment != 0) {
    fail(FailureKind::kMisaligned, site, what, "shared byte %lld is not a multiple of %u",
         static_cast<long long>(offset), alignment);
  }
}

uint32_t shared_offset(const Block& block, uint32_t smem, uint32_t bytes, uint32_t alignment, const Site& site,
                       const char* what) {
  const int64_t offset = static_cast<int64_t>(static_cast<int32_t>(smem)) - kSharedReserved;
  check_shared_range(block, offset, bytes, alignment, site, what);
  return static_cast<uint32_t>(offset);
}

uint32_t shared_address(const void* smem, const Site& site, const char* what) {
  const int64_t offset = static_cast<const unsigned char*>(smem) - shared_window();
  if (offset < 0 || offset > static_cast<int64_t>(machine.current->block->shared.size())) {
    fail(FailureKind::kOutOfBounds, site, what, "not an address in shared memory (offset %lld of %zu)",
         static_cast<long long>(offset), machine.current->block->shared.size());
  }
  return static_cast<uint32_t>(offset) + kSharedReserved;
}

void record_read(Block& block, uint32_t offset, uint32_t bytes, const Fiber& fiber, int agent, uint32_t clock,
                 bool async, const Site& site, const char* what) {
  ++machine.statistics.shared_accesses;
  const Access access{clock, static_cast<uint16_t>(agent), site_number(site, what)};
  for (uint32_t index = offset / 4; index <= (offset + bytes - 1) / 4; ++index) {
    Word& word = block.words[index];
    if ((word.flags & kBarrierWord) != 0) {
      fail(FailureKind::kMbarrierMisuse, site, what, "reads the mbarrier at shared byte %u as data", index * 4);
    }
    if ((word.flags & kWritten) != 0) {
      const bool needs_fence = async && (word.flags & kAsyncWrite) == 0;
      if (!over(fiber, word.write, needs_fence) && machine.launch.check_races) {
        fail_conflict(block, index * 4, word.write, true, fiber, agent, false, async, site, what);
      }
    } else {
      fail(FailureKind::kUninitialisedRead, site, what, "%s reads shared byte %u, which nothing has written",
           agent_text(block, agent).c_str(), index * 4);
    }
    add_read(block, word, access, fiber);
  }
}

void record_write(Block& block, uint32_t offset, uint32_t bytes, const Fiber& fiber, int agent, uint32_t clock,
                  bool async, const Site& site, const char* what) {
  ++machine.statistics.shared_accesses;
  const Access access{clock, static_cast<uint16_t>(agent), site_number(site, what)};
  for (uint32_t index = offset / 4; index <= (offset + bytes - 1) / 4; ++index) {
    Word& word = block.words[index];
    if ((word.flags & kBarrierWord) != 0) {
      fail(FailureKind::kMbarrierMisuse, site, what, "overwrites the mbarrier at shared byte %u", index * 4);
    }
    if (machine.launch.check_races) {
      if ((word.flags & kWritten) != 0) {
        const bool needs_fence = async && (word.flags & kAsyncWrite) == 0;
        if (!over(fiber, word.write, needs_fence)) {
          fail_conflict(block, index * 4, word.write, true, fiber, agent, true, async, site, what);
        }
      }
      prune_reads(block, word, fiber);
      if (word.read_count != 0) {
        fail_conflict(block, index * 4, word.reads[0], false, fiber, agent, true, false, site, what);
      }
      if (word.spill >= 0 && !block.spilled_reads[static_cast<size_t>(word.spill)].empty()) {
        fail_conflict(block, index * 4, block.spilled_reads[static_cast<size_t>(word.spill)][0], false, fiber, agent,
                      true, false, site, what);
      }
    }
    word.write = access;
    word.flags = static_cast<uint8_t>(kWritten | kInitialised | (async ? kAsyncWrite : 0));
  }
}

void load_shared(void* to, uint32_t smem, int bytes, const Site& site, const char* what) {
  maybe_switch();
  Fiber& fiber = *machine.current;
  const uint32_t size = static_cast<uint32_t>(bytes);
  const uint32_t offset = shared_offset(*fiber.block, smem, size, size, site, what);
  record_read(*fiber.block, offset, size, fiber, fiber.thread, own_clock(fiber), false, site, what);
  std::memcpy(to, fiber.block->shared.data() + offset, size);
}

void store_shared(uint32_t smem, const void* from, int bytes, const Site& site, const char* what) {
  maybe_switch();
  Fiber& fiber = *machine.current;
  const uint32_t size = static_cast<uint32_t>(bytes);
  const uint32_t offset = shared_offset(*fiber.block, smem, size, size, site, what);
  record_write(*fiber.block, offset, size, fiber, fiber.thread, own_clock(fiber), false, site, what);
  std::memcpy(fiber.block->shared.data() + offset, from, size);
}

// ---- global memory -------------------------------------------------------------------------------------------------
uint64_t reserve_addresses(uint64_t bytes) {
  const uint64_t padded = (bytes + 4095) / 4096 * 4096 + 2 * 4096;
  const uint64_t base = reinterpret_cast<uint64_t>(reserve(padded));
  windows.push_back({base, padded});
  return base + 4096;
}

void map_buffer(uint64_t address, void* storage, uint64_t bytes, bool writable, bool initialised, const char* name) {
  Buffer buffer{address, bytes, static_cast<unsigned char*>(storage), writable, name, {}, {}};
  if (!initialised) buffer.initialised.assign(bytes, 0);
  if (writable) buffer.writer.assign((bytes + 1) / 2, 0);
  machine.buffers.push_back(std::move(buffer));
}

uint64_t add_buffer(void* storage, uint64_t bytes, bool writable, bool initialised, const char* name) {
  const uint64_t address = reserve_addresses(bytes);
  map_buffer(address, storage, bytes, writable, initialised, name);
  return address;
}

void clear_buffers() {
  machine.buffers.clear();
  machine.last_buffer = 0;
  const uint64_t shared = reinterpret_cast<uint64_t>(shared_window()) - kSharedWindowBytes / 2;
  for (const Window& window : windows) {
    if (window.base != shared) munmap(reinterpret_cast<void*>(window.base), window.bytes);
  }
  windows = {{shared, 2 * kSharedWindowBytes}};
}

bool in_windows(const void* address) {
  const uint64_t at = reinterpret_cast<uint64_t>(address);
  return std::any_of(windows.begin(), windows.end(),
                     [&](const Window& window) { return at >= window.base && at < window.base + window.bytes; });
}

namespace {

Buffer* find_buffer(uint64_t address) {
  if (machine.last_buffer < machine.buffers.size()) {
    Buffer& last = machine.buffers[machine.last_buffer];
    if (address >= last.base && address < last.base + last.bytes) return &last;
  }
  for (size_t i = 0; i < machine.buffers.size(); ++i) {
    Buffer& buffer = machine.buffers[i];
    if (address >= buffer.base && address < buffer.base + buffer.bytes) {
      machine.last_buffer = i;
      return &buffer;
    }
  }
  return nullptr;
}

std::string nearest_text(uint64_t address) {
  const Buffer* best = nullptr;
  int64_t distance = 0;
  for (const Buffer& buffer : machine.buffers) {
    const int64_t past = static_cast<int64_t>(address - buffer.base);
    const int64_t gap = past < 0 ? -past : past - static_cast<int64_t>(buffer.bytes);
    if (best == nullptr || gap < distance) best = &buffer, distance = gap;
  }
  if (best == nullptr) return "no buffer is mapped";
  return "the nearest is '" + best->name + "' (" + std::to_string(best->bytes) + " bytes), offset " +
         std::to_string(static_cast<int64_t>(address - best->base));
}

void check_global_write(Buffer& buffer, uint64_t offset, uint32_t bytes, const Fiber* fiber, const Site& site,
                        const char* what) {
  if (fiber == nullptr) return;
  const uint64_t who = static_cast<uint64_t>(fiber->block->index) * kMaxBlockThreads +
                       static_cast<uint64_t>(fiber->thread) + 1;
  const uint64_t mark = who << 32 | fiber->view.seen[static_cast<size_t>(fiber->thread)];
  for (uint64_t unit = offset / 2; unit <= (offset + bytes - 1) / 2; ++unit) {
    const uint64_t before = buffer.writer[unit];
    const uint64_t writer = (before >> 32) - 1;
    if (before != 0 && before >> 32 != who && machine.launch.check_races) {
      const bool same_block = writer / kMaxBlockThreads == static_cast<uint64_t>(fiber->block->index);
      const uint32_t clock = static_cast<uint32_t>(before);
      if (!same_block || fiber->view.seen[writer % kMaxBlockThreads] < clock) {
        fail(FailureKind::kGlobalRace, site, what,
             "byte %llu of '%s' was written by block %llu, thread %llu too, and nothing orders the two",
             static_cast<unsigned long long>(unit * 2), buffer.name.c_str(),
             static_cast<unsigned long long>(writer / kMaxBlockThreads),
             static_cast<unsigned long long>(writer % kMaxBlockThreads));
      }
    }
    buffer.writer[unit] = mark;
  }
}

}  // namespace

unsigned char* global_storage(const void* gmem, uint32_t bytes, uint32_t alignment, bool write, const Fiber* fiber,
                              const Site& site, const char* what) {
  ++machine.statistics.global_accesses;
  const uint64_t address = reinterpret_cast<uint64_t>(gmem);
  if (address % alignment != 0) {
    fail(FailureKind::kMisaligned, site, what, "global address is not a multiple of %u; %s", alignment,
         nearest_text(address).c_str());
  }
  Buffer* buffer = find_buffer(address);
  if (buffer == nullptr || address + bytes > buffer->base + buffer->bytes) {
    fail(FailureKind::kOutOfBounds, site, what, "%u bytes of global memory outside every buffer; %s", bytes,
         nearest_text(address).c_str());
  }
  const uint64_t offset = address - buffer->base;
  if (write) {
    if (!buffer->writable) {
      fail(FailureKind::kReadOnly, site, what, "writes to '%s', which is an input", buffer->name.c_str());
    }
    check_global_write(*buffer, offset, bytes, fiber, site, what);
    if (!buffer->initialised.empty()) std::memset(buffer->initialised.data() + offset, 1, bytes);
  } else if (!buffer->initialised.empty()) {
    for (uint32_t i = 0; i < bytes; ++i) {
      if (buffer->initialised[offset + i] == 0) {
        fail(FailureKind::kUninitialisedRead, site, what, "reads byte %llu of '%s', which nothing has written",
             static_cast<unsigned long long>(offset + i), buffer->name.c_str());
      }
    }
  }
  return buffer->storage + offset;
}

void load_global(void* to, const void* gmem, int bytes, const Site& site, const char* what) {
  maybe_switch();
  const uint32_t size = static_cast<uint32_t>(bytes);
  std::memcpy(to, global_storage(gmem, size, size, false, machine.current, site, what), size);
}

void store_global(void* gmem, const void* from, int bytes, const Site& site, const char* what) {
  maybe_switch();
  const uint32_t size = static_cast<uint32_t>(bytes);
  std::memcpy(global_storage(gmem, size, size, true, machine.current, site, what), from, size);
}

int32_t atomic_add(int32_t* gmem, int32_t value, const Site& site, const char* what) {
  maybe_switch();
  global_storage(gmem, 4, 4, false, nullptr, site, what);
  unsigned char* storage = global_storage(gmem, 4, 4, true, nullptr, site, what);
  int32_t before;
  std::memcpy(&before, storage, 4);
  const int32_t after = before + value;
  std::memcpy(storage, &after, 4);
  return before;
}

}  // namespace emulation
}  // namespace flashmoe
