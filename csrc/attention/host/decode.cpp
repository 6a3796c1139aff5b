#include "attention/host/decode.h"

#include <algorithm>
#include <cstring>

#include "host/last_kernel.h"
#include "host/launch.h"
#include "host/tile_counters.h"
#include "host/workspace.h"

namespace flashmoe {
namespace attention {
namespace {

constexpr const char* kFamily = "sm80";
// Rows of a head beyond which its keys are read too often: one item has 16 of them.
constexpr int32_t kMostRows = 32;
constexpr int32_t kMostSplits = 64;  // that are worth the adding up

int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

bool is_forced_elsewhere(const char* forced) { return forced != nullptr && std::strcmp(forced, kFamily) != 0; }

bool has_family(int32_t capability) {
  for (const char* const* family = host::families_of(capability); *family != nullptr; ++family) {
    if (std::strcmp(*family, kFamily) == 0) return true;
  }
  return false;
}

}  // namespace

const Kernel* select_decode(const host::KernelRequest& request, const ForwardParams& params) {
  if (params.seq_q > kMostRows || params.seq_q > params.seq_k) return nullptr;
  if (is_forced_elsewhere(request.forced_family) || !has_family(request.capability)) return nullptr;
  return host::find_kernel(
      {"attention_decode", kFamily, "", request.dtype, {std::max(params.head_dim, params.head_dim_v)}}, axis::kHeadDim,
      host::loadable_kernels(request.capability));
}

void describe_as_band(ForwardParams& params, bool is_causal) {
  params.head_dim_v = params.head_dim;
  params.entries = Batch{};
  params.band = Band{};
  params.band.left = kUnbounded;
  params.band.right = is_causal ? 0 : kUnbounded;
  params.band.mask_factor = 1.0F;
  params.band.folded_heads = 1;
}

void launch_decode(ForwardParams params, const Kernel& kernel, const host::CudaCall& call) {
  if (params.num_splits == 0) params.num_splits = kMostSplits;
  const int64_t items =
      ceil_div(params.seq_q, kernel.block_m) * params.heads_q * static_cast<int64_t>(params.batch);
  const int64_t tiles = params.num_splits == 1 ? items : items * (ceil_div(params.seq_k, kernel.block_n) + 1);
  const int64_t grid = std::min(host::grid_for(kernel, tiles, call.gpu), host::kMostCounters);
  host::Workspace workspace;
  host::TileCounter counters;
  if (params.num_splits > 1) {
    // Each block may leave the end of one item and the beginning of another one.
    const int64_t rows = 2 * grid * kernel.block_m;
    const int64_t out = workspace.add<float>(rows * kernel.axes[axis::kHeadDim]);
    const int64_t state = workspace.add<float>(rows * 2);
    workspace.allocate(call);
    params.out_partial = workspace.address<float>(out);
    params.lse_partial = workspace.address<float>(state);
    counters = host::zeroed_counters(call, grid);
    params.tile_counter = counters.address;
  }
  host::LaunchList list;
  list.add({&kernel, grid, &params, nullptr, /*is_dependent=*/false});
  list.run(call);
  host::set_last_kernel(kernel.symbol);
}

}  // namespace attention
}  // namespace flashmoe
