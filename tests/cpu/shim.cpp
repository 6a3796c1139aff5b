// The CPU backend as C functions for ctypes. Errors are returned as text.
#include <cstdio>
#include <exception>

#include "attention/cpu/attention.h"
#include "attention/cpu/backward.h"
#include "cpu/isa.h"

namespace {

template <class Call>
int guarded(Call call, char* message, size_t size) {
  try {
    call();
    return 0;
  } catch (const std::exception& error) {
    std::snprintf(message, size, "%s", error.what());
    return 1;
  }
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) int cpu_forward(const flashmoe::attention::ForwardParams* params, int type,
                                                       int causal, flashmoe::cpu::ParallelFor parallel_for,
                                                       int num_threads, char* message, size_t size) {
  return guarded(
      [&] {
        flashmoe::cpu::attention_forward(*params, static_cast<flashmoe::cpu::ScalarType>(type), causal != 0,
                                         parallel_for, num_threads);
      },
      message, size);
}

__attribute__((visibility("default"))) int cpu_backward(const flashmoe::attention::BackwardParams* params, int type,
                                                        int causal, flashmoe::cpu::ParallelFor parallel_for,
                                                        int num_threads, char* message, size_t size) {
  return guarded(
      [&] {
        flashmoe::cpu::attention_backward(*params, static_cast<flashmoe::cpu::ScalarType>(type), causal != 0,
                                          parallel_for, num_threads);
      },
      message, size);
}

__attribute__((visibility("default"))) int cpu_set_isa(const char* name, char* message, size_t size) {
  return guarded([&] { flashmoe::cpu::set_isa(name); }, message, size);
}

__attribute__((visibility("default"))) int cpu_selected_isa(char* message, size_t size) {
  return guarded([&] { std::snprintf(message, size, "%s", flashmoe::cpu::selected_isa()); }, message, size);
}

__attribute__((visibility("default"))) const char* cpu_supported_isas() { return flashmoe::cpu::supported_isas(); }
}
