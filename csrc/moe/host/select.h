// Which of the kernels of a mixture-of-experts layer serve a problem on a GPU. Pure: numbers in, a choice or an explained refusal
// out.
#pragma once

#include <cstdint>

#include "host/find_kernels.h"

namespace flashmoe {
namespace moe {

using host::Kernel;

// The grouped products, and how their kernels' axis `weights` says that the weights lie; operations.toml's words in its order.
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
enum class Memory : int32_t { kNk, kKn, kKnPairs };

// Indices into Kernel::cost: the most rows an expert for which the tile is the right one, (few rows alone) the least k, and (packed
// weights alone) the time of a wave of tiles.
namespace cost {
enum : int32_t { kRows, kLeastK, kWave };
}

struct ProductInput {
  host::KernelRequest request;
  Product product;
  Memory memory;    // not looked at for the weight gradient and products of weights with scales
  int64_t slots;    // rows at most: what a host that does not wait for the device knows of them
  int64_t experts;  // of this layer
  // Of a product: columns of the result, length of the sums; weight gradient: rows and columns of the result.
  int64_t n;
  int64_t k;
};

// Of the kernels for few rows the smallest tile that is made for slots / experts rows; else, of the best family (or the forced
// one), the smallest such tile, or the largest there is; of tiles for equally many rows the first, unless a later one wastes less
// of the columns, and of tiles whose waves are timed one whose waves take less (select.cpp). Throws as host::refuse() says where there is no kernel.
const Kernel& select_product(const ProductInput& input);

bool is_for_few_rows(const Kernel& kernel);

// The kernels around the products. They exist in one form for all GPUs that can run them, so a forced family does not matter.
enum class Step : int32_t {
  kRoute,
  kSortOne,
  kSortCount,
  kSortPlace,
  kCombine,
  kCombineBackward,
  kBiasGradient,
  kGather,
  kQuantize,
  kQuantizeFloat,  // float32 numbers
  kQuantizeWeights,
  kQuantizeTokens,
  kQuantizeGradients,
  kGatedGradient
};

// Throws as host::refuse() says.
const Kernel& select_step(const host::KernelRequest& request, Step step);

}  // namespace moe
}  // namespace flashmoe
