// Global memory: reserved address space without memory, the buffers in it, what they hold and who wrote it.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "emulation/internal.h"

namespace flashmoe::emulation {

namespace {

struct Window {
  uint64_t base, bytes;
};

std::vector<Window> windows;

}  // namespace

unsigned char* reserve_window(uint64_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    std::perror("flashmoe emulation: address space");
    std::abort();
  }
  windows.push_back({reinterpret_cast<uint64_t>(base), bytes});
  return static_cast<unsigned char*>(base);
}

uint64_t reserve_addresses(uint64_t bytes) {
  const uint64_t padded = (bytes + 4095) / 4096 * 4096 + 2 * 4096;
  return reinterpret_cast<uint64_t>(reserve_window(padded)) + 4096;
}

void map_buffer(uint64_t address, void* storage, uint64_t bytes, bool writable, bool initialised, const char* name) {
  Buffer buffer{address, bytes, static_cast<unsigned char*>(storage), writable, false, name, {}, {}};
  if (!initialised) buffer.initialised.assign(bytes, 0);
  if (writable) buffer.writer.assign(bytes, 0);
  machine.buffers.push_back(std::move(buffer));
}

void expect_from_preceding_grid(uint64_t address) {
  for (Buffer& buffer : machine.buffers) {
    if (buffer.base == address) buffer.from_preceding_grid = true;
  }
}

void grid_dependency_wait() { machine.current->grid_waited = true; }

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
  const uint64_t who =
      static_cast<uint64_t>(fiber->block->index) * kMaxBlockThreads + static_cast<uint64_t>(fiber->thread) + 1;
  const uint64_t mark = who << 32 | fiber->view.seen[static_cast<size_t>(fiber->thread)];
  for (uint64_t byte = offset; byte < offset + bytes; ++byte) {
    const uint64_t before = buffer.writer[byte];
    const uint64_t writer = (before >> 32) - 1;
    if (before != 0 && before >> 32 != who && machine.launch.check_races) {
      const bool same_block = writer / kMaxBlockThreads == static_cast<uint64_t>(fiber->block->index);
      const uint32_t clock = static_cast<uint32_t>(before);
      if (!same_block || fiber->view.seen[writer % kMaxBlockThreads] < clock) {
        fail(FailureKind::kGlobalRace, site, what,
             "byte %llu of '%s' was written by block %llu, thread %llu too, and nothing orders the two",
             static_cast<unsigned long long>(byte), buffer.name.c_str(),
             static_cast<unsigned long long>(writer / kMaxBlockThreads),
             static_cast<unsigned long long>(writer % kMaxBlockThreads));
      }
    }
    buffer.writer[byte] = mark;
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
  if (buffer->from_preceding_grid && fiber != nullptr && !fiber->grid_waited) {
    fail(FailureKind::kGlobalRace, site, what, "touches '%s', which the grid in front may still write: no wait for it",
         buffer->name.c_str());
  }
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
  machine.current->loads.clear();
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

void semaphore_wait(const int32_t* gmem, int32_t value, const Site& site, const char* what) {
  for (;;) {
    int32_t found;
    std::memcpy(&found, global_storage(gmem, 4, 4, false, nullptr, site, what), 4);
    if (found == value) return;
    let_others_run();
  }
}

void semaphore_release(int32_t* gmem, int32_t value, const Site& site, const char* what) {
  maybe_switch();
  std::memcpy(global_storage(gmem, 4, 4, true, nullptr, site, what), &value, 4);
}

}  // namespace flashmoe::emulation
