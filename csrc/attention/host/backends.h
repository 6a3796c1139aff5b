// The two backends of the operators; of the dense backward pass the CPU's. Arguments are checked, outputs allocated and not
// empty.
#pragma once

#include "attention/host/arguments.h"
#include "attention/host/varlen_arguments.h"
#include "attention/params/backward.h"

namespace flashmoe::attention {

void forward_cpu(const ForwardArguments& arguments, const ForwardOutputs& outputs);
void forward_cuda(const ForwardArguments& arguments, const ForwardOutputs& outputs);
void backward_cpu(const BackwardParams& params, const ForwardArguments& arguments);

// Ragged, paged and banded attention: at least one sequence, row and head; max_seqlen_k may be 0.
void forward_varlen_cpu(const VarlenArguments& arguments, const ForwardOutputs& outputs);
void forward_varlen_cuda(const VarlenArguments& arguments, const ForwardOutputs& outputs);
// At least one row and one key.
void backward_varlen_cpu(const VarlenBackwardArguments& arguments, const Gradients& gradients);
void backward_varlen_cuda(const VarlenBackwardArguments& arguments, const Gradients& gradients);
// Whether it stores the gradient of the scores behind a mask, which takes all other gradients, too.
bool stores_scores_gradient(const VarlenBackwardArguments& arguments);
// Memory for it, and for its sums where the mask has fewer matrices.
void allocate_mask_gradient(const VarlenArguments& forward, Gradients& gradients);
// At least one new key.
void append_cpu(const AppendArguments& arguments);
void append_cuda(const AppendArguments& arguments);

}  // namespace flashmoe::attention
