// The extension on a driver without a GPU. "CUDA" memory is the CPU's; calls for the CPU run the GPU's path; a "kernel"
// is a few plain loops over its launch parameters, in bf16, so that results can be compared; every launch is logged.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "../fake_driver.h"
#include "../fake_memory.h"
#include "attention/host/schemas.h"
#include "host/ceil_div.h"
#include "host/tile_counters.h"
#include "linear/params/linear.h"
#include "moe/host/backends.h"
#include "moe/host/select.h"
#include "moe/host/sort_plan.h"
#include "moe/params/mxfp4.h"
#include "moe/params/training.h"

namespace flashmoe {
namespace moe {

void route_cpu(const RouteArguments& arguments, const RouteOutputs& outputs) { route_cuda(arguments, outputs); }
void sort_cpu(const SortArguments& arguments, const SortOutputs& outputs) { sort_cuda(arguments, outputs); }
void layer_cpu(const LayerArguments& arguments, const LayerOutputs& outputs) { layer_cuda(arguments, outputs); }
void layer_backward_cpu(const LayerBackwardArguments& arguments, const LayerGradients& gradients) {
  layer_backward_cuda(arguments, gradients);
}
void grouped_cpu(const GroupedArguments& arguments, const Tensor& out) { grouped_cuda(arguments, out); }
void grouped_gradient_cpu(const GroupedGradientArguments& arguments, const Tensor& out) {
  grouped_gradient_cuda(arguments, out);
}

namespace {

using host::load;
using host::store;

struct GateUp {
  int64_t gate;
  int64_t up;
};
// Columns of z.
GateUp columns_of(const GemmParams& params, int64_t column, int64_t intermediate) {
  return params.is_interleaved != 0 ? GateUp{2 * column, 2 * column + 1} : GateUp{column, intermediate + column};
}

double activation(Activation kind, double gate, double up) {
  const auto sigmoid = [](double x) { return 1.0 / (1.0 + std::exp(-x)); };
  switch (kind) {
    case Activation::kGeglu:
      return gate * 0.5 * (1.0 + std::erf(gate * std::sqrt(0.5))) * up;
    case Activation::kGegluTanh:
      return gate * sigmoid(1.5957691216 * (gate + 0.044715 * gate * gate * gate)) * up;
    case Activation::kReglu:
      return std::max(gate, 0.0) * up;
    case Activation::kClampedSwiglu:
      gate = std::min(gate, 7.0);
      return gate * sigmoid(1.702 * gate) * (std::clamp(up, -7.0, 7.0) + 1.0);
    default:
      return gate * sigmoid(gate) * up;
  }
}

// The activation and its two derivatives, by differences.
struct Activated {
  float value, by_gate, by_up;
};
Activated activate(Activation kind, float gate, float up) {
  const auto slope = [&](double g, double u) {
    return static_cast<float>((activation(kind, gate + g, up + u) - activation(kind, gate - g, up - u)) / 2e-4);
  };
  return {static_cast<float>(activation(kind, gate, up)), slope(1e-4, 0.0), slope(0.0, 1e-4)};
}

int64_t row_of(const int32_t* slots, int64_t row, int32_t top_k) { return slots == nullptr ? row : slots[row] / top_k; }

class GemmKernel {
 public:
  GemmKernel(const GemmParams& params, WeightLayout layout) : p(params), layout_(layout) {}

  float product(int64_t expert, int64_t row, int64_t n) const {
    const int64_t a_row = row_of(p.a_slots, row, p.top_k) * p.a_stride;
    float sum = 0.0F;
    for (int64_t k = 0; k < p.k; ++k) sum += load(p.a, a_row + k) * load(p.b, weight(expert, n, k));
    return sum + (p.bias != nullptr ? load(p.bias, expert * p.n + n) : 0.0F);
  }

  void plain(int64_t expert, int64_t row) const {
    for (int64_t n = 0; n < p.n; ++n) store(p.d, row * p.d_stride + n, product(expert, row, n));
  }

  void gated(int64_t expert, int64_t row) const {
    for (int64_t column = 0; column < p.n / 2; ++column) {
      const GateUp at = columns_of(p, column, p.n / 2);
      const float gate = product(expert, row, at.gate), up = product(expert, row, at.up);
      store(p.d, row * p.d_stride + column, activate(p.activation, gate, up).value);
      if (p.preactivation == nullptr) continue;
      store(p.preactivation, row * p.n + at.gate, gate);
      store(p.preactivation, row * p.n + at.up, up);
    }
  }

  void gated_backward(int64_t expert, int64_t row) const {
    for (int64_t column = 0; column < p.n; ++column) {
      const GateUp at = columns_of(p, column, p.n);
      const float s = product(expert, row, column);
      const Activated a = activate(p.activation, load(p.preactivation, row * 2 * p.n + at.gate),
                                   load(p.preactivation, row * 2 * p.n + at.up));
      store(p.d, row * p.d_stride + at.gate, p.row_weights[row] * s * a.by_gate);
      store(p.d, row * p.d_stride + at.up, p.row_weights[row] * s * a.by_up);
      store(p.weighted_activation, row * p.n + column, p.row_weights[row] * a.value);
      float& dot = p.row_dots[column / kDotColumns * p.slots + row];
      dot = (column % kDotColumns == 0 ? 0.0F : dot) + a.value * s;
    }
  }

  void weight_gradient(int64_t expert) const {
    for (int64_t n = 0; n < p.n; ++n) {
      for (int64_t k = 0; k < p.k; ++k) {
        float sum = 0.0F;
        for (int64_t row = p.expert_offsets[expert]; row < p.expert_offsets[expert + 1]; ++row) {
          sum += load(p.a, row_of(p.a_slots, row, p.top_k) * p.a_stride + n) *
                 load(p.b, row_of(p.b_slots, row, p.top_k) * p.b_stride + k);
        }
        store(p.d, (expert * p.n + n) * p.d_stride + k, sum);
      }
    }
  }

 private:
  int64_t weight(int64_t expert, int64_t n, int64_t k) const {
    const bool is_nk = layout_ == WeightLayout::kNk;
    return expert * p.b_expert_stride + (is_nk ? n * p.b_stride + k : k * p.b_stride + n);
  }

  const GemmParams& p;
  WeightLayout layout_;
};

// As if each expert had one more tile than full ones, and one sum per gradient tile; a counter if blocks draw tiles.
std::string check_tiles(const host::Kernel& kernel, const GemmParams& p, int64_t grid) {
  const bool is_gradient = std::strstr(kernel.operation, "weight_gradient") != nullptr;
  const int64_t broken = p.expert_offsets != nullptr ? std::min(p.experts, p.slots) : 0;
  const int64_t row_tiles =
      is_gradient ? p.experts * ceil_div(p.n, kernel.block_m) : ceil_div(p.slots, kernel.block_m) + broken;
  const int64_t tiles = row_tiles * ceil_div(is_gradient ? p.k : p.n, kernel.block_n);
  if (grid != host::grid_of(kernel, tiles)) return "another grid";
  if ((tiles > grid) != (p.tile_counter != nullptr)) return "a counter of tiles that are not drawn, or none";
  return p.tile_counter != nullptr && *p.tile_counter != 0 ? "the tile counter is not zero" : "";
}

// Calls of linear that only test the choice of a kernel.
bool is_long(const GemmParams& params) { return int64_t{params.slots} * params.n * params.k > int64_t{1} << 22; }

// Returns what is wrong, or an empty text.
std::string multiply(const host::Kernel& kernel, const GemmParams& params, WeightLayout layout, int64_t grid) {
  const std::string operation = kernel.operation;
  const GemmKernel run(params, layout);
  const bool is_gated =
      operation.rfind("grouped_gemm_gated", 0) == 0 && operation.find("backward") == std::string::npos;
  if (is_gated && (layout == WeightLayout::kKnPairs) != (layout != WeightLayout::kNk && params.is_interleaved != 0)) {
    return "gate and up in turn need kn_pairs, and nothing else does";
  }
  const int32_t of_one[] = {0, params.slots};
  const int32_t* offsets = params.expert_offsets != nullptr ? params.expert_offsets : of_one;
  for (int64_t expert = 0; expert < params.experts; ++expert) {
    const int64_t begin = offsets[expert], end = offsets[expert + 1];
    if (operation == "grouped_gemm_weight_gradient") {
      run.weight_gradient(expert);
      continue;
    }
    if (params.expert_offsets == nullptr && is_long(params)) continue;
    for (int64_t row = begin; row < end; ++row) {
      if (operation == "grouped_gemm_gated_backward") {
        run.gated_backward(expert, row);
      } else if (is_gated) {
        run.gated(expert, row);
      } else {
        run.plain(expert, row);
      }
    }
  }
  return check_tiles(kernel, params, grid);
}

#include "fake_mxfp4.h"

#include "fake_scaled.h"

#include "fake_linear.h"
#include "fake_training.h"

void sort(const SortParams& p) {
  int64_t row = 0;
  for (int64_t slot = 0; slot < p.slots; ++slot) p.slot_rows[slot] = -1;
  for (int64_t expert = 0; expert < p.experts; ++expert) {
    p.expert_offsets[expert] = static_cast<int32_t>(row);
    for (int64_t slot = 0; slot < p.slots; ++slot) {
      const int64_t id = p.ids_dtype == Scalar::kInt64 ? static_cast<const int64_t*>(p.ids)[slot]
                                                       : static_cast<const int32_t*>(p.ids)[slot];
      if (id < 0 || id >= p.ids_end || (p.expert_map != nullptr ? p.expert_map[id] : id) != expert) continue;
      p.row_slots[row] = static_cast<int32_t>(slot);
      p.slot_rows[slot] = static_cast<int32_t>(row);
      p.row_weights[row] = p.weights_dtype == Scalar::kFloat32 ? static_cast<const float*>(p.topk_weights)[slot]
                                                               : load(p.topk_weights, slot);
      ++row;
    }
  }
  p.expert_offsets[p.experts] = static_cast<int32_t>(row);
  for (; row < p.slots; ++row) {
    p.row_slots[row] = -1;
    p.row_weights[row] = 0.0F;
  }
}

void combine(const CombineParams& p) {
  for (int64_t token = 0; token < p.tokens; ++token) {
    for (int64_t column = 0; column < p.columns; ++column) {
      float sum = p.shared != nullptr ? load(p.shared, token * p.shared_stride + column) : 0.0F;
      for (int64_t slot = token * p.top_k; slot < (token + 1) * p.top_k; ++slot) {
        const int64_t row = p.slot_rows[slot];
        if (row >= 0)
          sum += (p.row_weights != nullptr ? p.row_weights[row] : 1.0F) * load(p.rows, row * p.columns + column);
      }
      store(p.out, token * p.out_stride + column, sum);
    }
  }
}

void combine_backward(const CombineParams& p) {
  if (p.out != nullptr) combine(p);
  if (p.dweights == nullptr) return;
  for (int64_t slot = 0; slot < static_cast<int64_t>(p.tokens) * p.top_k; ++slot) {
    const int64_t row = p.slot_rows[slot];
    float sum = 0.0F;
    for (int64_t tile = 0; row >= 0 && tile < p.dot_tiles; ++tile) {
      sum += p.row_dots[tile * p.tokens * p.top_k + row];
    }
    int64_t expert = 0;
    while (row >= 0 && p.bias != nullptr && p.expert_offsets[expert + 1] <= row) ++expert;
    for (int64_t column = 0; row >= 0 && p.bias != nullptr && column < p.columns; ++column) {
      sum += load(p.dout, slot / p.top_k * p.dout_stride + column) * load(p.bias, expert * p.columns + column);
    }
    p.dweights[slot] = sum;
  }
}

void gather(const GatherParams& p) {
  for (int64_t slot = 0; slot < static_cast<int64_t>(p.tokens) * p.top_k; ++slot) {
    const int64_t row = p.slot_rows[slot];
    for (int64_t column = 0; row >= 0 && column < p.columns; ++column) {
      store(p.rows, row * p.columns + column, load(p.a, slot / p.top_k * p.a_stride + column));
    }
  }
}

void bias_gradient(const BiasGradientParams& p) {
  for (int64_t expert = 0; expert < p.experts; ++expert) {
    for (int64_t column = 0; column < p.columns; ++column) {
      float sum = 0.0F;
      for (int64_t row = p.expert_offsets[expert]; row < p.expert_offsets[expert + 1]; ++row) {
        const float weight = p.row_weights != nullptr ? p.row_weights[row] : 1.0F;
        sum += weight * load(p.a, row_of(p.a_slots, row, p.top_k) * p.a_stride + column);
      }
      store(p.d, expert * p.columns + column, sum);
    }
  }
}

template <class Params>
const Params& params_of(void** arguments) {
  return *static_cast<const Params*>(arguments[0]);
}

// Addresses of the two factors of a grouped product, or the parameters of routing, as text; empty for other kernels.
std::string factors(const host::Kernel& kernel, void** arguments) {
  const std::string operation = kernel.operation;
  if (operation == "moe_route") {
    const auto& p = params_of<RouteParams>(arguments);
    std::string text;
    for (const double value : {double(p.logits_stride), double(p.logits_dtype), double(p.scoring), double(p.tokens),
                               double(p.experts), double(p.top_k), double(p.groups), double(p.topk_groups),
                               double(p.renormalize), double(p.scale), double(p.bias != nullptr)})
      text += (text.empty() ? "" : ", ") + std::to_string(value);
    return text;
  }
  if (operation == "linear_nk") return linear_factors(params_of<linear::LinearParams>(arguments));
  if (operation.rfind("grouped_gemm", 0) != 0 && operation.rfind("linear", 0) != 0) return "";
  const GemmParams& gemm = operation.find("_scaled") != std::string::npos ? params_of<ScaledGemmParams>(arguments).gemm
                                                                          : params_of<GemmParams>(arguments);
  return std::to_string(reinterpret_cast<uintptr_t>(gemm.a)) + ", " +
         std::to_string(reinterpret_cast<uintptr_t>(gemm.b));
}

// The tensor of each map, in the kernel's order.
std::string check_maps(const host::Kernel& kernel, void** arguments) {
  const std::string operation = kernel.operation;
  const auto has = [&](const char* word) { return operation.find(word) != std::string::npos; };
  if (kernel.num_tensor_maps == 0) return "";
  const GemmParams& p = has("_scaled")     ? params_of<ScaledGemmParams>(arguments).gemm
                        : has("_mxfp4")    ? params_of<Mxfp4GemmParams>(arguments).gemm
                        : has("linear_nk") ? params_of<linear::LinearParams>(arguments).gemm
                                           : params_of<GemmParams>(arguments);
  std::vector<const void*> tensors{p.a, p.b, p.b, p.d};
  if (has("_packed")) {
    tensors = has("gated") ? std::vector<const void*>{p.b, p.a} : std::vector<const void*>{p.a, p.b};
  } else if (has("_mxfp4")) {
    tensors = has("gated") ? std::vector<const void*>{p.d} : std::vector<const void*>{p.a, p.d};
  } else if (has("weight_gradient") || has("linear_nk") || (has("_scaled") && !has("gated"))) {
    tensors = {p.a, p.b, p.d};
  } else if (has("gated_backward")) {
    tensors = {p.a, p.b, p.b};
  } else if (has("_scaled")) {
    tensors = {p.b, p.d, p.preactivation};
  } else if (has("gated")) {
    tensors = {p.b, p.b, p.d, p.preactivation};
  }
  if (tensors.size() < static_cast<std::size_t>(kernel.num_tensor_maps)) return "more tensor maps than tensors";
  for (int32_t map = 0; map < kernel.num_tensor_maps; ++map) {
    const void* tensor = tensors[static_cast<std::size_t>(map)];
    if (tensor != nullptr && std::memcmp(arguments[1 + map], &tensor, sizeof(void*)) != 0) {
      return "tensor map " + std::to_string(map) + " is of another tensor";
    }
    CUtensorMapL2promotion promotion{};  // after the address: fake_driver.h
    std::memcpy(&promotion, static_cast<const char*>(arguments[1 + map]) + sizeof(void*), sizeof promotion);
    const bool is_narrow = has("_scaled") && !has("weight_gradient") && tensor == p.b;
    if (promotion != (is_narrow ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B)) {
      return "tensor map " + std::to_string(map) + " fetches another width";
    }
  }
  return "";
}

// Does what the kernel would do; returns what is wrong, or an empty text.
std::string run_kernel(const host::Kernel& kernel, int64_t grid, void** arguments) {
  const std::string operation = kernel.operation;
  if (operation == "grouped_gemm_weight_gradient_scaled") {
    return multiply_weight_gradient(kernel, params_of<ScaledGemmParams>(arguments), grid);
  }
  if (operation.rfind("grouped_gemm", 0) == 0 && operation.find("_scaled") != std::string::npos) {
    return multiply_scaled(kernel, params_of<ScaledGemmParams>(arguments), grid);
  }
  if (operation.rfind("grouped_gemm", 0) == 0 && operation.find("_mxfp4") != std::string::npos) {
    return multiply_mxfp4(kernel, params_of<Mxfp4GemmParams>(arguments), grid);
  }
  if (operation == "linear_nk") {
    return multiply_linear(kernel, params_of<linear::LinearParams>(arguments), grid);
  }
  if (operation.rfind("grouped_gemm", 0) == 0 ||
      operation.rfind("linear", 0) == 0) {  // axes[0]: the layout of the weights, except for the weight gradient
    return multiply(kernel, params_of<GemmParams>(arguments), static_cast<WeightLayout>(kernel.axes[0]), grid);
  }
  if (operation == "moe_sort") {
    const auto& params = params_of<SortParams>(arguments);
    const auto step = static_cast<SortStep>(kernel.axes[0]);
    if (grid != sort_blocks(params.slots)) return "another grid than planned";
    if (step != SortStep::kOne && params.block_counts == nullptr) return "no room for the counts of blocks";
    if (step != SortStep::kCount) sort(params);
  } else if (operation == "moe_combine" || operation == "moe_combine_backward") {
    const auto& params = params_of<CombineParams>(arguments);
    const bool is_shared_out = params.tokens <= host::g_gpu.num_multiprocessors;
    if (grid != params.tokens * (is_shared_out ? ceil_div(params.columns, 8 * kernel.threads) : 1))
      return "another grid";
    operation == "moe_combine" ? combine(params) : combine_backward(params);
  } else if (operation == "moe_bias_gradient") {
    const auto& params = params_of<BiasGradientParams>(arguments);
    if (grid != params.experts * ceil_div(params.columns, 64)) return "another grid";
    bias_gradient(params);
  } else if (operation == "moe_gather") {
    const auto& params = params_of<GatherParams>(arguments);
    if (grid != ceil_div(params.tokens, kernel.threads / 32)) return "another grid";
    gather(params);
  } else if (operation == "moe_quantize") {
    const auto& params = params_of<QuantizeParams>(arguments);
    if (grid != ceil_div(int64_t{params.rows} * params.columns / kScaleBlock, kernel.threads / 16))
      return "another grid";
    quantize(params, kernel.dtype == Dtype::kFloat32);
  } else if (operation == "moe_quantize_tiles") {
    const auto& params = params_of<QuantizeTilesParams>(arguments);
    const auto source = static_cast<TileSource>(kernel.axes[0]);
    const int64_t rows =
        source == TileSource::kWeights ? int64_t{params.experts} * params.rows : params.transposed_stride;
    if (grid != rows / kScaleBlock * (params.columns / kScaleBlock)) return "not a block for each tile";
    quantize_tiles(params, source);
  } else if (operation == "moe_gated_gradient") {
    const auto& params = params_of<GatedGradientParams>(arguments);
    if (grid != params.transposed_stride / kScaleBlock * (params.columns / kScaleBlock))
      return "not a block for each tile";
    differentiate(params);
  } else if (operation != "moe_route") {
    return "no loops for it";
  }
  return "";
}

}  // namespace

void mxfp4_cpu(Mxfp4Arguments arguments, const Tensor& out) {
  if (g_packs) {
    const bool is_interleaved = arguments.shape.is_interleaved;
    arguments.w13 = pack(arguments.w13, arguments.w13_scale, /*is_gated=*/true, is_interleaved);
    arguments.w2 = pack(arguments.w2, arguments.w2_scale, /*is_gated=*/false, is_interleaved);
    arguments.is_packed = true;
  }
  mxfp4_cuda(arguments, out);
}

}  // namespace moe

namespace host {
namespace {

CUresult launch(CUfunction function, unsigned grid, unsigned block, unsigned shared, bool is_dependent,
                void** arguments) {
  const Kernel& kernel = kernel_of(function);
  std::string problem = moe::run_kernel(kernel, grid, arguments);
  if (problem.empty()) problem = moe::check_maps(kernel, arguments);
  g_log += std::string("{\"symbol\": \"") + kernel.symbol + "\", \"operation\": \"" + kernel.operation +
           "\", \"grid\": " + std::to_string(grid) + ", \"block\": " + std::to_string(block) +
           ", \"shared\": " + std::to_string(shared) + ", \"is_dependent\": " + (is_dependent ? "true" : "false") +
           ", \"factors\": [" + moe::factors(kernel, arguments) + "], \"problem\": \"" + problem + "\"}\n";
  return CUDA_SUCCESS;
}

}  // namespace

}  // namespace host
}  // namespace flashmoe

// Only the names of attention's operators are known.
STABLE_TORCH_LIBRARY_FRAGMENT(flashmoe, library) {
  flashmoe::attention::define_dense(library);
  flashmoe::attention::define_varlen(library);
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CPU, library) {
  library.impl("_fused_moe_scaled", &flashmoe::moe::boxed_scaled);
  library.impl("_fused_moe_scaled_kept", &flashmoe::moe::boxed_scaled_kept);
  library.impl("_fused_moe_scaled_backward", &flashmoe::moe::boxed_scaled_backward);
  library.impl("_quantize_weights", &flashmoe::moe::boxed_quantize_weights);
}

FAKE_EXPORT void fake_gpu(int capability, int multiprocessors, int is_capturing) {
  flashmoe::host::begin_call(capability, multiprocessors, is_capturing != 0);
}

FAKE_EXPORT void fake_packs(int packs) { flashmoe::moe::g_packs = packs != 0; }
