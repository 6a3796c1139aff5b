#include "attention/cpu/attention.h"
#include "attention/cpu/backward.h"
#include "attention/host/backends.h"
#include "host/cpu_call.h"
#include "host/last_kernel.h"

namespace flashmoe {
namespace attention {

void forward_cpu(const ForwardArguments& arguments, const ForwardOutputs& outputs) {
  const char* isa = host::checked_isa();
  cpu::attention_forward(make_params(arguments, outputs), host::scalar_type(arguments.dtype), arguments.is_causal,
                         host::torch_parallel, host::num_cpu_threads());
  host::set_last_isa(isa);
}

void backward_cpu(const BackwardParams& params, const ForwardArguments& arguments) {
  const char* isa = host::checked_isa();
  cpu::attention_backward(params, host::scalar_type(arguments.dtype), arguments.is_causal, host::torch_parallel,
                          host::num_cpu_threads());
  host::set_last_isa(isa);
}

}  // namespace attention
}  // namespace flashmoe
