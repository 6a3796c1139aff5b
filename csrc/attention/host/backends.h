// The two backends of the operators; for the dense backward pass only the CPU's. Arguments are checked, outputs are
// allocated and not empty.
#pragma once

#include "attention/host/arguments.h"
#include "attention/host/varlen_arguments.h"
#include "attention/params/backward.h"

namespace flashmoe::attention {

void forward_cpu(const ForwardArguments& arguments, const ForwardOutputs& outputs);
void forward_cuda(const ForwardArguments& arguments, const ForwardOutputs& outputs);
void backward_cpu(const BackwardParams& params, const ForwardArguments& arguments);

// Ragged, paged and windowed attention: at least one sequence, row and head; max_seqlen_k may be 0.
void forward_varlen_cpu(const VarlenArguments& arguments, const ForwardOutputs& outputs);
void forward_varlen_cuda(const VarlenArguments& arguments, const ForwardOutputs& outputs);
// Needs at least one row and one key.
void backward_varlen_cpu(const VarlenBackwardArguments& arguments, const Gradients& gradients);
void backward_varlen_cuda(const VarlenBackwardArguments& arguments, const Gradients& gradients);
// Returns whether the backward pass stores the gradient of the scores behind a mask; it then computes all other
// gradients too.
bool stores_scores_gradient(const VarlenBackwardArguments& arguments);
// Allocates memory for it, and for its sums if the mask has fewer matrices.
void allocate_mask_gradient(const VarlenArguments& forward, Gradients& gradients);
// Needs at least one new key.
void append_cpu(const AppendArguments& arguments);
void append_cuda(const AppendArguments& arguments);

}  // namespace flashmoe::attention
