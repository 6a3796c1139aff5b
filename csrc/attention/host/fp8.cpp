// Attention with q, k and v in 8-bit floats on a GPU: transposes V, then runs the kernel that reads it.

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "attention/forward/sm90/e4m3/tensor_map.h"
#include "attention/host/e4m3.h"
#include "attention/host/prepare.h"
#include "attention/host/select.h"
#include "attention/host/varlen.h"
#include "host/ceil_div.h"
#include "host/copies.h"
#include "host/last_kernel.h"
#include "host/launch.h"
#include "host/tile_counters.h"
#include "host/workspace.h"

namespace flashmoe::attention {
namespace {

using host::describe_dtype;
using host::describe_sizes;
using host::violate;

constexpr int64_t kSmallBlock = 64, kLargeBlock = 128;  // rows per scale

BlockScale make_block_scale(const ScaleArgument& scale, const Tensor& codes) {
  const CacheScale of_heads = make_scale(scale, /*has_pages=*/false);
  BlockScale result{of_heads.values, of_heads.stride, of_heads.head_stride, 0, 0, of_heads.factor};
  if (!scale.values.is_given() || scale.values.dim() != 3) return result;
  const int64_t* strides = scale.values.strides();
  result.stride = strides[0];
  result.head_stride = strides[1];
  result.block_stride = strides[2];
  const bool is_large = scale.values.sizes()[2] == ceil_div(codes.sizes()[2], kLargeBlock);
  result.block_shift = is_large ? 7 : 6;  // kLargeBlock, kSmallBlock
  return result;
}

// A scale per tensor, per head, or, [batch, heads, blocks], per block of 128 or of least_block rows.
void check_fp8_scale(const ScaleArgument& scale, const char* name, const ForwardArguments& forward, const Tensor& codes,
                     int64_t least_block) {
  const int64_t* sizes = codes.sizes();
  if (!scale.values.is_given() || scale.values.dim() != 3) {
    check_scale(scale, name, forward, codes, sizes[0], /*has_pages=*/false);
    return;
  }
  const Tensor& values = scale.values;
  check_device(values, name, forward);
  if (values.dtype() != aoti_torch_dtype_float32()) {
    violate("attention.companion_dtype",
            {{"name", name}, {"found", describe_dtype(values.dtype())}, {"needed", "float32"}});
  }
  const int64_t blocks = values.sizes()[2];
  const bool fits = blocks == ceil_div(sizes[2], kLargeBlock) || blocks == ceil_div(sizes[2], least_block);
  if (!std::equal(sizes, sizes + 2, values.sizes()) || !fits) {
    violate("attention.fp8_scale_shape", {{"name", name},
                                          {"found", describe_sizes(values)},
                                          {"batch", sizes[0]},
                                          {"heads", sizes[1]},
                                          {"rows", sizes[2]},
                                          {"block", least_block == kLargeBlock ? "128" : "128 or 64"}});
  }
}

TransposeParams make_transpose_params(const E4m3AttentionParams& params) {
  const ForwardParams& forward = params.forward;
  TransposeParams result{};
  result.v = forward.v;
  result.v_stride = forward.v_stride;
  result.batch = forward.batch;
  result.heads_kv = forward.heads_kv;
  result.seq_k = forward.seq_k;
  result.head_dim_v = forward.head_dim_v;
  result.value_blocks = params.value_blocks;
  result.value_rows = params.value_rows;
  result.sequences = forward.sequences;
  return result;
}

void check_fp8_dtypes(const QueryKeyValue& operands) {
  const Tensor &q = operands.q, &k = operands.k, &v = operands.v;
  const int32_t code = aoti_torch_dtype_float8_e4m3fn();
  if (q.dtype() == code && k.dtype() == code && v.dtype() == code) return;
  violate("attention.fp8_dtypes",
          {{"q", describe_dtype(q.dtype())}, {"k", describe_dtype(k.dtype())}, {"v", describe_dtype(v.dtype())}});
}

// forward.v and head_dim_v describe V before the transpose; the output has `columns` columns.
void run(E4m3AttentionParams& params, const Fp8Kernels& kernels, int64_t columns, const host::Device& gpu) {
  const Kernel& kernel = *kernels.forward;
  ForwardParams& forward = params.forward;
  const bool is_ragged = forward.sequences.cu_seqlens_k != nullptr;
  params.value_blocks =
      static_cast<int32_t>(is_ragged ? forward.sequences.keys_total / kernel.block_n + int64_t{forward.batch}
                                     : ceil_div(forward.seq_k, kernel.block_n));
  params.value_rows = kernel.axes[axis::kHeadDim];
  TransposeParams transpose = make_transpose_params(params);

  const host::CudaCall call(gpu);
  const int64_t kv_heads = (is_ragged ? int64_t{1} : forward.batch) * forward.heads_kv;
  host::Workspace workspace;
  const int64_t transposed =
      workspace.add<uint8_t>(kv_heads * params.value_blocks * params.value_rows * kernel.block_n);
  workspace.allocate(call);
  transpose.out = workspace.address<uint8_t>(transposed);
  forward.v = transpose.out;
  forward.head_dim_v = static_cast<int32_t>(columns);

  const int64_t tiles = most_row_blocks(forward, kernel.block_m) * forward.heads_q;
  const int64_t grid = host::grid_for(kernel, tiles, gpu);
  host::TileCounter counter;
  if (tiles > grid) {
    counter = host::tile_counter(call);
    forward.tile_counter = counter.address;
  }
  const TensorMaps maps = encode(sm90::e4m3_tensor_maps(params, kernel.block_n), kernel.dtype);
  // A thread transposes four columns of 32 keys.
  const int64_t threads = kv_heads * params.value_blocks * (kernel.block_n / 32) * (params.value_rows / 4);
  host::LaunchList list;
  list.add({kernels.transpose, ceil_div(threads, kernels.transpose->threads), &transpose, nullptr,
            /*is_dependent=*/false});
  list.add({&kernel, grid, &params, maps.data(), /*is_dependent=*/true});
  list.run(call);
  host::set_last_kernel(kernel.symbol);
}

// The outputs that kernels write: padded if the head dim is not a multiple of 16 bytes.
ForwardOutputs writable(const ForwardOutputs& outputs, bool is_aligned) {
  ForwardOutputs written;
  written.out = is_aligned ? host::alias(outputs.out) : host::empty_like(outputs.out, host::padded_sizes(outputs.out));
  written.lse = host::alias(outputs.lse);
  return written;
}

}  // namespace

void check_fp8(Fp8Arguments& arguments) {
  ForwardArguments& forward = arguments.forward;
  check_devices(forward);
  check_fp8_dtypes(forward);
  const Tensor &q = forward.q, &k = forward.k, &v = forward.v;
  check_layout(q, "q", kDenseLayout);
  check_layout(k, "k", kDenseLayout);
  check_layout(v, "v", kDenseLayout);
  check_heads(forward, k.sizes()[1]);
  if (!std::equal(k.sizes(), k.sizes() + 3, v.sizes())) {
    violate("attention.key_value_sizes", {{"k", describe_sizes(k)}, {"v", describe_sizes(v)}});
  }
  check_batch(q.sizes()[0], k.sizes()[0]);
  check_scale(forward.scale);
  check_fp8_scale(arguments.q_scale, "q_scale", forward, q, kSmallBlock);
  check_fp8_scale(arguments.k_scale, "k_scale", forward, k, kSmallBlock);
  check_fp8_scale(arguments.v_scale, "v_scale", forward, v, kLargeBlock);
}

void forward_fp8_cuda(const Fp8Arguments& arguments, const ForwardOutputs& outputs) {
  const ForwardArguments& given = arguments.forward;
  const host::Device& gpu = host::device(given.device_index);
  if (given.k.sizes()[2] == 0) {
    fill_without_keys(outputs, /*sinks=*/Tensor(), gpu);
    return;
  }
  const auto head_dim = static_cast<int32_t>(std::max(given.q.sizes()[3], given.v.sizes()[3]));
  const Mask mask = given.is_causal ? Mask::kCausal : Mask::kFull;
  const auto is_of_blocks = [](const ScaleArgument& scale) {
    return scale.values.is_given() && scale.values.dim() == 3;
  };
  const bool has_block_scales =
      is_of_blocks(arguments.k_scale) || is_of_blocks(arguments.v_scale);  // a tile has only one scale of q
  const Fp8Kernels kernels = select_fp8(host::make_request(gpu, given.dtype), mask, head_dim, has_block_scales);
  ForwardArguments read;
  read.q = loadable_codes(given.q, /*may_repeat=*/false);
  read.k = loadable_codes(given.k, /*may_repeat=*/false);
  read.v = loadable_codes(given.v, /*may_repeat=*/true);
  read.scale = given.scale;
  const bool is_aligned = given.v.sizes()[3] % host::kRowAlignElements == 0;
  const ForwardOutputs written = writable(outputs, is_aligned);
  E4m3AttentionParams params{};
  params.forward = make_params(read, written);
  params.forward.head_dim_v = static_cast<int32_t>(read.v.sizes()[3]);
  params.q_scale = make_block_scale(arguments.q_scale, read.q);
  params.k_scale = make_block_scale(arguments.k_scale, read.k);
  params.v_scale = make_block_scale(arguments.v_scale, read.v);
  run(params, kernels, written.out.sizes()[3], gpu);
  if (!is_aligned) host::copy_unpadded(written.out, outputs.out);
}

void check_fp8(Fp8VarlenArguments& arguments) {
  VarlenArguments& varlen = arguments.varlen;
  check_devices(varlen);
  check_fp8_dtypes(varlen);
  check_varlen_arguments(varlen);
  check_scale(arguments.q_scale, "q_scale", varlen, varlen.q, varlen.batch(), /*has_pages=*/false);
  check_scale(arguments.k_scale, "k_scale", varlen, varlen.k, varlen.batch(), /*has_pages=*/false);
  check_scale(arguments.v_scale, "v_scale", varlen, varlen.v, varlen.batch(), /*has_pages=*/false);
}

void forward_fp8_cuda(const Fp8VarlenArguments& arguments, const ForwardOutputs& outputs) {
  const VarlenArguments& given = arguments.varlen;
  const host::Device& gpu = host::device(given.device_index);
  if (given.max_seqlen_k == 0 || given.k.sizes()[0] == 0) {
    fill_without_keys(outputs, /*sinks=*/Tensor(), gpu);
    return;
  }
  const auto head_dim = static_cast<int32_t>(std::max(given.head_dim(), given.head_dim_v()));
  const Fp8Kernels kernels = select_fp8_varlen(host::make_request(gpu, given.dtype), head_dim);
  const VarlenArguments read =
      with_operands(given, loadable_codes(given.q, /*may_repeat=*/false), loadable_codes(given.k, /*may_repeat=*/false),
                    loadable_codes(given.v, /*may_repeat=*/true));
  const bool is_aligned = given.head_dim_v() % host::kRowAlignElements == 0;
  const ForwardOutputs written = writable(outputs, is_aligned);
  E4m3AttentionParams params{};
  params.forward = make_varlen_params(read, written);
  params.q_scale = make_block_scale(arguments.q_scale, read.q);
  params.k_scale = make_block_scale(arguments.k_scale, read.k);
  params.v_scale = make_block_scale(arguments.v_scale, read.v);
  run(params, kernels, written.out.sizes()[2], gpu);
  if (!is_aligned) host::copy_unpadded(written.out, outputs.out);
}

}  // namespace flashmoe::attention
