// The sum of a tile with cp.async: a ring of stages, and a step's fragments read one step ahead of their product.
#pragma once

#include "moe/grouped_gemm/mma_sync/kernel.cuh"
#include "moe/grouped_gemm/sm80/spec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"

namespace flashmoe::moe::sm80 {

using mma_sync::kSteps;

template <typename Operand>
__device__ __forceinline__ void load_operand(Operand& operand, ptx::SmemPointer tile_smem) {
  operand.visit([&](int pass, const auto* gmem, bool valid) {
    ptx::cp_async_16(tile_smem + Operand::smem_offset(pass), gmem, valid ? kChunkBytes : 0);
  });
}

template <typename Spec, typename A, typename B>
__device__ __forceinline__ void load_stage(mma_sync::Operands<A, B>& operands, ptx::SmemPointer stage_smem) {
  load_operand(operands.a, stage_smem);
  load_operand(operands.b, stage_smem + Spec::kABytes);
}

// A position in the ring of stages.
template <typename Spec>
struct Ring {
  int offset = 0;

  __device__ __forceinline__ void advance() {
    offset += Spec::kStageBytes;
    if (offset == Spec::kRingBytes) offset = 0;
  }
};

// while_loading(): work that the block can do until the first tiles have arrived.
template <typename Spec, typename A, typename B, typename WhileLoading>
__device__ __forceinline__ void multiply(mma_sync::Operands<A, B>& operands, mma_sync::Accumulator<Spec>& accum,
                                         ptx::SmemPointer ring_smem, WhileLoading while_loading) {
  constexpr int kAhead = Spec::kNumStages - 1;
  const int steps = operands.steps;
#pragma unroll
  for (int stage = 0; stage < kAhead; ++stage) {
    if (stage < steps) load_stage<Spec>(operands, ring_smem + stage * Spec::kStageBytes);
    ptx::cp_async_commit();
  }
  while_loading();
  const mma_sync::StageReader<Spec, A::kIsMn, B::kIsMn> reader;
  mma_sync::Fragments<Spec> fragments[2];
  ptx::cp_async_wait<kAhead - 1>();
  ptx::barrier_sync_block();  // stage 0 is complete: all threads' copies
  Ring<Spec> reading, writing{kAhead * Spec::kStageBytes};
  if (steps > 0) reader.read(fragments[0], ring_smem, 0);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    // Free since the last barrier, before which its fragments were read.
    if (step + kAhead < steps) load_stage<Spec>(operands, ring_smem + writing.offset);
    ptx::cp_async_commit();
    writing.advance();
#pragma unroll
    for (int k_step = 0; k_step < kSteps; ++k_step) {
      if (k_step + 1 < kSteps) {
        reader.read(fragments[(k_step + 1) % 2], ring_smem + reading.offset, k_step + 1);
      } else {
        ptx::cp_async_wait<kAhead - 1>();
        ptx::barrier_sync_block();  // the next stage is complete, and all warps have read this one
        reading.advance();
        if (step + 1 < steps) reader.read(fragments[(k_step + 1) % 2], ring_smem + reading.offset, 0);
      }
      accum.add_product(fragments[k_step % 2]);
    }
  }
}

}  // namespace flashmoe::moe::sm80
