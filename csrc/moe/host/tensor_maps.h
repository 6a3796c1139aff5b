// The tensor maps of the products' kernels; each is described next to its kernel.
#pragma once

#include <cuda.h>

#include "moe/host/select.h"
#include "moe/params/gemm.h"
#include "moe/params/mxfp4.h"
#include "moe/params/scaled.h"

namespace flashmoe::moe {

// Writes kernel.num_tensor_maps of them, in the order of operations.toml.
void make_tensor_maps(Product product, const GemmParams& params, const Kernel& kernel, CUtensorMap* maps);
void make_tensor_maps(Product product, const ScaledGemmParams& params, const Kernel& kernel, CUtensorMap* maps);
void make_tensor_maps(Product product, const Mxfp4GemmParams& params, const Kernel& kernel, CUtensorMap* maps);

}  // namespace flashmoe::moe
