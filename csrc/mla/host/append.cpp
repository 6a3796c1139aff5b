#include "mla/host/append.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "host/copies.h"
#include "host/last_kernel.h"
#include "host/launch.h"
#include "mla/host/checks.h"
#include "mla/params/append.h"
#include "mla/params/decode.h"

namespace flashmoe::mla {
namespace {

using host::describe_device;
using host::describe_dtype;
using host::describe_sizes;
using host::violate;

void check_latents(AppendArguments& arguments) {
  const Tensor& latents = arguments.latents;
  if (!latents.is_defined()) violate("tensor.missing", {{"name", "latents"}});
  if (latents.description() != nullptr && latents.device_type() < 0) {
    violate("attention.device", {{"device", describe_device(latents)}});
  }
  const std::optional<Dtype> dtype = host::dtype_of(latents.dtype());
  if (!dtype.has_value() || *dtype == Dtype::kFloat32) {
    violate("mla.latents_dtype", {{"found", describe_dtype(latents.dtype())}});
  }
  arguments.dtype = *dtype;
  if (latents.dim() != 3 || latents.sizes()[2] != kHeadDim) {
    violate("mla.latents", {{"found", describe_sizes(latents)}});
  }
  check_last_stride(latents, "latents");
}

void check_cache(const AppendArguments& arguments) {
  const Tensor& cache = arguments.kv_cache;
  if (!cache.is_defined()) violate("tensor.missing", {{"name", "kv_cache"}});
  check_device(cache, "kv_cache", arguments.latents, "latents");
  if (!is_fp8_dtype(cache)) violate("mla.append_cache", {{"found", describe_dtype(cache.dtype())}});
  check_fp8_cache(cache, arguments.has_pages(), arguments.batch());
  if (arguments.block_table.is_given()) check_page_size(cache);
}

void check_rows(const AppendArguments& arguments) {
  const Tensor& latents = arguments.latents;
  if (arguments.slots.is_given() == arguments.cache_seqlens.is_given()) {
    violate("mla.append_rows", {{"found", arguments.slots.is_given() ? "both" : "neither"}});
  }
  if (arguments.slots.is_given()) {
    const Tensor& slots = arguments.slots;
    if (arguments.block_table.is_given()) violate("mla.append_table", {});
    check_device(slots, "slots", latents, "latents");
    if (slots.dtype() != aoti_torch_dtype_int64()) {
      violate("mla.companion_dtype",
              {{"name", "slots"}, {"found", describe_dtype(slots.dtype())}, {"needed", "int64"}});
    }
    if (slots.dim() != 2 || slots.sizes()[0] != arguments.batch() || slots.sizes()[1] != arguments.tokens()) {
      violate("mla.slots",
              {{"found", describe_sizes(slots)}, {"batch", arguments.batch()}, {"tokens", arguments.tokens()}});
    }
    return;
  }
  const int32_t int32 = aoti_torch_dtype_int32();
  check_companion(arguments.cache_seqlens, "cache_seqlens", latents, "latents", int32, 1, arguments.batch());
  if (arguments.block_table.is_given()) {
    check_companion(arguments.block_table, "block_table", latents, "latents", int32, 2, arguments.batch());
  }
}

AppendParams make_params(const AppendArguments& arguments, const Tensor& latents, const Tensor& slots) {
  const Tensor& cache = arguments.kv_cache;
  AppendParams params{};
  params.latents = latents.data();
  params.cache = cache.data();
  params.latents_stride_batch = latents.strides()[0];
  params.latents_stride_token = latents.strides()[1];
  params.page_stride = cache.strides()[0];
  params.key_stride = cache.strides()[1];
  params.batch = static_cast<int32_t>(arguments.batch());
  params.tokens = static_cast<int32_t>(arguments.tokens());
  params.page_size = static_cast<int32_t>(std::max<int64_t>(1, cache.sizes()[1]));
  params.num_pages = cache.sizes()[1] > 0 ? static_cast<int32_t>(cache.sizes()[0]) : 0;
  if (slots.is_given()) {
    params.slots = static_cast<const int64_t*>(slots.data());
    return params;
  }
  int64_t capacity = cache.sizes()[1];
  params.cache_seqlens = static_cast<const int32_t*>(arguments.cache_seqlens.data());
  if (arguments.block_table.is_given()) {
    params.block_table = static_cast<const int32_t*>(arguments.block_table.data());
    params.block_table_stride = arguments.block_table.strides()[0];
    capacity *= arguments.block_table.sizes()[1];
  }
  params.capacity = static_cast<int32_t>(std::min<int64_t>(capacity, std::numeric_limits<int32_t>::max()));
  return params;
}

}  // namespace

AppendArguments parse_append(host::Arguments& given) {
  AppendArguments arguments;
  given.tensors(arguments.latents, arguments.kv_cache);
  given.optional_tensors(arguments.cache_seqlens, arguments.block_table, arguments.slots);
  check_latents(arguments);
  check_cache(arguments);
  check_rows(arguments);
  return arguments;
}

void append_cuda(const AppendArguments& arguments) {
  const host::Device& gpu = host::device(arguments.latents.device_index());
  const host::KernelRequest request = host::make_request(gpu, arguments.dtype);
  const host::Kernel* kernel = host::find_kernel({"mla_append", "sm80", "", request.dtype, {}}, host::kNoAxis,
                                                 host::loadable_kernels(request.capability));
  if (kernel == nullptr) host::refuse(request, "an FP8 cache of latents");
  const Tensor latents = host::loadable(arguments.latents, *kernel);
  const Tensor slots = arguments.slots.is_given() ? host::contiguous(arguments.slots) : Tensor();
  const AppendParams params = make_params(arguments, latents, slots);
  const int64_t rows = arguments.batch() * arguments.tokens(), warps = kernel->threads / 32;
  const host::CudaCall call(gpu);
  host::LaunchList list;
  list.add({kernel, (rows + warps - 1) / warps, &params, nullptr, /*is_dependent=*/false});
  list.run(call);
  host::set_last_kernel(kernel->symbol);
}

}  // namespace flashmoe::mla
