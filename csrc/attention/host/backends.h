// The two backends of the forward operators, and the CPU's of the backward pass. Arguments are checked, outputs allocated and
// not empty.
#pragma once

#include "attention/host/arguments.h"
#include "attention/params/backward.h"

namespace flashmoe {
namespace attention {

void forward_cpu(const ForwardArguments& arguments, const ForwardOutputs& outputs);
void forward_cuda(const ForwardArguments& arguments, const ForwardOutputs& outputs);
void backward_cpu(const BackwardParams& params, const ForwardArguments& arguments);

}  // namespace attention
}  // namespace flashmoe
