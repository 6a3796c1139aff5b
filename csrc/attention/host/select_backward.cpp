// Selects the kernels for the gradients of dense and ragged attention, and of a mask.
#include <algorithm>
#include <cstring>

#include "attention/host/select.h"
#include "host/ceil_div.h"
#include "host/error.h"

namespace flashmoe::attention {
namespace {

// From this length on the split kernels of dropout (sm80's up to 128 columns) and of masks take twice as long as the
// fused one.
constexpr int64_t kMinFusedSlowSplit = 512;

}  // namespace

BackwardKernels select_backward(const host::KernelRequest& request, Mask mask, int32_t head_dim) {
  const host::KernelList& loadable = host::loadable_kernels(request.capability);
  for (const char* const* family = host::families_of(request.capability); *family != nullptr; ++family) {
    if (!is_allowed(request, *family)) continue;
    const auto find = [&](const char* operation) {
      return host::find_kernel({operation, *family, "", request.dtype, {head_dim, static_cast<int32_t>(mask)}},
                               axis::kHeadDim, loadable);
    };
    BackwardKernels kernels{find("attention_backward_dq"), find("attention_backward_dkv")};
    if (kernels.dq == nullptr || kernels.dkv == nullptr) continue;
    const auto find_helper = [&](const char* operation) {
      return host::find_kernel({operation, *family, "", request.dtype, {head_dim}}, axis::kHeadDim, loadable);
    };
    kernels.prepare = find_helper("attention_backward_fused_prepare");
    kernels.convert = find_helper("attention_backward_fused_convert");
    const Kernel* fused = find("attention_backward_fused");
    const bool has_all = fused != nullptr && kernels.prepare != nullptr && kernels.convert != nullptr;
    if (has_all && fused->axes[axis::kHeadDim] == kernels.dkv->axes[axis::kHeadDim]) kernels.fused = fused;
    return kernels;
  }
  return {};
}

bool prefers_fused(const BackwardKernels& kernels, const SelectorInput& problem, bool is_split_slow) {
  // Measured on an H100, all of head dim 128 on an H200. For short sequences the float32 sums cost as much as the two
  // products that the fused kernel saves; with few query tiles all tiles of a head would wait for each other. One key
  // head is as good as many, if it has enough tiles.
  // $FLASHMOE_SPLIT_BACKWARD: for users to whom memory is worth more than time.
  if (kernels.fused == nullptr || host::is_switched_on("FLASHMOE_SPLIT_BACKWARD")) return false;
  const bool is_wide = kernels.fused->axes[axis::kHeadDim] > 64;
  // If half of the tiles are hidden, or heads share dk and dv, a tile has less work for the same sums.
  const bool has_light_tiles = problem.mask == Mask::kCausal || problem.heads_q != problem.heads_kv;
  const int64_t min_length = is_wide && has_light_tiles ? 1280 : 1024;
  const int64_t min_rounds = problem.seq_k >= 2048 ? 3 : is_wide ? 10 : 12;  // of tiles, one per multiprocessor
  // The fused kernel takes 1.7 to 1.9 times as long as the split kernels with windows of 4096 to 12288 of 16384 keys.
  if (is_wide && problem.has_window) return false;
  if (is_split_slow) return std::min(problem.seq_q, problem.seq_k) >= kMinFusedSlowSplit;
  if (problem.seq_q < min_length || problem.seq_k < min_length) return false;
  const int64_t tiles = ceil_div(problem.seq_k, kernels.fused->block_n) * problem.heads_kv * problem.batch;
  return tiles >= min_rounds * problem.request.num_multiprocessors;
}

SelectorInput as_equal_sequences(const SelectorInput& longest, int64_t rows_total, int64_t keys_total,
                                 int64_t visible_keys) {
  SelectorInput equal = longest;
  equal.seq_q = std::min(longest.seq_q, rows_total);
  equal.seq_k = std::min({longest.seq_k, keys_total, visible_keys});
  equal.has_window = visible_keys < std::min(longest.seq_k, keys_total);
  equal.batch = std::max<int64_t>(1, keys_total / std::max<int64_t>(1, equal.seq_k));
  return equal;
}

BackwardKernels select_varlen_backward(const host::KernelRequest& request, int32_t head_dim, int32_t head_dim_v,
                                       bool has_score_mod, bool has_alibi, bool streams_mask) {
  const char* wanted = has_score_mod ? "scores" : values_variant(head_dim, head_dim_v);
  const host::KernelList& loadable = host::loadable_kernels(request.capability);
  for (const char* const* family = host::families_of(request.capability); *family != nullptr; ++family) {
    if (!is_allowed(request, *family)) continue;
    const auto find_variant = [&](const char* operation, const char* variant) {
      return host::find_kernel({operation, *family, variant, request.dtype, {head_dim}}, axis::kHeadDim, loadable);
    };
    const auto find = [&](const char* operation) {
      if (has_alibi) return find_variant(operation, "alibi");
      const Kernel* own = find_variant(operation, wanted);
      return own != nullptr ? own : find_variant(operation, "");
    };
    BackwardKernels kernels{find("attention_varlen_backward_dq"), find("attention_varlen_backward_dkv")};
    if (kernels.dq == nullptr || kernels.dkv == nullptr) continue;
    if (has_score_mod && !streams_mask) return kernels;
    kernels.prepare = find_variant("attention_varlen_backward_fused_prepare", "");
    kernels.convert = find_variant("attention_varlen_backward_fused_convert", "");
    const Kernel* fused = find(streams_mask ? "attention_mask_backward_fused" : "attention_varlen_backward_fused");
    const bool has_all = fused != nullptr && kernels.prepare != nullptr && kernels.convert != nullptr;
    if (has_all && fused->axes[axis::kHeadDim] == kernels.dkv->axes[axis::kHeadDim]) kernels.fused = fused;
    return kernels;
  }
  refuse_head_dim(request, "the gradient of packed or windowed attention", head_dim);
}

const Kernel& select_row_dot(const host::KernelRequest& request) {
  return select_first(request, "attention_row_dot", "dk and dv without dq");
}

const Kernel& select_storing(const host::KernelRequest& request, const Kernel& fused) {
  const Kernel* storing =
      host::find_kernel({fused.operation, fused.family, "gradient", fused.dtype, {fused.axes[axis::kHeadDim]}},
                        axis::kHeadDim, host::loadable_kernels(request.capability));
  if (storing == nullptr) host::refuse(request, "the gradient of attn_mask");
  return *storing;
}

const Kernel& select_scores_sum(const host::KernelRequest& request) {
  return select_first(request, "attention_scores_sum", "the gradient of attn_mask");
}

const Kernel& select_bias_gradient(const host::KernelRequest& given, int32_t head_dim, bool has_dropout, bool folds) {
  constexpr const char* kUnfolded = "sm90";  // the family whose kernels take no mask of one row or one key
  host::KernelRequest request = given;
  const bool is_forced = request.forced_family != nullptr;
  if (folds && is_forced && std::strcmp(request.forced_family, kUnfolded) == 0) {
    host::refuse(request, "the gradient of an attn_mask with one row or one key");
  }
  if (folds && !is_forced && request.capability == kMeasuredCapability) request.forced_family = "sm80";
  return select_by_head_dim(request, "attention_bias_gradient", has_dropout ? "dropout" : "", head_dim,
                            "the gradient of attn_mask");
}

}  // namespace flashmoe::attention
