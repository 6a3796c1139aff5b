// A warp's product of two operand tiles. Spec::multiply is the family's 16x8x16 product.
#pragma once

#include "moe/grouped_gemm/mma_sync/tile.cuh"

namespace flashmoe::moe::mma_sync {

// A warp's operands of one k step: its 16 columns of A and 16 rows of B.
template <typename Spec>
struct Fragments {
  uint32_t a[Spec::kMmaM][4];
  uint32_t b[Spec::kMmaN / 2][4];  // two blocks of 8 columns each
};

// Reads a warp's fragments from a stage: A's tile, then B's.
template <typename Spec, bool kAIsMn, bool kBIsMn>
struct StageReader {
  FragmentWalk<Side::kA, kAIsMn, Spec::kBlockM> a;
  FragmentWalk<Side::kB, kBIsMn, Spec::kBlockN> b;

  __device__ __forceinline__ StageReader() : a(Spec::warp_row()), b(Spec::warp_column()) {}

  __device__ __forceinline__ void read(Fragments<Spec>& fragments, ptx::SmemPointer stage_smem, int step) const {
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m) a.load(fragments.a[m], stage_smem, m, step);
#pragma unroll
    for (int pair = 0; pair < Spec::kMmaN / 2; ++pair)
      b.load(fragments.b[pair], stage_smem + Spec::kABytes, pair, step);
  }
};

// The warp's tile of sums, fp32: element i of d[m][n] as in ptx/mma.cuh.
template <typename Spec>
struct Accumulator {
  float d[Spec::kMmaM][Spec::kMmaN][4];

  __device__ __forceinline__ Accumulator() {
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) d[m][n][i] = 0.0f;
  }

  __device__ __forceinline__ void add_product(const Fragments<Spec>& fragments) {
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n) {
        const uint32_t (&b)[4] = fragments.b[n / 2];
        Spec::multiply(d[m][n], fragments.a[m], b[n % 2 * 2], b[n % 2 * 2 + 1]);
      }
  }
};

}  // namespace flashmoe::moe::mma_sync
