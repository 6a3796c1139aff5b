// d[e] = sum over e's rows of a[row]^T b[row] for transposed e4m3 operands (moe/params/training.h), for sm_90a. Stages,
// products and stores are those of the grouped products with scales, with an expert's padded rows as k.
//
//   grid     min(tiles, multiprocessors) blocks; tiles = experts * ceil(n / kBlockM) * ceil(k / kBlockN)
//   counter  params.gemm.tile_counter is 0 at launch, and 0 again at the end
//
// a has one scale per 128 rows of a column, b one per 128 rows of 128 columns. Every tile has all its 128 rows of d: n
// is a multiple of 128. One block sums a tile over all of the expert's rows in order: the bits do not depend on the
// grid.
#pragma once

#include "moe/grouped_gemm/sm90/scaled.cuh"
#include "moe/params/training.h"

namespace flashmoe::moe::weight_gradient::sm90 {

using moe::sm90::ScaledEpilogue;
using moe::sm90::ScaledMainloop;
using moe::sm90::WarpgroupTile;

template <typename Element, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kOutputSlabs>
using ScaledWeightGradientSpec =
    moe::sm90::ScaledGemmSpec<Element, kBlockM, kBlockN, kNumStages, kNumWarps, kOutputSlabs>;

struct ScaledTile {
  int expert;  // < 0: no more work
  int first_block;
  int blocks;       // blocks of the expert's rows; 0: its gradient is zero
  int coordinates;  // m tile * 65536 + n tile

  __device__ __forceinline__ int m_tile() const { return coordinates >> 16; }
  __device__ __forceinline__ int n_tile() const { return coordinates & 0xffff; }
};

// The scales that a thread needs, one block of rows at a time: of its two columns of a, 8 apart, and of two blocks of
// columns of b.
template <typename Spec>
struct GradientScales {
  const float* row_gmem;
  const float* weight_gmem[2];
  int64_t row_step, weight_step;
  float row[2];
  float weight[2];

  __device__ __forceinline__ GradientScales(const ScaledGemmParams& params, const ScaledTile& tile, int consumer) {
    const GemmParams& gemm = params.gemm;
    const int thread_row = consumer * 64 + ptx::warp_index() % 4 * 16 + ptx::lane_index() / 4;
    const int count = gemm.k / kScaleBlock;
    row_step = gemm.n;
    weight_step = count;
    row_gmem = params.a_scale + tile.first_block * row_step + tile.m_tile() * Spec::kBlockM + thread_row;
    const float* of_block = params.b_scale + tile.first_block * weight_step;
    const int first = tile.n_tile() * (Spec::kBlockN / kScaleBlock);
    weight_gmem[0] = of_block + first;
    weight_gmem[1] = of_block + minimum(first + 1, count - 1);  // a tile may lack its last 128 columns
  }

  __device__ __forceinline__ void load(int block) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row[i] = ptx::ld_global_float(row_gmem + block * row_step + 8 * i);
      weight[i] = ptx::ld_global_float(weight_gmem[i] + block * weight_step);
    }
  }
};

template <typename Spec>
struct ScaledProducer {
  const GemmParams& params;
  const moe::sm90::SharedMemory<Spec> smem;
  const ptx::TensorMap& a_map;
  const ptx::TensorMap& b_map;
  RingPosition<Spec::kNumStages> state;

  // Experts one after another; within one, sections of kSection m tiles, all n tiles of a section before the next
  // section, so that concurrent blocks share rows of both operands.
  __device__ __forceinline__ ScaledTile tile(int m_tiles, int n_tiles, int tile_index) const {
    constexpr int kSection = 8;
    const int expert = tile_index / (m_tiles * n_tiles);
    const int rest = tile_index - expert * m_tiles * n_tiles;
    const int first_m = rest / (kSection * n_tiles) * kSection;
    const int in_section = minimum(kSection, m_tiles - first_m);
    const int within = rest - first_m * n_tiles;
    const int n_tile = within / in_section;
    const int m_tile = first_m + within - n_tile * in_section;
    const int first_row = static_cast<int>(ptx::ld_global_32(params.expert_offsets + expert));
    const int rows = static_cast<int>(ptx::ld_global_32(params.expert_offsets + expert + 1)) - first_row;
    return ScaledTile{expert, padded_block(first_row, expert), ceil_div(rows, kScaleBlock), m_tile << 16 | n_tile};
  }

  __device__ __forceinline__ void load(const ScaledTile& tile) {
    constexpr ptx::CacheHint kHint = ptx::CacheHint::kEvictNormal;
    for (int block = 0; block < tile.blocks; ++block, state.advance()) {
      ptx::Mbarrier* full = smem.full(state.stage);
      ptx::mbarrier_wait(smem.empty(state.stage), state.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, Spec::kABytes + Spec::kBBytes);
      const int k = (tile.first_block + block) * Spec::kBlockK;
#pragma unroll
      for (int slab = 0; slab < Spec::kBlockM / 64; ++slab) {
        ptx::tma_load_4d(smem.a(state.stage) + slab * Spec::kSlabBytes, &a_map, full, k,
                         tile.m_tile() * Spec::kBlockM + slab * 64, 0, 0, kHint);
      }
      ptx::tma_load_4d(smem.b(state.stage), &b_map, full, k, tile.n_tile() * Spec::kBlockN, 0, 0, kHint);
    }
  }

  // Called by one thread.
  __device__ __forceinline__ void run() {
    const int m_tiles = ceil_div(params.n, Spec::kBlockM), n_tiles = ceil_div(params.k, Spec::kBlockN);
    const int num_tiles = m_tiles * n_tiles * params.experts;
    RingPosition<Spec::kNumTileSlots> tile_state;
    for (int tile_index = ptx::block_index();; tile_state.advance()) {
      const bool is_end = tile_index >= num_tiles;
      // One tile ahead: the counter's answer arrives while this tile's loads are issued.
      const int next = is_end ? tile_index : next_tile_index(params.tile_counter, num_tiles, tile_index);
      const ScaledTile found = is_end ? ScaledTile{-1, 0, 0, 0} : tile(m_tiles, n_tiles, tile_index);
      // Hazard: some warp may still read the tile that this one overwrites.
      ptx::mbarrier_wait(smem.tile_empty(tile_state.stage), tile_state.parity ^ 1);
      publish_tile(smem.tile(tile_state.stage), found);
      ptx::mbarrier_arrive(smem.tile_full(tile_state.stage));
      if (is_end) return;
      load(found);
      tile_index = next;
    }
  }
};

template <typename Spec>
__device__ __forceinline__ void consume_gradient(const ScaledGemmParams& params,
                                                 const moe::sm90::SharedMemory<Spec>& smem, int consumer,
                                                 const ptx::TensorMap& d_map) {
  const GemmParams& gemm = params.gemm;
  ScaledMainloop<Spec> mainloop(smem, consumer);
  ScaledEpilogue<Spec> epilogue(gemm, smem, consumer, d_map, gemm.k);
  RingPosition<Spec::kNumTileSlots> tile_state;
  while (true) {
    const auto tile = moe::sm90::next_tile<Spec, ScaledTile>(smem, tile_state);
    if (tile.expert < 0) break;
    float accum[Spec::kAccumulators];
    if (tile.blocks > 0) {
      GradientScales<Spec> scales(params, tile, consumer);
      scales.load(0);
      mainloop.template multiply<2>(accum, scales, consumer, 0, tile.blocks);
    } else {
#pragma unroll
      for (int i = 0; i < Spec::kAccumulators; ++i) accum[i] = 0.0f;
    }
    const int row = tile.expert * gemm.n + tile.m_tile() * Spec::kBlockM + consumer * 64;
    epilogue.template store<2>(WarpgroupTile<Spec>{tile.expert, row, 64, tile.n_tile() * Spec::kBlockN}, accum, 0,
                               [] {});
  }
  epilogue.finish();
}

template <typename Spec>
__device__ __forceinline__ void scaled_weight_gradient(const ScaledGemmParams& params, const ptx::TensorMap& a_map,
                                                       const ptx::TensorMap& b_map, const ptx::TensorMap& d_map) {
  const moe::sm90::SharedMemory<Spec> smem{ptx::dynamic_shared_memory()};
  // The shuffle tells the compiler that the role is the same in the whole warp.
  const int warp = ptx::shuffle_index(ptx::warp_index(), 0);
  const int warpgroup = warp / 4;

  if (warp == 0 && ptx::elect_one()) {
    ptx::prefetch_tensor_map(&a_map);
    ptx::prefetch_tensor_map(&b_map);
    ptx::prefetch_tensor_map(&d_map);
    moe::sm90::init_barriers(smem);
  }
  ptx::barrier_sync_block();
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Spec::kProducerRegisters>();
    if (warp == 0 && ptx::lane_index() == 0) ScaledProducer<Spec>{params.gemm, smem, a_map, b_map, {}}.run();
  } else {
    ptx::setmaxnreg_inc<Spec::kConsumerRegisters>();
    consume_gradient<Spec>(params, smem, warpgroup - 1, d_map);
  }
}

}  // namespace flashmoe::moe::weight_gradient::sm90
