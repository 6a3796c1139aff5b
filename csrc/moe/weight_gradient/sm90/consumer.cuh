// A consumer warpgroup: 64 rows of M, all columns of N, the rows of the expert in ascending order.
#pragma once

#include "device/convert.cuh"
#include "device/warpgroup_product.cuh"
#include "moe/weight_gradient/sm90/producer.cuh"
#include "ptx/fence.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/wgmma.cuh"

namespace flashmoe::moe::weight_gradient::sm90 {

template <typename Spec>
struct Consumer {
  using Element = typename Spec::Element;
  static constexpr int kAccumulators = Spec::kBlockN / 2;

  const GemmParams& params;
  const SharedMemory<Spec> smem;
  const ptx::TensorMap& d_map;
  const int consumer;  // 0 to kNumConsumers - 1
  RingPosition<Spec::kNumStages> state;

  __device__ __forceinline__ Consumer(const GemmParams& params_, const SharedMemory<Spec>& smem_,
                                      const ptx::TensorMap& d_map_, int consumer_)
      : params(params_), smem(smem_), d_map(d_map_), consumer(consumer_) {}

  // sums += a^T b over the 64 rows of a stage; asynchronous.
  __device__ __forceinline__ void issue(float (&accum)[kAccumulators]) const {
    const auto a = SharedTile<Spec::kStageRows, 64>{smem.a(state.stage) + consumer * Spec::kSlabBytes}.mn_major();
    const auto b = SharedTile<Spec::kStageRows, Spec::kBlockN>{smem.b(state.stage)}.mn_major();
    issue_product<Element, Spec::kStageRows / 16, true>(accum, a, b);
  }

  // Before its first products each other consumer lets consumer 0 run ahead, by waiting for rows that it needs only
  // later. The distance stays.
  __device__ __forceinline__ void fall_behind(int rows) const {
    if (Spec::kLead > 0 && consumer > 0) {
      ptx::mbarrier_wait(smem.full(minimum(Spec::kLead, ceil_div(rows, Spec::kStageRows) - 1)), 0);
    }
  }

  __device__ __forceinline__ void multiply(float (&accum)[kAccumulators], int rows) {
    RingPosition<Spec::kNumStages> used = state;  // the oldest stage that has not been released
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) accum[i] = 0.0f;
#pragma unroll 1
    for (int done = 0; done < rows; done += Spec::kStageRows) {
      ptx::mbarrier_wait(smem.full(state.stage), state.parity);
      // Makes what cp.async has written visible to wgmma.
      ptx::fence_proxy_async_shared();
      issue(accum);
      state.advance();
      ptx::wgmma_wait<1>();
      if (done == 0) continue;
      release(smem.empty(used.stage));
      used.advance();
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operands(accum);
    if (rows > 0) release(smem.empty(used.stage));
  }

  // Each warp stores its own 16 rows, slab by slab, without waiting for other warps. The tensor map clips what is past
  // n and k.
  __device__ __forceinline__ void store(const float (&accum)[kAccumulators], const Tile& tile) const {
    const int lane = ptx::lane_index();
    const int warp = ptx::warp_index() % 4;
    const int row = lane % 16;
#pragma unroll
    for (int slab = 0; slab < Spec::kBlockN / 64; ++slab) {
      unsigned char* slab_smem = smem.output(consumer, slab % Spec::kOutputSlabs) + warp * 16 * 128;
      // Hazard: TMA may still read the previous contents of this buffer.
      if (lane == 0) ptx::tma_store_wait_read<Spec::kOutputSlabs - 1>();
      ptx::warp_sync();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const float* d = &accum[32 * slab + 8 * step];
        const uint32_t words[4] = {pack<Element>(d[0], d[1]), pack<Element>(d[2], d[3]), pack<Element>(d[4], d[5]),
                                   pack<Element>(d[6], d[7])};
        const int chunk = step * 2 + lane / 16;
        ptx::stmatrix_x4(slab_smem + row * 128 + (chunk ^ (row % 8)) * 16, words);
      }
      // Hazard: TMA must not read before every lane's share is written and visible to it.
      ptx::fence_proxy_async_shared();
      ptx::warp_sync();
      if (lane == 0) {
        ptx::tma_store_4d(&d_map, slab_smem, tile.n_tile() * Spec::kBlockN + slab * 64,
                          tile.m_tile() * Spec::kBlockM + consumer * 64 + warp * 16, 0, tile.expert);
        ptx::tma_store_commit();
      }
    }
  }

  __device__ __forceinline__ void run() {
    RingPosition<Spec::kTileSlots> tile_state;
    bool is_first = true;
    while (true) {
      ptx::mbarrier_wait(smem.tile_full(tile_state.stage), tile_state.parity);
      const Tile tile = read_tile<Tile>(smem.tile(tile_state.stage));
      release(smem.tile_empty(tile_state.stage));
      tile_state.advance();
      if (tile.expert < 0) break;
      if (is_first && tile.rows > 0) {
        fall_behind(tile.rows);
        is_first = false;
      }
      float accum[kAccumulators];
      multiply(accum, tile.rows);
      store(accum, tile);
    }
    if (ptx::lane_index() == 0) ptx::tma_store_wait<0>();
  }
};

}  // namespace flashmoe::moe::weight_gradient::sm90
