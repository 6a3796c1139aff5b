// Scores of warps that share rows: each warp multiplies its columns of Q and K, and the sum over the warps is the
// score.
#pragma once

#include "attention/forward/sm80/spec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention::sm80 {

// Does nothing if no warps share rows. Terms of the next key tile may be published once all warps have passed a barrier
// after add().
template <typename Spec>
struct ScoreTerms {
  const ptx::SmemPointer smem;  // [kNumWarps] of [kMmaM][kMmaN][32 lanes] of the accumulator's four floats

  __device__ __forceinline__ explicit ScoreTerms(ptx::SmemPointer smem_) : smem(smem_) {}

  __device__ __forceinline__ ptx::SmemPointer of_warp(int warp, int m, int n) const {
    return smem + warp * Spec::kTermBytes + (m * Spec::kMmaN + n) * 512 + ptx::lane_index() * 16;
  }

  __device__ __forceinline__ void publish(const float (&S_rmem)[Spec::kMmaM][Spec::kMmaN][4]) const {
    if constexpr (Spec::kColumnWarps > 1) {
      const int warp = ptx::warp_index();
#pragma unroll
      for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
        for (int n = 0; n < Spec::kMmaN; ++n) {
          const uint32_t words[4] = {ptx::float_bits(S_rmem[m][n][0]), ptx::float_bits(S_rmem[m][n][1]),
                                     ptx::float_bits(S_rmem[m][n][2]), ptx::float_bits(S_rmem[m][n][3])};
          ptx::st_shared_128(of_warp(warp, m, n), words);
        }
    }
  }

  // Read after write: terms of the warps that share this one's rows.
  __device__ __forceinline__ void sync() const {
    if constexpr (Spec::kColumnWarps > 1) {
      ptx::named_barrier_sync(1 + Spec::row_group(), 32 * Spec::kColumnWarps);
    }
  }

  // Adds the terms in the order of columns, including this warp's, so that all warps of a row have the same bits.
  __device__ __forceinline__ void add(float (&S_rmem)[Spec::kMmaM][Spec::kMmaN][4]) const {
    if constexpr (Spec::kColumnWarps > 1) {
      const int first_warp = Spec::row_group() * Spec::kColumnWarps;
      const int own_part = Spec::column_part();
#pragma unroll
      for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
        for (int n = 0; n < Spec::kMmaN; ++n) {
          float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
          for (int part = 0; part < Spec::kColumnWarps; ++part) {
            float term[4] = {S_rmem[m][n][0], S_rmem[m][n][1], S_rmem[m][n][2], S_rmem[m][n][3]};
            if (part != own_part) {
              uint32_t words[4];
              ptx::ld_shared_128(words, of_warp(first_warp + part, m, n));
#pragma unroll
              for (int i = 0; i < 4; ++i) term[i] = ptx::bits_float(words[i]);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[i] += term[i];
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) S_rmem[m][n][i] = sum[i];
        }
    }
  }
};

}  // namespace flashmoe::attention::sm80
