// What only the numbers in cu_seqlens, seqused_k and block_table can tell.
#pragma once

#include "attention/host/varlen_arguments.h"

namespace flashmoe::attention {

// Throws where lengths do not start at 0, decrease, exceed the tensors or max_seqlen, or where a page is none of the tensor's. Reads what lies on the
// CPU always; of a GPU only where $FLASHMOE_CHECK_VALUES is 1, which waits for the GPU. Kernels hold such numbers to the
// tensors: unchecked, they can make results wrong, but nothing is read or written outside of the tensors.
void check_varlen_lengths(const VarlenArguments& arguments);
void check_append_lengths(const AppendArguments& arguments);

}  // namespace flashmoe::attention
