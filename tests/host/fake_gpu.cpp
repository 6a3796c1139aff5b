// The forward's CUDA path on a driver without a GPU, which writes down what it is asked to launch. "CUDA" memory is the CPU's, so
// that torch's copies are real; a "kernel" fills its output with ones.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "attention/host/backends.h"
#include "host/boxed.h"
#include "host/driver.h"

extern "C" const unsigned char flashmoe_binaries[1] = {0};
extern "C" const char flashmoe_index[1] = {0};
extern "C" int32_t aoti_torch_device_type_cuda() { return aoti_torch_device_type_cpu(); }

namespace flashmoe {
namespace host {
namespace {

Device g_gpu;
bool g_is_capturing = false;
bool g_fails = false;
std::string g_log;  // one JSON object a line

const Kernel& kernel_of(CUfunction function) {
  const KernelTable& table = kernel_table();
  for (int32_t index = 0; index < table.num_kernels; ++index) {
    if (table.kernels[index].symbol == reinterpret_cast<const char*>(function)) return table.kernels[index];
  }
  fail(ErrorCode::kInternal, "a function that was not loaded");
}

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

CUresult record(CUfunction function, unsigned grid, unsigned block, unsigned shared, bool is_dependent,
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

Driver make_driver() {
  Driver calls;
  calls.cuThreadExchangeStreamCaptureMode = [](CUstreamCaptureMode*) { return CUDA_SUCCESS; };
  calls.cuModuleLoadDataEx = [](CUmodule* module, const void*, unsigned, CUjit_option*, void**) {
    *module = reinterpret_cast<CUmodule>(1);
    return CUDA_SUCCESS;
  };
  calls.cuModuleGetFunction = [](CUfunction* function, CUmodule, const char* symbol) {
    *function = reinterpret_cast<CUfunction>(const_cast<char*>(symbol));
    return CUDA_SUCCESS;
  };
  calls.cuFuncSetAttribute = [](CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; };
  calls.cuStreamIsCapturing = [](CUstream, CUstreamCaptureStatus* status) {
    *status = g_is_capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
  };
  calls.cuMemAlloc = [](CUdeviceptr* memory, std::size_t bytes) {
    static std::deque<std::vector<char>> allocations;
    *memory = reinterpret_cast<CUdeviceptr>(allocations.emplace_back(bytes).data());
    return CUDA_SUCCESS;
  };
  calls.cuMemsetD8Async = [](CUdeviceptr address, unsigned char value, std::size_t count, CUstream) {
    std::memset(reinterpret_cast<void*>(address), value, count);
    return CUDA_SUCCESS;
  };
  calls.cuMemsetD32Async = [](CUdeviceptr address, unsigned value, std::size_t count, CUstream) {
    for (std::size_t word = 0; word < count; ++word) reinterpret_cast<unsigned*>(address)[word] = value;
    return CUDA_SUCCESS;
  };
  calls.cuTensorMapEncodeTiled = [](CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void* address, const cuuint64_t*,
                                    const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                    CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    std::memcpy(map, &address, sizeof(address));
    return CUDA_SUCCESS;
  };
  calls.cuLaunchKernel = [](CUfunction function, unsigned grid, unsigned, unsigned, unsigned block, unsigned, unsigned,
                            unsigned shared, CUstream, void** arguments,
                            void**) { return record(function, grid, block, shared, false, arguments); };
  calls.cuLaunchKernelEx = [](const CUlaunchConfig* config, CUfunction function, void** arguments, void**) {
    return record(function, config->gridDimX, config->blockDimX, config->sharedMemBytes,
                  config->attrs[0].value.programmaticStreamSerializationAllowed == 1, arguments);
  };
  return calls;
}

}  // namespace

const Driver& driver() {
  static const Driver fake = make_driver();
  return fake;
}
const Device& device(int32_t) { return g_gpu; }
std::string describe(CUresult result) { return std::to_string(static_cast<int>(result)); }
CUstream current_stream(int32_t) { return nullptr; }
ContextGuard::ContextGuard(CUcontext) {}
ContextGuard::~ContextGuard() = default;

void boxed_forward(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  check_counts("fake", num_arguments, 5, num_outputs, 2);
  attention::ForwardArguments arguments;
  arguments.q = take_tensor(stack[0]);
  arguments.k = take_tensor(stack[1]);
  arguments.v = take_tensor(stack[2]);
  arguments.scale = take<double>(stack[3]);
  arguments.is_causal = take<bool>(stack[4]);
  attention::check_arguments(arguments);
  attention::ForwardOutputs outputs = attention::allocate_outputs(arguments, /*with_lse=*/true);
  attention::forward_cuda(arguments, outputs);
  stack[0] = give(std::move(outputs.out));
  stack[1] = give(std::move(outputs.lse));
}

void boxed_varlen(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  check_counts("fake", num_arguments, 10, num_outputs, 2);
  attention::VarlenArguments arguments;
  arguments.q = take_tensor(stack[0]);
  arguments.k = take_tensor(stack[1]);
  arguments.v = take_tensor(stack[2]);
  arguments.cu_seqlens_q = take_optional_tensor(stack[3]);
  arguments.seqused_k = take_optional_tensor(stack[4]);
  arguments.block_table = take_optional_tensor(stack[5]);
  arguments.sinks = take_optional_tensor(stack[6]);
  arguments.mask = take_optional_tensor(stack[7]);
  arguments.max_seqlen_q = take<int64_t>(stack[8]);
  arguments.max_seqlen_k = take<int64_t>(stack[9]);
  arguments.scale = 0.125;
  attention::check_varlen_arguments(arguments);
  attention::VarlenOutputs outputs = attention::allocate_varlen_outputs(arguments, /*with_lse=*/true);
  attention::forward_varlen_cuda(arguments, outputs);
  stack[0] = give(std::move(outputs.out));
  stack[1] = give(std::move(outputs.lse));
}

}  // namespace host
}  // namespace flashmoe

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

// Begins a call on a GPU of this kind: nothing has been launched.
extern "C" void fake_gpu(int capability, int multiprocessors, int is_capturing, int fails) {
  using namespace flashmoe::host;
  g_gpu.capability = capability;
  g_gpu.num_multiprocessors = multiprocessors;
  g_gpu.name = "a GPU";
  g_is_capturing = is_capturing != 0;
  g_fails = fails != 0;
  g_log.clear();
}
extern "C" const char* fake_log() { return flashmoe::host::g_log.c_str(); }
