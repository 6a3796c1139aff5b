// wgmma: descriptors, products in flight per warpgroup, and accumulators that hold nothing useful until the wait.
//
// Each warp of a warpgroup issues its quarter separately; a product runs, in issue order, at a seeded moment after its
// fourth quarter arrived, and at the latest when a wait covers it. Between the issue and that wait the accumulator
// registers hold a NaN pattern; finding anything else there at the end is a failure. A from registers is read at the
// issue, and finding other values in those registers at the wait is a failure too.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "emulation/internal.h"

namespace flashmoe::emulation {

namespace {

constexpr int kWarps = 4;
constexpr int kDepth = 16;  // for 16-bit elements; for 8-bit ones it is 32, in as many bytes
constexpr int kWarpRows = 16;
constexpr uint32_t kAccumulatorPoison = 0x7fa5dead;

struct Operand {
  int64_t start, leading, stride;  // bytes; start as a shared offset
  uint32_t row;                    // bytes of a swizzled row; 16 without swizzle
  uint32_t xor_mask;
};

Operand decode(uint64_t descriptor, const Site& site, const char* what) {
  Operand operand{};
  operand.start = static_cast<int64_t>((descriptor & 0x3fff) << 4) - kSharedReserved;
  operand.leading = static_cast<int64_t>((descriptor >> 16 & 0x3fff) << 4);
  operand.stride = static_cast<int64_t>((descriptor >> 32 & 0x3fff) << 4);
  const uint32_t base_offset = static_cast<uint32_t>(descriptor >> 49 & 7);
  if (base_offset != 0) {
    fail(FailureKind::kDescriptor, site, what,
         "base offset %u: only slabs that start at a multiple of 1024 are modelled", base_offset);
  }
  const uint32_t rows[] = {16, 128, 64, 32};
  operand.row = rows[descriptor >> 62];
  operand.xor_mask = operand.row / 16 - 1;
  return operand;
}

// Shared offset of the 16-byte chunk `chunk` (8 elements) of row `row` of an operand, both counted along the layout:
// K-major: row = m or n, chunk along k; otherwise row = k, chunk along n.
uint32_t chunk_offset(const Operand& operand, bool k_major, int row, int chunk, const Block& block, const Site& site,
                      const char* what) {
  const int64_t chunks_per_row = operand.row / 16;
  int64_t address = operand.start + row / 8 * operand.stride + row % 8 * static_cast<int64_t>(operand.row);
  if (k_major) {
    address += operand.row == 16 ? chunk * operand.leading : chunk * 16;
  } else {
    address += chunk / chunks_per_row * operand.leading + chunk % chunks_per_row * 16;
  }
  check_shared_range(block, address, 16, 16, site, what);
  const uint32_t physical = static_cast<uint32_t>(address) + kSharedReserved;
  return (physical ^ ((physical >> 7 & operand.xor_mask) << 4)) - kSharedReserved;
}

// Visits the chunks of one operand tile: `rows` x `chunks` (see chunk_offset).
template <typename Visit>
void for_each_chunk(const Operand& operand, bool k_major, int row_begin, int row_end, int chunks, const Block& block,
                    const Site& site, const char* what, Visit visit) {
  for (int row = row_begin; row < row_end; ++row) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
      visit(row, chunk, chunk_offset(operand, k_major, row, chunk, block, site, what));
    }
  }
}

// The same for the 16 rows of A that warp `part` multiplies; if transposed, chunks are counted from its first.
template <typename Visit>
void for_each_chunk_of_a(uint64_t descriptor, bool transposed, int warp_index, const Block& block, const Site& site,
                         const char* what, Visit visit) {
  const Operand operand = decode(descriptor, site, what);
  if (!transposed) {
    for_each_chunk(operand, true, warp_index * kWarpRows, (warp_index + 1) * kWarpRows, kDepth / 8, block, site, what,
                   visit);
    return;
  }
  constexpr int kChunks = kWarpRows / 8;
  for (int row = 0; row < kDepth; ++row) {
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      visit(row, chunk, chunk_offset(operand, false, row, warp_index * kChunks + chunk, block, site, what));
    }
  }
}

int elements_in_chunk(Format format) { return format == Format::kE4M3 ? 16 : 8; }
int depth_of(Format format) { return 2 * elements_in_chunk(format); }

// Element i of a 16-byte chunk.
float chunk_element(Format format, const unsigned char* chunk, int i) {
  if (format == Format::kE4M3) return e4m3_to_float(chunk[i]);
  uint16_t bits;
  std::memcpy(&bits, chunk + 2 * i, 2);
  return element_to_float(format, bits);
}

Warpgroup& warpgroup_of(const Warp& warp) { return warp.block->warpgroups[static_cast<size_t>(warp.index / kWarps)]; }

struct ProductArguments {
  float* d;
  int columns;
  const uint32_t* a;
  bool a_has_address;
  uint64_t descriptor_a, descriptor_b;
  bool transposed_a, transposed_b;
  int scale_d;
  Format format;
  const Site* site;
  const char* what;
};

// The accumulator of this warp's lanes: the one in flight if the registers are the same, otherwise a new one that takes
// their values and leaves poison.
std::shared_ptr<Accumulator> take_accumulator(Warp& warp, Warpgroup& group, int columns, const ProductArguments& mine) {
  const int warp_index = warp.index % kWarps;
  float* first = static_cast<ProductArguments*>(warp.arguments[0])->d;
  for (auto product = group.products.rbegin(); product != group.products.rend(); ++product) {
    const auto& candidate = product->warps[warp_index].accumulator;
    if (candidate == nullptr || candidate->released || candidate->lanes[0] != first) continue;
    if (candidate->columns != columns) {
      fail(FailureKind::kWgmmaMisuse, *mine.site, mine.what, "the same accumulators with %d columns are in flight",
           candidate->columns);
    }
    return candidate;
  }
  auto accumulator = std::make_shared<Accumulator>();
  accumulator->columns = columns;
  accumulator->value.resize(static_cast<size_t>(kWarpRows * columns));
  for (int lane = 0; lane < kWarpSize; ++lane) {
    float* d = static_cast<ProductArguments*>(warp.arguments[lane])->d;
    accumulator->lanes.push_back(d);
    for (int i = 0; i < columns / 2; ++i) {
      const int row = lane / 4 + 8 * (i / 2 % 2), column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      accumulator->value[static_cast<size_t>(row * columns + column)] = d[i];
      std::memcpy(&d[i], &kAccumulatorPoison, 4);
    }
  }
  return accumulator;
}

void give_back(Accumulator& accumulator, const Product& product) {
  for (int lane = 0; lane < kWarpSize; ++lane) {
    float* d = accumulator.lanes[static_cast<size_t>(lane)];
    for (int i = 0; i < accumulator.columns / 2; ++i) {
      if (float_bits(d[i]) != kAccumulatorPoison) {
        fail(FailureKind::kAccumulatorTouched, product.site, "Wgmma",
             "accumulator %d of lane %d was written between the product and the wgmma_wait that covers it", i, lane);
      }
      const int row = lane / 4 + 8 * (i / 2 % 2), column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      d[i] = accumulator.value[static_cast<size_t>(row * accumulator.columns + column)];
    }
  }
  accumulator.released = true;
}

void check_a_registers(const WarpOperands& operands, const Product& product) {
  for (size_t lane = 0; lane < operands.a_addresses.size(); ++lane) {
    const uint32_t* a = operands.a_addresses[lane];
    if (a == nullptr || std::equal(a, a + 4, &operands.a[lane * 4])) continue;
    fail(FailureKind::kOperandTouched, product.site, "Wgmma",
         "the registers of A of lane %zu were written between the product and the wgmma_wait that covers it", lane);
  }
}

void gather_a(Block& block, const Product& product, int warp_index, std::vector<float>& a) {
  const int depth = depth_of(product.format), per_chunk = elements_in_chunk(product.format);
  a.assign(static_cast<size_t>(kWarpRows * depth), 0.0f);
  if (product.a_in_registers) {
    // A register holds two 16-bit or four 8-bit neighbours along k, registers 0 and 1 in the first half of the depth.
    const std::vector<uint32_t>& registers = product.warps[warp_index].a;
    const int in_word = depth / 8, bits = 32 / in_word;
    for (int lane = 0; lane < kWarpSize; ++lane) {
      for (int i = 0; i < 4 * in_word; ++i) {
        const int word = i / in_word, row = lane / 4 + 8 * (word % 2);
        const int k = lane % 4 * in_word + depth / 2 * (word / 2) + i % in_word;
        const uint32_t value = registers[static_cast<size_t>(lane * 4 + word)] >> bits * (i % in_word);
        a[static_cast<size_t>(row * depth + k)] = product.format == Format::kE4M3
                                                      ? e4m3_to_float(static_cast<uint8_t>(value))
                                                      : element_to_float(product.format, static_cast<uint16_t>(value));
      }
    }
    return;
  }
  for_each_chunk_of_a(product.descriptor_a, product.transposed_a, warp_index, block, product.site, "Wgmma",
                      [&](int row, int chunk, uint32_t offset) {
                        for (int i = 0; i < per_chunk; ++i) {
                          const int m = product.transposed_a ? chunk * 8 + i : row - warp_index * kWarpRows;
                          const int k = product.transposed_a ? row : chunk * per_chunk + i;
                          a[static_cast<size_t>(m * depth + k)] =
                              chunk_element(product.format, block.shared.data() + offset, i);
                        }
                      });
}

void gather_b(Block& block, const Product& product, std::vector<float>& b) {
  const int per_chunk = elements_in_chunk(product.format);
  b.assign(static_cast<size_t>(depth_of(product.format) * product.columns), 0.0f);
  const Operand operand = decode(product.descriptor_b, product.site, "Wgmma");
  const bool k_major = !product.transposed_b;
  const int rows = k_major ? product.columns : kDepth, chunks = (k_major ? kDepth : product.columns) / 8;
  for_each_chunk(operand, k_major, 0, rows, chunks, block, product.site, "Wgmma",
                 [&](int row, int chunk, uint32_t offset) {
                   for (int i = 0; i < per_chunk; ++i) {
                     const int k = k_major ? chunk * per_chunk + i : row, n = k_major ? row : chunk * 8 + i;
                     b[static_cast<size_t>(k * product.columns + n)] =
                         chunk_element(product.format, block.shared.data() + offset, i);
                   }
                 });
}

void execute(Block& block, Product& product) {
  std::vector<float> a, b;
  gather_b(block, product, b);
  for (int warp_index = 0; warp_index < kWarps; ++warp_index) {
    gather_a(block, product, warp_index, a);
    std::vector<float>& value = product.warps[warp_index].accumulator->value;
    if (product.scale_d == 0) std::fill(value.begin(), value.end(), 0.0f);
    const bool is_8_bit = product.format == Format::kE4M3;
    const TensorCore core{machine.launch.tensor_core_block, machine.launch.tensor_core_extra_bits};
    tensor_core_product(is_8_bit ? kHopperE4M3 : core, kWarpRows, product.columns, depth_of(product.format),
                        value.data(), a.data(), b.data());
  }
  product.executed = true;
  ++machine.statistics.warpgroup_products;
  machine.statistics.multiply_adds +=
      static_cast<uint64_t>(kWarps * kWarpRows * product.columns * depth_of(product.format));
}

bool execute_next(Block& block, Warpgroup& group) {
  const size_t position = group.executed - group.first;
  if (position >= group.products.size() || group.products[position].arrived != kWarps) return false;
  execute(block, group.products[position]);
  ++group.executed;
  return true;
}

// Ends a warp's wait for the groups through `through`; returns false if products of theirs are not fully issued.
bool try_finish_wait(Warp& warp, uint32_t through) {
  Block& block = *warp.block;
  Warpgroup& group = warpgroup_of(warp);
  const int warp_index = warp.index % kWarps;
  for (Product& product : group.products) {
    if (product.group > through) break;
    while (!product.executed) {
      if (!execute_next(block, group)) return false;
    }
  }
  for (size_t i = 0; i < group.products.size(); ++i) {
    Product& product = group.products[i];
    if (product.group > through) break;
    WarpOperands& mine = product.warps[warp_index];
    if (mine.accumulator == nullptr) continue;
    check_a_registers(mine, product);
    if (!mine.accumulator->released && mine.accumulator->last_product == group.first + i) {
      give_back(*mine.accumulator, product);
    }
    mine.accumulator = nullptr;
  }
  while (!group.products.empty()) {
    const Product& front = group.products.front();
    if (!front.executed || std::any_of(std::begin(front.warps), std::end(front.warps),
                                       [](const WarpOperands& p) { return p.accumulator != nullptr; })) {
      break;
    }
    group.products.pop_front();
    ++group.first;
  }
  if (group.agent >= 0) {
    for (Fiber* lane : warp.lanes) {
      uint32_t& seen = lane->view.seen[static_cast<size_t>(group.agent)];
      seen = std::max(seen, through);
    }
  }
  return true;
}

void serve_waits(Block& block, int warpgroup) {
  for (int w = warpgroup * kWarps; w < (warpgroup + 1) * kWarps && w < static_cast<int>(block.warps.size()); ++w) {
    Warp& warp = *block.warps[static_cast<size_t>(w)];
    if (!warp.waits_for_products || !try_finish_wait(warp, warp.waits_for_group)) continue;
    warp.waits_for_products = false;
    for (Fiber* lane : warp.lanes) wake(*lane);
  }
}

void check_same(const Product& product, const ProductArguments& mine, uint32_t group) {
  const bool in_registers = mine.a != nullptr;
  if (product.columns != mine.columns || product.a_in_registers != in_registers ||
      product.transposed_a != mine.transposed_a || product.transposed_b != mine.transposed_b ||
      product.scale_d != (mine.scale_d != 0) || product.descriptor_b != mine.descriptor_b ||
      product.format != mine.format || product.group != group ||
      (!in_registers && product.descriptor_a != mine.descriptor_a)) {
    fail(FailureKind::kDivergentCollective, *mine.site, mine.what,
         "the warps of the warpgroup issue different products (the other at %s:%d)", product.site.file,
         product.site.line);
  }
}

// Checks, for the reading warp, that what the product reads is there, and records the reads.
void record_operands(Warp& warp, const ProductArguments& mine, uint32_t clock) {
  Block& block = *warp.block;
  Warpgroup& group = warpgroup_of(warp);
  const Fiber& reader = *warp.lanes[machine.random.below(kWarpSize)];
  const auto note = [&](int, int, uint32_t offset) {
    record_read(block, offset, 16, reader, group.agent, clock, true, *mine.site, mine.what);
  };
  const Operand b = decode(mine.descriptor_b, *mine.site, mine.what);
  const bool k_major = !mine.transposed_b;
  for_each_chunk(b, k_major, 0, k_major ? mine.columns : kDepth, (k_major ? kDepth : mine.columns) / 8, block,
                 *mine.site, mine.what, note);
  if (mine.a == nullptr) {
    for_each_chunk_of_a(mine.descriptor_a, mine.transposed_a, warp.index % kWarps, block, *mine.site, mine.what, note);
  }
}

bool issue(Warp& warp) {
  Block& block = *warp.block;
  Warpgroup& group = warpgroup_of(warp);
  const ProductArguments& mine = *static_cast<ProductArguments*>(warp.arguments[0]);
  for (int lane = 1; lane < kWarpSize; ++lane) {
    const auto& other = *static_cast<ProductArguments*>(warp.arguments[lane]);
    if (other.descriptor_b != mine.descriptor_b || other.descriptor_a != mine.descriptor_a ||
        (other.scale_d != 0) != (mine.scale_d != 0)) {
      fail(FailureKind::kDivergentCollective, *mine.site, mine.what, "lanes 0 and %d name different operands", lane);
    }
  }
  if (group.agent < 0) group.agent = add_agent(block, AgentKind::kProducts, warp.index / kWarps);
  const uint32_t number = warp.products_issued++;
  const uint32_t group_number = warp.groups_committed + 1;
  while (group.first + group.products.size() <= number) group.products.emplace_back();
  Product& product = group.products[number - group.first];
  if (product.arrived == 0) {
    product.columns = mine.columns;
    product.a_in_registers = mine.a != nullptr;
    product.transposed_a = mine.transposed_a;
    product.transposed_b = mine.transposed_b;
    product.scale_d = mine.scale_d != 0;
    product.descriptor_a = mine.descriptor_a;
    product.descriptor_b = mine.descriptor_b;
    product.group = group_number;
    product.format = mine.format;
    product.site = *mine.site;
  } else {
    check_same(product, mine, group_number);
  }
  WarpOperands& operands = product.warps[warp.index % kWarps];
  operands.accumulator = take_accumulator(warp, group, mine.columns, mine);
  const bool in_flight_before = operands.accumulator.use_count() > 1;
  if (!warp.fenced_since_commit && (mine.a != nullptr || !in_flight_before)) {
    fail(FailureKind::kWgmmaMisuse, *mine.site, mine.what,
         "no wgmma_fence since the last wgmma_commit orders the registers before this product");
  }
  operands.accumulator->last_product = number;
  if (mine.a != nullptr) {
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const uint32_t* a = static_cast<ProductArguments*>(warp.arguments[lane])->a;
      operands.a.insert(operands.a.end(), a, a + 4);
      operands.a_addresses.push_back(mine.a_has_address ? a : nullptr);
    }
  }
  record_operands(warp, mine, group_number);
  if (++product.arrived == kWarps) serve_waits(block, warp.index / kWarps);
  return true;
}

struct WaitArguments {
  int pending;
};

}  // namespace

void wgmma_product(float* d, int columns, const uint32_t* a, bool a_has_address, uint64_t descriptor_a,
                   uint64_t descriptor_b, bool transposed_a, bool transposed_b, int scale_d, Format format,
                   const Site& site, const char* what) {
  maybe_switch();
  const Fiber& fiber = *machine.current;
  if (static_cast<size_t>(fiber.warp->index / kWarps * kWarps + kWarps) > fiber.block->warps.size()) {
    fail(FailureKind::kWgmmaMisuse, site, what, "warp %d is not part of a whole warpgroup", fiber.warp->index);
  }
  ProductArguments arguments{
      d,       columns, a,     a_has_address, descriptor_a, descriptor_b, transposed_a, transposed_b,
      scale_d, format,  &site, what};
  gather(what, site, &arguments, issue);
}

void wgmma_fence(const Site& site, const char* what) {
  gather(what, site, nullptr, [](Warp& warp) {
    warp.fenced_since_commit = true;
    return true;
  });
}

void wgmma_commit(const Site& site, const char* what) {
  gather(what, site, nullptr, [](Warp& warp) {
    ++warp.groups_committed;
    warp.fenced_since_commit = false;
    return true;
  });
}

void wgmma_wait(int pending, const Site& site, const char* what) {
  WaitArguments arguments{pending};
  gather(what, site, &arguments, [](Warp& warp) {
    const uint32_t left = static_cast<uint32_t>(static_cast<WaitArguments*>(warp.arguments[0])->pending);
    const uint32_t through = warp.groups_committed > left ? warp.groups_committed - left : 0;
    if (try_finish_wait(warp, through)) return true;
    warp.waits_for_products = true;
    warp.waits_for_group = through;
    for (Fiber* lane : warp.lanes) lane->waits_for = "(products that other warps of the warpgroup have not issued)";
    return false;
  });
}

bool execute_random_product(Block& block) {
  const uint32_t groups = static_cast<uint32_t>(block.warpgroups.size());
  const uint32_t first = machine.random.below(groups);
  for (uint32_t i = 0; i < groups; ++i) {
    if (execute_next(block, block.warpgroups[(first + i) % groups])) return true;
  }
  return false;
}

}  // namespace flashmoe::emulation
