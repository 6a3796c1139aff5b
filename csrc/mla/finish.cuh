// Finishes a row: its sums over keys become an output and a log-sum-exp.
#pragma once

#include "mla/params/decode.h"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"

namespace flashmoe::mla {

// inverse: the factor for the sums over keys; lse: the natural logarithm of the sum of exponentials.
struct FinishedRow {
  float inverse;
  float lse;
};

// sum: over keys of 2^(exponent - shift); shift is -inf if no key was seen. A head's sink is one more term.
__device__ __forceinline__ FinishedRow finish_row(const DecodeParams& params, int head, float shift, float sum) {
  constexpr float kLog2E = 1.44269504088896341f;
  constexpr float kLn2 = 0.693147180559945309f;
  const float sink =
      params.sinks == nullptr ? ptx::negative_infinity() : ptx::ld_global_float(params.sinks + head) * kLog2E;
  const float largest = ptx::max_ftz(shift, sink);
  if (largest == ptx::negative_infinity()) {  // no term, or only NaN, which the sum holds
    return FinishedRow{sum == 0.0f ? 0.0f : 1.0f / sum, sum == 0.0f ? largest : sum};
  }
  const float factor = ptx::exp2_approx(ptx::sub_rn(shift, largest));
  const float total = ptx::fma_rn(sum, factor, ptx::exp2_approx(ptx::sub_rn(sink, largest)));
  return FinishedRow{factor / total, (largest + ptx::lg2_approx(total)) * kLn2};
}

__device__ __forceinline__ void store_lse(const DecodeParams& params, int batch, int row, float lse) {
  const int token = static_cast<int>(static_cast<uint32_t>(row) / static_cast<uint32_t>(params.heads));
  const int head = row - token * params.heads;
  const int sequence =
      static_cast<int>(static_cast<uint32_t>(batch) / static_cast<uint32_t>(params.batches_per_sequence));
  const int64_t first = (static_cast<int64_t>(sequence) * params.heads + head) * params.batches_per_sequence +
                        (batch - sequence * params.batches_per_sequence);
  const int64_t at = first * params.tokens + token;
  ptx::st_global_float(params.lse + at, lse);
}

}  // namespace flashmoe::mla
