#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <limits>

#include "attention/forward/sm90/tensor_map.h"
#include "attention/host/attention.h"
#include "host/launch.h"
#include "attention/host/select.h"
#include "host/tile_counters.h"

namespace flashmoe {
namespace host {
namespace {

constexpr int64_t kAlignBytes = 16;     // of every row that a kernel loads
constexpr int64_t kElementBytes = 2;    // CUDA kernels take 16-bit types only
constexpr int64_t kAlignElements = kAlignBytes / kElementBytes;

int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// Whether the kernel's loads can read the tensor where it lies: whole 16-byte pieces, and for TMA no dimension that
// repeats (stride 0).
bool is_loadable(const Tensor& tensor, const Kernel& kernel) {
  const int64_t* sizes = tensor.sizes();
  const int64_t* strides = tensor.strides();
  if (sizes[3] % kAlignElements != 0 || reinterpret_cast<uintptr_t>(tensor.data()) % kAlignBytes != 0) return false;
  for (int axis = 0; axis < 3; ++axis) {
    if (sizes[axis] > 1 && strides[axis] % kAlignElements != 0) return false;
    if (sizes[axis] > 1 && strides[axis] <= 0 && kernel.num_tensor_maps > 0) return false;
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

bool is_scale_positive(const AttentionArguments& arguments) { return static_cast<float>(arguments.scale) > 0.0F; }

// Kernels find the maximum of a row of q k^T before they scale it, which is the maximum after scaling only for a positive
// scale. So a negative one moves its sign into the copied q; for zero, q becomes q - q: zero, or NaN where q is not finite.
void make_scale_positive(AttentionArguments& arguments) {
  if (arguments.scale < 0.0) {
    StableIValue stack[1] = {torch::stable::detail::from(alias(arguments.q).release())};
    check_shim(torch_call_dispatcher("aten::neg_", "", stack, TORCH_ABI_VERSION), "neg_");
    arguments.q = Tensor(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
    arguments.scale = -arguments.scale;
  }
  if (!is_scale_positive(arguments)) {
    AtenTensorHandle zeros = nullptr;
    check_shim(aoti_torch_aten_subtract_Tensor(arguments.q.get(), arguments.q.get(), 1.0, &zeros), "subtract");
    arguments.q = Tensor(zeros);
    arguments.scale = 1.0;
  }
}

// What a kernel is launched with. It need not be what the caller asked for, as long as the result is the same.
struct Problem {
  attention::ForwardParams params;
  Mask mask;
};

// A single query row sees every key, so with grouped heads the query heads of one key head serve as the rows of one
// tile: its keys are read once instead of once a query head.
Problem make_problem(const AttentionArguments& arguments, const AttentionOutputs& outputs) {
  Problem problem{make_params(arguments, outputs), arguments.is_causal ? Mask::kCausal : Mask::kFull};
  attention::ForwardParams& params = problem.params;
  if (params.seq_q == 1 && params.heads_q > params.heads_kv) {
    const int32_t group = params.heads_q / params.heads_kv;
    for (attention::Strides* stride : {&params.q_stride, &params.out_stride}) {
      stride->row = stride->head;
      stride->head *= group;
    }
    params.heads_q = params.heads_kv;
    params.seq_q = group;
    problem.mask = Mask::kFull;
  }
  return problem;
}

// resolve_families, remembered: looking through the whole table takes longer than the rest of the selection.
const FamilyList& families_for(const SelectorInput& input) {
  constexpr int64_t kHeadDims = kMaxHeadDim / kAlignElements + 1;  // kernels differ at multiples of this only
  struct Memory {
    int32_t capability = 0;
    KernelList loadable;
    std::array<FamilyList, 2 * 2 * kHeadDims> families;
    std::array<bool, 2 * 2 * kHeadDims> is_known{};
  };
  thread_local Memory memory;
  if (memory.capability != input.capability) {
    memory.loadable = loadable_kernels(input.capability, kernel_table());
    memory.is_known.fill(false);
    memory.capability = input.capability;
  }
  const int64_t mask = input.mask == Mask::kCausal ? 1 : 0;
  const int64_t dtype = input.dtype == Dtype::kBFloat16 ? 1 : 0;
  const auto slot = static_cast<std::size_t>((2 * mask + dtype) * kHeadDims + ceil_div(input.head_dim, kAlignElements));
  if (!memory.is_known[slot]) {
    memory.families[slot] = resolve_families(input, memory.loadable, kernel_table());
    memory.is_known[slot] = true;
  }
  return memory.families[slot];
}

Choice choose(const AttentionArguments& arguments, const Problem& problem, const Device& gpu) {
  const attention::ForwardParams& params = problem.params;
  const char* forced = std::getenv("FLASHMOE_KERNEL");
  SelectorInput input{};
  input.capability = gpu.capability;
  input.num_multiprocessors = gpu.num_multiprocessors;
  input.gpu_name = gpu.name.c_str();
  input.forced_family = forced != nullptr && forced[0] != '\0' ? forced : nullptr;
  input.dtype = arguments.dtype;
  input.mask = problem.mask;
  input.head_dim = params.head_dim;
  input.batch = params.batch;
  input.heads_q = params.heads_q;
  input.heads_kv = params.heads_kv;
  input.seq_q = params.seq_q;
  input.seq_k = params.seq_k;
  return select_forward(input, families_for(input), kernel_table());
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
  if (outputs.lse.get() == nullptr) return;
  check_driver(driver().cuMemsetD32Async(reinterpret_cast<CUdeviceptr>(outputs.lse.data()), kMinusInfinity,
                                         static_cast<std::size_t>(rows), stream),
               "cuMemsetD32Async", "log-sum-exp of ", rows, " rows");
}

struct TensorMaps {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap out;
};

CUtensorMap encode(const attention::sm90::TensorMapArguments& from, CUtensorMapDataType type, const char* name) {
  static_assert(sizeof(cuuint64_t) == sizeof(from.dims[0]) && sizeof(cuuint32_t) == sizeof(from.box[0]),
                "the driver's integer types and ours");
  const auto widen = [](const std::uint64_t* values) { return reinterpret_cast<const cuuint64_t*>(values); };
  return encode_tensor_map(type, from.address, widen(from.dims), widen(from.strides_bytes), from.box,
                           from.element_strides, name);
}

TensorMaps make_tensor_maps(const attention::ForwardParams& params, const Kernel& kernel) {
  const auto type = kernel.dtype == Dtype::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const attention::sm90::ForwardTensorMaps from = attention::sm90::forward_tensor_maps(params, kernel.block_n);
  return {encode(from.q, type, "q"), encode(from.k, type, "k"), encode(from.v, type, "v"),
          encode(from.out, type, "out")};
}

// Float scratch memory for the partial results of split kernels, freed in stream order by torch's allocator. One tensor for
// both: each costs the calling thread about a microsecond.
Tensor allocate_partials(const AttentionArguments& arguments, attention::ForwardParams& params) {
  const int64_t rows = static_cast<int64_t>(params.batch) * params.heads_q * params.seq_q;
  const int64_t out_elements = params.num_splits * rows * params.head_dim;
  const int64_t lse_elements = params.num_splits * rows;
  Tensor partials = empty({out_elements + lse_elements}, aoti_torch_dtype_float32(), arguments.device_type,
                          arguments.device_index);
  params.out_partial = static_cast<float*>(partials.data());
  params.lse_partial = params.out_partial + out_elements;
  return partials;
}

LaunchShape forward_shape(const attention::ForwardParams& params, const Kernel& kernel, const Device& gpu) {
  const int64_t tiles = ceil_div(params.seq_q, kernel.block_m) * params.heads_q * static_cast<int64_t>(params.batch) *
                        params.num_splits;
  const int64_t resident = static_cast<int64_t>(gpu.num_multiprocessors) * kernel.min_blocks;
  return {kernel.is_persistent ? std::min(tiles, resident) : tiles, tiles, kernel.threads, kernel.shared_bytes};
}

void launch_forward(attention::ForwardParams& params, const Kernel& kernel, CUfunction function,
                    const LaunchShape& shape, CUstream stream) {
  if (kernel.num_tensor_maps > 0) {
    TensorMaps maps = make_tensor_maps(params, kernel);
    std::array<void*, 5> arguments{&params, &maps.q, &maps.k, &maps.v, &maps.out};
    launch(kernel, function, shape, stream, arguments.data());
  } else {
    std::array<void*, 1> arguments{&params};
    launch(kernel, function, shape, stream, arguments.data());
  }
}

void run(const AttentionArguments& arguments, const Problem& problem, const Choice& choice, const Device& gpu) {
  attention::ForwardParams params = problem.params;
  params.num_splits = choice.num_splits;
  const Kernel& kernel = *choice.forward;
  const ContextGuard guard(gpu.context);
  const CUstream stream = current_stream(arguments.device_index);
  CUfunction function = load_kernel(kernel, gpu, arguments.device_index);
  const LaunchShape shape = forward_shape(params, kernel, gpu);
  TileCounter counter;
  if (kernel.is_persistent && shape.tiles > shape.grid) {
    counter = tile_counter(arguments.device_type, arguments.device_index, stream);
    params.tile_counter = counter.address;
  }
  Tensor partials;
  if (choice.combine != nullptr) partials = allocate_partials(arguments, params);
  launch_forward(params, kernel, function, shape, stream);
  if (choice.combine != nullptr) {
    const Kernel& combine = *choice.combine;
    const int64_t rows = static_cast<int64_t>(params.batch) * params.heads_q * params.seq_q;
    const int64_t blocks = ceil_div(rows, combine.block_m);
    std::array<void*, 1> pointers{&params};
    launch_dependent(combine, load_kernel(combine, gpu, arguments.device_index),
                     {blocks, blocks, combine.threads, combine.shared_bytes}, stream, pointers.data());
    set_last_kernel(kernel.symbol);
  }
}

// Copies what the kernel cannot read or write in place, runs it, and copies the output back if it had to.
void run_on_copies(const AttentionArguments& arguments, const AttentionOutputs& outputs, const Choice& choice,
                   const Device& gpu) {
  const Kernel& kernel = *choice.forward;
  const auto loadable = [&kernel](const Tensor& tensor) {
    return is_loadable(tensor, kernel) ? alias(tensor) : padded_copy(tensor);
  };
  AttentionArguments aligned;
  aligned.q = is_scale_positive(arguments) ? loadable(arguments.q) : padded_copy(arguments.q);
  aligned.k = loadable(arguments.k);
  aligned.v = loadable(arguments.v);
  aligned.scale = arguments.scale;
  aligned.is_causal = arguments.is_causal;
  aligned.dtype = arguments.dtype;
  aligned.torch_dtype = arguments.torch_dtype;
  aligned.device_type = arguments.device_type;
  aligned.device_index = arguments.device_index;
  if (!is_scale_positive(aligned)) make_scale_positive(aligned);
  // A head_dim that is no whole number of 16-byte pieces pads all three inputs alike, and the output with them.
  const bool is_padded = aligned.q.sizes()[3] != arguments.q.sizes()[3];
  AttentionOutputs padded;
  padded.out = is_padded ? like(outputs.out, padded_sizes(outputs.out)) : alias(outputs.out);
  if (outputs.lse.get() != nullptr) padded.lse = alias(outputs.lse);
  run(aligned, make_problem(aligned, padded), choice, gpu);
  if (is_padded) {
    const Tensor view = view_of(padded.out, outputs.out.sizes(), padded.out.strides());
    check_shim(aoti_torch_copy_(outputs.out.get(), view.get(), /*non_blocking=*/0), "copy_");
  }
}

}  // namespace

void attention_forward_cuda(const AttentionArguments& arguments, const AttentionOutputs& outputs) {
  const Device& gpu = device(arguments.device_index);
  if (arguments.k.sizes()[2] == 0) {
    fill_without_keys(arguments, outputs, gpu);
    return;
  }
  const Problem problem = make_problem(arguments, outputs);
  const Choice choice = choose(arguments, problem, gpu);
  const Kernel& kernel = *choice.forward;
  if (is_scale_positive(arguments) && is_loadable(arguments.q, kernel) && is_loadable(arguments.k, kernel) &&
      is_loadable(arguments.v, kernel)) {
    run(arguments, problem, choice, gpu);
  } else {
    run_on_copies(arguments, outputs, choice, gpu);
  }
}

}  // namespace host
}  // namespace flashmoe
