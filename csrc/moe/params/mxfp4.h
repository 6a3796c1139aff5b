// What the host passes to the products of 16-bit rows with weights of 4 bits. Plain C types only, as in gemm.h, which says what slots
// and rows are.
//
// Weights [experts, n, k] are e2m1 codes (sign, two bits of exponent with bias 1, one of mantissa), two in a byte, the first in the low
// four bits. Each 32 of a row have one scale of 8 bits, b: a weight is its code's number times 2^(b - 127), and NaN where b is 255,
// rounded to bf16. That rounding changes nothing but what lies beyond bf16's range, which becomes infinite. A product is then the one
// of 16-bit weights, with the same sums in the same order: the same bits. k is a multiple of 32.
#pragma once

#include "moe/params/gemm.h"

#ifdef __CUDACC_RTC__
using uint8_t = unsigned char;
#endif

namespace flashmoe::moe {

constexpr int kMxfp4Block = 32;  // weights of a row with one scale

// Packed weights (flashmoe.pack_mxfp4, which is where the order of their bits is written down) are blocks of 64 weight rows by 64 k,
// [experts, ceil(n / 64), k / 64], each in lines of 128 bytes: first, of each thread of a warpgroup, the four words that
// spread_packed (grouped_gemm/mxfp4.cuh) makes its A operands of, then the scales of each eight rows and their next eight. A gated
// product's 16 rows of a warp are eight of gate and the same eight of up. k is a multiple of 64, and n, too.
constexpr int kMxfp4PackedRows = 64;
constexpr int kMxfp4PackedK = 64;
constexpr int kMxfp4PackedCodes = kMxfp4PackedRows * kMxfp4PackedK / 2;                                // bytes
constexpr int kMxfp4PackedBytes = kMxfp4PackedCodes + kMxfp4PackedRows * kMxfp4PackedK / kMxfp4Block;  // of a block
constexpr int kMxfp4PackedLines = kMxfp4PackedBytes / 128;

// Rows of a that a copy brings to a tile of packed weights: an expert may have few rows, but many small copies take longer than their bytes.
constexpr int packed_box_rows(int block_m) { return block_m < 32 ? 8 : block_m / 4; }

// Whether a gated product of packed weights gathers tokens' rows itself; for larger tiles moe_gather puts them into their order before.
constexpr bool packed_gathers(int block_m) { return block_m < 256; }

//   grouped_gemm_mxfp4, grouped_gemm_gated_mxfp4   as grouped_gemm and grouped_gemm_gated; no preactivation
//   the same with _packed                          of packed weights: no strides of b, no b_scale
//
// In `gemm`, b_stride and b_expert_stride count 16-bit elements, each of which holds four weights; k counts weights.
struct Mxfp4GemmParams {
  GemmParams gemm;
  const uint8_t* b_scale;  // [experts, n, k / 32]
};

}  // namespace flashmoe::moe
