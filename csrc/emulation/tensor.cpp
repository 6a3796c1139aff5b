// TMA: tensor maps, loads that complete on an mbarrier, stores in bulk groups.
#include <algorithm>
#include <cstring>

#include "emulation/internal.h"

namespace flashmoe::emulation {

namespace {

constexpr uint32_t kChunk = 16;  // bytes that a swizzle moves as one

TensorMapContent read_map(const void* tensor_map, const Site& site, const char* what) {
  if (reinterpret_cast<uint64_t>(tensor_map) % 64 != 0) {
    fail(FailureKind::kTensorMap, site, what, "the tensor map is not 64-byte aligned");
  }
  TensorMapContent map;
  std::memcpy(&map, tensor_map, sizeof map);
  if (map.magic != kTensorMapMagic) {
    fail(FailureKind::kTensorMap, site, what, "these 128 bytes are no tensor map");
  }
  return map;
}

uint32_t row_bytes(const TensorMapContent& map) { return map.box[0] * map.element_bytes; }

int box_rows(const TensorMapContent& map) {
  int rows = 1;
  for (int d = 1; d < map.rank; ++d) rows *= static_cast<int>(map.box[d]);
  return rows;
}

// Swizzled address of the 16-byte chunk at `address` of the box: address bits 4 to 6 (128 bytes; fewer for the narrower
// modes) are xored with bits 7 to 9 of the shared address itself.
uint32_t swizzled(uint32_t address, uint32_t swizzle_bytes) {
  const uint32_t mask = swizzle_bytes == 0 ? 0 : swizzle_bytes / kChunk - 1;
  return address ^ ((address >> 7 & mask) << 4);
}

// The span of a box row inside the tensor: elements [begin, end) of the row, and the global address of `begin`.
struct RowSpan {
  int64_t begin, end;
  uint64_t address;
};

RowSpan row_span(const TensorCopy& copy, int row) {
  const TensorMapContent& map = copy.map;
  uint64_t address = map.address;
  int rest = row;
  for (int d = 1; d < map.rank; ++d) {
    const int64_t at = static_cast<int64_t>(copy.coordinates[d]) + rest % static_cast<int>(map.box[d]);
    rest /= static_cast<int>(map.box[d]);
    if (at < 0 || at >= static_cast<int64_t>(map.dims[d])) return {0, 0, 0};
    address += static_cast<uint64_t>(at) * map.strides[d - 1];
  }
  const int64_t first = copy.coordinates[0];
  const int64_t begin = std::max<int64_t>(0, -first);
  const int64_t end = std::min<int64_t>(map.box[0], static_cast<int64_t>(map.dims[0]) - first);
  if (begin >= end) return {0, 0, 0};
  return {begin, end, address + static_cast<uint64_t>(first + begin) * map.element_bytes};
}

void load_row(Block& block, const TensorCopy& copy, int row) {
  const TensorMapContent& map = copy.map;
  const uint32_t bytes = row_bytes(map);
  unsigned char staged[4096] = {};
  const RowSpan span = row_span(copy, row);
  if (span.begin < span.end) {
    const uint32_t size = static_cast<uint32_t>(span.end - span.begin) * map.element_bytes;
    const unsigned char* from = global_storage(reinterpret_cast<const void*>(span.address), size, map.element_bytes,
                                               false, copy.issuer, copy.site, "tma_load");
    std::memcpy(staged + span.begin * map.element_bytes, from, size);
  }
  for (uint32_t at = 0; at < bytes; at += kChunk) {
    const uint32_t logical = copy.offset + static_cast<uint32_t>(row) * bytes + at + kSharedReserved;
    std::memcpy(block.shared.data() + swizzled(logical, map.swizzle_bytes) - kSharedReserved, staged + at, kChunk);
  }
}

// Words are added atomically, in any order: such a write does not race, but needs memory that has been written.
void add_words(const TensorCopy& copy, const void* gmem, const unsigned char* words, uint32_t bytes) {
  unsigned char* sums = global_storage(gmem, bytes, 16, false, copy.issuer, copy.site, "bulk_reduce_add");
  for (uint32_t at = 0; at < bytes; at += sizeof(float)) {
    float sum, word;
    std::memcpy(&sum, sums + at, sizeof sum);
    std::memcpy(&word, words + at, sizeof word);
    sum += word;
    std::memcpy(sums + at, &sum, sizeof sum);
  }
}

void store_row(Block& block, const TensorCopy& copy, int row) {
  const TensorMapContent& map = copy.map;
  const uint32_t bytes = row_bytes(map);
  unsigned char staged[4096];
  for (uint32_t at = 0; at < bytes; at += kChunk) {
    const uint32_t logical = copy.offset + static_cast<uint32_t>(row) * bytes + at + kSharedReserved;
    std::memcpy(staged + at, block.shared.data() + swizzled(logical, map.swizzle_bytes) - kSharedReserved, kChunk);
  }
  const RowSpan span = row_span(copy, row);
  if (span.begin >= span.end) return;
  const uint32_t size = static_cast<uint32_t>(span.end - span.begin) * map.element_bytes;
  if (copy.adds) return add_words(copy, reinterpret_cast<const void*>(span.address), staged, size);
  unsigned char* to = global_storage(reinterpret_cast<const void*>(span.address), size, map.element_bytes, true,
                                     copy.issuer, copy.site, "tma_store");
  std::memcpy(to, staged + span.begin * map.element_bytes, size);
}

// Enqueues the rows of a box as one to three copies.
void enqueue(Block& block, TensorCopy copy) {
  const int rows = box_rows(copy.map);
  const int pieces = std::min(rows, 1 + static_cast<int>(machine.random.below(3)));
  for (int i = 0; i < pieces; ++i) {
    copy.row_begin = rows * i / pieces;
    copy.row_end = rows * (i + 1) / pieces;
    block.tensor_copies.push_back(copy);
  }
}

TensorCopy describe(const void* tensor_map, uint32_t smem, int rank, const int* coordinates, const Site& site,
                    const char* what) {
  TensorCopy copy{};
  copy.issuer = machine.current;
  copy.map = read_map(tensor_map, site, what);
  copy.site = site;
  if (copy.map.rank != rank) {
    fail(FailureKind::kTensorMap, site, what, "%d coordinates for a tensor map of rank %d", rank, copy.map.rank);
  }
  std::copy(coordinates, coordinates + rank, copy.coordinates);
  const uint32_t bytes = row_bytes(copy.map) * static_cast<uint32_t>(box_rows(copy.map));
  copy.offset = shared_offset(*machine.current->block, smem, bytes, 128, site, what);
  if (copy.map.swizzle_bytes == 128 && copy.offset % 1024 != 0) {
    fail(
        FailureKind::kMisaligned, site, what,
        "shared byte %u; a box with the 128-byte swizzle starts at a multiple of 1024 here, since the kernels take its "
        "first row for row 0 of the pattern",
        copy.offset);
  }
  return copy;
}

// Describes a copy of contiguous bytes as one of contiguous rows.
TensorCopy describe_bytes(const void* gmem, uint32_t smem, uint32_t bytes, const Site& site, const char* what) {
  const uint32_t row = bytes % 1024 == 0 ? 1024 : 16;
  if (bytes == 0 || bytes % 16 != 0 || reinterpret_cast<uint64_t>(gmem) % 16 != 0) {
    fail(FailureKind::kMisaligned, site, what, "%u bytes at global address %llu; multiples of 16 are needed", bytes,
         static_cast<unsigned long long>(reinterpret_cast<uint64_t>(gmem)));
  }
  TensorCopy copy{};
  copy.issuer = machine.current;
  copy.site = site;
  copy.map.magic = kTensorMapMagic;
  copy.map.rank = 2;
  copy.map.element_bytes = sizeof(float);
  copy.map.address = reinterpret_cast<uint64_t>(gmem);
  copy.map.dims[0] = copy.map.box[0] = row / sizeof(float);
  copy.map.dims[1] = copy.map.box[1] = bytes / row;
  copy.map.strides[0] = row;
  copy.offset = shared_offset(*machine.current->block, smem, bytes, 16, site, what);
  return copy;
}

// Starts a load whose bytes complete on the barrier.
void start_load(TensorCopy copy, uint32_t barrier_address, const Site& site, const char* what) {
  Fiber& fiber = *machine.current;
  Block& block = *fiber.block;
  ++machine.statistics.tensor_copies;
  Mbarrier& barrier = find_mbarrier(block, barrier_address, site, what);
  if (!barrier.init_fenced && fiber.view.fenced[barrier.init.agent] < barrier.init.clock) {
    fail(FailureKind::kProxyFenceMissing, site, what,
         "the init of the mbarrier at shared byte %u, %s, is not fenced (mbarrier_init_fence)", barrier.offset,
         site_text(barrier.init.site).c_str());
  }
  for (size_t i = 0; i < block.mbarriers.size(); ++i) {
    if (block.mbarriers[i].get() == &barrier) copy.mbarrier = static_cast<int>(i);
  }
  copy.phase = barrier.phase;
  const uint32_t bytes = row_bytes(copy.map) * static_cast<uint32_t>(box_rows(copy.map));
  record_write(block, copy.offset, bytes, fiber, barrier.agent, barrier.phase + 1, true, site, what);
  if (machine.policy != AsyncPolicy::kEager) std::memset(block.shared.data() + copy.offset, kPoison, bytes);
  enqueue(block, copy);
}

void start_store(TensorCopy copy, const Site& site, const char* what) {
  Fiber& fiber = *machine.current;
  Block& block = *fiber.block;
  ++machine.statistics.tensor_copies;
  copy.is_store = true;
  if (fiber.store_agent < 0) fiber.store_agent = add_agent(block, AgentKind::kStores, fiber.thread);
  copy.group = fiber.stores_committed + 1;
  fiber.last_store_group = copy.group;
  const uint32_t bytes = row_bytes(copy.map) * static_cast<uint32_t>(box_rows(copy.map));
  record_read(block, copy.offset, bytes, fiber, fiber.store_agent, copy.group, true, site, what);
  enqueue(block, copy);
}

}  // namespace

void prefetch_tensor_map(const void* tensor_map, const Site& site, const char* what) {
  read_map(tensor_map, site, what);
}

void tensor_load(uint32_t smem, const void* tensor_map, uint32_t barrier, int rank, const int* coordinates,
                 const Site& site, const char* what) {
  maybe_switch();
  start_load(describe(tensor_map, smem, rank, coordinates, site, what), barrier, site, what);
}

void tensor_store(const void* tensor_map, uint32_t smem, int rank, const int* coordinates, const Site& site,
                  const char* what) {
  maybe_switch();
  start_store(describe(tensor_map, smem, rank, coordinates, site, what), site, what);
}

void bulk_load(uint32_t smem, const void* gmem, uint32_t bytes, uint32_t barrier, const Site& site, const char* what) {
  maybe_switch();
  start_load(describe_bytes(gmem, smem, bytes, site, what), barrier, site, what);
}

void bulk_copy(float* gmem, uint32_t smem, uint32_t bytes, bool adds, const Site& site, const char* what) {
  maybe_switch();
  TensorCopy copy = describe_bytes(gmem, smem, bytes, site, what);
  copy.adds = adds;
  start_store(copy, site, what);
}

void run_tensor_copy(Block& block, TensorCopy copy) {
  Fiber* const before = machine.current;
  machine.current = copy.issuer;
  for (int row = copy.row_begin; row < copy.row_end; ++row) {
    if (copy.is_store)
      store_row(block, copy, row);
    else
      load_row(block, copy, row);
  }
  if (!copy.is_store) {
    const uint32_t bytes = static_cast<uint32_t>(copy.row_end - copy.row_begin) * row_bytes(copy.map);
    transaction_complete(*block.mbarriers[static_cast<size_t>(copy.mbarrier)], bytes, copy.phase, copy.site,
                         "tma_load");
  }
  machine.current = before;
}

bool complete_random_tensor_copy(Block& block) {
  if (block.tensor_copies.empty()) return false;
  const size_t choice = machine.random.below(static_cast<uint32_t>(block.tensor_copies.size()));
  const TensorCopy copy = block.tensor_copies[choice];
  block.tensor_copies[choice] = block.tensor_copies.back();
  block.tensor_copies.pop_back();
  run_tensor_copy(block, copy);
  return true;
}

void tensor_store_commit(const Site&, const char*) { ++machine.current->stores_committed; }

void tensor_store_wait(int pending, const Site&, const char*) {
  Fiber& fiber = *machine.current;
  const uint32_t left = static_cast<uint32_t>(pending);
  const uint32_t through = fiber.stores_committed > left ? fiber.stores_committed - left : 0;
  finish_stores(fiber, through);
  fiber.stores_waited = std::max(fiber.stores_waited, through);
  if (fiber.store_agent >= 0) {
    uint32_t& seen = fiber.view.seen[static_cast<size_t>(fiber.store_agent)];
    seen = std::max(seen, through);
  }
}

void finish_stores(Fiber& fiber, uint32_t through_group) {
  std::vector<TensorCopy>& copies = fiber.block->tensor_copies;
  for (size_t i = 0; i < copies.size();) {
    if (!copies[i].is_store || copies[i].issuer != &fiber || copies[i].group > through_group) {
      ++i;
      continue;
    }
    const TensorCopy copy = copies[i];
    copies.erase(copies.begin() + static_cast<std::ptrdiff_t>(i));
    run_tensor_copy(*fiber.block, copy);
  }
}

}  // namespace flashmoe::emulation
