// d[e] = sum over e's rows of a[row]^T b[row], [n, k]; zeros for an expert without rows.
//   grid     min(tiles, multiprocessors) blocks; tiles = experts * ceil(n / kBlockM) * ceil(k / kBlockN); each block
//            takes one tile after another
//   maps     built by the host as tensor_map.h describes
//   counter  params.tile_counter is 0 at launch, and 0 again at the end
// One block sums a tile over all of the expert's rows in order: the bits do not depend on the grid.
#pragma once

#include "moe/weight_gradient/sm90/consumer.cuh"
#include "moe/weight_gradient/sm90/producer.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/register_control.cuh"
#include "ptx/shuffle.cuh"

namespace flashmoe::moe::weight_gradient::sm90 {

template <typename Spec>
__device__ __forceinline__ void weight_gradient(const GemmParams& params, const ptx::TensorMap& a_map,
                                                const ptx::TensorMap& b_map, const ptx::TensorMap& d_map) {
  const SharedMemory<Spec> smem{ptx::dynamic_shared_memory()};
  // The shuffle tells the compiler that the role is the same in the whole warp.
  const int warp = ptx::shuffle_index(ptx::warp_index(), 0);
  const int warpgroup = warp / 4;

  if (warp == 0 && ptx::elect_one()) {
    ptx::prefetch_tensor_map(&a_map);
    ptx::prefetch_tensor_map(&b_map);
    ptx::prefetch_tensor_map(&d_map);
    init_barriers(smem);
  }
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  sort_experts(params, smem);

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Spec::kProducerRegisters>();
    Producer<Spec>(params, smem, a_map, b_map).run();
  } else {
    ptx::setmaxnreg_inc<Spec::kConsumerRegisters>();
    Consumer<Spec>(params, smem, d_map, warpgroup - 1).run();
  }
}

}  // namespace flashmoe::moe::weight_gradient::sm90
