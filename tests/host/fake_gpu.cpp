// The forward's CUDA path on a driver without a GPU, which logs what it is asked to launch. "CUDA" memory is the CPU's,
// so that torch's copies are real; a "kernel" fills its output with ones.
#include <torch/csrc/stable/library.h>

#include "attention/host/backends.h"
#include "fake_driver.h"
#include "host/boxed.h"
#include "host/launch.h"
#include "host/tile_counters.h"

namespace flashmoe::host {
namespace {

bool g_fails = false;

void fill_with_ones(const attention::ForwardParams& params) {
  constexpr uint16_t kOne = 0x3c00;  // fp16
  for (int64_t b = 0; b < params.batch; ++b)
    for (int64_t h = 0; h < params.heads_q; ++h)
      for (int64_t s = 0; s < params.seq_q; ++s)
        for (int64_t d = 0; d < (params.head_dim_v > 0 ? params.head_dim_v : params.head_dim); ++d) {
          const attention::Strides& stride = params.out_stride;
          static_cast<uint16_t*>(params.out)[b * stride.batch + h * stride.head + s * stride.row + d] = kOne;
        }
}

CUresult launch(CUfunction function, unsigned grid, unsigned block, unsigned shared, bool is_dependent,
                void** arguments) {
  if (g_fails) return CUDA_ERROR_INVALID_VALUE;
  const Kernel& kernel = kernel_of(function);
  const auto& params = *static_cast<const attention::ForwardParams*>(arguments[0]);
  const void* tensors[] = {params.q, params.k, params.v, params.out};
  for (int32_t map = 0; map < kernel.num_tensor_maps; ++map) {
    if (std::memcmp(arguments[1 + map], &tensors[map], sizeof(void*)) != 0) return CUDA_ERROR_INVALID_VALUE;
  }
  const auto add = [](const char* name, const std::string& value) {
    g_log += std::string(", \"") + name + "\": " + value;
  };
  const auto truth = [](bool value) { return std::string(value ? "true" : "false"); };
  g_log += std::string("{\"symbol\": \"") + kernel.symbol + "\"";
  add("grid", std::to_string(grid));
  add("block", std::to_string(block));
  add("shared", std::to_string(shared));
  add("is_dependent", truth(is_dependent));
  add("maps", std::to_string(kernel.num_tensor_maps));
  int32_t of_keys = -1;
  if (kernel.num_tensor_maps > 1) std::memcpy(&of_keys, static_cast<const char*>(arguments[2]) + sizeof(void*), 4);
  add("key_promotion", std::to_string(of_keys));
  add("counter", std::to_string(reinterpret_cast<uintptr_t>(params.tile_counter)));
  add("has_counter", truth(params.tile_counter != nullptr && *params.tile_counter == 0));
  add("has_partials", truth(params.out_partial != nullptr && params.lse_partial != nullptr));
  add("splits", std::to_string(params.num_splits));
  add("heads", std::to_string(params.heads_q));
  add("rows", std::to_string(params.seq_q));
  add("columns", std::to_string(params.head_dim));
  add("scale", std::to_string(params.scale));
  add("folded", std::to_string(params.score_options.folded_heads));
  add("is_ragged", truth(params.sequences.cu_seqlens_q != nullptr));
  add("mask_strides", "[" + std::to_string(params.score_options.mask_stride_head) + ", " +
                          std::to_string(params.score_options.mask_stride_row) + "]");
  for (int32_t tensor = 0; tensor < 3; ++tensor) {
    add(&"q\0k\0v"[2 * tensor], std::to_string(reinterpret_cast<uintptr_t>(tensors[tensor])));
  }
  g_log += "}\n";
  fill_with_ones(params);
  return CUDA_SUCCESS;
}

}  // namespace

void boxed_forward(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  check_counts("fake", num_arguments, 5, num_outputs, 2);
  attention::ForwardArguments arguments;
  arguments.q = unbox_tensor(stack[0]);
  arguments.k = unbox_tensor(stack[1]);
  arguments.v = unbox_tensor(stack[2]);
  arguments.scale = unbox<double>(stack[3]);
  arguments.is_causal = unbox<bool>(stack[4]);
  attention::check_arguments(arguments);
  attention::ForwardOutputs outputs = attention::allocate_outputs(arguments, /*with_lse=*/true);
  attention::forward_cuda(arguments, outputs);
  stack[0] = box(std::move(outputs.out));
  stack[1] = box(std::move(outputs.lse));
}

void boxed_varlen(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  check_counts("fake", num_arguments, 10, num_outputs, 2);
  attention::VarlenArguments arguments;
  arguments.q = unbox_tensor(stack[0]);
  arguments.k = unbox_tensor(stack[1]);
  arguments.v = unbox_tensor(stack[2]);
  arguments.cu_seqlens_q = unbox_optional_tensor(stack[3]);
  arguments.seqused_k = unbox_optional_tensor(stack[4]);
  arguments.block_table = unbox_optional_tensor(stack[5]);
  arguments.sinks = unbox_optional_tensor(stack[6]);
  arguments.mask = unbox_optional_tensor(stack[7]);
  arguments.max_seqlen_q = unbox<int64_t>(stack[8]);
  arguments.max_seqlen_k = unbox<int64_t>(stack[9]);
  arguments.scale = 0.125;
  attention::check_varlen_arguments(arguments);
  attention::ForwardOutputs outputs = attention::allocate_outputs(arguments, /*with_lse=*/true);
  attention::forward_varlen_cuda(arguments, outputs);
  stack[0] = box(std::move(outputs.out));
  stack[1] = box(std::move(outputs.lse));
}

}  // namespace flashmoe::host

STABLE_TORCH_LIBRARY_FRAGMENT(flashmoe_fake, library) {
  library.def("forward(Tensor q, Tensor k, Tensor v, float scale, bool causal) -> (Tensor out, Tensor lse)");
  library.def(
      "varlen(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? seqused_k, Tensor? block_table, Tensor? "
      "sinks, "
      "Tensor? mask, int max_seqlen_q, int max_seqlen_k) -> (Tensor out, Tensor lse)");
}
STABLE_TORCH_LIBRARY_IMPL(flashmoe_fake, CPU, library) {
  library.impl("forward", &flashmoe::host::boxed_forward);
  library.impl("varlen", &flashmoe::host::boxed_varlen);
}

FAKE_EXPORT void fake_gpu(int capability, int multiprocessors, int is_capturing, int fails) {
  using namespace flashmoe::host;
  begin_call(capability, multiprocessors, is_capturing != 0);
  g_fails = fails != 0;
}

// The error of a list of this many launches of this many blocks with this many counters; empty if it is launched.
FAKE_EXPORT const char* fake_list(long long grid, int launches, long long counters) {
  using namespace flashmoe;
  static std::string said;
  const host::KernelTable& table = host::kernel_table();
  const host::Kernel* kernel = table.kernels;
  while (kernel->num_tensor_maps > 0) ++kernel;
  const attention::ForwardParams params{};
  said.clear();
  try {
    const host::CudaCall call(host::device(0));
    host::tile_counter(call, counters);
    host::LaunchList list;
    for (int launch = 0; launch < launches; ++launch) list.add({kernel, grid, &params, nullptr, false});
    list.run(call);
  } catch (const std::exception& error) {
    said = error.what();
  }
  return said.c_str();
}
