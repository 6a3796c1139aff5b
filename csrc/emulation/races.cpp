// The race detector: what has accessed each word of shared memory, as which agent, and what a thread knows about it.
#include <string>
#include <unordered_map>

#include "emulation/internal.h"

namespace flashmoe::emulation {

namespace {

struct SiteEntry {
  Site site;
  const char* what;
};

std::vector<SiteEntry> sites = {{Site{"?", 0, "?"}, "?"}};

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

// Drops the reads that are known to be complete.
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

// Fails if a read of the word, or an addition to it, may still be under way; `writes`: whether this access writes.
void expect_no_reads(Block& block, uint32_t index, const Fiber& fiber, int agent, bool writes, const Site& site,
                     const char* what) {
  Word& word = block.words[index];
  const bool added = (word.flags & kAdded) != 0;
  prune_reads(block, word, fiber);
  if (word.read_count != 0) {
    fail_conflict(block, index * 4, word.reads[0], added, fiber, agent, writes, false, site, what);
  }
  if (word.spill >= 0 && !block.spilled_reads[static_cast<size_t>(word.spill)].empty()) {
    fail_conflict(block, index * 4, block.spilled_reads[static_cast<size_t>(word.spill)][0], added, fiber, agent,
                  writes, false, site, what);
  }
  word.flags = static_cast<uint8_t>(word.flags & ~kAdded);
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
  const std::string place =
      " (warp " + std::to_string(agent.owner / kWarpSize) + ", lane " + std::to_string(agent.owner % kWarpSize) + ")";
  switch (agent.kind) {
    case AgentKind::kThread:
      return "thread " + owner + place;
    case AgentKind::kCopies:
      return "a cp.async of thread " + owner + place;
    case AgentKind::kMbarrier:
      return "a tensor copy onto the mbarrier at shared byte " +
             std::to_string(block.mbarriers[static_cast<size_t>(agent.owner)]->offset);
    case AgentKind::kProducts:
      return "wgmma of warpgroup " + owner;
    case AgentKind::kStores:
      return "a bulk store of thread " + owner + place;
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

// The larger of each pair. Two pointers only: among six, a compiler cannot tell what overlaps, and uses no vectors.
#if defined(__x86_64__) && !defined(FLASHMOE_EMULATION_SANITIZE)
__attribute__((target_clones("avx512f", "avx2", "default")))  // SSE2 has no maximum of unsigned words
#endif
static void raise(uint32_t* to, const uint32_t* least, size_t count) {
  for (size_t i = 0; i < count; ++i) to[i] = to[i] > least[i] ? to[i] : least[i];
}

void View::join(const View& other, size_t agents) {
  raise(seen.data(), other.seen.data(), agents);
  raise(fenced.data(), other.fenced.data(), agents);
  raise(passed.data(), other.passed.data(), agents);
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
    if ((word.flags & kAdded) != 0 && machine.launch.check_races) {
      expect_no_reads(block, index, fiber, agent, false, site, what);
    }
    add_read(block, word, access, fiber);
    const bool is_load = block.agents[static_cast<size_t>(agent)].kind == AgentKind::kThread;
    if (is_load && (word.flags & kAsyncWrite) != 0) block.fibers[static_cast<size_t>(agent)]->loads.push_back(index);
  }
}

void record_addition(Block& block, uint32_t offset, Fiber& fiber, const Site& site, const char* what) {
  Word& word = block.words[offset / 4];
  const bool is_first = (word.flags & kAdded) == 0;
  if (is_first && machine.launch.check_races) {
    expect_no_reads(block, offset / 4, fiber, fiber.thread, true, site, what);
  }
  word.flags = static_cast<uint8_t>(word.flags & ~kAdded);  // additions need no order among themselves
  record_read(block, offset, 4, fiber, fiber.thread, own_clock(fiber), false, site, what);
  word.flags |= kAdded;
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
      expect_no_reads(block, index, fiber, agent, true, site, what);
      if (async && (word.flags & kLoading) != 0) {
        fail(FailureKind::kProxyFenceMissing, site, what,
             "shared byte %u: %s (async proxy) writes what an arrival let go of behind a load, which may still be "
             "under way: nothing between the two "
             "has used its value, and there is no fence_proxy_async_shared",
             index * 4, agent_text(block, agent).c_str());
      }
    }
    word.write = access;
    word.flags = static_cast<uint8_t>(kWritten | (async ? kAsyncWrite : 0));
  }
}

}  // namespace flashmoe::emulation
