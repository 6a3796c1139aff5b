// The sum of a tile without cp.async: the next tile is loaded into registers while this one is multiplied.
#pragma once

#include "moe/grouped_gemm/mma_sync/kernel.cuh"
#include "moe/grouped_gemm/sm75/spec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"

namespace flashmoe::moe::sm75 {

// A thread's chunks of one operand's tile.
template <typename Operand>
struct StagedTile {
  uint32_t chunks_rmem[Operand::kPasses][4];

  __device__ __forceinline__ void fetch(Operand& operand) {
    operand.visit([&](int pass, const auto* gmem, bool valid) {
      uint32_t (&chunk)[4] = chunks_rmem[pass];
      chunk[0] = chunk[1] = chunk[2] = chunk[3] = 0;
      if (valid) ptx::ld_global_128(chunk, gmem);
    });
  }

  __device__ __forceinline__ void store(ptx::SmemPointer tile_smem) const {
#pragma unroll
    for (int pass = 0; pass < Operand::kPasses; ++pass)
      ptx::st_shared_128(tile_smem + Operand::smem_offset(pass), chunks_rmem[pass]);
  }
};

// while_loading(): work that the block can do until the first tiles have arrived.
template <typename Spec, typename A, typename B, typename WhileLoading>
__device__ __forceinline__ void multiply(mma_sync::Operands<A, B>& operands, mma_sync::Accumulator<Spec>& accum,
                                         ptx::SmemPointer ring_smem, WhileLoading while_loading) {
  const int steps = operands.steps;
  const mma_sync::StageReader<Spec, A::kIsMn, B::kIsMn> reader;
  StagedTile<A> a_staged;
  StagedTile<B> b_staged;
  int offset = 0;  // of the stage being multiplied
  if (steps > 0) {
    a_staged.fetch(operands.a);
    b_staged.fetch(operands.b);
  }
  while_loading();
  if (steps > 0) {
    a_staged.store(ring_smem);
    b_staged.store(ring_smem + Spec::kABytes);
  }
  ptx::barrier_sync_block();  // stage 0 is complete
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const bool has_next = step + 1 < steps;
    if (has_next) {
      a_staged.fetch(operands.a);
      b_staged.fetch(operands.b);
    }
#pragma unroll
    for (int k_step = 0; k_step < mma_sync::kSteps; ++k_step) {
      mma_sync::Fragments<Spec> fragments;
      reader.read(fragments, ring_smem + offset, k_step);
      accum.add_product(fragments);
    }
    offset = Spec::kStageBytes - offset;
    if (has_next) {  // the other stage has been free since the last barrier
      a_staged.store(ring_smem + offset);
      b_staged.store(ring_smem + offset + Spec::kABytes);
    }
    ptx::barrier_sync_block();  // the next stage is complete, and all warps have read this one
  }
}

}  // namespace flashmoe::moe::sm75
