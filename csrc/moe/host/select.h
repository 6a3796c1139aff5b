// Selects the kernels of a mixture-of-experts layer for a problem on a GPU. Pure: numbers in, a choice or an explained
// refusal out.
#pragma once

#include <cstdint>

#include "host/find_kernels.h"

namespace flashmoe {
namespace moe {

using host::Kernel;

// The grouped products, and the memory layouts of the weights, in the order of the values of the axis `weights` in
// operations.toml.
enum class Product : int32_t {
  kPlain,
  kGated,
  kGatedBackward,
  kWeightGradient,
  kScaled,
  kScaledGated,
  kMxfp4,
  kMxfp4Gated,
  kMxfp4Packed,
  kMxfp4PackedGated,
  kScaledWeightGradient,
  kScaledGatedKept
};
enum class WeightLayout : int32_t { kNk, kKn, kKnPairs };

// Indices into Kernel::cost: the most rows per expert for which the tile is the right one, (few rows only) the smallest k,
// and (packed weights only) the time of a wave of tiles.
namespace cost {
enum : int32_t { kRows, kMinK, kWave };
}

struct ProductInput {
  host::KernelRequest request;
  Product product;
  WeightLayout layout;  // ignored for the weight gradient and for products of weights with scales
  int64_t slots;        // upper bound of the rows: what the host knows without waiting for the device
  int64_t experts;      // of this layer
  // Product: columns of the result, length of the sums. Weight gradient: rows and columns of the result.
  int64_t n;
  int64_t k;
};

// The smallest tile of the kernels for few rows that is made for slots / experts rows, if there is one; else, in the
// best family (or the forced one), the smallest such tile, or the largest there is. Among tiles for equally many rows
// it is the first, unless a later one wastes fewer columns; among tiles with wave times it is one whose waves take less
// (select.cpp). Throws as host::refuse() says if there is no kernel.
const Kernel& select_product(const ProductInput& input);

bool is_for_few_rows(const Kernel& kernel);

// The kernels around the products. They exist in one form for all GPUs that can run them, so a forced family does not
// matter.
enum class Op : int32_t {
  kRoute,
  kSortOne,
  kSortCount,
  kSortPlace,
  kCombine,
  kCombineBackward,
  kBiasGradient,
  kGather,
  kQuantize,
  kQuantizeFloat,  // from float32
  kQuantizeWeights,
  kQuantizeTokens,
  kQuantizeGradients,
  kGatedGradient
};

// Throws as host::refuse() says.
const Kernel& select_op(const host::KernelRequest& request, Op op);

}  // namespace moe
}  // namespace flashmoe
