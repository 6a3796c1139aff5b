// y = x W^T + b: the grouped product with one expert, or linear's own kernels built from the same parts. The bits of a
// row depend only on the row, W and b: in every tile the sum over k is one chain of products of 16 k in ascending order
// or, for few columns and a long sum, as many chains as W's sizes determine (params/linear.h). So the tile may be
// chosen by the number of rows.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "host/arguments.h"
#include "host/boxed.h"
#include "host/copies.h"
#include "host/last_kernel.h"
#include "host/tensor_map.h"
#include "host/tile_counters.h"
#include "host/workspace.h"
#include "linear/sm90/tensor_map.h"
#include "moe/host/argument_checks.h"
#include "moe/host/backends.h"
#include "moe/host/launch.h"

namespace flashmoe::linear {
namespace {

using host::Kernel;
using host::Tensor;
using moe::check_kind;
using moe::check_sizes;
using moe::data_or_null;
using moe::GroupedArguments;
using moe::make_contiguous;
using moe::select_product;

constexpr int64_t kChoose = -1;

bool is_operation(const Kernel& kernel, const char* name) { return std::strcmp(kernel.operation, name) == 0; }

bool is_linear_nk(const Kernel& kernel) { return is_operation(kernel, "linear_nk"); }

// A way to compute the product. is_divided: each segment of a tile's sum over k has its own block.
struct Tile {
  const Kernel* kernel;
  bool is_divided;
};
using Tiles = std::vector<Tile>;

// The number of segments of the sum over k, each one chain of products. It depends only on the weights. Few columns
// give few tiles, and a long chain takes its latency, whatever else runs.
int64_t segments_of(int64_t n, int64_t k) { return n <= 2048 && k >= 4096 ? kSegments : 1; }

// Every tile that can compute the product on this GPU, whether or not it is ever chosen; for a sum in segments, the
// tiles that support them.
const Tiles& tiles_for(const host::KernelRequest& request, moe::WeightLayout layout, bool has_segments) {
  constexpr int32_t kMaxColumns = 160;  // of linear/sm90/linear.cuh
  thread_local std::map<std::tuple<int32_t, host::Dtype, moe::WeightLayout, bool>, Tiles> remembered;
  const auto [found, is_new] =
      remembered.try_emplace(std::tuple(request.capability, request.dtype, layout, has_segments));
  if (!is_new) return found->second;
  for (const Kernel* kernel : host::loadable_kernels(request.capability)) {
    if (kernel->dtype != request.dtype || kernel->axes[0] != static_cast<int32_t>(layout)) continue;
    if (has_segments) {
      if (!is_linear_nk(*kernel) || kernel->block_n > kMaxColumns) continue;
      found->second.push_back({kernel, true});
      found->second.push_back({kernel, false});
    } else if (is_operation(*kernel, "grouped_gemm") || is_operation(*kernel, "grouped_gemm_few_rows") ||
               is_operation(*kernel, "linear") || is_linear_nk(*kernel) || is_operation(*kernel, "linear_few_rows")) {
      found->second.push_back({kernel, false});
    }
  }
  return found->second;
}

struct Problem {
  const host::KernelRequest& request;
  moe::WeightLayout layout;
  int64_t rows, n, k;
  int64_t segments;  // 1: the sum is not divided

  int64_t tiles(const Kernel& kernel) const { return ceil_div(rows, kernel.block_m) * ceil_div(n, kernel.block_n); }
  const Tiles& all_tiles() const { return tiles_for(request, layout, segments > 1); }
};

// Sums over weights [n, k] on a GPU with wgmma are divided, whichever tile computes them; with another forced family,
// and on other GPUs, they are not.
Problem problem_of(const host::KernelRequest& request, moe::WeightLayout layout, int64_t rows, int64_t n, int64_t k) {
  Problem problem{request, layout, rows, n, k, segments_of(n, k)};
  const bool is_other = request.forced_family != nullptr && std::strcmp(request.forced_family, "sm90") != 0;
  if (is_other || problem.all_tiles().empty()) problem.segments = 1;
  return problem;
}

// Blocks that share a tile.
int64_t blocks_of(const Problem& problem, const Tile& tile) { return tile.is_divided ? problem.segments : 1; }

// Consumer warpgroups, each with its own partial sums and counter.
int64_t consumers_of(const Kernel& kernel) { return kernel.block_m / 64; }

// The approximate clocks that a wgmma tile takes for all rows on an H200. A multiprocessor computes its tiles one after
// another, while all multiprocessors read x and the weights from L2.
double clocks(const Problem& problem, const Tile& tile) {
  constexpr double kBytesOfOne = 64, kBytesOfAll = 8000;  // bytes per clock
  constexpr double kStart = 1750;                         // per tile: its first loads, its last stores
  const Kernel& kernel = *tile.kernel;
  const double columns = kernel.block_n;
  const auto blocks = static_cast<double>(blocks_of(problem, tile));
  const double tiles = static_cast<double>(problem.tiles(kernel)) * blocks;
  const double waves = std::ceil(tiles / static_cast<double>(problem.request.num_multiprocessors));
  // Per 16 k.
  const double bytes = 32 * (static_cast<double>(std::min<int64_t>(problem.rows, kernel.block_m)) + columns);
  const double products = kernel.block_m > 64 ? 1.2 * columns : std::max(0.65 * columns, 16 + 0.25 * columns);
  const double step = std::max(waves * std::max(products, bytes / kBytesOfOne), tiles * bytes / kBytesOfAll);
  const double sums = tile.is_divided ? 11000 + blocks * 4 * columns * kernel.block_m / kBytesOfOne : 0;
  return static_cast<double>(problem.k) / 16 / blocks * step + waves * kStart + sums;
}

// Whether every multiprocessor has at most one block.
bool is_one_wave(const Problem& problem, const Tile& tile) {
  return problem.tiles(*tile.kernel) * blocks_of(problem, tile) <= problem.request.num_multiprocessors;
}

// The narrowest 64-row tile of linear_nk that fits in one wave; null if there is none.
const Tile* one_wave(const Problem& problem, const Tiles& tiles) {
  const Tile* best = nullptr;
  for (const Tile& tile : tiles) {
    const Kernel& kernel = *tile.kernel;
    const bool is_like = is_linear_nk(kernel) && kernel.block_m == 64 && tile.is_divided == (problem.segments > 1);
    if (is_like && is_one_wave(problem, tile) && (best == nullptr || kernel.block_n < best->kernel->block_n)) {
      best = &tile;
    }
  }
  return best;
}

Tile choose(const Problem& problem) {
  const int64_t rows = problem.rows, n = problem.n;
  Tiles wide;
  const Tile* few = nullptr;
  bool has_linear = false;
  // With many columns mma.sync is slower than the kernels that load by TMA.
  const bool is_narrow = n < 128 * static_cast<int64_t>(problem.request.num_multiprocessors);
  if (problem.request.forced_family == nullptr || problem.segments > 1) {
    for (const Tile& tile : problem.all_tiles()) {
      const Kernel& kernel = *tile.kernel;
      has_linear = has_linear || is_operation(kernel, "linear") || is_linear_nk(kernel);
      if (is_operation(kernel, "linear_few_rows") && is_narrow && rows <= kernel.block_m) few = &tile;
      if (std::strcmp(kernel.family, "sm90") == 0 && kernel.block_m <= 128) wide.push_back(tile);
    }
  }
  if (few != nullptr) return *few;
  if (!has_linear) {
    return {&select_product({problem.request, moe::Product::kPlain, problem.layout, rows, /*experts=*/1, n, problem.k}),
            false};
  }
  const Tile* only = rows <= 64 ? one_wave(problem, wide) : nullptr;
  if (only != nullptr) return *only;
  // Divided tiles of more than one wave wait for each other: 768 rows, N = 2048, K = 8192 take 62 us, undivided 45. One
  // wave needs at most two counters per multiprocessor.
  const auto cost = [&](const Tile& one) {
    const bool waits = one.is_divided && !is_one_wave(problem, one);
    return waits || one.kernel->block_n < 64 ? std::numeric_limits<double>::max() : clocks(problem, one);
  };
  return *std::min_element(wide.begin(), wide.end(), [&](const Tile& a, const Tile& b) { return cost(a) < cost(b); });
}

// Runs a kernel of linear/sm90/.
void run_linear(const host::CudaCall& call, const Problem& problem, const Tile& tile, const moe::GemmParams& gemm) {
  const Kernel& kernel = *tile.kernel;
  LinearParams params{};
  params.gemm = gemm;
  params.segments = static_cast<int32_t>(problem.segments);
  const int64_t tiles = problem.tiles(kernel), consumers = tiles * consumers_of(kernel);
  host::Workspace workspace;
  host::TileCounter arrivals;
  if (tile.is_divided) {
    const int64_t sums = workspace.add<float>(consumers * problem.segments * 64 * kernel.block_n);
    workspace.allocate(call);
    params.partials = workspace.address<float>(sums);
    arrivals = host::tile_counter(call, consumers);
    params.arrivals = arrivals.address;
  }
  const auto from = sm90::linear_tensor_maps(params, kernel.block_n);
  const auto encode = [&](const auto& description, const char* name) {
    return host::encode_tensor_map(description, kernel.dtype, name);
  };
  const std::array<CUtensorMap, 3> maps{encode(from.a, "x"), encode(from.b, "weight"), encode(from.d, "results")};
  const int64_t grid = host::grid_for(kernel, tiles * blocks_of(problem, tile), call.gpu);
  host::LaunchList list;
  list.add({&kernel, grid, &params, maps.data(), /*is_dependent=*/false});
  list.run(call);
}

void run_cuda(const GroupedArguments& arguments, int64_t index, const Tensor& out) {
  const host::Device& gpu = host::device(arguments.common.device_index);
  const host::KernelRequest request = host::make_request(gpu, arguments.common.dtype);
  const Tensor x = moe::loadable_rows(arguments.a), bias = moe::loadable_rows(arguments.bias);
  const moe::WeightOperand weight = moe::loadable_weights(arguments.b_owner, /*is_transposed=*/false);
  const moe::WeightLayout layout = moe::layout_of(weight.view, /*is_interleaved=*/false);
  const Problem problem = problem_of(request, layout, arguments.rows, arguments.b.n, arguments.b.k);
  const Tiles& tiles = problem.all_tiles();
  const auto count = static_cast<int64_t>(tiles.size());
  if (index < kChoose || index >= count) host::violate("linear.tile", {{"tile", index}, {"last", count - 1}});
  const Tile tile = index == kChoose ? choose(problem) : tiles[static_cast<std::size_t>(index)];
  moe::GroupedGemm product(moe::Product::kPlain, *tile.kernel);
  set_weights(product.params, weight.view);
  set_grouped(product.params, arguments, x, /*offsets=*/nullptr, out);
  product.params.bias = data_or_null(bias);
  const host::CudaCall call(gpu);
  if (is_linear_nk(*tile.kernel)) {
    run_linear(call, problem, tile, product.params);
  } else {
    moe::CallList list(call);
    product.add(list, /*is_dependent=*/false);
    list.run();
  }
  host::set_last_kernel(tile.kernel->symbol);
}

void run_cpu(GroupedArguments& arguments, int64_t tile, const Tensor& out) {
  if (tile != kChoose) host::violate("linear.tile", {{"tile", tile}, {"last", kChoose}});
  arguments.offsets = host::empty({1}, aoti_torch_dtype_int32(), arguments.common.device_type, 0);
  *static_cast<int32_t*>(arguments.offsets.data()) = static_cast<int32_t>(arguments.rows);
  moe::grouped_cpu(arguments, out);
}

// x [rows, k], weight [n, k], bias [n].
GroupedArguments parse_arguments(host::Arguments& inputs) {
  GroupedArguments arguments;
  moe::RequiredTensors required(inputs);
  Tensor& x = arguments.a;
  x = required.next("x");
  Tensor weight = required.next("weight");
  Tensor bias = inputs.optional_tensor();
  required.check();
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
  host::Arguments inputs(stack);
  GroupedArguments arguments = parse_arguments(inputs);
  const int64_t tile = inputs.integer();
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
  stack[0] = host::box(std::move(out));
}

const host::ArgumentCheck kCheck("_linear", [](host::Arguments& inputs) { parse_arguments(inputs); });

}  // namespace
}  // namespace flashmoe::linear

STABLE_TORCH_LIBRARY_FRAGMENT(flashmoe, library) {
  // x [rows, k], weight [n, k], bias [n]; tile: -1, or the index of a tile that can compute it (tests and timings).
  library.def("_linear(Tensor x, Tensor weight, Tensor? bias, int tile) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CPU, library) { library.impl("_linear", &flashmoe::linear::boxed_linear<false>); }

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CUDA, library) { library.impl("_linear", &flashmoe::linear::boxed_linear<true>); }
