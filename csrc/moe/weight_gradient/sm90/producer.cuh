// The producer warpgroup: fetches tiles and loads the rows of both operands.
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
  const SharedMemory<Spec> smem;
  const ptx::TensorMap& a_map;
  const ptx::TensorMap& b_map;
  RingPosition<Spec::kNumStages> state;

  __device__ __forceinline__ Producer(const GemmParams& params_, const SharedMemory<Spec>& smem_,
                                      const ptx::TensorMap& a_map_, const ptx::TensorMap& b_map_)
      : params(params_), smem(smem_), a_map(a_map_), b_map(b_map_) {}

  // Hazard: some warp may still read the tile that this one overwrites.
  __device__ __forceinline__ void publish(const RingPosition<Spec::kTileSlots>& tile_state, const Tile& tile) const {
    ptx::mbarrier_wait(smem.tile_empty(tile_state.stage), tile_state.parity ^ 1);
    publish_tile(smem.tile(tile_state.stage), tile);
    ptx::mbarrier_arrive(smem.tile_full(tile_state.stage));
  }

  template <int kSlabs>
  __device__ __forceinline__ void copy_boxes(unsigned char* operand_smem, const ptx::TensorMap& map, int column,
                                             int row) const {
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      ptx::tma_load_4d(operand_smem + slab * Spec::kSlabBytes, &map, smem.full(state.stage), column + slab * 64, row, 0,
                       0, ptx::CacheHint::kEvictNormal);
    }
  }

  // Calls fetch_next(rows left) before each stage.
  template <typename FetchNext>
  __device__ __forceinline__ void load_tile(const Tile& tile, FetchNext fetch_next) {
    const int a_column = tile.m_tile() * Spec::kBlockM;
    const int b_column = tile.n_tile() * Spec::kBlockN;
    for (int done = 0; done < tile.rows; done += Spec::kStageRows) {
      const int first = tile.first_row + done;
      const int left = tile.rows - done;
      const bool is_full = left >= Spec::kStageRows;
      fetch_next(left);
      ptx::mbarrier_wait(smem.empty(state.stage), state.parity ^ 1);
      if (ptx::thread_index() == 0) {
        ptx::mbarrier_arrive_expect_tx(smem.full(state.stage), is_full ? Spec::kStageBytes : 0);
        if (is_full) {
          copy_boxes<kASlabs>(smem.a(state.stage), a_map, a_column, first);
          copy_boxes<kBSlabs>(smem.b(state.stage), b_map, b_column, first);
        }
      }
      if (!is_full) {
        RowCopies<kASlabs>(params.a, params.a_stride, a_column, params.n).copy(smem.a(state.stage), first, left);
        RowCopies<kBSlabs>(params.b, params.b_stride, b_column, params.k).copy(smem.b(state.stage), first, left);
      }
      ptx::mbarrier_arrive_cp_async(smem.full(state.stage));
      state.advance();
    }
  }

  __device__ __forceinline__ void run() {
    const Schedule<Spec> schedule(params, smem);
    const int num_tiles = schedule.num_tiles();
    const bool is_scheduling_thread = ptx::thread_index() == 0;
    RingPosition<Spec::kTileSlots> tile_state;
    int tile_index = ptx::block_index();
    if (is_scheduling_thread) publish(tile_state, schedule.tile(tile_index));
    while (true) {
      ptx::mbarrier_wait(smem.tile_full(tile_state.stage), tile_state.parity);
      const Tile tile = read_tile<Tile>(smem.tile(tile_state.stage));
      release(smem.tile_empty(tile_state.stage));
      tile_state.advance();
      if (tile.expert < 0) return;
      bool fetches = is_scheduling_thread;
      const auto fetch_next = [&](int rows_left) {
        if (!fetches || rows_left > kDrawAhead * Spec::kStageRows) return;
        tile_index = next_tile_index(params.tile_counter, num_tiles, tile_index);
        fetches = false;
      };
      load_tile(tile, fetch_next);
      fetch_next(0);  // for an expert without rows
      if (is_scheduling_thread)
        publish(tile_state, tile_index < num_tiles ? schedule.tile(tile_index) : Tile{-1, 0, 0, 0});
    }
  }
};

}  // namespace flashmoe::moe::weight_gradient::sm90
