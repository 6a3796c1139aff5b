#include "moe/host/launch.h"

#include <algorithm>

#include "moe/host/prepare.h"
#include "moe/host/sort_plan.h"
#include "moe/host/tensor_maps.h"

namespace flashmoe {
namespace moe {

Sorted pointers_of(const SortOutputs& sorted) {
  return {static_cast<int32_t*>(sorted.expert_offsets.data()), static_cast<int32_t*>(sorted.row_slots.data()),
          static_cast<int32_t*>(sorted.slot_rows.data()), static_cast<float*>(sorted.row_weights.data())};
}

SortedRoom::SortedRoom(host::Workspace& workspace, int64_t slots, int64_t experts)
    : expert_offsets_(workspace.add<int32_t>(experts + 1)),
      row_slots_(workspace.add<int32_t>(slots)),
      slot_rows_(workspace.add<int32_t>(slots)),
      row_weights_(workspace.add<float>(slots)) {}

Sorted SortedRoom::pointers(const host::Workspace& workspace) const {
  return {workspace.address<int32_t>(expert_offsets_), workspace.address<int32_t>(row_slots_),
          workspace.address<int32_t>(slot_rows_), workspace.address<float>(row_weights_)};
}

int64_t combine_grid(const Kernel& kernel, int64_t tokens, int64_t columns, int32_t num_multiprocessors) {
  const int64_t columns_at_once = 8 * kernel.threads;  // of a block
  return tokens <= num_multiprocessors ? tokens * ceil_div(columns, columns_at_once) : tokens;
}

CombineParams combine_params(const LayerShape& shape, const Sorted& sorted, const Tensor& shared, const Tensor& out,
                             const void* rows) {
  CombineParams params{};
  params.rows = rows;
  params.shared = data_or_null(shared);
  params.shared_stride = params.shared != nullptr ? shared.strides()[0] : 0;
  params.out = out.data();
  params.out_stride = out.strides()[0];
  params.row_weights = sorted.row_weights;
  params.slot_rows = sorted.slot_rows;
  params.tokens = static_cast<int32_t>(shape.tokens);
  params.top_k = static_cast<int32_t>(shape.top_k);
  params.columns = static_cast<int32_t>(shape.hidden);
  params.experts = static_cast<int32_t>(shape.experts);
  return params;
}

SortPart::SortPart(const SortArguments& arguments, const host::KernelRequest& request, host::Workspace& workspace)
    : blocks_(sort_blocks(arguments.slots)),
      block_counts_(workspace.add<int32_t>(sort_workspace(arguments.slots, arguments.experts))) {
  if (blocks_ == 1) {
    kernels_[0] = &select_step(request, Step::kSortOne);
  } else {
    kernels_ = {&select_step(request, Step::kSortCount), &select_step(request, Step::kSortPlace)};
  }
  params_.ids = arguments.ids.data();
  params_.topk_weights = arguments.topk_weights.data();
  params_.expert_map = static_cast<const int32_t*>(data_or_null(arguments.expert_map));
  params_.ids_dtype = scalar_of(arguments.ids);
  params_.weights_dtype = scalar_of(arguments.topk_weights);
  params_.slots = static_cast<int32_t>(arguments.slots);
  params_.experts = static_cast<int32_t>(arguments.experts);
  params_.ids_end = static_cast<int32_t>(arguments.ids_end);
}

void SortPart::add(host::LaunchList& list, const Sorted& sorted, const host::Workspace& workspace) {
  params_.expert_offsets = sorted.expert_offsets;
  params_.row_slots = sorted.row_slots;
  params_.slot_rows = sorted.slot_rows;
  params_.row_weights = sorted.row_weights;
  params_.block_counts = workspace.address<int32_t>(block_counts_);
  list.add({kernels_[0], blocks_, &params_, nullptr, /*is_dependent=*/true});
  if (kernels_[1] != nullptr) list.add({kernels_[1], blocks_, &params_, nullptr, /*is_dependent=*/true});
}

ProductPart::ProductPart(Product product, const host::KernelRequest& request, const ExpertWeights& weights,
                         bool is_paired, int64_t slots, int64_t experts)
    : product_(product),
      kernel_(
          &select_product({request, product, memory_of(weights, is_paired), slots, experts, weights.n, weights.k})) {
  if (product != Product::kWeightGradient) set_weights(params, weights);
  params.slots = static_cast<int32_t>(slots);
  params.experts = static_cast<int32_t>(experts);
}

// The device alone knows how many rows each expert has: as if each had one more tile of rows than a full one.
int64_t ProductPart::bound_on_tiles() const {
  const int64_t columns = ceil_div(product_ == Product::kWeightGradient ? params.k : params.n, kernel_->block_n);
  if (product_ == Product::kWeightGradient) return params.experts * ceil_div(params.n, kernel_->block_m) * columns;
  return (ceil_div(params.slots, kernel_->block_m) + std::min(params.experts, params.slots)) * columns;
}

void ProductPart::add(host::LaunchList& list, bool is_dependent, const host::CudaCall& call,
                      std::optional<host::TileCounter>& counter) {
  const int64_t tiles = bound_on_tiles();
  const int64_t grid = host::grid_for(*kernel_, tiles, call.gpu);
  params.tile_counter = nullptr;
  if (tiles > grid) {
    if (!counter.has_value()) counter = host::tile_counter(call);
    params.tile_counter = counter->address;
  }
  if (kernel_->num_tensor_maps > 0) make_tensor_maps(product_, params, *kernel_, maps_.data());
  list.add({kernel_, grid, &params, maps_.data(), is_dependent});
}

}  // namespace moe
}  // namespace flashmoe
