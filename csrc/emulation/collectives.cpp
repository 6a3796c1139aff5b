// Warp collectives: shuffles, votes, ldmatrix, stmatrix, mma, setmaxnreg.
#include <algorithm>
#include <cstring>

#include "emulation/internal.h"

namespace flashmoe::emulation {

namespace {

// Every lane now knows how far the others have come, but nothing about their memory accesses.
void note_passed(Warp& warp) {
  for (Fiber* lane : warp.lanes) {
    for (const Fiber* other : warp.lanes) {
      const size_t thread = static_cast<size_t>(other->thread);
      lane->view.passed[thread] = other->view.seen[thread];
    }
  }
  for (Fiber* lane : warp.lanes) ++own_clock(*lane);
}

}  // namespace

void gather(const char* what, const Site& site, void* argument, bool (*action)(Warp& warp)) {
  Fiber& fiber = *machine.current;
  Warp& warp = *fiber.warp;
  if (warp.gathered == 0) {
    warp.collective = what;
    warp.collective_site = site;
  } else if (warp.collective != what || warp.collective_site.line != site.line ||
             warp.collective_site.file != site.file) {
    fail(FailureKind::kDivergentCollective, site, what, "other lanes of this warp are in %s at %s:%d", warp.collective,
         warp.collective_site.file, warp.collective_site.line);
  }
  if (warp.size != kWarpSize) {
    fail(FailureKind::kDivergentCollective, site, what, "the warp has %d threads; a collective needs 32", warp.size);
  }
  if (argument != nullptr) fiber.loads.clear();
  warp.arguments[fiber.lane] = argument;
  warp.gathered |= 1u << fiber.lane;
  if (warp.gathered != kFullMask) {
    for (const Fiber* lane : warp.lanes) {
      if (lane->state == FiberState::kDone) {
        fail(FailureKind::kDivergentCollective, site, what, "lane %d of this warp has exited", lane->lane);
      }
    }
    fiber.waits_for = "(lanes of its warp)";
    block_current(what, site);
    return;
  }
  warp.gathered = 0;
  note_passed(warp);
  const bool finished = action(warp);
  machine.current = &fiber;  // actions set it to one lane after the other
  for (Fiber* lane : warp.lanes) {
    if (lane == &fiber) continue;
    if (finished) wake(*lane);
  }
  if (!finished) block_current(what, site);
}

namespace {

struct ShuffleArguments {
  uint32_t value;
  int parameter;
  uint32_t result;
};

template <typename Arguments>
Arguments& argument_of(Warp& warp, int lane) {
  return *static_cast<Arguments*>(warp.arguments[lane]);
}

}  // namespace

uint32_t shuffle_xor(uint32_t value, int lane_mask, const Site& site, const char* what) {
  ShuffleArguments arguments{value, lane_mask, 0};
  gather(what, site, &arguments, [](Warp& warp) {
    for (int lane = 0; lane < kWarpSize; ++lane) {
      ShuffleArguments& mine = argument_of<ShuffleArguments>(warp, lane);
      mine.result = argument_of<ShuffleArguments>(warp, (lane ^ mine.parameter) & 31).value;
    }
    return true;
  });
  return arguments.result;
}

uint32_t shuffle_index(uint32_t value, int lane, const Site& site, const char* what) {
  ShuffleArguments arguments{value, lane, 0};
  gather(what, site, &arguments, [](Warp& warp) {
    for (int at = 0; at < kWarpSize; ++at) {
      ShuffleArguments& mine = argument_of<ShuffleArguments>(warp, at);
      mine.result = argument_of<ShuffleArguments>(warp, mine.parameter & 31).value;
    }
    return true;
  });
  return arguments.result;
}

uint32_t ballot(bool predicate, const Site& site, const char* what) {
  ShuffleArguments arguments{predicate ? 1u : 0u, 0, 0};
  gather(what, site, &arguments, [](Warp& warp) {
    uint32_t mask = 0;
    for (int lane = 0; lane < kWarpSize; ++lane) mask |= argument_of<ShuffleArguments>(warp, lane).value << lane;
    for (int lane = 0; lane < kWarpSize; ++lane) argument_of<ShuffleArguments>(warp, lane).result = mask;
    return true;
  });
  return arguments.result;
}

uint32_t reduce_max(uint32_t value, const Site& site, const char* what) {
  ShuffleArguments arguments{value, 0, 0};
  gather(what, site, &arguments, [](Warp& warp) {
    uint32_t largest = 0;
    for (int lane = 0; lane < kWarpSize; ++lane) {
      largest = std::max(largest, argument_of<ShuffleArguments>(warp, lane).value);
    }
    for (int lane = 0; lane < kWarpSize; ++lane) argument_of<ShuffleArguments>(warp, lane).result = largest;
    return true;
  });
  return arguments.result;
}

uint32_t reduce_add(uint32_t value, const Site& site, const char* what) {
  ShuffleArguments arguments{value, 0, 0};
  gather(what, site, &arguments, [](Warp& warp) {
    uint32_t sum = 0;
    for (int lane = 0; lane < kWarpSize; ++lane) sum += argument_of<ShuffleArguments>(warp, lane).value;
    for (int lane = 0; lane < kWarpSize; ++lane) argument_of<ShuffleArguments>(warp, lane).result = sum;
    return true;
  });
  return arguments.result;
}

bool elect(const Site& site, const char* what) {
  gather(what, site, nullptr, [](Warp&) { return true; });
  // Which lane is elected is fixed for a launch, but not known to the kernel.
  return machine.current->lane == machine.elected_lane;
}

// ---- ldmatrix, stmatrix --------------------------------------------------------------------------------------------
namespace {

struct MatrixArguments {
  uint32_t* r;
  uint32_t row;
  int matrices;
  bool transposed;
  const Site* site;
  const char* what;
};

constexpr int kRows = 8;

uint16_t half_of(uint32_t word, int index) { return static_cast<uint16_t>(word >> 16 * index); }

// Value `index` of a word that holds two values, or four of 8 bits.
float value_of(Format format, uint32_t word, int index) {
  if (format == Format::kE4M3) return e4m3_to_float(static_cast<uint8_t>(word >> 8 * index));
  return element_to_float(format, half_of(word, index));
}

// Position of element (row, column) of an 8x8 matrix in the registers: lane and half.
void register_position(bool transposed, int row, int column, int& lane, int& half) {
  const int major = transposed ? column : row, minor = transposed ? row : column;
  lane = major * 4 + minor / 2;
  half = minor % 2;
}

}  // namespace

void load_matrix(uint32_t* r, uint32_t smem_row, int matrices, bool transposed, const Site& site, const char* what) {
  maybe_switch();
  MatrixArguments arguments{r, smem_row, matrices, transposed, &site, what};
  gather(what, site, &arguments, [](Warp& warp) {
    Block& block = *warp.block;
    const MatrixArguments common = argument_of<MatrixArguments>(warp, 0);
    uint32_t result[kWarpSize][4] = {};
    for (int row = 0; row < kRows * common.matrices; ++row) {
      Fiber& fiber = *warp.lanes[row];
      machine.current = &fiber;
      const MatrixArguments& mine = argument_of<MatrixArguments>(warp, row);
      const uint32_t offset = shared_offset(block, mine.row, 16, 16, *mine.site, mine.what);
      record_read(block, offset, 16, fiber, fiber.thread, own_clock(fiber), false, *mine.site, mine.what);
      uint16_t elements[8];
      std::memcpy(elements, block.shared.data() + offset, 16);
      for (int column = 0; column < 8; ++column) {
        int lane, half;
        register_position(common.transposed, row % kRows, column, lane, half);
        result[lane][row / kRows] |= static_cast<uint32_t>(elements[column]) << 16 * half;
      }
    }
    for (int lane = 0; lane < kWarpSize; ++lane) {
      std::memcpy(argument_of<MatrixArguments>(warp, lane).r, result[lane], 4 * static_cast<size_t>(common.matrices));
    }
    return true;
  });
}

void store_matrix(uint32_t smem_row, const uint32_t* r, int matrices, bool transposed, const Site& site,
                  const char* what) {
  maybe_switch();
  MatrixArguments arguments{const_cast<uint32_t*>(r), smem_row, matrices, transposed, &site, what};
  gather(what, site, &arguments, [](Warp& warp) {
    Block& block = *warp.block;
    const MatrixArguments common = argument_of<MatrixArguments>(warp, 0);
    for (int row = 0; row < kRows * common.matrices; ++row) {
      Fiber& fiber = *warp.lanes[row];
      machine.current = &fiber;
      const MatrixArguments& mine = argument_of<MatrixArguments>(warp, row);
      const uint32_t offset = shared_offset(block, mine.row, 16, 16, *mine.site, mine.what);
      record_write(block, offset, 16, fiber, fiber.thread, own_clock(fiber), false, *mine.site, mine.what);
      uint16_t elements[8];
      for (int column = 0; column < 8; ++column) {
        int lane, half;
        register_position(common.transposed, row % kRows, column, lane, half);
        elements[column] = half_of(argument_of<MatrixArguments>(warp, lane).r[row / kRows], half);
      }
      std::memcpy(block.shared.data() + offset, elements, 16);
    }
    return true;
  });
}

// ---- mma -----------------------------------------------------------------------------------------------------------
namespace {

struct ProductArguments {
  float* d;
  const uint32_t* a;
  const uint32_t* b;
  int k;
  Format format;
};

}  // namespace

void matrix_product(float* d, const uint32_t* a, const uint32_t* b, int k, Format format, const Site& site,
                    const char* what) {
  ProductArguments arguments{d, a, b, k, format};
  gather(what, site, &arguments, [](Warp& warp) {
    const ProductArguments common = argument_of<ProductArguments>(warp, 0);
    float d_tile[16 * 8], a_tile[16 * 32], b_tile[32 * 8];
    const int depth = common.k;
    const int values = common.format == Format::kE4M3 ? 4 : 2;  // per register
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const ProductArguments& mine = argument_of<ProductArguments>(warp, lane);
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < 4; ++i) d_tile[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = mine.d[i];
      for (int i = 0; i < depth / (2 * values); ++i) {  // a[0], a[1]: rows g, g + 8; a[2], a[3]: the next 4 lanes' k
        for (int j = 0; j < values; ++j) {
          a_tile[(g + 8 * (i % 2)) * depth + values * (t + 4 * (i / 2)) + j] = value_of(common.format, mine.a[i], j);
        }
      }
      for (int i = 0; i < depth / (4 * values); ++i) {
        for (int j = 0; j < values; ++j) {
          b_tile[(values * (t + 4 * i) + j) * 8 + g] = value_of(common.format, mine.b[i], j);
        }
      }
    }
    tensor_core_product({machine.launch.tensor_core_block, machine.launch.tensor_core_extra_bits}, 16, 8, depth, d_tile,
                        a_tile, b_tile);
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const ProductArguments& mine = argument_of<ProductArguments>(warp, lane);
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < 4; ++i) mine.d[i] = d_tile[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2];
    }
    ++machine.statistics.matrix_products;
    machine.statistics.multiply_adds += static_cast<uint64_t>(16 * 8 * depth);
    return true;
  });
}

// ---- setmaxnreg ----------------------------------------------------------------------------------------------------
namespace {

struct RegisterArguments {
  int registers;
  bool increase;
  const Site* site;
  const char* what;
};

void set_registers(Block& block, Warp& warp, int registers) {
  block.free_registers += static_cast<int64_t>(warp.registers - registers) * kWarpSize;
  warp.registers = registers;
}

// Gives waiting warps the registers that they requested, as far as the pool allows.
void serve_waiting(Block& block) {
  for (const auto& warp : block.warps) {
    const int wanted = warp->registers_wanted;
    if (wanted == 0 || (wanted - warp->registers) * kWarpSize > block.free_registers) continue;
    warp->registers_wanted = 0;
    set_registers(block, *warp, wanted);
    for (Fiber* lane : warp->lanes) wake(*lane);
  }
}

}  // namespace

void set_max_registers(int registers, bool increase, const Site& site, const char* what) {
  RegisterArguments arguments{registers, increase, &site, what};
  gather(what, site, &arguments, [](Warp& warp) {
    const RegisterArguments& mine = argument_of<RegisterArguments>(warp, 0);
    Block& block = *warp.block;
    const bool wrong_way = mine.increase ? mine.registers < warp.registers : mine.registers > warp.registers;
    if (wrong_way) {
      fail(FailureKind::kRegisterBudget, *mine.site, mine.what, "from %d to %d registers per thread", warp.registers,
           mine.registers);
    }
    if (mine.increase && (mine.registers - warp.registers) * kWarpSize > block.free_registers) {
      warp.registers_wanted = mine.registers;
      for (Fiber* lane : warp.lanes) {
        lane->waits_for = "(" + std::to_string(mine.registers) + " registers per thread; the pool has " +
                          std::to_string(block.free_registers) + " free)";
      }
      return false;
    }
    set_registers(block, warp, mine.registers);
    serve_waiting(block);
    return true;
  });
}

}  // namespace flashmoe::emulation
