// The two backends of the forward operators. Arguments are checked, outputs allocated and not empty.
#pragma once

#include "attention/host/arguments.h"

namespace flashmoe {
namespace attention {

void forward_cpu(const ForwardArguments& arguments, const ForwardOutputs& outputs);
void forward_cuda(const ForwardArguments& arguments, const ForwardOutputs& outputs);

}  // namespace attention
}  // namespace flashmoe
