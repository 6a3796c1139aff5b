// Appends new keys and values to a cache on a GPU.

#include <algorithm>
#include <cstdint>

#include "attention/host/backends.h"
#include "attention/host/select.h"
#include "attention/host/varlen_arguments.h"
#include "attention/params/append.h"
#include "host/copies.h"
#include "host/last_kernel.h"
#include "host/launch.h"

namespace flashmoe::attention {
namespace {

// Whether every row of the tensor starts and ends at a multiple of 16 bytes.
bool is_aligned(const Tensor& tensor) {
  if (reinterpret_cast<std::uintptr_t>(tensor.data()) % (host::kRowAlignElements * host::kElementBytes) != 0)
    return false;
  const int64_t last = tensor.dim() - 1;
  for (int64_t dim = 0; dim < last; ++dim) {
    if (tensor.strides()[dim] % host::kRowAlignElements != 0) return false;
  }
  return tensor.sizes()[last] % host::kRowAlignElements == 0;
}

}  // namespace

AppendParams make_append_params(const AppendArguments& arguments) {
  const bool is_paged = arguments.has_pages();
  const int64_t* cache_sizes = arguments.k_cache.sizes();
  const int64_t* new_sizes = arguments.k_new.sizes();
  AppendParams params{};
  params.k_cache = arguments.k_cache.data();
  params.v_cache = arguments.v_cache.data();
  params.k_new = arguments.k_new.data();
  params.v_new = arguments.v_new.data();
  params.k_cache_stride = strides_of(arguments.k_cache, is_paged);
  params.v_cache_stride = strides_of(arguments.v_cache, is_paged);
  params.k_new_stride = strides_of(arguments.k_new);
  params.v_new_stride = strides_of(arguments.v_new);
  params.cache_seqlens = static_cast<const int32_t*>(arguments.cache_seqlens.data());
  params.batch = static_cast<int32_t>(new_sizes[0]);
  params.heads_kv = static_cast<int32_t>(new_sizes[1]);
  params.new_keys = static_cast<int32_t>(new_sizes[2]);
  params.head_dim = static_cast<int32_t>(new_sizes[3]);
  params.head_dim_v = static_cast<int32_t>(arguments.v_new.sizes()[3]);
  params.room = static_cast<int32_t>(cache_sizes[2]);
  if (is_paged) {
    params.block_table = static_cast<const int32_t*>(arguments.block_table.data());
    params.block_table_stride = arguments.block_table.strides()[0];
    params.num_pages = static_cast<int32_t>(cache_sizes[0]);
    params.page_size = static_cast<int32_t>(cache_sizes[1]);
    params.room =
        static_cast<int32_t>(std::min<int64_t>(arguments.block_table.sizes()[1] * params.page_size, kUnbounded));
  }
  params.is_aligned = is_aligned(arguments.k_cache) && is_aligned(arguments.v_cache) && is_aligned(arguments.k_new) &&
                      is_aligned(arguments.v_new);
  return params;
}

void append_cuda(const AppendArguments& arguments) {
  const host::Device& gpu = host::device(arguments.device_index);
  const host::Kernel& kernel = select_append(host::make_request(gpu, arguments.dtype));
  const AppendParams params = make_append_params(arguments);
  const int64_t rows = 2 * static_cast<int64_t>(params.batch) * params.new_keys * params.heads_kv;
  const int64_t warps = kernel.threads / 32;
  const host::CudaCall call(gpu);
  host::LaunchList list;
  list.add({&kernel, (rows + warps - 1) / warps, &params, nullptr, /*is_dependent=*/false});
  list.run(call);
  host::set_last_kernel(kernel.symbol);
}

}  // namespace flashmoe::attention
