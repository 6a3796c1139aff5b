// Vector work done beside tile products. Include after vector_avx512.h. Internal linkage.
//
// A product occupies the tile unit for 16 cycles, in which the core can do some 30 vector instructions; but it looks
// ahead over three or four tile instructions only (measured: n products, then 32 n additions, take as long as one
// after the other from n = 8 on, and half of that for n = 4). So both streams have to be interleaved finely: vector
// work is cut into units that take about as long as the products of a step, and a unit has the products inside.
#pragma once

#include <cstdint>

#include "amx_tiles.h"

namespace flashmoe {
namespace cpu {
namespace {

// Calls body(Index<0>) to body(Index<kCount - 1>).
template <int kIndex>
struct Index {
  static constexpr int value = kIndex;
};
template <int kCount, int kFirst = 0, class Body>
__attribute__((always_inline)) inline void unrolled(const Body& body) {
  if constexpr (kFirst < kCount) {
    body(Index<kFirst>{});
    unrolled<kCount, kFirst + 1>(body);
  }
}

// A left operand is two tiles of 16 rows, in a row steps of [planes] of 64 bytes. A right one: see below.
constexpr int64_t kRightRow = kTileBytesPerRow;  // from a row of a tile to the next
template <int kPlanes>
struct RightLayout {
  static constexpr int64_t kPlane = 2 * kTileBytes;
  static constexpr int64_t kTile = kTileBytes;
  static constexpr int64_t kF32StepBytes = kPlanes * 2 * kTileBytes;
};

// The products of one step: four for each pair of planes, done by tick<0>, tick<1>, ... of the vector unit beside it.
// Operands are loaded ahead, one tile a tick: tiles 4, 5 are the left operand's, 6, 7 the right one's, 0 to 3 the sums.
// The first step of a panel stores the sums of the panel before.
template <int kPlanes, Product kProduct>
struct Step {
  using Pairs = PlanePairs<kPlanes, kProduct>;
  static constexpr int kTicks = 4 * Pairs::kCount;

  const char* left;
  int64_t left_row;  // bytes
  const char* right;
  const char* next_left;  // of the next step, whose first tiles this one loads; null if it must not
  int64_t next_left_row;
  const char* next_right;
  bool opens_panel;
  bool is_whole;   // else the upper right one of the four sums is not wanted
  bool store_whole;
  float* store_to;  // null if there is nothing to store
  int64_t store_row;  // bytes

  template <int kTick>
  __attribute__((always_inline)) void tick() const {
    constexpr int kPair = kTick / 4;
    constexpr bool kIsFirst = kPair == 0, kIsLast = kPair == Pairs::kCount - 1;
    constexpr PlanePair kNow = Pairs::kPairs[kPair], kBefore = Pairs::kPairs[kIsFirst ? 0 : kPair - 1];
    constexpr PlanePair kNext = Pairs::kPairs[kIsLast ? 0 : kPair + 1];
    constexpr bool kLoadsLeft = kIsFirst || kNow.a != kBefore.a;
    constexpr bool kLoadsNextLeft = kIsLast || kNext.a != kNow.a, kLoadsNextRight = kIsLast || kNext.b != kNow.b;
    if constexpr (kTick < 4) open_sum<kTick>();
    const bool loads_next = !kIsLast || next_left != nullptr;
    const char* next_right_tile = (kIsLast ? next_right : right) + kNext.b * RightLayout<kPlanes>::kPlane;
    if constexpr (kTick % 4 == 0) {
      _tile_dpbf16ps(0, 4, 6);
      if (kLoadsLeft) _tile_loadd(5, left + kNow.a * kTileBytesPerRow + kTileRows * left_row, left_row);
    } else if constexpr (kTick % 4 == 1) {
      if (is_whole) _tile_dpbf16ps(1, 4, 7);
      if (kLoadsNextLeft && loads_next) {
        _tile_loadd(4, (kIsLast ? next_left : left) + kNext.a * kTileBytesPerRow, kIsLast ? next_left_row : left_row);
      }
    } else if constexpr (kTick % 4 == 2) {
      _tile_dpbf16ps(2, 5, 6);
      if (kLoadsNextRight && loads_next) _tile_loadd(6, next_right_tile, kRightRow);
    } else {
      _tile_dpbf16ps(3, 5, 7);
      if (kLoadsNextRight && loads_next) _tile_loadd(7, next_right_tile + RightLayout<kPlanes>::kTile, kRightRow);
    }
  }

  // What the step before would have loaded.
  void load_first() const {
    constexpr PlanePair kFirst = Pairs::kPairs[0];
    order_memory();
    _tile_loadd(4, left + kFirst.a * kTileBytesPerRow, left_row);
    _tile_loadd(6, right + kFirst.b * RightLayout<kPlanes>::kPlane, kRightRow);
    _tile_loadd(7, right + kFirst.b * RightLayout<kPlanes>::kPlane + RightLayout<kPlanes>::kTile, kRightRow);
  }

  template <int kSum>
  __attribute__((always_inline)) void store_sum() const {
    if (kSum == 1 && !store_whole) return;
    float* c = store_to + kSum % 2 * kTileRows;
    char* p = reinterpret_cast<char*>(c) + kSum / 2 * kTileRows * store_row;
    // The intrinsics' tile is part of an instruction's text.
    if constexpr (kSum == 0) _tile_stored(0, p, store_row);
    if constexpr (kSum == 1) _tile_stored(1, p, store_row);
    if constexpr (kSum == 2) _tile_stored(2, p, store_row);
    if constexpr (kSum == 3) _tile_stored(3, p, store_row);
  }

 private:
  template <int kSum>
  __attribute__((always_inline)) void open_sum() const {
    if (!opens_panel) return;
    if (store_to != nullptr) store_sum<kSum>();
    if constexpr (kSum == 0) _tile_zero(0);
    if constexpr (kSum == 1) _tile_zero(1);
    if constexpr (kSum == 2) _tile_zero(2);
    if constexpr (kSum == 3) _tile_zero(3);
  }
};
struct NoStep {
  template <int kTick>
  void tick() const {}
};

// `count` units of one kind. item and panel are the owner's: what the units are part of.
template <class Owner, class Step>
struct Job {
  void (*unit)(Owner& owner, const Job& job, const Step& step);
  void (*alone)(Owner& owner, const Job& job, const NoStep& step);
  int32_t count;
  int32_t item;
  int32_t panel;
  int32_t index;  // of the next unit
};

// Jobs in the order in which they were added. A ticket says that all jobs up to one are done.
template <class Owner, class Step>
class WorkQueue {
 public:
  using Ticket = uint32_t;
  using OneJob = Job<Owner, Step>;

  explicit WorkQueue(Owner& owner) : owner_(owner) {}

  template <class Kind>
  Ticket add(int32_t count, int32_t item, int32_t panel) {
    jobs_[end_ % kCapacity] = {&Kind::template run<Step>, &Kind::template run<NoStep>, count, item, panel, 0};
    return ++end_;
  }
  Ticket last() const { return end_; }

  // A step with a unit, or alone when there is none.
  void run(const Step& step) {
    if (next_ == end_) return unrolled<Step::kTicks>([&](auto i) { step.template tick<decltype(i)::value>(); });
    OneJob& job = jobs_[next_ % kCapacity];
    job.unit(owner_, job, step);
    if (++job.index == job.count) ++next_;
  }

  bool is_empty() const { return next_ == end_; }
  bool is_done(Ticket ticket) const { return static_cast<int32_t>(ticket - next_) <= 0; }

  // Without products, but for what keeps the tile unit awake, where tile 0 is free for it.
  void finish(Ticket ticket, bool sums_are_free = true) {
    for (int32_t unit = 0; !is_done(ticket); ++unit) {
      if (sums_are_free && unit % 2 == 0) keep_awake();
      OneJob& job = jobs_[next_ % kCapacity];
      job.alone(owner_, job, NoStep{});
      if (++job.index == job.count) ++next_;
    }
  }

 private:
  // More than a task ever has: 8 for V and for the output, 4 for K and for the weights, some single ones.
  static constexpr uint32_t kCapacity = 64;

  Owner& owner_;
  uint32_t next_ = 0;
  uint32_t end_ = 0;
  OneJob jobs_[kCapacity];
};

}  // namespace
}  // namespace cpu
}  // namespace flashmoe
