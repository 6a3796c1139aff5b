#include "moe/host/launch.h"

#include <algorithm>

#include "moe/host/sort_plan.h"
#include "moe/host/tensor_maps.h"

namespace flashmoe::moe {
namespace {

GemmParams& gemm_of(GemmParams& params) { return params; }
GemmParams& gemm_of(ScaledGemmParams& params) { return params.gemm; }
GemmParams& gemm_of(Mxfp4GemmParams& params) { return params.gemm; }

// An upper bound, because only the device knows how many rows each expert has: one more row tile per expert than full
// ones.
int64_t bound_on_tiles(Product product, const GemmParams& params, const Kernel& kernel) {
  const bool is_gradient = product == Product::kWeightGradient || product == Product::kScaledWeightGradient;
  const int64_t columns = ceil_div(is_gradient ? params.k : params.n, kernel.block_n);
  if (is_gradient) return params.experts * ceil_div(params.n, kernel.block_m) * columns;
  if (params.expert_offsets == nullptr) return ceil_div(params.slots, kernel.block_m) * columns;
  return (ceil_div(params.slots, kernel.block_m) + std::min(params.experts, params.slots)) * columns;
}

}  // namespace

SortedWorkspace::SortedWorkspace(host::Workspace& workspace, int64_t slots, int64_t experts)
    : expert_offsets_(workspace.add<int32_t>(experts + 1)),
      row_slots_(workspace.add<int32_t>(slots)),
      slot_rows_(workspace.add<int32_t>(slots)),
      row_weights_(workspace.add<float>(slots)) {}

Sorted SortedWorkspace::pointers(const host::Workspace& workspace) const {
  return {workspace.address<int32_t>(expert_offsets_), workspace.address<int32_t>(row_slots_),
          workspace.address<int32_t>(slot_rows_), workspace.address<float>(row_weights_)};
}

void add_combine(CallList& list, const Kernel& kernel, const CombineParams& params, bool is_dependent) {
  const int64_t columns_at_once = 8 * kernel.threads;  // per block
  const bool is_shared_out = params.tokens <= list.call().gpu.num_multiprocessors;
  list.add(kernel, params.tokens * (is_shared_out ? ceil_div(params.columns, columns_at_once) : 1), &params,
           is_dependent);
}

SortKernels::SortKernels(const SortArguments& arguments, const host::KernelRequest& request, host::Workspace& workspace)
    : arguments_(arguments),
      blocks_(sort_blocks(arguments.slots)),
      block_counts_(workspace.add<int32_t>(sort_workspace(arguments.slots, arguments.experts))) {
  if (blocks_ == 1) {
    kernels_[0] = &select_op(request, Op::kSortOne);
  } else {
    kernels_ = {&select_op(request, Op::kSortCount), &select_op(request, Op::kSortPlace)};
  }
}

void SortKernels::add(CallList& list, const Sorted& sorted, const host::Workspace& workspace) {
  params_ = sort_params(arguments_, sorted);
  params_.block_counts = workspace.address<int32_t>(block_counts_);
  for (const Kernel* kernel : kernels_) {
    if (kernel != nullptr) list.add(*kernel, blocks_, &params_);
  }
}

template <class Params>
void GroupedProduct<Params>::add(CallList& list, bool is_dependent) {
  GemmParams& gemm = gemm_of(params);
  const int64_t tiles = bound_on_tiles(product_, gemm, *kernel_);
  const int64_t grid = host::grid_for(*kernel_, tiles, list.call().gpu);
  gemm.tile_counter = tiles > grid ? list.tile_counter() : nullptr;
  if (kernel_->num_tensor_maps > 0) make_tensor_maps(product_, params, *kernel_, maps_.data());
  list.add(*kernel_, grid, &params, is_dependent, maps_.data());
}
template class GroupedProduct<GemmParams>;
template class GroupedProduct<ScaledGemmParams>;
template class GroupedProduct<Mxfp4GemmParams>;

GroupedGemm make_gemm(Product product, const host::KernelRequest& request, const ExpertWeights& weights,
                      bool is_interleaved, int64_t slots, int64_t experts) {
  GroupedGemm gemm(product, select_product({request, product, layout_of(weights, is_interleaved), slots, experts,
                                            weights.n, weights.k}));
  if (product != Product::kWeightGradient) set_weights(gemm.params, weights);
  return gemm;
}

void set_early_ids(GemmParams& params, const SortArguments& routing, const host::Device& gpu) {
  constexpr int64_t kMaxEarlySlots = 1024;
  constexpr int32_t kFirstToWait = 90;  // on older GPUs no kernel begins early
  if (routing.slots > kMaxEarlySlots || routing.expert_map.is_given() || gpu.capability < kFirstToWait) return;
  params.ids = routing.ids.data();
  params.id_bytes = scalar_of(routing.ids) == Scalar::kInt64 ? 8 : 4;
}

}  // namespace flashmoe::moe
