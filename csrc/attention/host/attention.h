// The two backends of the forward operator. Arguments are checked, outputs allocated and not empty.
#pragma once

#include "attention/host/arguments.h"

namespace flashmoe {
namespace host {

void attention_forward_cpu(const AttentionArguments& arguments, const AttentionOutputs& outputs);
void attention_forward_cuda(const AttentionArguments& arguments, const AttentionOutputs& outputs);

}  // namespace host
}  // namespace flashmoe
