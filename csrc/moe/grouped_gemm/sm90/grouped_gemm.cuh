// d[row] = a[row] B_e (+ bias_e) for sm_90a: TMA, wgmma, one producer and two consumer warpgroups, a persistent grid.
//   grid     min(multiprocessors, bound) blocks, bound = (ceil(slots / kBlockM) + min(experts, slots)) * column tiles
//   maps     built by the host as tensor_map.h describes
//   counter  params.tile_counter is 0 at launch, and 0 again at the end; null means a static schedule
// Read in this order: ../tiles.cuh (tile schedule), producer.cuh (loads), mainloop.cuh (products and the kernel),
// output_slabs.cuh (stores).
#pragma once

#include "moe/grouped_gemm/sm90/mainloop.cuh"
#include "moe/grouped_gemm/sm90/output_slabs.cuh"

namespace flashmoe::moe::sm90 {

// Adds an expert's bias to accumulators of neighbouring columns; `bias` points at this thread's first one, `columns` counts
// from there.
template <typename Element, int kAccumulators>
__device__ __forceinline__ void add_bias(float (&accum)[kAccumulators], const Element* bias, int columns) {
  uint32_t pairs[kAccumulators / 4];
#pragma unroll
  for (int j = 0; j < kAccumulators / 4; ++j) pairs[j] = 8 * j < columns ? ptx::ld_global_32(bias + 8 * j) : 0;
#pragma unroll
  for (int j = 0; j < kAccumulators / 4; ++j) {
    const float2 pair = unpack<Element>(pairs[j]);
    accum[4 * j] += pair.x;
    accum[4 * j + 1] += pair.y;
    accum[4 * j + 2] += pair.x;
    accum[4 * j + 3] += pair.y;
  }
}

template <typename Spec>
struct PlainEpilogue {
  using Element = typename Spec::Element;
  const GemmParams& params;
  const ptx::TensorMap& d_map;
  OutputSlabs<Spec> slabs;

  __device__ __forceinline__ PlainEpilogue(const GemmParams& params_, const SharedMemory<Spec>& smem, int consumer,
                                           const ptx::TensorMap& d_map_)
      : params(params_), d_map(d_map_), slabs(smem, consumer) {}

  // Stores 2 * kSums columns, from own.column on.
  template <int kNumAccum>
  __device__ __forceinline__ void store(const WarpgroupTile<Spec>& wg_tile, float (&accum)[kNumAccum]) {
    if (params.bias != nullptr) {
      const int column = wg_tile.column + ptx::lane_index() % 4 * 2;
      add_bias(accum,
               static_cast<const Element*>(params.bias) + static_cast<int64_t>(wg_tile.expert) * params.n + column,
               params.n - column);
    }
    // If a tile is not a whole number of slabs wide, only its own columns of the last slab are stored.
    constexpr int kRemainder = kNumAccum % 32;
    const int end = kRemainder == 0 ? params.n : minimum(params.n, wg_tile.column + Spec::kBlockN);
    const SlabTarget to{d_map, params.d, params.d_stride, end, 0};
#pragma unroll
    for (int slab = 0; slab < (kNumAccum + 31) / 32; ++slab) {
      const int column = wg_tile.column + slab * 64;
      if (column >= params.n) break;
      const bool is_whole = kRemainder == 0 || slab < kNumAccum / 32;
      if (is_whole) {
        write_slab<Element>(slabs.acquire(), accum + 32 * slab);
      } else {
        write_slab<Element, kRemainder>(slabs.acquire(), accum + 32 * slab);
      }
      slabs.store(to, wg_tile.row, wg_tile.rows, column, is_whole);
    }
  }

  __device__ __forceinline__ void finish() const { slabs.finish(); }
};

template <typename Spec, Weights kWeights>
__device__ __forceinline__ void grouped_gemm(const GemmParams& params, const ptx::TensorMap& a_map,
                                             const ptx::TensorMap& b_nk_map, const ptx::TensorMap& b_kn_map,
                                             const ptx::TensorMap& d_map) {
  run_grouped_gemm<Spec, kWeights, PlainEpilogue<Spec>>(params, &a_map, kWeights == Weights::kNk ? b_nk_map : b_kn_map,
                                                        d_map);
}

}  // namespace flashmoe::moe::sm90
