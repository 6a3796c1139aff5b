// What a GPU answers where the build holds no kernels for ragged, paged and banded attention. Weak: kernels' own definitions win.

#include "attention/host/backends.h"

namespace flashmoe {
namespace attention {
namespace {

[[noreturn]] void refuse(const char* what) {
  host::fail(host::ErrorCode::kGpu, "this build has no CUDA kernel for ", what,
             "; use the CPU, or torch's scaled_dot_product_attention");
}

}  // namespace

__attribute__((weak)) void forward_varlen_cuda(const VarlenArguments&, const VarlenOutputs&) {
  refuse("ragged, paged or banded attention");
}
__attribute__((weak)) void backward_varlen_cuda(const VarlenBackwardArguments&, const VarlenGradients&) {
  refuse("gradients of ragged or banded attention");
}
__attribute__((weak)) void append_cuda(const AppendArguments&) { refuse("appending keys to a cache"); }

}  // namespace attention
}  // namespace flashmoe
