// The producer warpgroup: takes tiles and loads the rows of both operands.
//
// Full stages are loaded by TMA. An expert's last stage may not be full: the rows that follow in memory are the next
// expert's, and 0 times a NaN among them would be NaN. So that stage is loaded by cp.async, which writes zeros for rows
// past the end.
#pragma once

#include "moe/weight_gradient/sm90/schedule.cuh"
#include "moe/weight_gradient/sm90/spec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/tma.cuh"

namespace flashmoe::moe::weight_gradient::sm90 {

// One arrival per warp, once all its lanes have reached this point.
__device__ __forceinline__ void release(ptx::Mbarrier* empty) {
  ptx::warp_sync();
  if (ptx::lane_index() == 0) ptx::mbarrier_arrive(empty);
}

// The part of a stage that one thread copies: in rows `row`, row + 16, + 32 and + 48, one 16-byte chunk of each of
// kSlabs slabs. Eight lanes copy the 128 bytes that a slab has of a row.
template <int kSlabs>
struct RowCopies {
  const unsigned char* gmem;  // the thread's chunk of the tile's first slab, in row 0 of the tensor
  int64_t stride_bytes;
  int columns;  // columns left from the chunk on: slab s has the chunk if 64 s is less

  static __device__ __forceinline__ int row() { return ptx::thread_index() / 8; }
  static __device__ __forceinline__ int chunk() { return ptx::thread_index() % 8; }

  __device__ __forceinline__ RowCopies(const void* tensor, int64_t stride, int first_column, int num_columns) {
    const int column = first_column + chunk() * 8;
    gmem = static_cast<const unsigned char*>(tensor) + static_cast<int64_t>(column) * 2;
    stride_bytes = stride * 2;
    columns = num_columns - column;
  }

  // Copies the stage of the `left` rows that start at row `first`.
  __device__ __forceinline__ void copy(unsigned char* smem, int first, int left) const {
    ptx::SmemPointer to = ptx::SmemPointer(smem) + (row() * 128 + (chunk() ^ (row() % 8)) * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool is_inside = row() + 16 * i < left;
      const unsigned char* from = gmem + (first + row() + 16 * i) * stride_bytes;
#pragma unroll
      for (int slab = 0; slab < kSlabs; ++slab) {
        ptx::cp_async_16(to + (i * 16 * 128 + slab * 64 * 128), from + slab * 128,
                         is_inside && slab * 64 < columns ? 16 : 0);
      }
    }
  }
};

template <typename Spec>
struct Producer {
  static constexpr int kASlabs = Spec::kBlockM / 64;
  static constexpr int kBSlabs = Spec::kBlockN / 64;

  const GemmParams& params;
  const SharedMemory<Spec> shared;
  const ptx::TensorMap& a_map;
  const ptx::TensorMap& b_map;
  RingPosition<Spec::kNumStages> at;

  __device__ __forceinline__ Producer(const GemmParams& params_, const SharedMemory<Spec>& shared_,
                                      const ptx::TensorMap& a_map_, const ptx::TensorMap& b_map_)
      : params(params_), shared(shared_), a_map(a_map_), b_map(b_map_) {}

  // Hazard: some warp may still read the tile that this one overwrites.
  __device__ __forceinline__ void publish(const RingPosition<Spec::kTileSlots>& slot, const Tile& tile) const {
    ptx::mbarrier_wait(shared.tile_empty(slot.stage), slot.parity ^ 1);
    publish_tile(shared.tile(slot.stage), tile);
    ptx::mbarrier_arrive(shared.tile_full(slot.stage));
  }

  template <int kSlabs>
  __device__ __forceinline__ void copy_boxes(unsigned char* smem, const ptx::TensorMap& map, int column,
                                             int row) const {
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      ptx::tma_load_4d(smem + slab * Spec::kSlabBytes, &map, shared.full(at.stage), column + slab * 64, row, 0, 0,
                       ptx::CacheHint::kEvictNormal);
    }
  }

  // Calls draw(rows left) before each stage.
  template <typename Draw>
  __device__ __forceinline__ void load_tile(const Tile& tile, Draw draw) {
    const int a_column = tile.m_tile() * Spec::kBlockM;
    const int b_column = tile.n_tile() * Spec::kBlockN;
    for (int done = 0; done < tile.rows; done += Spec::kStageRows) {
      const int first = tile.first_row + done;
      const int left = tile.rows - done;
      const bool is_full = left >= Spec::kStageRows;
      draw(left);
      ptx::mbarrier_wait(shared.empty(at.stage), at.parity ^ 1);
      if (ptx::thread_index() == 0) {
        ptx::mbarrier_arrive_expect_tx(shared.full(at.stage), is_full ? Spec::kStageBytes : 0);
        if (is_full) {
          copy_boxes<kASlabs>(shared.a(at.stage), a_map, a_column, first);
          copy_boxes<kBSlabs>(shared.b(at.stage), b_map, b_column, first);
        }
      }
      if (!is_full) {
        RowCopies<kASlabs>(params.a, params.a_stride, a_column, params.n).copy(shared.a(at.stage), first, left);
        RowCopies<kBSlabs>(params.b, params.b_stride, b_column, params.k).copy(shared.b(at.stage), first, left);
      }
      ptx::mbarrier_arrive_cp_async(shared.full(at.stage));
      at.advance();
    }
  }

  __device__ __forceinline__ void run() {
    const Schedule<Spec> schedule(params, shared);
    const int num_tiles = schedule.num_tiles();
    const bool is_drawing_thread = ptx::thread_index() == 0;
    RingPosition<Spec::kTileSlots> slot;
    int number = ptx::block_index();
    if (is_drawing_thread) publish(slot, schedule.tile(number));
    while (true) {
      ptx::mbarrier_wait(shared.tile_full(slot.stage), slot.parity);
      const Tile tile = read_tile<Tile>(shared.tile(slot.stage));
      release(shared.tile_empty(slot.stage));
      slot.advance();
      if (tile.expert < 0) return;
      // The next tile is taken late: a block that takes it at the start of a long tile holds up a tile that others,
      // done sooner, could begin. But not at the very end, when the next tile's loads would wait for the counter's
      // answer.
      constexpr int kDrawAheadRows = 3 * Spec::kStageRows;
      bool draws = is_drawing_thread;
      const auto draw = [&](int rows_left) {
        if (!draws || rows_left > kDrawAheadRows) return;
        number = next_tile_index(params.tile_counter, num_tiles, number);
        draws = false;
      };
      load_tile(tile, draw);
      draw(0);  // for an expert without rows
      if (is_drawing_thread) publish(slot, number < num_tiles ? schedule.tile(number) : Tile{-1, 0, 0, 0});
    }
  }
};

}  // namespace flashmoe::moe::weight_gradient::sm90
