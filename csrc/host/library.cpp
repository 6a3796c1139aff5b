// Registration of the operators with torch through its stable ABI (target 2.10), and the C functions that Python reads
// through ctypes.

#include <torch/csrc/stable/library.h>

#include <cstring>
#include <exception>
#include <optional>

#include "cpu/isa.h"
#include "host/attention.h"
#include "host/kernel_table.h"
#include "host/launch.h"

namespace flashmoe {
namespace host {
namespace {

// The operators; their schemas are below.
enum class Operator { kForward, kInference, kDropIn };
using Backend = void (*)(const AttentionArguments&, const AttentionOutputs&);

// Whether scaled_dot_product_attention means what our operator does: four dimensions, nothing to broadcast, a square mask.
bool is_usual(const AttentionArguments& arguments, bool enable_gqa) {
  const Tensor& q = arguments.q;
  const Tensor& k = arguments.k;
  if (!q.is_defined() || !k.is_defined() || q.dim() != 4 || k.dim() != 4) return false;
  const int64_t* q_sizes = q.sizes();
  const int64_t* k_sizes = k.sizes();
  return q_sizes[0] == k_sizes[0] && (enable_gqa || q_sizes[1] == k_sizes[1]) &&
         (!arguments.is_causal || q_sizes[2] == k_sizes[2]);
}

// The stack holds the arguments on entry, whose tensors we then own, and the owned results on return.
template <Operator kOperator, Backend kBackend>
void boxed_attention_forward(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  using torch::stable::detail::to;
  constexpr bool kWithLse = kOperator == Operator::kForward;
  constexpr uint64_t kNumArguments = kOperator == Operator::kDropIn ? 6 : 5, kNumOutputs = kWithLse ? 2 : 1;
  if (num_arguments != kNumArguments || num_outputs != kNumOutputs) {
    fail(ErrorCode::kInternal, "attention was called with ", num_arguments, " arguments for ", num_outputs,
         " results; ", kNumArguments, " and ", kNumOutputs, " are registered");
  }
  AttentionArguments arguments;
  arguments.q = Tensor(to<AtenTensorHandle>(stack[0]));
  arguments.k = Tensor(to<AtenTensorHandle>(stack[1]));
  arguments.v = Tensor(to<AtenTensorHandle>(stack[2]));
  if constexpr (kOperator == Operator::kForward) {
    arguments.scale = to<double>(stack[3]);
  } else {
    const auto scale = to<std::optional<double>>(stack[3]);
    arguments.has_default_scale = !scale.has_value();
    arguments.scale = scale.value_or(0.0);
  }
  arguments.is_causal = to<bool>(stack[4]);
  if constexpr (kOperator == Operator::kDropIn) {
    if (!is_usual(arguments, to<bool>(stack[5]))) {
      stack[0] = torch::stable::detail::from(std::nullopt);
      return;
    }
  }
  check_arguments(arguments);
  AttentionOutputs outputs = allocate_outputs(arguments, kWithLse);
  set_last_kernel("");
  const int64_t* sizes = outputs.out.sizes();
  if (sizes[0] != 0 && sizes[1] != 0 && sizes[2] != 0) kBackend(arguments, outputs);
  if constexpr (kOperator == Operator::kDropIn) {
    stack[0] = torch::stable::detail::from(std::optional<AtenTensorHandle>(outputs.out.release()));
  } else {
    stack[0] = torch::stable::detail::from(outputs.out.release());
  }
  if constexpr (kWithLse) stack[1] = torch::stable::detail::from(outputs.lse.release());
}

template <class Library, Backend kBackend>
void register_backend(Library& library) {
  library.impl("flash_attention_forward", &boxed_attention_forward<Operator::kForward, kBackend>);
  library.impl("_flash_attention_inference", &boxed_attention_forward<Operator::kInference, kBackend>);
  library.impl("_flash_attention_drop_in", &boxed_attention_forward<Operator::kDropIn, kBackend>);
}

}  // namespace
}  // namespace host
}  // namespace flashmoe

STABLE_TORCH_LIBRARY(flashmoe, library) {
  library.def(
      "flash_attention_forward(Tensor q, Tensor k, Tensor v, float scale, bool causal) -> (Tensor out, Tensor lse)");
  // Called where no gradient can be wanted. Without lse there is one allocation less, and without an autograd rule in
  // Python a call costs half the CPU time; what Python need not look at (the default scale 1 / sqrt(head_dim), sizes)
  // saves some percent more.
  library.def("_flash_attention_inference(Tensor q, Tensor k, Tensor v, float? scale, bool causal) -> Tensor");
  // For scaled_dot_product_attention; None where that means another thing.
  library.def(
      "_flash_attention_drop_in(Tensor q, Tensor k, Tensor v, float? scale, bool causal, bool enable_gqa) -> Tensor?");
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CPU, library) {
  flashmoe::host::register_backend<decltype(library), flashmoe::host::attention_forward_cpu>(library);
}

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CUDA, library) {
  flashmoe::host::register_backend<decltype(library), flashmoe::host::attention_forward_cuda>(library);
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
