// Checks of the values in cu_seqlens, seqused_k and block_table.
#pragma once

#include "attention/host/varlen_arguments.h"

namespace flashmoe::attention {

// Throws if lengths do not start at 0, decrease, or exceed the tensors or max_seqlen, or if a page number is outside
// the tensor. Always reads CPU tensors; reads GPU tensors only if $FLASHMOE_CHECK_VALUES is 1, which waits for the GPU.
// Kernels clamp such values to the tensors: unchecked values can make results wrong, but nothing outside the tensors is
// read or written.
void check_varlen_lengths(const VarlenArguments& arguments);
void check_append_lengths(const AppendArguments& arguments);

}  // namespace flashmoe::attention
