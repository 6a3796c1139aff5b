// Decoding on a GPU: selects the kernel, prepares tensors, builds the launch list. Nothing here reads device memory.
#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "host/ceil_div.h"
#include "host/copies.h"
#include "host/last_kernel.h"
#include "host/launch.h"
#include "host/tensor_map.h"
#include "host/workspace.h"
#include "mla/host/arguments.h"
#include "mla/params/decode.h"
#include "mla/sm90/tensor_map.h"

namespace flashmoe::mla {
namespace {

using host::Kernel;

constexpr double kLog2E = 1.4426950408889634;
constexpr int32_t kNoLimit = 1 << 20;  // on the parts of a sequence
// Keys are read once, and the size of a key is not a multiple of 256 bytes.
constexpr CUtensorMapL2promotion kKeyPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;

const Kernel* find_kernel(const host::KernelRequest& request, const char* operation, const char* family,
                          const char* variant) {
  return host::find_kernel({operation, family, variant, request.dtype, {}}, host::kNoAxis,
                           host::loadable_kernels(request.capability));
}

// TMA needs at least one key.
bool has_keys(const DecodeArguments& arguments) {
  return arguments.kv_cache.sizes()[0] > 0 && arguments.max_keys() > 0;
}

// What the kernel reads: the cache itself if possible. TMA needs pages in ascending order.
Tensor readable_cache(const DecodeArguments& arguments, const Kernel& kernel) {
  const Tensor& cache = arguments.kv_cache;
  if (!arguments.is_fp8) return host::loadable(cache, kernel);
  const bool is_mappable =
      (cache.sizes()[0] == 1 || cache.strides()[0] > 0) && (cache.sizes()[1] == 1 || cache.strides()[1] > 0);
  return is_mappable || kernel.num_tensor_maps == 0 ? host::alias(cache) : host::contiguous(cache);
}

constexpr char kFewRows[] = "mla_decode_few";

bool is_few_rows(const Kernel& kernel) { return std::strcmp(kernel.operation, kFewRows) == 0; }

// Whether up to 32 rows run as two tiles of 16: if each block of the grid then has at most one key block. Not with one
// split, whose bits are the same in any batch.
bool is_in_two_tiles(const DecodeArguments& arguments, int64_t rows, int64_t num_multiprocessors) {
  constexpr int64_t kBlockN = 64;
  const int64_t sequences = arguments.batch() * (arguments.is_sparse() ? arguments.tokens() : 1);
  return rows <= 32 && arguments.num_splits != 1 &&
         2 * sequences * ceil_div(arguments.max_keys(), kBlockN) <= num_multiprocessors;
}

// The kernel for few rows if the GPU has it and no family is forced. Otherwise the best family that the GPU has, or the
// forced one. Neither the cache's format nor indices affect that: their bits are those of dense 16-bit keys.
const Kernel& select_decode(const host::KernelRequest& request, const DecodeArguments& arguments, int64_t rows,
                            int64_t num_multiprocessors) {
  const bool is_wgmma_wanted = has_keys(arguments);
  constexpr int64_t kMaxFewRows = 16;
  const bool is_few = rows <= kMaxFewRows;
  std::string few = rows <= 8 ? "m8" : "m16";
  std::string wgmma;
  std::string mma_sync = is_few ? "" : "m32";
  for (const char* word : {arguments.is_fp8 ? "codes" : "", arguments.is_sparse() ? "sparse" : ""}) {
    for (std::string* variant : {&few, &wgmma, &mma_sync}) {
      if (!variant->empty() && *word != '\0') *variant += '_';
      *variant += word;
    }
  }
  const bool is_forced = request.forced_family != nullptr;
  if (is_wgmma_wanted && !is_forced && (is_few || is_in_two_tiles(arguments, rows, num_multiprocessors))) {
    const Kernel* kernel = find_kernel(request, kFewRows, "sm90", few.c_str());
    if (kernel != nullptr) return *kernel;
  }
  for (const char* const* family = host::families_of(request.capability); *family != nullptr; ++family) {
    if (is_forced && std::strcmp(request.forced_family, *family) != 0) continue;
    const bool is_wgmma = std::strcmp(*family, "sm90") == 0;
    if (is_wgmma && (!is_wgmma_wanted || (is_few && !is_forced))) continue;
    const Kernel* kernel = find_kernel(request, "mla_decode", *family, is_wgmma ? wgmma.c_str() : mma_sync.c_str());
    if (kernel != nullptr) return *kernel;
  }
  host::refuse(request, arguments.is_fp8        ? "an FP8 cache of latents"
                        : arguments.is_sparse() ? "latents named by indices"
                                                : "multi-head latent attention");
}

const Kernel& select_combine(const host::KernelRequest& request) {
  const Kernel* kernel = find_kernel(request, "mla_combine", "sm80", "");
  if (kernel == nullptr) host::refuse(request, "multi-head latent attention");
  return *kernel;
}

// Whether all rows of a sequence have one stride and can be loaded 16 bytes at a time.
bool is_loadable_query(const Tensor& q, const Kernel& kernel) {
  const int64_t* strides = q.strides();
  return host::is_loadable(q, kernel) && (q.sizes()[1] == 1 || strides[1] == q.sizes()[2] * strides[2]);
}

// Whether all tokens have one stride.
bool has_even_tokens(const Tensor& q) {
  const int64_t *sizes = q.sizes(), *strides = q.strides();
  const int64_t token = sizes[2] * strides[2];
  return (sizes[1] == 1 || strides[1] == token) && (sizes[0] == 1 || strides[0] == sizes[1] * token);
}

DecodeParams make_params(const DecodeArguments& arguments, const Tensor& q, const Tensor& cache, const Tensor& out,
                         const Tensor& lse) {
  const bool has_pages = arguments.block_table.is_given();
  DecodeParams params{};
  params.q = q.data();
  params.cache = cache.data();
  params.out = out.data();
  params.lse = static_cast<float*>(lse.data());
  if (has_pages) {
    params.block_table = static_cast<const int32_t*>(arguments.block_table.data());
    params.block_table_stride = arguments.block_table.strides()[0];
  }
  if (arguments.cache_seqlens.is_given()) {
    params.cache_seqlens = static_cast<const int32_t*>(arguments.cache_seqlens.data());
  }
  if (arguments.sinks.is_given()) params.sinks = static_cast<const float*>(arguments.sinks.data());
  params.q_stride_batch = q.strides()[0];
  params.q_stride_row = q.strides()[2];
  params.page_stride = cache.strides()[0];
  params.key_stride = cache.strides()[1];
  params.batch = static_cast<int32_t>(arguments.batch());
  params.tokens = static_cast<int32_t>(arguments.tokens());
  params.batches_per_sequence = 1;
  params.heads = static_cast<int32_t>(arguments.heads());
  params.max_keys = cache.sizes()[0] > 0 ? static_cast<int32_t>(arguments.max_keys()) : 0;
  params.page_size = static_cast<int32_t>(std::max<int64_t>(1, cache.sizes()[1]));
  params.num_pages = static_cast<int32_t>(cache.sizes()[0]);
  params.is_causal = arguments.is_causal ? 1 : 0;
  params.is_fp8 = arguments.is_fp8 ? 1 : 0;
  params.scale_log2 = static_cast<float>(arguments.scale * kLog2E);
  return params;
}

// Every token becomes a sequence, whose keys its indices select.
void set_topk_indices(DecodeParams& params, const Tensor& indices) {
  params.indices = static_cast<const int32_t*>(indices.data());
  params.num_slots = static_cast<int32_t>(
      std::min<int64_t>(int64_t{params.num_pages} * params.page_size, std::numeric_limits<int32_t>::max()));
  params.q_stride_batch = params.q_stride_row * params.heads;
  params.batches_per_sequence = params.tokens;
  params.batch *= params.tokens;
  params.tokens = 1;
  params.is_causal = 0;
}

int32_t log2_of(int32_t power) {
  int32_t log2 = 0;
  while ((1 << log2) < power) ++log2;
  return log2;
}

void run(const DecodeArguments& arguments, DecodeParams params, const Kernel& kernel, const Kernel& combine,
         const host::Device& gpu) {
  const int64_t rows = int64_t{params.tokens} * params.heads;
  const int64_t row_tiles = ceil_div(rows, kernel.block_m);
  params.block_m = kernel.block_m;
  params.row_tiles = static_cast<int32_t>(row_tiles);
  params.block_n_log2 = log2_of(kernel.block_n);
  params.box_rows = sm90::page_box_rows(params.block_table != nullptr, params.page_size, kernel.block_n);
  params.num_splits = arguments.num_splits == 0 ? kNoLimit : static_cast<int32_t>(arguments.num_splits);
  // As many parts as the GPU holds blocks at once. Shorter ones cost more at their ends than they gain.
  params.min_blocks_per_part = is_few_rows(kernel) ? 1 : 2;
  const int64_t blocks = int64_t{gpu.num_multiprocessors} * kernel.min_blocks;
  const int64_t max_parts = std::max<int64_t>(1, blocks / row_tiles);
  // Without lengths all sequences are equal. With about one per part, the scheduler would give each its own part.
  const bool is_one_each =
      params.cache_seqlens == nullptr && params.batch <= max_parts && 17 * int64_t{params.batch} >= 16 * max_parts;
  if (is_one_each) params.num_splits = 1;
  const bool is_split = params.num_splits != 1;
  // Leaves up to 1/32 of the parts unused if equal sequences then have whole parts, or parts whole sequences.
  const int64_t even_parts = params.batch <= max_parts ? max_parts / params.batch * params.batch : max_parts;
  const bool is_even = max_parts - even_parts <= max_parts / 32;
  params.num_sm_parts = static_cast<int32_t>(!is_split ? params.batch : is_even ? even_parts : max_parts);
  constexpr int32_t kLanes = 32;  // tile_scheduler.cuh looks at this many sequences at once
  params.parts_per_sequence = is_split && params.batch <= kLanes ? params.num_sm_parts / params.batch : 0;
  // If each sequence is in many parts, several warps add up a row.
  constexpr int64_t kManyParts = 24;
  params.warps_per_sum = params.num_sm_parts >= kManyParts * params.batch ? combine.block_m : 1;

  const host::CudaCall call(gpu);
  host::Workspace workspace;
  if (is_split) {
    const int64_t partial_rows = 2 * int64_t{params.num_sm_parts} * row_tiles * kernel.block_m;
    const int64_t out = workspace.add<float>(partial_rows * kLatentDim);
    const int64_t state = workspace.add<float>(partial_rows * 2);
    workspace.allocate(call);
    params.out_partial = workspace.address<float>(out);
    params.state_partial = workspace.address<float>(state);
  }
  CUtensorMap maps[2];
  if (kernel.num_tensor_maps > 0) {
    const sm90::DecodeTensorMaps described = sm90::decode_tensor_maps(params, kernel.block_n);
    maps[0] = host::encode_tensor_map(described.q, kernel.dtype, "q");
    maps[1] = host::encode_tensor_map(described.cache, kernel.dtype, "kv_cache", kKeyPromotion);
  }
  host::LaunchList list;
  list.add({&kernel, params.num_sm_parts * row_tiles, &params, maps, /*is_dependent=*/true});
  if (is_split) {
    const int64_t sums = combine.block_m / params.warps_per_sum;  // per block at once
    const int64_t sequences = std::min<int64_t>(params.batch, params.num_sm_parts);
    // More blocks than the GPU holds at once would only make the schedule again.
    const int64_t held = std::max<int64_t>(1, int64_t{gpu.num_multiprocessors} * combine.min_blocks / sequences);
    const int64_t units = ceil_div(rows, kSumRows) * (kLatentDim / kSumColumns);
    params.tile_pairs_per_warp = units > held * sums ? 2 : 1;  // 2: fewer rounds; 1: more warps
    // Divides evenly: units are a multiple of 32, and the divisor is a power of two up to 16.
    const int64_t blocks = std::min(units / (sums * params.tile_pairs_per_warp), held);
    list.add({&combine, sequences * blocks, &params, nullptr, /*is_dependent=*/true});
  }
  list.run(call);
}

}  // namespace

void decode_cuda(const DecodeArguments& arguments, const Tensor& out, const Tensor& lse) {
  const host::Device& gpu = host::device(arguments.q.device_index());
  const host::KernelRequest request = host::make_request(gpu, arguments.dtype);
  const bool is_sparse = arguments.is_sparse();
  const int64_t rows = is_sparse ? arguments.heads() : arguments.tokens() * arguments.heads();
  const Kernel& kernel = select_decode(request, arguments, rows, gpu.num_multiprocessors);
  const bool is_loadable = is_loadable_query(arguments.q, kernel) && (!is_sparse || has_even_tokens(arguments.q));
  const Tensor q = is_loadable ? host::alias(arguments.q) : host::padded_copy(arguments.q);
  const Tensor cache = readable_cache(arguments, kernel);
  DecodeParams params = make_params(arguments, q, cache, out, lse);
  const Tensor indices = is_sparse ? host::contiguous(arguments.indices) : Tensor();
  if (is_sparse) set_topk_indices(params, indices);
  run(arguments, params, kernel, select_combine(request), gpu);
  host::set_last_kernel(kernel.symbol);
}

}  // namespace flashmoe::mla
