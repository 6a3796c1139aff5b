// Head dims above those of the dense kernels, and few rows whose keys are split over several blocks.

#include <algorithm>
#include <string>

#include "attention/host/select.h"
#include "host/error.h"

namespace flashmoe::attention {
namespace {

constexpr int64_t kMinKeysPerSplit = 128;
constexpr int64_t kMaxSplits = 32;  // one per lane of the combining warp

int64_t tiles_of(const VarlenSelectorInput& input, const Kernel& kernel) {
  return most_row_blocks(input.rows, input.batch, input.rows_total, kernel.block_m) * input.heads;
}

}  // namespace

void refuse_head_dim(const host::KernelRequest& request, const std::string& what, int64_t head_dim) {
  if (head_dim > kMaxDenseHeadDim && request.forced_family == nullptr) {
    host::violate("attention.wide", {{"what", what}, {"head_dim", head_dim}, {"most", kMaxDenseHeadDim}});
  }
  host::refuse(request, what + (what.empty() ? "" : ", ") + "head_dim " + std::to_string(head_dim));
}

int64_t num_value_slices(const Kernel& kernel) {
  if (kernel.num_tensor_maps == 0 || kernel.axes[axis::kHeadDim] <= kMaxDenseHeadDim) return 1;
  return kernel.axes[axis::kHeadDim] / kMaxDenseHeadDim;
}

bool supports_wide(const VarlenSelectorInput& input, const Kernel& kernel) {
  constexpr int64_t kMostFewRows = 64;  // up to here tiles with half the rows, or with split keys, run
  if (num_value_slices(kernel) == 1) return true;
  return input.rows > kMostFewRows && !input.has_score_functions && !input.is_consistent && !input.is_batch_invariant;
}

const Kernel* find_split_kernel(const VarlenSelectorInput& input, const Kernel& standard,
                                const host::KernelList& loadable) {
  // Some ragged rows may belong to no sequence, and the second pass would write them.
  if (input.is_consistent || input.has_alibi || input.rows_total != 0) return nullptr;
  const Kernel* split_kernel = host::find_kernel(
      {standard.operation, standard.family, "split", input.request.dtype, {input.head_dim}}, axis::kHeadDim, loadable);
  if (split_kernel == nullptr || split_kernel->axes[axis::kHeadDim] != standard.axes[axis::kHeadDim]) return nullptr;
  if (input.rows <= split_kernel->block_m) return split_kernel;
  // With more rows, several of its tiles each read the keys; worthwhile if the standard tiles would leave most of the
  // GPU idle.
  constexpr int64_t kMinKeys = 1024;
  const bool is_idle = 4 * tiles_of(input, standard) <= input.request.num_multiprocessors;
  return !input.is_batch_invariant && input.rows <= standard.block_m && input.keys >= kMinKeys && is_idle ? split_kernel
                                                                                                          : nullptr;
}

SplitPlan plan_split(const VarlenSelectorInput& input, const Kernel& kernel) {
  if (std::string(kernel.variant) != "split") return {};
  SplitPlan split_plan;
  split_plan.combine = find_combine(input.request, input.head_dim_v);
  if (split_plan.combine == nullptr) refuse_head_dim(input.request, "the split-KV combine", input.head_dim_v);
  if (input.is_batch_invariant) return split_plan;
  const int64_t by_machine = input.request.num_multiprocessors * kernel.min_blocks / tiles_of(input, kernel);
  const int64_t by_keys = input.keys / kMinKeysPerSplit;
  split_plan.num_splits = static_cast<int32_t>(std::max<int64_t>(1, std::min({by_machine, by_keys, kMaxSplits})));
  return split_plan;
}

}  // namespace flashmoe::attention
