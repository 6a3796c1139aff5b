#include "host/cpu_call.h"

#include <torch/csrc/stable/c/shim.h>

#include <stdexcept>

#include "cpu/isa.h"
#include "host/tensor.h"

namespace flashmoe::host {

cpu::ScalarType scalar_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat16:
      return cpu::ScalarType::kFloat16;
    case Dtype::kBFloat16:
      return cpu::ScalarType::kBFloat16;
    case Dtype::kFloat32:
      break;
  }
  return cpu::ScalarType::kFloat32;
}

int num_cpu_threads() {
  uint32_t num_threads = 1;
  check_shim(torch_get_num_threads(&num_threads), "get_num_threads");
  return static_cast<int>(num_threads);
}

void torch_parallel(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context) {
  check_shim(torch_parallel_for(begin, end, grain, body, context), "parallel_for");
}

const char* checked_isa() {
  try {
    return cpu::selected_isa();
  } catch (const std::invalid_argument& error) {
    fail(ErrorCode::kArgument, error.what());
  }
}

}  // namespace flashmoe::host
