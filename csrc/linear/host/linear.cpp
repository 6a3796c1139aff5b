// y = x W^T + b: the grouped product with one expert. The bits of a row depend on the row, W and b alone: in every tile the sum over k is one
// chain of products of 16 k in ascending order (moe/params/gemm.h), so which tile runs may follow the number of rows.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "host/arguments.h"
#include "host/boxed.h"
#include "host/copies.h"
#include "host/last_kernel.h"
#include "moe/host/argument_checks.h"
#include "moe/host/backends.h"
#include "moe/host/launch.h"

namespace flashmoe {
namespace linear {
namespace {

using host::Kernel;
using host::Tensor;
using moe::ceil_div;
using moe::check_kind;
using moe::check_sizes;
using moe::data_or_null;
using moe::GroupedArguments;
using moe::make_contiguous;
using moe::select_product;
using Tiles = std::vector<const Kernel*>;

constexpr int64_t kChoose = -1;

bool is_operation(const Kernel& kernel, const char* name) { return std::strcmp(kernel.operation, name) == 0; }

// Every tile that can compute the product on this GPU, whether or not it is ever chosen.
const Tiles& tiles_for(const host::KernelRequest& request, moe::Memory memory) {
  thread_local std::map<std::tuple<int32_t, host::Dtype, moe::Memory>, Tiles> remembered;
  const auto [found, is_new] = remembered.try_emplace(std::tuple(request.capability, request.dtype, memory));
  if (!is_new) return found->second;
  for (const Kernel* kernel : host::loadable_kernels(request.capability)) {
    const bool is_product = is_operation(*kernel, "grouped_gemm") || is_operation(*kernel, "grouped_gemm_few_rows") ||
                            is_operation(*kernel, "linear") || is_operation(*kernel, "linear_nk") ||
                            is_operation(*kernel, "linear_few_rows");
    if (is_product && kernel->dtype == request.dtype && kernel->axes[0] == static_cast<int32_t>(memory)) {
      found->second.push_back(kernel);
    }
  }
  return found->second;
}

// Clocks, about, that a tile with wgmma takes for all rows on an H200. A multiprocessor computes its tiles one after the other, while all
// of them read x and the weights from the second-level cache.
double clocks(const Kernel& kernel, int64_t rows, int64_t n, int64_t k, int64_t multiprocessors) {
  constexpr double kBytesOfOne = 56, kBytesOfAll = 7000;  // a clock
  constexpr double kStart = 1500;                         // of a tile: its first loads, its last stores
  const double columns = kernel.block_n;
  const double tiles = static_cast<double>(ceil_div(rows, kernel.block_m) * ceil_div(n, kernel.block_n));
  const double waves = std::ceil(tiles / static_cast<double>(multiprocessors));
  // Of 16 k.
  const double bytes = 32 * (static_cast<double>(std::min<int64_t>(rows, kernel.block_m)) + columns);
  const double products = kernel.block_m > 64 ? 1.2 * columns : std::max(0.65 * columns, 16 + 0.25 * columns);
  const double step = std::max(waves * std::max(products, bytes / kBytesOfOne), tiles * bytes / kBytesOfAll);
  return static_cast<double>(k) / 16 * step + waves * kStart;
}

const Kernel& choose(const host::KernelRequest& request, const GroupedArguments& arguments, moe::Memory memory) {
  const int64_t rows = arguments.rows, n = arguments.b.n, k = arguments.b.k;
  const int64_t multiprocessors = request.num_multiprocessors;
  Tiles few_rows, wide;
  bool has_own = false;
  // Up to so many rows the copy engine would fill most of a tile of 64 with zeros, which is slow; many columns hide it.
  const bool is_few = rows <= 32 && n < 128 * multiprocessors;
  if (request.forced_family == nullptr) {
    for (const Kernel* kernel : tiles_for(request, memory)) {
      has_own = has_own || is_operation(*kernel, "linear");
      if (is_operation(*kernel, "linear_few_rows") && is_few) few_rows.push_back(kernel);
      if (std::strcmp(kernel->family, "sm90") == 0 && kernel->block_m <= 128) wide.push_back(kernel);
    }
  }
  // The smallest tile that has room for all rows; smaller ones, which read the weights several times, where it leaves more than a
  // quarter of the multiprocessors idle.
  std::sort(few_rows.begin(), few_rows.end(), [](const Kernel* a, const Kernel* b) { return a->block_m < b->block_m; });
  auto few = std::find_if(few_rows.begin(), few_rows.end(), [rows](const Kernel* one) { return rows <= one->block_m; });
  if (few != few_rows.end()) {
    const auto tiles_of = [&](const Kernel& kernel) {
      return ceil_div(rows, kernel.block_m) * ceil_div(n, kernel.block_n);
    };
    while (few != few_rows.begin() && 4 * tiles_of(**few) < 3 * multiprocessors) --few;
    return **few;
  }
  if (!has_own) {
    return select_product({request, moe::Product::kPlain, memory, rows, /*experts=*/1, n, k});
  }
  const auto cost = [&](const Kernel* one) { return clocks(*one, rows, n, k, multiprocessors); };
  return **std::min_element(wide.begin(), wide.end(),
                            [&](const Kernel* a, const Kernel* b) { return cost(a) < cost(b); });
}

void run_cuda(const GroupedArguments& arguments, int64_t tile, const Tensor& out) {
  const host::Device& gpu = host::device(arguments.common.device_index);
  const host::KernelRequest request = host::make_request(gpu, arguments.common.dtype);
  const Tensor x = moe::loadable_rows(arguments.a), bias = moe::loadable_rows(arguments.bias);
  const moe::WeightOperand weight = moe::loadable_weights(arguments.b_owner, /*is_transposed=*/false);
  const moe::Memory memory = moe::memory_of(weight.view, /*is_paired=*/false);
  const Tiles& tiles = tiles_for(request, memory);
  const auto count = static_cast<int64_t>(tiles.size());
  if (tile < kChoose || tile >= count) host::violate("linear.tile", {{"tile", tile}, {"last", count - 1}});
  moe::GroupedGemm product(moe::Product::kPlain, tile == kChoose ? choose(request, arguments, memory)
                                                                 : *tiles[static_cast<std::size_t>(tile)]);
  set_weights(product.params, weight.view);
  set_grouped(product.params, arguments, x, /*offsets=*/nullptr, out);
  product.params.bias = data_or_null(bias);
  const host::CudaCall call(gpu);
  moe::CallList list(call);
  product.add(list, /*is_dependent=*/false);
  list.run();
  host::set_last_kernel(product.kernel().symbol);
}

void run_cpu(GroupedArguments& arguments, int64_t tile, const Tensor& out) {
  if (tile != kChoose) host::violate("linear.tile", {{"tile", tile}, {"last", kChoose}});
  arguments.offsets = host::empty({1}, aoti_torch_dtype_int32(), arguments.common.device_type, 0);
  *static_cast<int32_t*>(arguments.offsets.data()) = static_cast<int32_t>(arguments.rows);
  moe::grouped_cpu(arguments, out);
}

// x [rows, k], weight [n, k], bias [n].
GroupedArguments take_arguments(host::Arguments& given) {
  GroupedArguments arguments;
  moe::Needed needed(given);
  Tensor& x = arguments.a;
  x = needed.take("x");
  Tensor weight = needed.take("weight");
  Tensor bias = given.optional_tensor();
  needed.check();
  arguments.common = moe::common_of(x, "x", /*has_float32=*/false);
  check_kind(weight, "weight", {x, "x"}, arguments.common.torch_dtype, /*is_like_first=*/true);
  moe::check_rank(x, "x", 2, "[rows, k]");
  moe::check_rank(weight, "weight", 2, "[n, k]");
  const int64_t n = weight.sizes()[0], k = weight.sizes()[1];
  check_sizes(x, "x", {x.sizes()[0], k}, "[rows, k]");
  moe::check_grouped_sizes(arguments.common, /*experts=*/1, n, k);
  arguments.rows = x.sizes()[0];
  moe::make_rows_contiguous(x);
  if (bias.is_given()) {
    check_kind(bias, "bias", {x, "x"}, arguments.common.torch_dtype, /*is_like_first=*/true);
    check_sizes(bias, "bias", {n}, "[n]");
    make_contiguous(bias);
  }
  if (weight.description() != nullptr) return arguments;
  const int64_t sizes[] = {1, n, k}, strides[] = {n * k, weight.strides()[0], weight.strides()[1]}, ones[] = {n, 1};
  if (bias.is_given()) arguments.bias = host::view_of(bias, 2, sizes, ones);
  arguments.b_owner = host::view_of(weight, 3, sizes, strides);
  moe::make_weights_contiguous(arguments.b_owner);
  arguments.b = moe::view_weights(arguments.b_owner, /*is_transposed=*/false);
  return arguments;
}

template <bool kIsCuda>
void boxed_linear(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("_linear", num_arguments, 4, num_outputs, 1);
  host::Arguments given(stack);
  GroupedArguments arguments = take_arguments(given);
  const int64_t tile = given.integer();
  Tensor out = host::empty({arguments.rows, arguments.b.n}, arguments.common.torch_dtype, arguments.common.device_type,
                           arguments.common.device_index);
  host::set_last_kernel("");
  if (arguments.rows > 0) {
    if constexpr (kIsCuda) {
      run_cuda(arguments, tile, out);
    } else {
      run_cpu(arguments, tile, out);
    }
  }
  stack[0] = host::give(std::move(out));
}

const host::ArgumentCheck kCheck("_linear", [](host::Arguments& given) { take_arguments(given); });

}  // namespace
}  // namespace linear
}  // namespace flashmoe

STABLE_TORCH_LIBRARY_FRAGMENT(flashmoe, library) {
  // x [rows, k], weight [n, k], bias [n]; tile: -1, or which of the tiles that could compute it (tests and timings).
  library.def("_linear(Tensor x, Tensor weight, Tensor? bias, int tile) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CPU, library) { library.impl("_linear", &flashmoe::linear::boxed_linear<false>); }

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CUDA, library) { library.impl("_linear", &flashmoe::linear::boxed_linear<true>); }
