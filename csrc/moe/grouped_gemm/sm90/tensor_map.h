// Arguments of cuTensorMapEncodeTiled for the tensor maps of the sm90 grouped products; the call is that of attention's
// forward pass (attention/forward/sm90/tensor_map.h). Plain C++.
//
// The weights have two maps, one per memory layout (the axis `weights`); a kernel uses one of them, but the parameters
// do not say which.
#pragma once

#include <cstdint>

#include "moe/params/gemm.h"
#include "ptx/tensor_map.h"

namespace flashmoe::moe::sm90 {

constexpr int kTensorMapRank = 4;
constexpr int kElementBytes = 2;
constexpr int kSlab = 64;  // rows, and columns: a 128-byte swizzled row

struct TensorMapArguments {
  void* address;
  std::uint64_t dims[kTensorMapRank];               // innermost first, elements
  std::uint64_t strides_bytes[kTensorMapRank - 1];  // of dimensions 1 and up
  std::uint32_t box[kTensorMapRank];                // elements
  std::uint32_t element_strides[kTensorMapRank];
};

struct Dimension {
  std::int64_t size;
  std::int64_t stride;  // elements
};

// A box of 64 columns by `rows` rows by `halves`.
inline TensorMapArguments tensor_map_arguments(const void* address, std::int64_t columns, Dimension rows,
                                               Dimension halves, Dimension experts, int box_rows, int box_halves) {
  // The stride of a dimension of length 1 is never used but must still be valid.
  const auto stride_bytes = [](Dimension dimension) {
    return static_cast<std::uint64_t>(dimension.size == 1 ? 16 : dimension.stride * kElementBytes);
  };
  return TensorMapArguments{const_cast<void*>(address),
                            {static_cast<std::uint64_t>(columns), static_cast<std::uint64_t>(rows.size),
                             static_cast<std::uint64_t>(halves.size), static_cast<std::uint64_t>(experts.size)},
                            {stride_bytes(rows), stride_bytes(halves), stride_bytes(experts)},
                            {kSlab, static_cast<std::uint32_t>(box_rows), static_cast<std::uint32_t>(box_halves), 1},
                            {1, 1, 1, 1}};
}

// A matrix [slots, columns], in boxes of 64 by 64.
inline TensorMapArguments slots_map(const void* address, std::int64_t columns, std::int64_t stride,
                                    const GemmParams& params) {
  return tensor_map_arguments(address, columns, {params.slots, stride}, {1, 0}, {1, 0}, kSlab, 1);
}

// The columns of gate and of up as two halves, 64 columns of each per box, or as one matrix if they are interleaved.
inline TensorMapArguments halves_map(const void* address, const GemmParams& params) {
  if (params.is_interleaved != 0) return slots_map(address, params.n, params.n, params);
  return tensor_map_arguments(address, params.n / 2, {params.slots, params.n}, {2, params.n / 2}, {1, 0}, kSlab, 1);
}

// Weights [experts, n, k] and [experts, k, n] of a product that is not gated.
inline TensorMapArguments nk_map(const GemmParams& params, int block_n) {
  return tensor_map_arguments(params.b, params.k, {params.n, params.b_stride}, {1, 0},
                              {params.experts, params.b_expert_stride}, block_n, 1);
}
inline TensorMapArguments kn_map(const GemmParams& params) {
  return tensor_map_arguments(params.b, params.n, {params.k, params.b_stride}, {1, 0},
                              {params.experts, params.b_expert_stride}, kSlab, 1);
}

struct GemmTensorMaps {
  TensorMapArguments a;
  TensorMapArguments b_nk;
  TensorMapArguments b_kn;
  TensorMapArguments d;
};

inline GemmTensorMaps gemm_tensor_maps(const GemmParams& params, int block_n) {
  return GemmTensorMaps{slots_map(params.a, params.k, params.a_stride, params), nk_map(params, block_n), kn_map(params),
                        slots_map(params.d, params.n, params.d_stride, params)};
}

struct GatedGemmTensorMaps {
  TensorMapArguments b_nk;
  TensorMapArguments b_kn;
  TensorMapArguments d;
  TensorMapArguments preactivation;
};

// A box of weights has 64 rows (nk) or columns (kn) of gate and the same of up; of interleaved columns it has 64.
// Without a preactivation its map is that of d's first columns, and unused.
inline GatedGemmTensorMaps gated_gemm_tensor_maps(const GemmParams& params, int /*block_n*/) {
  const std::int64_t half = params.n / 2;
  const bool is_interleaved = params.is_interleaved != 0;
  const Dimension experts{params.experts, params.b_expert_stride};
  const Dimension row{half, (is_interleaved ? 2 : 1) * params.b_stride};
  const Dimension half_of_rows{2, (is_interleaved ? 1 : half) * params.b_stride};
  const Dimension depth{params.k, params.b_stride};
  return GatedGemmTensorMaps{tensor_map_arguments(params.b, params.k, row, half_of_rows, experts, kSlab, 2),
                             is_interleaved ? tensor_map_arguments(params.b, params.n, depth, {1, 0}, experts, kSlab, 1)
                                            : tensor_map_arguments(params.b, half, depth, {2, half}, experts, kSlab, 2),
                             slots_map(params.d, half, params.d_stride, params),
                             halves_map(params.preactivation != nullptr ? params.preactivation : params.d, params)};
}

struct GatedBackwardTensorMaps {
  TensorMapArguments a;
  TensorMapArguments b_nk;
  TensorMapArguments b_kn;
};

inline GatedBackwardTensorMaps gated_backward_tensor_maps(const GemmParams& params, int block_n) {
  return GatedBackwardTensorMaps{slots_map(params.a, params.k, params.a_stride, params), nk_map(params, block_n),
                                 kn_map(params)};
}

}  // namespace flashmoe::moe::sm90
