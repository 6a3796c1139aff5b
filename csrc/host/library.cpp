// Registration of the operators with torch through its stable ABI (target 2.10), and the C functions that Python reads
// through ctypes.

#include <torch/csrc/stable/library.h>

#include <cstring>
#include <exception>

#include "cpu/attention.h"
#include "host/attention.h"
#include "host/kernel_table.h"
#include "host/launch.h"

namespace flashmoe {
namespace host {
namespace {

// (Tensor q, Tensor k, Tensor v, float scale, bool causal) -> (Tensor out, Tensor lse), or out alone.
// The stack holds five arguments on entry, whose tensors we then own, and the owned results on return.
template <void (*kBackend)(const AttentionArguments&, const AttentionOutputs&), bool kWithLse>
void boxed_attention_forward(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  using torch::stable::detail::to;
  constexpr uint64_t kNumOutputs = kWithLse ? 2 : 1;
  if (num_arguments != 5 || num_outputs != kNumOutputs) {
    fail(ErrorCode::kInternal, "attention was called with ", num_arguments, " arguments for ", num_outputs,
         " results; 5 and ", kNumOutputs, " are registered");
  }
  AttentionArguments arguments;
  arguments.q = Tensor(to<AtenTensorHandle>(stack[0]));
  arguments.k = Tensor(to<AtenTensorHandle>(stack[1]));
  arguments.v = Tensor(to<AtenTensorHandle>(stack[2]));
  arguments.scale = to<double>(stack[3]);
  arguments.is_causal = to<bool>(stack[4]);
  check_arguments(arguments);
  AttentionOutputs outputs = allocate_outputs(arguments, kWithLse);
  set_last_kernel("");
  const int64_t* sizes = outputs.out.sizes();
  if (sizes[0] != 0 && sizes[1] != 0 && sizes[2] != 0) kBackend(arguments, outputs);
  stack[0] = torch::stable::detail::from(outputs.out.release());
  if constexpr (kWithLse) stack[1] = torch::stable::detail::from(outputs.lse.release());
}

}  // namespace
}  // namespace host
}  // namespace flashmoe

STABLE_TORCH_LIBRARY(flashmoe, library) {
  library.def(
      "flash_attention_forward(Tensor q, Tensor k, Tensor v, float scale, bool causal) -> (Tensor out, Tensor lse)");
  // Without lse there is one allocation less, and without an autograd rule in Python a call costs half the CPU time.
  // flashmoe.attention calls it where no gradient can be wanted.
  library.def("_flash_attention_inference(Tensor q, Tensor k, Tensor v, float scale, bool causal) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CPU, library) {
  library.impl("flash_attention_forward",
               &flashmoe::host::boxed_attention_forward<flashmoe::host::attention_forward_cpu, true>);
  library.impl("_flash_attention_inference",
               &flashmoe::host::boxed_attention_forward<flashmoe::host::attention_forward_cpu, false>);
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CUDA, library) {
  library.impl("flash_attention_forward",
               &flashmoe::host::boxed_attention_forward<flashmoe::host::attention_forward_cuda, true>);
  library.impl("_flash_attention_inference",
               &flashmoe::host::boxed_attention_forward<flashmoe::host::attention_forward_cuda, false>);
}

#define FLASHMOE_EXPORT extern "C" __attribute__((visibility("default")))

// The kernel that this thread's last operator call ran; "" when the output was empty or nothing ran yet.
FLASHMOE_EXPORT const char* flashmoe_last_kernel() { return flashmoe::host::last_kernel(); }

// The JSON index of the embedded device binaries, as in the section .flashmoe.index.
FLASHMOE_EXPORT const char* flashmoe_index_json() { return flashmoe::host::embedded_index(); }

// The instruction set that the CPU backend uses; "" when FLASHMOE_CPU_ISA names one that this machine or this build lacks.
FLASHMOE_EXPORT const char* flashmoe_cpu_isa() {
  try {
    return flashmoe::cpu::selected_isa();
  } catch (const std::exception&) {
    return "";
  }
}

// Forces the CPU backend's instruction set; returns 0, or 1 when this machine or this build lacks it.
FLASHMOE_EXPORT int flashmoe_set_cpu_isa(const char* name) {
  try {
    flashmoe::cpu::set_isa(name);
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}
