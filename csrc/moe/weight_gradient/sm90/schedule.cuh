// The tile schedule: experts one after another, those with the most rows first, so that short tiles fill the end.
#pragma once

#include "device/math.cuh"
#include "device/persistent.cuh"
#include "moe/weight_gradient/sm90/spec.cuh"
#include "ptx/barrier.cuh"

namespace flashmoe::moe::weight_gradient::sm90 {

struct Tile {
  int expert;  // < 0: no more work
  int first_row;
  int rows;         // of the expert
  int coordinates;  // m tile * 65536 + n tile

  __device__ __forceinline__ int m_tile() const { return coordinates >> 16; }
  __device__ __forceinline__ int n_tile() const { return coordinates & 0xffff; }
};

// Writes the order of experts to shared memory. Called by all threads of the block; ends with a barrier.
template <typename Spec>
__device__ __forceinline__ void sort_experts(const GemmParams& params, const SharedMemory<Spec>& smem) {
  const int experts = params.experts;
  if (experts <= Spec::kSortedExperts) {
    for (int expert = ptx::thread_index(); expert < experts; expert += Spec::kNumThreads) {
      const uint32_t rows =
          ptx::ld_global_32(params.expert_offsets + expert + 1) - ptx::ld_global_32(params.expert_offsets + expert);
      ptx::st_shared_32(smem.lengths() + expert * 4, rows);
    }
    ptx::barrier_sync_block();
    for (int expert = ptx::thread_index(); expert < experts; expert += Spec::kNumThreads) {
      const uint32_t rows = ptx::ld_shared_32(smem.lengths() + expert * 4);
      int rank = 0;
      for (int other = 0; other < experts; ++other) {
        const uint32_t other_rows = ptx::ld_shared_32(smem.lengths() + other * 4);
        rank += other_rows > rows || (other_rows == rows && other < expert) ? 1 : 0;
      }
      ptx::st_shared_32(smem.order() + rank * 4, static_cast<uint32_t>(expert));
    }
  }
  ptx::barrier_sync_block();
}

template <typename Spec>
struct Schedule {
  // An expert's tiles are visited in sections of kSection m tiles, all n tiles of a section before the next section, so
  // that concurrent blocks share rows of both operands.
  static constexpr int kSection = 8;

  const GemmParams& params;
  const SharedMemory<Spec> smem;
  int m_tiles;
  int n_tiles;

  __device__ __forceinline__ Schedule(const GemmParams& params_, const SharedMemory<Spec>& smem_)
      : params(params_), smem(smem_) {
    m_tiles = ceil_div(params.n, Spec::kBlockM);
    n_tiles = ceil_div(params.k, Spec::kBlockN);
  }

  __device__ __forceinline__ int num_tiles() const { return m_tiles * n_tiles * params.experts; }

  __device__ __forceinline__ Tile tile(int tile_index) const {
    const int per_expert = m_tiles * n_tiles;
    const int rank = tile_index / per_expert;
    const int rest = tile_index - rank * per_expert;
    const int first_m = rest / (kSection * n_tiles) * kSection;
    const int in_section = minimum(kSection, m_tiles - first_m);
    const int within = rest - first_m * n_tiles;
    const int n_tile = within / in_section;
    const int m_tile = first_m + within - n_tile * in_section;
    const bool is_sorted = params.experts <= Spec::kSortedExperts;
    const int expert = is_sorted ? static_cast<int>(ptx::ld_shared_32(smem.order() + rank * 4)) : rank;
    const int first_row = static_cast<int>(ptx::ld_global_32(params.expert_offsets + expert));
    const int end_row = static_cast<int>(ptx::ld_global_32(params.expert_offsets + expert + 1));
    return Tile{expert, first_row, end_row - first_row, m_tile << 16 | n_tile};
  }
};

}  // namespace flashmoe::moe::weight_gradient::sm90
