#include "moe/host/tensor_maps.h"

#include "host/tensor_map.h"
#include "moe/grouped_gemm/sm90/mxfp4_tensor_map.h"
#include "moe/grouped_gemm/sm90/scaled_tensor_map.h"
#include "moe/grouped_gemm/sm90/tensor_map.h"
#include "moe/weight_gradient/sm90/scaled_tensor_map.h"
#include "moe/weight_gradient/sm90/tensor_map.h"

namespace flashmoe::moe {

// Only the family sm90 has tensor maps.
void make_tensor_maps(Product product, const GemmParams& params, const Kernel& kernel, CUtensorMap* maps) {
  const auto encode = [&kernel](const auto& description, const char* name) {
    return host::encode_tensor_map(description, kernel.dtype, name);
  };
  switch (product) {
    case Product::kPlain: {
      const auto from = sm90::gemm_tensor_maps(params, kernel.block_n);
      maps[0] = encode(from.a, "rows");
      maps[1] = encode(from.b_nk, "weights");
      maps[2] = encode(from.b_kn, "weights");
      maps[3] = encode(from.d, "results");
      return;
    }
    case Product::kGated: {
      const auto from = sm90::gated_gemm_tensor_maps(params, kernel.block_n);
      maps[0] = encode(from.b_nk, "w13");
      maps[1] = encode(from.b_kn, "w13");
      maps[2] = encode(from.d, "activations");
      maps[3] = encode(from.preactivation, "preactivation");
      return;
    }
    case Product::kWeightGradient: {
      const auto from = weight_gradient::sm90::weight_gradient_tensor_maps(params, kernel.block_n);
      maps[0] = encode(from.a, "rows");
      maps[1] = encode(from.b, "rows");
      maps[2] = encode(from.d, "weight gradient");
      return;
    }
    case Product::kGatedBackward: {
      const auto from = sm90::gated_backward_tensor_maps(params, kernel.block_n);
      maps[0] = encode(from.a, "rows");
      maps[1] = encode(from.b_nk, "w2");
      maps[2] = encode(from.b_kn, "w2");
      return;
    }
    case Product::kScaled:
    case Product::kScaledGated:
    case Product::kMxfp4:
    case Product::kMxfp4Gated:
    case Product::kMxfp4Packed:
    case Product::kMxfp4PackedGated:
    case Product::kScaledWeightGradient:
    case Product::kScaledGatedKept:
      return;  // handled below
  }
}

// Two e4m3 values are one element of the kernel's 16-bit type. A tile takes 128 bytes of a weight row at a time, and L2
// promotion fetches no more than that: docs/notebook/2026-11-29-experts-few-tokens.md.
void make_tensor_maps(Product product, const ScaledGemmParams& params, const Kernel& kernel, CUtensorMap* maps) {
  const auto encode = [&kernel](const auto& description, const char* name,
                                CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
    return host::encode_tensor_map(description, kernel.dtype, name, promotion);
  };
  constexpr CUtensorMapL2promotion kOfWeights = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  if (product == Product::kScaledGated) {
    const auto from = sm90::scaled_gated_gemm_tensor_maps(params, kernel.block_n);
    maps[0] = encode(from.b, "w13", kOfWeights);
    maps[1] = encode(from.d, "activations");
  } else if (product == Product::kScaledGatedKept) {
    const auto from = sm90::scaled_kept_gemm_tensor_maps(params, kernel.block_n);
    maps[0] = encode(from.b, "w13", kOfWeights);
    maps[1] = encode(from.d, "activations");
    maps[2] = encode(from.preactivation, "preactivation");
  } else if (product == Product::kScaledWeightGradient) {
    const auto from = weight_gradient::sm90::scaled_weight_gradient_tensor_maps(params, kernel.block_n);
    maps[0] = encode(from.a, "gradients");
    maps[1] = encode(from.b, "rows");
    maps[2] = encode(from.d, "weight gradient");
  } else {
    const auto from = sm90::scaled_gemm_tensor_maps(params, kernel.block_n);
    maps[0] = encode(from.a, "rows");
    maps[1] = encode(from.b, "w2", kOfWeights);
    maps[2] = encode(from.d, "results");
  }
}

// Threads copy 4-bit weights, unless they are packed.
void make_tensor_maps(Product product, const Mxfp4GemmParams& params, const Kernel& kernel, CUtensorMap* maps) {
  const auto encode = [&kernel](const auto& description, const char* name) {
    return host::encode_tensor_map(description, kernel.dtype, name);
  };
  if (product == Product::kMxfp4PackedGated || product == Product::kMxfp4Packed) {
    const auto from = sm90::mxfp4_packed_gemm_tensor_maps(params, kernel.block_m, kernel.block_n);
    const bool is_gated = product == Product::kMxfp4PackedGated;
    maps[is_gated ? 1 : 0] = encode(from.a, "rows");
    maps[is_gated ? 0 : 1] = encode(from.b, is_gated ? "w13" : "w2");
  } else if (product == Product::kMxfp4Gated) {
    maps[0] = encode(sm90::mxfp4_gated_gemm_tensor_maps(params, kernel.block_n).d, "activations");
  } else {
    const auto from = sm90::mxfp4_gemm_tensor_maps(params, kernel.block_n);
    maps[0] = encode(from.a, "rows");
    maps[1] = encode(from.d, "results");
  }
}

}  // namespace flashmoe::moe
