// Shared memory: addresses, bounds, alignment, loads and stores.
#include <cstring>

#include "emulation/internal.h"

namespace flashmoe::emulation {

unsigned char* shared_window() {
  static unsigned char* const window = [] {
    // 1024-byte aligned, like the dynamic shared memory of a kernel that requests it.
    return reserve_window(2 * kSharedWindowBytes) + kSharedWindowBytes / 2;
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
  fiber.loads.clear();
  std::memcpy(fiber.block->shared.data() + offset, from, size);
}

void add_shared(uint32_t smem, int32_t value, const Site& site, const char* what) {
  maybe_switch();
  Fiber& fiber = *machine.current;
  const uint32_t offset = shared_offset(*fiber.block, smem, 4, 4, site, what);
  record_addition(*fiber.block, offset, fiber, site, what);
  int32_t sum;
  std::memcpy(&sum, fiber.block->shared.data() + offset, 4);
  sum += value;
  std::memcpy(fiber.block->shared.data() + offset, &sum, 4);
}

}  // namespace flashmoe::emulation
