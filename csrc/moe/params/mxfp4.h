// Parameters that the host passes to the products of 16-bit rows with 4-bit weights. Plain C types only, as in gemm.h,
// which defines slots and rows.
//
// Weights [experts, n, k] are e2m1 codes (sign, two exponent bits with bias 1, one mantissa bit), two per byte, the
// first in the low four bits. Every 32 of a row share one 8-bit scale b: a weight is its code's value times
// 2^(b - 127), NaN if b is 255, rounded to bf16. The rounding only changes values beyond bf16's range, which become
// infinite. So a product is that of 16-bit weights, with the same sums in the same order: the same bits. k is a
// multiple of 32.
#pragma once

#include "moe/params/gemm.h"

#ifdef __CUDACC_RTC__
using uint8_t = unsigned char;
#endif

namespace flashmoe::moe {

constexpr int kMxfp4Block = 32;  // weights of a row that share a scale

// Packed weights (flashmoe.pack_mxfp4 documents the order of their bits) are blocks of 64 weight rows by 64 k,
// [experts, ceil(n / 64), k / 64], each stored as lines of 128 bytes: first, for each thread of a warpgroup, the four
// words from which spread_packed (grouped_gemm/mxfp4.cuh) makes its A operands, then the scales, one word for each pair
// of weight rows that are 8 apart. In a gated product a warp's 16 rows are eight of gate and the same eight of up. k
// and n are multiples of 64.
constexpr int kMxfp4PackedRows = 64;
constexpr int kMxfp4PackedK = 64;
constexpr int kMxfp4PackedCodes = kMxfp4PackedRows * kMxfp4PackedK / 2;                                // bytes
constexpr int kMxfp4PackedBytes = kMxfp4PackedCodes + kMxfp4PackedRows * kMxfp4PackedK / kMxfp4Block;  // of a block
constexpr int kMxfp4PackedLines = kMxfp4PackedBytes / 128;

// Rows of a per TMA copy into a tile of packed weights: an expert may have few rows, but many small copies take longer
// than their bytes.
constexpr int packed_box_rows(int block_m) { return block_m < 32 ? 8 : block_m / 4; }

// Whether a gated product of packed weights gathers the tokens' rows itself; for larger tiles moe_gather orders them
// beforehand.
constexpr bool packed_gathers(int block_m) { return block_m < 256; }

//   grouped_gemm_mxfp4, grouped_gemm_gated_mxfp4   like grouped_gemm and grouped_gemm_gated; no preactivation
//   the same with _packed                          with packed weights: no strides of b, no b_scale
//
// In `gemm`, b_stride and b_expert_stride count 16-bit elements of four weights each; k counts weights.
struct Mxfp4GemmParams {
  GemmParams gemm;
  const uint8_t* b_scale;  // [experts, n, k / 32]
};

}  // namespace flashmoe::moe
