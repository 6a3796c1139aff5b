#include <torch/csrc/stable/c/shim.h>

#include <stdexcept>

#include "attention/cpu/attention.h"
#include "cpu/isa.h"
#include "host/attention.h"
#include "host/launch.h"

namespace flashmoe {
namespace host {
namespace {

void torch_pool(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context) {
  check_shim(torch_parallel_for(begin, end, grain, body, context), "parallel_for");
}

cpu::ScalarType scalar_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat16: return cpu::ScalarType::kFloat16;
    case Dtype::kBFloat16: return cpu::ScalarType::kBFloat16;
    case Dtype::kFloat32: break;
  }
  return cpu::ScalarType::kFloat32;
}

}  // namespace

void attention_forward_cpu(const AttentionArguments& arguments, const AttentionOutputs& outputs) {
  uint32_t num_threads = 1;
  check_shim(torch_get_num_threads(&num_threads), "get_num_threads");
  const attention::ForwardParams params = make_params(arguments, outputs);
  try {
    cpu::selected_isa();
  } catch (const std::invalid_argument& error) {  // what FLASHMOE_CPU_ISA names, read at the first call
    fail(ErrorCode::kArgument, error.what());
  }
  cpu::attention_forward(params, scalar_type(arguments.dtype), arguments.is_causal,
                         torch_pool, static_cast<int>(num_threads));
  set_last_isa(cpu::selected_isa());
}

}  // namespace host
}  // namespace flashmoe
