// Shared by the dispatcher and the per-instruction-set translation units of this folder. Plain data and declarations
// only: an inline function here would be compiled once with AVX-512 and once without, and the linker would keep either
// one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/scalar_types.h"
#include "moe/params/gemm.h"
#include "moe/params/routing.h"

namespace flashmoe::cpu {

enum class MoeProduct { kPlain, kGated, kGatedBackward, kWeightGradient };

// A part of one expert's product. A panel is the columns that one pass of the micro-kernel computes; in a gated product
// it has as many gates as ups.
struct GemmTask {
  const moe::GemmParams* params;
  MoeProduct product;
  ScalarType type;
  bool is_kn;  // weights [experts, k, n], else [experts, n, k]
  int32_t expert;
  int32_t row_begin;  // rows of the result: sorted slots; weight_gradient: elements of n
  int32_t row_end;
  int32_t panel_begin;
  int32_t panel_end;
};

// One instruction set's implementation. No result depends on how the work is divided into tasks.
struct MoeKernel {
  int32_t panel_columns;
  // Bytes of scratch memory, 64-byte aligned, that a task of that many rows and panels needs.
  size_t (*scratch_bytes)(int32_t rows, int32_t panels);
  void (*multiply)(const GemmTask& task, void* scratch);
  // For tokens [begin, end): the rows of moe_combine and of moe_combine_backward, and the latter's dweights.
  void (*combine)(const moe::CombineParams& params, ScalarType type, int64_t begin, int64_t end);
  void (*weight_gradients)(const moe::CombineParams& params, ScalarType type, int64_t begin, int64_t end);
  // For experts [begin, end).
  void (*bias_gradient)(const moe::BiasGradientParams& params, ScalarType type, int64_t begin, int64_t end);
};

extern const MoeKernel kMoeBaselineKernel;
extern const MoeKernel kMoeAvx2Kernel;
extern const MoeKernel kMoeAvx512Kernel;
extern const MoeKernel kMoeAvx512Bf16Kernel;

}  // namespace flashmoe::cpu
