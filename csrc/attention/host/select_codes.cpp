// Kernels for float8_e4m3fn: caches, and attention with q, k and v in 8 bits.

#include "attention/host/select.h"

namespace flashmoe::attention {

const Kernel& select_e4m3(const host::KernelRequest& request, int32_t head_dim) {
  return select_by_head_dim(request, "attention_decode_e4m3", "", head_dim, "a float8_e4m3fn cache");
}

KernelPlan select_coded_chunk(const host::KernelRequest& request, const KernelPlan& chunk) {
  if (chunk.forward == nullptr) return {};
  const Kernel* kernel = host::find_kernel({"attention_chunk_forward_e4m3",
                                            chunk.forward->family,
                                            chunk.forward->variant,
                                            request.dtype,
                                            {chunk.forward->axes[axis::kHeadDim]}},
                                           axis::kHeadDim, host::loadable_kernels(request.capability));
  if (kernel == nullptr) return {};
  return {kernel, chunk.combine, chunk.num_splits};
}

namespace {

Fp8Kernels find_fp8(const host::KernelRequest& request, host::KernelName name, int32_t head_dim) {
  const host::KernelList& loadable = host::loadable_kernels(request.capability);
  Fp8Kernels kernels;
  if (is_allowed(request, "sm90")) {
    kernels.forward = host::find_kernel(name, axis::kHeadDim, loadable);
    kernels.transpose =
        host::find_kernel({"attention_transpose_e4m3", "sm90", "", Dtype::kFloat16, {}}, host::kNoAxis, loadable);
  }
  if (kernels.forward != nullptr && kernels.transpose != nullptr) return kernels;
  refuse_head_dim(request, "float8_e4m3fn attention", head_dim);
}

}  // namespace

Fp8Kernels select_fp8(const host::KernelRequest& request, Mask mask, int32_t head_dim, bool has_block_scales) {
  const char* variant = has_block_scales ? "blocks" : "";
  return find_fp8(request,
                  {"attention_forward_e4m3", "sm90", variant, request.dtype, {head_dim, static_cast<int32_t>(mask)}},
                  head_dim);
}

Fp8Kernels select_fp8_varlen(const host::KernelRequest& request, int32_t head_dim) {
  return find_fp8(request, {"attention_varlen_forward_e4m3", "sm90", "", request.dtype, {head_dim}}, head_dim);
}

const Kernel& select_e4m3_append(const host::KernelRequest& request) {
  return select_first(request, "attention_append_e4m3", "appending to a float8_e4m3fn cache");
}

const Kernel& select_dequantize(const host::KernelRequest& request) {
  return select_first(request, "attention_dequantize_e4m3", "prefill over a float8_e4m3fn cache");
}

}  // namespace flashmoe::attention
