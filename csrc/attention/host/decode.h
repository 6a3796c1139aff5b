// Decoding on a GPU: few query rows an entry, many keys, by the kernels of attention/decode.
#pragma once

#include "attention/host/select.h"
#include "attention/params/forward.h"
#include "host/driver.h"

namespace flashmoe {
namespace attention {

// What the decoding kernel of a call is; none where the GPU has none, where another family is forced, or where another kernel is
// expected to be faster.
//
// params: folded where they can be, with entries and band. num_splits as the caller gave it: 0 lets the device share every entry's keys
// among as many blocks as there are; 1 leaves them to one block, so that a row's result is the same in any batch.
const Kernel* select_decode(const host::KernelRequest& request, const ForwardParams& params);

// Launches it. In params, num_splits as above; the rest of what belongs to the workspace is set here.
void launch_decode(ForwardParams params, const Kernel& kernel, const host::CudaCall& call);

// What the decoding kernels ask for beside the params of a dense call: no array of lengths, no window, no scores to change.
void describe_as_band(ForwardParams& params, bool is_causal);

}  // namespace attention
}  // namespace flashmoe
