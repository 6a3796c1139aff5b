#include <string>

#include "attention/host/select.h"

namespace flashmoe::attention {

const Kernel& select_dropout_forward(const host::KernelRequest& request, int32_t head_dim, bool has_score_mod,
                                     bool has_alibi) {
  const host::KernelList& loadable = host::loadable_kernels(request.capability);
  for (const char* const* family = host::families_of(request.capability); *family != nullptr; ++family) {
    if (!is_allowed(request, *family)) continue;
    const Kernel* kernel =
        host::find_kernel({"attention_dropout_forward", *family, has_alibi ? "alibi" : "", request.dtype, {head_dim}},
                          axis::kHeadDim, loadable);
    if (kernel != nullptr && (!has_score_mod || kernel->num_tensor_maps == 0)) return *kernel;
  }
  const char* what = has_score_mod ? "dropout with a softcap or a mask tensor" : "dropout";
  refuse_head_dim(request, what, head_dim);
}

BackwardKernels select_dropout_backward(const host::KernelRequest& request, int32_t head_dim, bool has_score_mod,
                                        bool has_alibi) {
  const host::KernelList& loadable = host::loadable_kernels(request.capability);
  const auto find = [&](const char* operation, const char* family, const char* variant) {
    return host::find_kernel({operation, family, variant, request.dtype, {head_dim}}, axis::kHeadDim, loadable);
  };
  const char* const* const families = host::families_of(request.capability);
  for (const char* const* family = families; *family != nullptr; ++family) {
    if (!is_allowed(request, *family)) continue;
    const char* variant = has_alibi ? "alibi" : "";
    BackwardKernels kernels{find("attention_dropout_backward_dq", *family, variant),
                            find("attention_dropout_backward_dkv", *family, variant)};
    if (kernels.dq == nullptr || kernels.dkv == nullptr) continue;
    // The wgmma kernels run wide heads, without a softcap or a mask tensor.
    const bool is_wgmma = kernels.dq->num_tensor_maps != 0;
    if (is_wgmma && (has_score_mod || head_dim <= kernels.dq->axes[axis::kHeadDim] / 2)) continue;
    if (has_score_mod || has_alibi || request.forced_family != nullptr) return kernels;
    // The fused kernel is that of the GPU's first family, whose prepare and convert kernels it uses.
    const Kernel* fused = find("attention_dropout_backward_fused", *families, "");
    kernels.prepare = find("attention_varlen_backward_fused_prepare", *families, "");
    kernels.convert = find("attention_varlen_backward_fused_convert", *families, "");
    const bool has_all = fused != nullptr && kernels.prepare != nullptr && kernels.convert != nullptr;
    if (has_all && fused->axes[axis::kHeadDim] == kernels.dkv->axes[axis::kHeadDim]) kernels.fused = fused;
    return kernels;
  }
  refuse_head_dim(request, "the gradient of dropout", head_dim);
}

}  // namespace flashmoe::attention
