#include <array>
#include <cstdlib>
#include <limits>

#include "host/attention.h"
#include "host/launch.h"
#include "host/select.h"

namespace flashmoe {
namespace host {
namespace {

constexpr int64_t kAlignBytes = 16;     // of every row that a kernel loads
constexpr int64_t kElementBytes = 2;    // CUDA kernels take 16-bit types only
constexpr int64_t kAlignElements = kAlignBytes / kElementBytes;

int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

bool is_loadable(const Tensor& tensor) {
  const int64_t* sizes = tensor.sizes();
  const int64_t* strides = tensor.strides();
  if (sizes[3] % kAlignElements != 0 || reinterpret_cast<uintptr_t>(tensor.data()) % kAlignBytes != 0) return false;
  for (int axis = 0; axis < 3; ++axis) {
    if (sizes[axis] > 1 && strides[axis] % kAlignElements != 0) return false;
  }
  return true;
}

Tensor view_of(const Tensor& tensor, const int64_t* sizes, const int64_t* strides) {
  AtenTensorHandle handle = nullptr;
  check_shim(aoti_torch__reinterpret_tensor(tensor.get(), 4, sizes, strides, 0, &handle), "_reinterpret_tensor");
  return Tensor(handle);
}

Sizes4 padded_sizes(const Tensor& tensor) {
  const int64_t* sizes = tensor.sizes();
  return {sizes[0], sizes[1], sizes[2], ceil_div(sizes[3], kAlignElements) * kAlignElements};
}

Tensor like(const Tensor& tensor, const Sizes4& sizes) {
  return empty({sizes[0], sizes[1], sizes[2], sizes[3]}, tensor.dtype(), tensor.device_type(), tensor.device_index());
}

// A contiguous copy whose head_dim is rounded up to whole 16-byte pieces, zeros in the added columns.
Tensor padded_copy(const Tensor& tensor) {
  const Sizes4 sizes = padded_sizes(tensor);
  Tensor copy = like(tensor, sizes);
  if (sizes[3] != tensor.sizes()[3]) check_shim(aoti_torch_zero_(copy.get()), "zero_");
  const Tensor view = view_of(copy, tensor.sizes(), copy.strides());
  check_shim(aoti_torch_copy_(view.get(), tensor.get(), /*non_blocking=*/0), "copy_");
  return copy;
}

// A second handle on the same tensor.
Tensor alias(const Tensor& tensor) {
  AtenTensorHandle handle = nullptr;
  check_shim(aoti_torch_new_tensor_handle(tensor.get(), &handle), "new_tensor_handle");
  return Tensor(handle);
}

Choice choose(const AttentionArguments& arguments, const attention::ForwardParams& params, const Device& gpu) {
  const char* forced = std::getenv("FLASHMOE_KERNEL");
  SelectorInput input{};
  input.capability = gpu.capability;
  input.num_multiprocessors = gpu.num_multiprocessors;
  input.gpu_name = gpu.name.c_str();
  input.forced_family = forced != nullptr && forced[0] != '\0' ? forced : nullptr;
  input.dtype = arguments.dtype;
  input.mask = arguments.is_causal ? Mask::kCausal : Mask::kFull;
  input.head_dim = params.head_dim;
  input.batch = params.batch;
  input.heads_q = params.heads_q;
  input.heads_kv = params.heads_kv;
  input.seq_q = params.seq_q;
  input.seq_k = params.seq_k;
  return select_forward(input, kernel_table());
}

// No key at all: the output is zero and the log-sum-exp of nothing is -inf.
void fill_without_keys(const AttentionArguments& arguments, const AttentionOutputs& outputs, const Device& gpu) {
  const ContextGuard guard(gpu.context);
  const CUstream stream = current_stream(arguments.device_index);
  const int64_t* sizes = outputs.out.sizes();
  const int64_t rows = sizes[0] * sizes[1] * sizes[2];
  constexpr unsigned kMinusInfinity = 0xff800000U;
  const auto bytes = static_cast<std::size_t>(rows * sizes[3] * kElementBytes);
  check_driver(driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(outputs.out.data()), 0, bytes, stream),
               "cuMemsetD8Async", "output of ", rows, " rows");
  check_driver(driver().cuMemsetD32Async(reinterpret_cast<CUdeviceptr>(outputs.lse.data()), kMinusInfinity,
                                         static_cast<std::size_t>(rows), stream),
               "cuMemsetD32Async", "log-sum-exp of ", rows, " rows");
}

void run(const AttentionArguments& arguments, attention::ForwardParams params, const Device& gpu) {
  const Choice choice = choose(arguments, params, gpu);
  const Kernel& kernel = *choice.forward;
  const ContextGuard guard(gpu.context);
  const CUstream stream = current_stream(arguments.device_index);
  CUfunction function = load_kernel(kernel, gpu, arguments.device_index);
  const int64_t tiles =
      ceil_div(params.seq_q, kernel.block_m) * params.heads_q * static_cast<int64_t>(params.batch);
  LaunchShape shape{tiles, kernel.threads, kernel.shared_bytes};
  std::array<void*, 1> kernel_arguments{&params};
  launch(kernel, function, shape, stream, kernel_arguments.data());
}

}  // namespace

void attention_forward_cuda(const AttentionArguments& arguments, const AttentionOutputs& outputs) {
  const Device& gpu = device(arguments.device_index);
  if (arguments.k.sizes()[2] == 0) {
    fill_without_keys(arguments, outputs, gpu);
    return;
  }
  const bool q_fits = is_loadable(arguments.q);
  const bool k_fits = is_loadable(arguments.k);
  const bool v_fits = is_loadable(arguments.v);
  if (q_fits && k_fits && v_fits) {
    run(arguments, make_params(arguments, outputs), gpu);
    return;
  }
  AttentionArguments aligned;
  aligned.q = q_fits ? alias(arguments.q) : padded_copy(arguments.q);
  aligned.k = k_fits ? alias(arguments.k) : padded_copy(arguments.k);
  aligned.v = v_fits ? alias(arguments.v) : padded_copy(arguments.v);
  aligned.scale = arguments.scale;
  aligned.is_causal = arguments.is_causal;
  aligned.dtype = arguments.dtype;
  aligned.torch_dtype = arguments.torch_dtype;
  aligned.device_type = arguments.device_type;
  aligned.device_index = arguments.device_index;
  AttentionOutputs padded;
  padded.out = is_loadable(outputs.out) ? alias(outputs.out) : like(outputs.out, padded_sizes(outputs.out));
  padded.lse = alias(outputs.lse);
  run(aligned, make_params(aligned, padded), gpu);
  if (!is_loadable(outputs.out)) {
    const Tensor view = view_of(padded.out, outputs.out.sizes(), padded.out.strides());
    check_shim(aoti_torch_copy_(outputs.out.get(), view.get(), /*non_blocking=*/0), "copy_");
  }
}

}  // namespace host
}  // namespace flashmoe
