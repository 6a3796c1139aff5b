#include "moe/host/select.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <tuple>
#include <vector>

namespace flashmoe::moe {
namespace {

using host::KernelList;
using host::KernelRequest;

constexpr int32_t kNumProducts = 12;
constexpr int32_t kNumOps = 14;

// Indexed by Product.
struct ProductName {
  const char* operation;
  const char* few_rows;  // null: none
  bool has_layout;
  const char* description;  // for error messages
};
constexpr std::array<ProductName, kNumProducts> kProducts{
    {{"grouped_gemm", "grouped_gemm_few_rows", true, "a grouped matrix product"},
     {"grouped_gemm_gated", "grouped_gemm_gated_few_rows", true, "a gated grouped matrix product"},
     {"grouped_gemm_gated_backward", nullptr, true, "the gradient of a gated grouped matrix product"},
     {"grouped_gemm_weight_gradient", nullptr, false, "the gradient of experts' weights"},
     {"grouped_gemm_scaled", "grouped_gemm_scaled_few_rows", false, "a grouped matrix product of float8_e4m3fn"},
     {"grouped_gemm_gated_scaled", "grouped_gemm_gated_scaled_few_rows", false,
      "a gated grouped matrix product of float8_e4m3fn"},
     {"grouped_gemm_mxfp4", "grouped_gemm_mxfp4_few_rows", false, "a grouped matrix product of mxfp4 weights"},
     {"grouped_gemm_gated_mxfp4", "grouped_gemm_gated_mxfp4_few_rows", false,
      "a gated grouped matrix product of mxfp4 weights"},
     {"grouped_gemm_mxfp4_packed", nullptr, false, "a grouped matrix product of packed mxfp4 weights"},
     {"grouped_gemm_gated_mxfp4_packed", nullptr, false, "a gated grouped matrix product of packed mxfp4 weights"},
     {"grouped_gemm_weight_gradient_scaled", nullptr, false, "the gradient of experts' weights in float8_e4m3fn"},
     {"grouped_gemm_gated_scaled_kept", nullptr, false,
      "a gated grouped matrix product of float8_e4m3fn for training"}}};

// Indexed by Step.
struct OpName {
  const char* operation;
  int32_t axis_value;  // on the operation's axis; host::kNoAxis if it has none
  bool has_dtype;      // else its tensors' dtypes are parameters, and the table lists it once, as float32
  const char* description;
};
constexpr std::array<OpName, kNumOps> kOps{
    {{"moe_route", host::kNoAxis, false, "routing"},
     {"moe_sort", 0, false, "sorting by expert"},
     {"moe_sort", 1, false, "sorting by expert"},
     {"moe_sort", 2, false, "sorting by expert"},
     {"moe_combine", host::kNoAxis, true, "combining experts' results"},
     {"moe_combine_backward", host::kNoAxis, true, "combining gradients"},
     {"moe_bias_gradient", host::kNoAxis, true, "the gradient of biases"},
     {"moe_gather", host::kNoAxis, true, "gathering experts' rows"},
     {"moe_quantize", host::kNoAxis, true, "conversion to float8_e4m3fn"},
     {"moe_quantize", host::kNoAxis, false, "conversion of float32 to float8_e4m3fn"},
     {"moe_quantize_tiles", 0, true, "conversion of weights to float8_e4m3fn"},
     {"moe_quantize_tiles", 1, true, "conversion of tokens to float8_e4m3fn"},
     {"moe_quantize_tiles", 2, true, "conversion of gradients to float8_e4m3fn"},
     {"moe_gated_gradient", host::kNoAxis, true, "the gradient of the activation in float8_e4m3fn"}}};

bool equal(const char* left, const char* right) { return std::strcmp(left, right) == 0; }

// The tiles of one family for one product, smallest first.
struct FamilyTiles {
  const char* family;
  std::vector<const Kernel*> few_rows;
  std::vector<const Kernel*> tiles;
};
using FamilyList = std::vector<FamilyTiles>;  // best first

double rows_of(const Kernel& kernel) { return kernel.has_cost ? kernel.cost[cost::kRows] : 0.0; }

std::vector<const Kernel*> find_tiles(const char* operation, const char* family, host::Dtype dtype, int32_t layout,
                                      const KernelList& kernels) {
  std::vector<const Kernel*> found;
  for (const Kernel* kernel : kernels) {
    if (kernel->dtype == dtype && kernel->axes[0] == layout && equal(kernel->operation, operation) &&
        equal(kernel->family, family)) {
      found.push_back(kernel);
    }
  }
  // If a family has tiles compiled for this GPU, only those are meant for it: PTX replaces them if there are none.
  const auto is_ptx = [](const Kernel* kernel) { return host::kernel_table().binaries[kernel->binary].is_ptx; };
  if (!std::all_of(found.begin(), found.end(), is_ptx)) {
    found.erase(std::remove_if(found.begin(), found.end(), is_ptx), found.end());
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Kernel* left, const Kernel* right) { return rows_of(*left) < rows_of(*right); });
  return found;
}

FamilyList resolve_families(const ProductInput& input) {
  const ProductName& name = kProducts[static_cast<std::size_t>(input.product)];
  const int32_t layout = name.has_layout ? static_cast<int32_t>(input.layout) : host::kNoAxis;
  const host::Dtype dtype = input.request.dtype;
  const KernelList& kernels = host::loadable_kernels(input.request.capability);
  FamilyList result;
  for (const char* const* family = host::families_of(input.request.capability); *family != nullptr; ++family) {
    FamilyTiles found{*family, {}, find_tiles(name.operation, *family, dtype, layout, kernels)};
    if (name.few_rows != nullptr) found.few_rows = find_tiles(name.few_rows, *family, dtype, layout, kernels);
    if (!found.tiles.empty() || !found.few_rows.empty()) result.push_back(std::move(found));
  }
  return result;
}

// resolve_families, cached: searching the whole table takes longer than the rest of the selection.
const FamilyList& families_for(const ProductInput& input) {
  thread_local std::map<std::tuple<int32_t, host::Dtype, Product, WeightLayout>, FamilyList> remembered;
  const auto key = std::tuple(input.request.capability, input.request.dtype, input.product, input.layout);
  const auto found = remembered.find(key);
  return found != remembered.end() ? found->second : remembered.emplace(key, resolve_families(input)).first->second;
}

// The smallest tile for that many rows and that k; null if none is large enough.
const Kernel* sufficient(const std::vector<const Kernel*>& tiles, double rows, int64_t k) {
  for (const Kernel* kernel : tiles) {
    if (rows <= rows_of(*kernel) && static_cast<double>(k) >= kernel->cost[cost::kMinK]) return kernel;
  }
  return nullptr;
}

int64_t up_to_multiple(int64_t size, int32_t block) { return (size + block - 1) / block * block; }

// How much of the result a tile computes: whole blocks of columns and, for a weight gradient, of rows.
double computed(const Kernel& kernel, const ProductInput& input) {
  if (input.product != Product::kWeightGradient) return static_cast<double>(up_to_multiple(input.n, kernel.block_n));
  return static_cast<double>(up_to_multiple(input.n, kernel.block_m)) *
         static_cast<double>(up_to_multiple(input.k, kernel.block_n));
}

// `kernel`, or one for equally many rows per expert that computes at least a twentieth less. A taller one needs many
// rows: an expert's last tile is half empty on average.
const Kernel* with_less_waste(const Kernel* kernel, const std::vector<const Kernel*>& tiles, const ProductInput& input,
                              double rows) {
  constexpr double kLess = 0.95;
  constexpr double kTilesOfRows = 4.0;
  const Kernel* best = kernel;
  for (const Kernel* other : tiles) {
    const bool has_rows = input.product == Product::kWeightGradient || rows >= kTilesOfRows * other->block_m;
    if (rows_of(*other) == rows_of(*kernel) && has_rows && computed(*other, input) < kLess * computed(*best, input)) {
      best = other;
    }
  }
  return best;
}

// By squaring. std::pow is a symbol of glibc 2.29.
double power(double base, int64_t exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent /= 2, base *= base) {
    if (exponent % 2 == 1) result *= base;
  }
  return result;
}

// `kernel`, or another tile for this many rows per expert whose waves, of one tile per multiprocessor, take at least 3%
// less time: smaller differences between two wave times cannot be told apart. Counts the tiles of the experts that
// would be chosen if the slots drew them at random.
const Kernel* with_shorter_waves(const Kernel* kernel, const std::vector<const Kernel*>& tiles,
                                 const ProductInput& input, double rows) {
  constexpr double kLess = 0.97;
  const double experts = static_cast<double>(input.experts);
  const double chosen = std::ceil(experts * (1.0 - power(1.0 - 1.0 / experts, input.slots)));
  const auto waves_time = [&](const Kernel& tile) {
    const double count = chosen * static_cast<double>(up_to_multiple(input.n, tile.block_n) / tile.block_n);
    return std::ceil(count / input.request.num_multiprocessors) * tile.cost[cost::kWave];
  };
  const Kernel* best = kernel;
  for (const Kernel* other : tiles) {
    const bool is_timed = other->has_cost && other->cost[cost::kWave] > 0;
    if (is_timed && rows <= rows_of(*other) && waves_time(*other) < kLess * waves_time(*best)) best = other;
  }
  return best;
}

const Kernel* find_op(const KernelRequest& request, Op op) {
  const OpName& name = kOps[static_cast<std::size_t>(op)];
  const host::Dtype dtype = name.has_dtype ? request.dtype : host::Dtype::kFloat32;
  const KernelList& kernels = host::loadable_kernels(request.capability);
  for (const char* const* family = host::families_of(request.capability); *family != nullptr; ++family) {
    for (const Kernel* kernel : kernels) {
      if (kernel->dtype == dtype && kernel->axes[0] == name.axis_value && equal(kernel->operation, name.operation) &&
          equal(kernel->family, *family)) {
        return kernel;
      }
    }
  }
  return nullptr;
}

}  // namespace

const Kernel& select_product(const ProductInput& input) {
  const double rows = static_cast<double>(input.slots) / static_cast<double>(input.experts);
  const FamilyList& families = families_for(input);
  const auto is_allowed = [&input](const FamilyTiles& family) {
    return input.request.forced_family == nullptr || equal(input.request.forced_family, family.family);
  };
  for (const FamilyTiles& family : families) {
    const Kernel* kernel = is_allowed(family) ? sufficient(family.few_rows, rows, input.k) : nullptr;
    if (kernel != nullptr) return *kernel;
  }
  for (const FamilyTiles& family : families) {
    if (!is_allowed(family) || family.tiles.empty()) continue;
    const Kernel* kernel = sufficient(family.tiles, rows, input.k);
    if (kernel == nullptr) kernel = family.tiles.back();
    return *with_shorter_waves(with_less_waste(kernel, family.tiles, input, rows), family.tiles, input, rows);
  }
  host::refuse(input.request, kProducts[static_cast<std::size_t>(input.product)].description);
}

bool is_for_few_rows(const Kernel& kernel) {
  return std::any_of(kProducts.begin(), kProducts.end(), [&kernel](const ProductName& name) {
    return name.few_rows != nullptr && equal(name.few_rows, kernel.operation);
  });
}

const Kernel& select_op(const KernelRequest& request, Op op) {
  thread_local std::map<std::tuple<int32_t, host::Dtype, Op>, const Kernel*> remembered;
  const Kernel*& known = remembered[{request.capability, request.dtype, op}];
  if (known == nullptr) known = find_op(request, op);
  if (known == nullptr) host::refuse(request, kOps[static_cast<std::size_t>(op)].description);
  return *known;
}

}  // namespace flashmoe::moe
