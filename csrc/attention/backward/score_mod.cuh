// Score modification (a softcap, a mask tensor) of a block's scores, for the dq kernels and the dk, dv kernels of every
// family. A thread holds two rows of scores, r = 0 and 1, eight apart, and in each row pairs of neighbouring columns,
// 8j and 8j + 1 from its first: pair 2j + r. This is the accumulator layout of wgmma and, for 16 rows per warp, of
// mma.sync.
#pragma once

#include "attention/masks.cuh"
#include "attention/params/backward.h"
#include "attention/scores.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"

namespace flashmoe::attention::backward {

// A log-sum-exp in base 2. For a row without visible keys +inf, so that its P is exp2(finite - inf) = 0.
__device__ __forceinline__ float in_base_2(float lse) {
  return lse == ptx::negative_infinity() ? -ptx::negative_infinity() : lse * kLog2E;
}

template <typename Spec>
constexpr int kScorePairs = Spec::kStreamRows / 4;  // per thread

// Values of a mask tensor for a thread's pairs of scores, 16 bits each; 0 or -inf for a boolean one. With ALiBi the
// numbers from which they are computed.
template <typename Spec, bool kHasAlibi = Spec::kHasAlibi>
struct MaskValuesOf {
  using Type = uint32_t[kScorePairs<Spec>];
};
template <typename Spec>
struct MaskValuesOf<Spec, true> {
  using Type = Alibi;
};
template <typename Spec>
using MaskValues = typename MaskValuesOf<Spec>::Type;

// The address of those values. Rows and columns are those of the scores: rows are queries in the dq kernel, keys in the
// dk, dv kernel.
struct MaskPointer {
  const unsigned char* first;  // the value of the thread's first score
  int64_t row_stride;          // elements
  int64_t column_stride;
  int columns[2];  // in the tensor, from the thread's first on, for each of its two rows

  // rows, columns: of the tensor; row, column: the thread's first
  __device__ __forceinline__ MaskPointer(const ScoreOptions& options, int sequence, int head, int64_t row_stride_,
                                         int64_t column_stride_, int row, int rows, int column, int columns_)
      : row_stride(row_stride_),
        column_stride(column_stride_),
        columns{row < rows ? columns_ - column : 0, row + 8 < rows ? columns_ - column : 0} {
    const int64_t at = sequence * options.mask_stride_batch + head * options.mask_stride_head + row * row_stride +
                       column * column_stride;
    first = static_cast<const unsigned char*>(options.mask) + at * (options.mask_type == MaskTensor::kBool ? 1 : 2);
  }
};

// A thread's ALiBi, as exponents to base 2, from the same arguments: the distance of row and column has either sign.
// Tiles of no sequence have no rows, and slope 0.
struct AlibiSource : Alibi {
  __device__ __forceinline__ AlibiSource(const ScoreOptions& options, int sequence, int head, int64_t, int64_t, int row,
                                         int rows, int column, int columns)
      : Alibi{row < rows ? alibi_slope(options, kLog2E, sequence, head, 0) : 0.0f,
              static_cast<float>(row + columns - rows - column)} {}
};
template <typename Spec, bool kHasAlibi = Spec::kHasAlibi>
struct MaskSourceOf {
  using Type = MaskPointer;
};
template <typename Spec>
struct MaskSourceOf<Spec, true> {
  using Type = AlibiSource;
};
template <typename Spec>
using MaskSource = typename MaskSourceOf<Spec>::Type;

// Two elements as a pair; kBytes 1: elements of a boolean mask.
template <typename Element, int kBytes>
__device__ __forceinline__ uint32_t mask_pair(uint32_t low, uint32_t high) {
  if constexpr (kBytes == 2) return low | high << 16;
  const uint32_t hidden = pack<Element>(ptx::negative_infinity(), 0.0f);
  return (low == 0 ? hidden : 0) | (high == 0 ? hidden << 16 : 0);
}

template <int kBytes>
__device__ __forceinline__ uint32_t load_mask_element(const unsigned char* gmem) {
  return kBytes == 1 ? ptx::ld_global_8(gmem) : ptx::ld_global_16(gmem);
}

// Pairs of neighbours in memory (dq, if keys are adjacent), at an even address.
template <typename Spec, int kBytes>
__device__ __forceinline__ void load_mask_pairs(MaskValues<Spec>& values, const MaskPointer& mask) {
  using Element = typename Spec::Element;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const unsigned char* row_gmem = mask.first + 8 * r * kBytes * mask.row_stride;
#pragma unroll
    for (int j = 0; j < kScorePairs<Spec> / 2; ++j) {
      if constexpr (kBytes == 2) {
        values[2 * j + r] = ptx::ld_global_32(row_gmem + 16 * j);
      } else {
        const uint32_t pair = ptx::ld_global_16(row_gmem + 8 * j);
        values[2 * j + r] = mask_pair<Element, 1>(pair & 0xff, pair >> 8);
      }
    }
  }
}

// Rows adjacent in memory (dk and dv, if keys are adjacent).
template <typename Spec, int kBytes>
__device__ __forceinline__ void load_mask_columns(MaskValues<Spec>& values, const MaskPointer& mask) {
  using Element = typename Spec::Element;
  const int64_t column_bytes = mask.column_stride * kBytes;
  const unsigned char* column_gmem = mask.first;
#pragma unroll
  for (int j = 0; j < kScorePairs<Spec> / 2; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const unsigned char* gmem = column_gmem + 8 * r * kBytes;
      values[2 * j + r] =
          mask_pair<Element, kBytes>(load_mask_element<kBytes>(gmem), load_mask_element<kBytes>(gmem + column_bytes));
    }
    column_gmem += 8 * column_bytes;
  }
}

// Any strides, and tails. Elements outside the tensor become 0: the visible range excludes them.
template <typename Spec, int kBytes>
__device__ __forceinline__ void load_mask_anyhow(MaskValues<Spec>& values, const MaskPointer& mask) {
  using Element = typename Spec::Element;
#pragma unroll
  for (int i = 0; i < kScorePairs<Spec>; ++i) {
    const int r = i % 2;
    uint32_t pair[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = i / 2 * 8 + c;
      const bool is_read = column < mask.columns[r];
      const unsigned char* gmem = mask.first + (8 * r * mask.row_stride + column * mask.column_stride) * kBytes;
      pair[c] = kBytes == 1 ? ptx::ld_global_8_if(gmem, is_read) : ptx::ld_global_16_if(gmem, is_read);
    }
    values[i] = mask_pair<Element, kBytes>(pair[0], pair[1]);
  }
}

template <typename Spec, int kBytes>
__device__ __forceinline__ void load_mask_elements(MaskValues<Spec>& values, const MaskPointer& mask) {
  constexpr int kColumns = Spec::kStreamRows - 6;  // the end of the last pair
  const bool is_whole = mask.columns[0] >= kColumns && mask.columns[1] >= kColumns;
  const bool is_even =
      (reinterpret_cast<uint64_t>(mask.first) | static_cast<uint64_t>(mask.row_stride * kBytes)) % (2 * kBytes) == 0;
  if constexpr (Spec::kHasStatistics) {
    if (ptx::vote_all(is_whole && mask.row_stride == 1)) return load_mask_columns<Spec, kBytes>(values, mask);
  } else {
    if (ptx::vote_all(is_whole && is_even && mask.column_stride == 1)) {
      return load_mask_pairs<Spec, kBytes>(values, mask);
    }
  }
  load_mask_anyhow<Spec, kBytes>(values, mask);
}

// Zeros if there is no mask tensor.
template <typename Spec, typename MakeMask>
__device__ __forceinline__ void load_mask(MaskValues<Spec>& values, const ScoreOptions& options, MakeMask make_mask) {
  if constexpr (Spec::kHasAlibi) {
    values = make_mask();
  } else {
    if (options.mask_type == MaskTensor::kBool) return load_mask_elements<Spec, 1>(values, make_mask());
    if (options.mask_type == MaskTensor::kAdditive) return load_mask_elements<Spec, 2>(values, make_mask());
#pragma unroll
    for (int i = 0; i < kScorePairs<Spec>; ++i) values[i] = 0;
  }
}

// How the softcap's tanh is computed.
//   kSeries   with a polynomial, absolute error 3e-7 up to kSeriesEnd; uses no special-function unit
enum class Softcap { kNone, kSeries, kExact };

constexpr float kSeriesEnd = 0.75f;

template <Softcap kSoftcap>
__device__ __forceinline__ float softcapped_score(const ScoreOptions& options, float score) {
  if constexpr (kSoftcap == Softcap::kNone) return score;
  if constexpr (kSoftcap == Softcap::kExact) return capped_score(options, score);
  const float x = score * options.score_factor;
  const float square = x * x;
  float sum = ptx::fma_rn(square, 0.01275058f, -0.04986608f);
  sum = ptx::fma_rn(sum, square, 0.13253363f);
  sum = ptx::fma_rn(sum, square, -0.33328045f);
  return x * ptx::fma_rn(sum, square, 1.0f);
}

// Replaces scores by the factor of dP - row_dot in dS: P, times the softcap's derivative 1 - tanh^2 if there is one.
// packed: P without that factor, if kPacks. lse_log2(i): of score i; visible: columns of each row, counted from the
// thread's first.
template <typename Spec, Softcap kSoftcap, bool kIsPlain, bool kPacks, typename LseLog2>
__device__ __forceinline__ void apply_softmax(const BackwardParams& params, float (&scores)[2 * kScorePairs<Spec>],
                                              uint32_t (&packed)[kScorePairs<Spec>], const MaskValues<Spec>& values,
                                              const KeyRange (&visible)[2], LseLog2 lse_log2) {
  using Element = typename Spec::Element;
#pragma unroll
  for (int i = 0; i < kScorePairs<Spec>; ++i) {
    float probability[2];
    float2 value;
    if constexpr (!Spec::kHasAlibi) value = unpack<Element>(values[i]);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float score = softcapped_score<kSoftcap>(params.score_options, scores[2 * i + c]);
      float exponent = ptx::fma_rn(score, params.scale_log2, -lse_log2(2 * i + c));
      if constexpr (Spec::kHasAlibi) {
        exponent = values.add(exponent, i % 2, i / 2 * 8 + c);
      } else if constexpr (!kIsPlain) {
        // P is at most 1, but for scores near the lowest float, which additive masks produce, the difference is only
        // rounding error.
        exponent = min(ptx::fma_rn(c == 0 ? value.x : value.y, kLog2E, exponent), 0.0f);
      }
      probability[c] = ptx::exp2_approx(exponent);
      if constexpr (!kIsPlain) {
        const int column = i / 2 * 8 + c;
        if (column < visible[i % 2].begin || column >= visible[i % 2].end) probability[c] = 0.0f;
      }
      scores[2 * i + c] =
          kSoftcap == Softcap::kNone ? probability[c] : probability[c] * ptx::fma_rn(-score, score, 1.0f);
    }
    if constexpr (kPacks) packed[i] = pack<Element>(probability[0], probability[1]);
  }
}

// Whether blocks of which every row sees all columns are plain.
template <typename Spec>
__device__ __forceinline__ bool has_plain_blocks(const ScoreOptions& options) {
  return Spec::kHasAlibi || options.mask_type == MaskTensor::kNone;
}

// is_plain: neither a mask tensor (ALiBi does not count) nor a limited range. see(visible): computes `visible`, called
// only if needed.
template <typename Spec, bool kPacks, typename LseLog2, typename See>
__device__ __forceinline__ void weigh_with_score_mod(const BackwardParams& params,
                                                     float (&scores)[2 * kScorePairs<Spec>],
                                                     uint32_t (&packed)[kScorePairs<Spec>],
                                                     const MaskValues<Spec>& values, bool is_plain, LseLog2 lse_log2,
                                                     See see) {
  KeyRange visible[2] = {{0, kUnbounded}, {0, kUnbounded}};
  if (!is_plain) see(visible);
  if (params.score_options.score_factor <= 0.0f) {
    if constexpr (Spec::kServesPlain || Spec::kHasAlibi) {
      if (is_plain) {
        return apply_softmax<Spec, Softcap::kNone, true, kPacks>(params, scores, packed, values, visible, lse_log2);
      }
    }
    return apply_softmax<Spec, Softcap::kNone, false, kPacks>(params, scores, packed, values, visible, lse_log2);
  }
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 2 * kScorePairs<Spec>; ++i) largest = max(largest, fabsf(scores[i]));
  if (!ptx::vote_all(largest * params.score_options.score_factor <= kSeriesEnd)) {
    if (is_plain) {
      apply_softmax<Spec, Softcap::kExact, true, kPacks>(params, scores, packed, values, visible, lse_log2);
    } else {
      apply_softmax<Spec, Softcap::kExact, false, kPacks>(params, scores, packed, values, visible, lse_log2);
    }
  } else if (is_plain) {
    apply_softmax<Spec, Softcap::kSeries, true, kPacks>(params, scores, packed, values, visible, lse_log2);
  } else {
    apply_softmax<Spec, Softcap::kSeries, false, kPacks>(params, scores, packed, values, visible, lse_log2);
  }
}

}  // namespace flashmoe::attention::backward
