// The CPU backend through C functions for ctypes. Errors come back as text.
#include <cstdio>
#include <cstring>
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

// Of a structure whose beginning ctypes gives: zeros behind it, not what lies behind it in memory.
template <class Params>
Params whole(const void* params, size_t bytes) {
  Params result{};
  std::memcpy(&result, params, bytes);
  return result;
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) int cpu_forward(const void* params, size_t bytes, int type, int causal,
                                                       flashmoe::cpu::ParallelFor parallel_for, int num_threads,
                                                       char* message, size_t size) {
  return guarded(
      [&] {
        flashmoe::cpu::attention_forward(whole<flashmoe::attention::ForwardParams>(params, bytes),
                                         static_cast<flashmoe::cpu::ScalarType>(type), causal != 0, parallel_for,
                                         num_threads);
      },
      message, size);
}

__attribute__((visibility("default"))) int cpu_backward(const void* params, size_t bytes, int type, int causal,
                                                        flashmoe::cpu::ParallelFor parallel_for, int num_threads,
                                                        char* message, size_t size) {
  return guarded(
      [&] {
        flashmoe::cpu::attention_backward(whole<flashmoe::attention::BackwardParams>(params, bytes),
                                          static_cast<flashmoe::cpu::ScalarType>(type), causal != 0, parallel_for,
                                          num_threads);
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
