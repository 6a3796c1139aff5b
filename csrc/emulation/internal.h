// The machine's state: launch, blocks, warps, threads, clocks and shadow memory. Included by the .cpp files only.
#pragma once

#include <csetjmp>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "emulation/api.h"
#include "emulation/failure.h"
#include "emulation/fiber.h"
#include "emulation/machine.h"

namespace flashmoe::emulation {

constexpr int kWarpSize = 32;
constexpr uint32_t kFullMask = 0xffffffffu;
constexpr int kMaxBlockThreads = 1024;
constexpr size_t kStackBytes = 256 * 1024;
constexpr uint32_t kSharedWindowBytes = 256 * 1024;
// Shared addresses start past what the driver reserves on sm_80 and later, so that a kernel that takes 0 for the start
// of its dynamic shared memory is detected.
constexpr uint32_t kSharedReserved = 1024;
constexpr unsigned char kPoison = 0xff;  // NaN in every format used

struct Block;
struct Warp;
struct Fiber;

// ---- happens-before ------------------------------------------------------------------------------------------------
// An agent is something that accesses memory in its own order: a thread, the cp.async copies of a thread, the copies
// that complete on an mbarrier, the products of a warpgroup, the bulk stores of a thread. Each has its own clock. A
// view says, for every agent, up to which clock its accesses are known to be complete (`seen`), up to which clock they
// are also covered by a generic-to-async proxy fence (`fenced`), and how far a thread has certainly come in its program
// (`passed`: what is seen, and what a warp collective reveals about its lanes without ordering memory).
enum class AgentKind : uint8_t { kThread, kCopies, kMbarrier, kProducts, kStores };

struct Agent {
  AgentKind kind;
  int owner;  // thread, mbarrier number or warpgroup
};

struct View {
  std::vector<uint32_t> seen, fenced, passed;

  void reset(size_t agents) { seen.assign(agents, 0), fenced.assign(agents, 0), passed.assign(agents, 0); }
  void join(const View& other, size_t agents);
};

struct Access {
  uint32_t clock = 0;
  uint16_t agent = 0;
  uint16_t site = 0;
};

// kAdded: the reads are additions that nothing orders before other accesses yet. kLoading: an arrival released the word
// after a load that may still be under way.
enum WordFlag : uint8_t { kAsyncWrite = 1, kBarrierWord = 2, kWritten = 4, kAdded = 8, kLoading = 16 };

// One 4-byte word of shared memory: its last write and the reads since then that are not known to be complete.
struct Word {
  static constexpr int kInlineReads = 6;
  Access write;
  Access reads[kInlineReads];
  uint8_t flags = 0;
  uint8_t read_count = 0;
  int32_t spill = -1;  // index into Block::spilled_reads
};

// ---- threads -------------------------------------------------------------------------------------------------------
enum class FiberState : uint8_t { kReady, kBlocked, kDone };

struct Copy {  // a cp.async in flight
  uint32_t group;
  uint32_t offset;
  const unsigned char* source;  // host memory; null when source_bytes is 0
  uint8_t bytes, source_bytes;
};

struct CopyArrival {  // at an mbarrier, due when the thread's copies through that group are complete
  uint32_t group;
  size_t mbarrier;
  std::vector<uint32_t> passed;  // what the thread had passed when it requested the arrival
  Site site;
};

struct Fiber {
  Context context;
  Block* block = nullptr;
  Warp* warp = nullptr;
  int thread = 0;
  int lane = 0;
  FiberState state = FiberState::kDone;
  const char* waits_in = nullptr;
  Site waits_at{};
  std::string waits_for;  // set by waits whose wrapper name is not enough
  View view;
  // cp.async
  int copy_agent = -1;
  uint32_t copies_committed = 0;
  std::vector<Copy> copies;
  std::vector<CopyArrival> copy_arrivals;
  bool waits_for_groups = false;  // it has used cp_async_wait, whose groups arrivals would renumber
  // bulk stores
  int store_agent = -1;
  uint32_t stores_committed = 0;
  uint32_t last_store_group = 0;  // newest group with a store in it
  uint32_t stores_waited = 0;     // groups through here have been waited for
  bool grid_waited = false;       // for the preceding grid
  // Words written by TMA that this thread has loaded since its last instruction that may have used a loaded value: a
  // store, a product, an exchange between lanes. Until then a load may be under way; a proxy fence waits for it, an
  // arrival does not.
  std::vector<uint32_t> loads;
};

struct Warp {
  Block* block = nullptr;
  int index = 0;
  Fiber* lanes[kWarpSize] = {};
  uint32_t ready = 0;
  int size = 0;
  // the collective whose lanes are being gathered
  uint32_t gathered = 0;
  const char* collective = nullptr;
  Site collective_site{};
  void* arguments[kWarpSize] = {};
  // wgmma
  uint32_t products_issued = 0;
  uint32_t groups_committed = 0;
  bool fenced_since_commit = false;
  bool product_since_commit = false;
  bool waits_for_products = false;
  uint32_t waits_for_group = 0;
  int registers = 0;
  int registers_wanted = 0;  // nonzero while a setmaxnreg.inc waits
};

// ---- barriers ------------------------------------------------------------------------------------------------------
struct NamedBarrier {
  int expected = 0;
  int arrived = 0;
  Site first_site{};
  View gathered;
  std::vector<Fiber*> waiting;
};

struct Mbarrier {
  uint32_t offset = 0;
  int arrivals = 0;
  int pending = 0;
  int64_t bytes = 0;   // announced but not yet arrived; negative while copies are ahead of the announcement
  uint32_t phase = 0;  // completed phases
  uint16_t agent = 0;
  bool init_fenced = false;
  Access init;
  View gathered, done;
  std::vector<Fiber*> waiting;
  std::vector<Access> waits;  // threads that have waited for the newest completed phase, at which of their clocks
};

// ---- asynchronous units --------------------------------------------------------------------------------------------
struct TensorMapContent {
  uint32_t magic;
  uint8_t rank, element_bytes, swizzle_bytes;
  uint64_t address;
  uint64_t dims[5];     // elements
  uint64_t strides[4];  // bytes, of dimensions 1 to 4
  uint32_t box[5];
};
static_assert(sizeof(TensorMapContent) <= 128, "a tensor map has 128 bytes");
constexpr uint32_t kTensorMapMagic = 0x7a3b19c5;

struct TensorCopy {  // some rows of a box
  bool is_store;
  bool adds;  // a store that adds float32 words
  Fiber* issuer;
  TensorMapContent map;
  int coordinates[5];
  uint32_t offset;         // of the box
  int row_begin, row_end;  // rows of the box, counted over dimensions 1 and up
  int mbarrier;            // loads
  uint32_t phase;          // loads: the phase that was current at the issue
  uint32_t group;          // stores
  Site site;
};

struct Accumulator {  // a warp's share of a wgmma accumulator while products are in flight
  std::vector<float*> lanes;
  std::vector<float> value;  // [16][columns]
  int columns;
  uint32_t last_product;  // number of the newest product that adds to it
  bool released = false;
};

struct WarpOperands {
  std::shared_ptr<Accumulator> accumulator;
  // If A comes from registers, by lane: [32][4] values, and their addresses (null: temporaries).
  std::vector<uint32_t> a;
  std::vector<const uint32_t*> a_addresses;
};

struct Product {
  WarpOperands warps[4];
  int arrived = 0;
  int columns = 0;
  bool a_in_registers = false, transposed_a = false, transposed_b = false, executed = false;
  int scale_d = 0;
  uint64_t descriptor_a = 0, descriptor_b = 0;
  uint32_t group = 0;
  Format format = Format::kF16;
  Site site{};
};

struct Warpgroup {
  int agent = -1;
  std::deque<Product> products;
  uint32_t first = 0;     // number of products.front()
  uint32_t executed = 0;  // products below this number are computed
};

// ---- blocks and the machine ----------------------------------------------------------------------------------------
struct Block {
  int index = 0;
  int threads = 0;
  int live = 0;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<unsigned char> shared;
  std::vector<Word> words;
  std::vector<std::vector<Access>> spilled_reads;
  std::vector<Agent> agents;
  size_t agent_capacity = 0;
  NamedBarrier barriers[16];
  std::vector<std::unique_ptr<Mbarrier>> mbarriers;
  std::vector<Warpgroup> warpgroups;
  std::vector<TensorCopy> tensor_copies;
  size_t copies_in_flight = 0;
  int64_t free_registers = 0;
  unsigned char* stacks = nullptr;
};

struct Buffer {
  uint64_t base;
  uint64_t bytes;
  unsigned char* storage;
  bool writable;
  bool from_preceding_grid;  // that grid may still write it: nothing may touch it before the wait for it
  std::string name;
  std::vector<uint8_t> initialised;  // per byte; empty when all of it is
  std::vector<uint64_t> writer;      // per byte: (block * kMaxBlockThreads + thread + 1) << 32 | clock
};

enum class AsyncPolicy { kLazy, kEager, kRandom };

struct Statistics {
  uint64_t steps = 0, switches = 0, matrix_products = 0, warpgroup_products = 0, multiply_adds = 0;
  uint64_t shared_accesses = 0, global_accesses = 0, copies = 0, tensor_copies = 0, barriers = 0;
};

class Random {
 public:
  void seed(uint64_t value) { state_ = value * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull; }
  uint32_t next() {
    state_ ^= state_ >> 12, state_ ^= state_ << 25, state_ ^= state_ >> 27;
    return static_cast<uint32_t>((state_ * 0x2545f4914f6cdd1dull) >> 32);
  }
  uint32_t below(uint32_t bound) { return static_cast<uint32_t>((static_cast<uint64_t>(next()) * bound) >> 32); }

 private:
  uint64_t state_ = 1;
};

struct Machine {
  Launch launch{};
  Random random;
  AsyncPolicy policy = AsyncPolicy::kRandom;
  Fiber* current = nullptr;
  Context scheduler;
  sigjmp_buf escape;
  bool running = false;
  bool failed = false;
  Failure failure{};
  std::vector<Buffer> buffers;
  size_t last_buffer = 0;
  std::vector<Block*> resident;
  int slice = 0;
  int elected_lane = 0;
  Statistics statistics;
};

extern Machine machine;

// scheduler.cpp
[[noreturn]] void fail(FailureKind kind, const Site& site, const char* what, const char* format, ...)
    __attribute__((format(printf, 4, 5)));
void block_current(const char* what, const Site& site);
void wake(Fiber& fiber);
void let_others_run();  // and completes something in flight; for a thread that polls
void maybe_switch();    // at a seeded random moment, lets others run
std::string run_launch(const Launch& launch);

// races.cpp
uint16_t site_number(const Site& site, const char* what);
std::string site_text(uint16_t number);
std::string agent_text(const Block& block, int agent);
int add_agent(Block& block, AgentKind kind, int owner);
// Checks an access against earlier accesses, as `fiber` knows them, and records it for `agent` at `clock`.
void record_read(Block& block, uint32_t offset, uint32_t bytes, const Fiber& fiber, int agent, uint32_t clock,
                 bool async, const Site& site, const char* what);
void record_write(Block& block, uint32_t offset, uint32_t bytes, const Fiber& fiber, int agent, uint32_t clock,
                  bool async, const Site& site, const char* what);
// An addition to one word: other additions need no order.
void record_addition(Block& block, uint32_t offset, Fiber& fiber, const Site& site, const char* what);

// shared_memory.cpp
uint32_t shared_offset(const Block& block, uint32_t smem, uint32_t bytes, uint32_t alignment, const Site& site,
                       const char* what);
void check_shared_range(const Block& block, int64_t offset, uint32_t bytes, uint32_t alignment, const Site& site,
                        const char* what);

// global_memory.cpp
unsigned char* reserve_window(uint64_t bytes);  // address space without memory: a plain dereference faults
unsigned char* global_storage(const void* gmem, uint32_t bytes, uint32_t alignment, bool write, const Fiber* fiber,
                              const Site& site, const char* what);
uint64_t add_buffer(void* storage, uint64_t bytes, bool writable, bool initialised, const char* name);
uint64_t reserve_addresses(uint64_t bytes);
void map_buffer(uint64_t address, void* storage, uint64_t bytes, bool writable, bool initialised, const char* name);
void expect_from_preceding_grid(uint64_t address);
void clear_buffers();
bool in_windows(const void* address);

// A thread's own clock; incremented after every release.
inline uint32_t& own_clock(Fiber& fiber) { return fiber.view.seen[static_cast<size_t>(fiber.thread)]; }

// barriers.cpp, tensor.cpp, wgmma.cpp: work in flight
void finish_copies(Fiber& fiber, uint32_t through_group);
bool complete_random_copy(Block& block);
bool complete_random_tensor_copy(Block& block);
void run_tensor_copy(Block& block, TensorCopy copy);
void finish_stores(Fiber& fiber, uint32_t through_group);
bool execute_random_product(Block& block);
void transaction_complete(Mbarrier& barrier, uint32_t bytes, uint32_t issue_phase, const Site& site, const char* what);
Mbarrier& find_mbarrier(Block& block, uint32_t address, const Site& site, const char* what);
void check_at_exit(Block& block);

// collectives.cpp
// Gathers the warp: returns after all 32 lanes have called with the same site and the last of them has run `action`,
// unless `action` returned false: then it has arranged for the lanes to be woken later.
void gather(const char* what, const Site& site, void* argument, bool (*action)(Warp& warp));

}  // namespace flashmoe::emulation
