#include "mla/host/arguments.h"

#include <cmath>
#include <limits>
#include <utility>

#include "mla/host/checks.h"
#include "mla/params/decode.h"

namespace flashmoe::mla {
namespace {

using host::describe_device;
using host::describe_dtype;
using host::describe_sizes;
using host::violate;

constexpr int64_t kMaxHeads = 128;
constexpr int64_t kMaxTokens = 4096;
constexpr int64_t kMaxSplits = 128;
constexpr int64_t kMaxKeys = (int64_t{1} << 30) - 1;

void check_cache(const DecodeArguments& arguments) {
  const Tensor& cache = arguments.kv_cache;
  const bool has_pages = arguments.block_table.is_given() || arguments.is_sparse();
  if (arguments.is_fp8) {
    check_fp8_cache(cache, has_pages, arguments.batch());
  } else {
    const char* rule = has_pages ? "mla.pages" : "mla.cache";
    if (cache.dim() != 3 || cache.sizes()[2] != kHeadDim || (!has_pages && cache.sizes()[0] != arguments.batch())) {
      violate(rule, {{"found", describe_sizes(cache)}, {"batch", arguments.batch()}});
    }
    check_last_stride(cache, "kv_cache");
  }
  if (arguments.block_table.is_given()) check_page_size(cache);
}

// Indices select the keys, or each sequence has its own.
void check_keys(const DecodeArguments& arguments) {
  const Tensor& q = arguments.q;
  const int32_t int32 = aoti_torch_dtype_int32();
  if (!arguments.is_sparse()) {
    check_companion(arguments.cache_seqlens, "cache_seqlens", q, "q", int32, 1, arguments.batch());
    if (arguments.block_table.is_given()) {
      check_companion(arguments.block_table, "block_table", q, "q", int32, 2, arguments.batch());
    }
    return;
  }
  const Tensor& indices = arguments.indices;
  if (arguments.cache_seqlens.is_given() || arguments.block_table.is_given()) {
    violate("mla.indices_alone", {{"name", arguments.cache_seqlens.is_given() ? "cache_seqlens" : "block_table"}});
  }
  check_device(indices, "indices", q, "q");
  if (indices.dtype() != int32) {
    violate("mla.companion_dtype",
            {{"name", "indices"}, {"found", describe_dtype(indices.dtype())}, {"needed", "int32"}});
  }
  if (indices.dim() != 3 || indices.sizes()[0] != arguments.batch() || indices.sizes()[1] != arguments.tokens()) {
    violate("mla.indices",
            {{"found", describe_sizes(indices)}, {"batch", arguments.batch()}, {"tokens", arguments.tokens()}});
  }
}

void check_operands(DecodeArguments& arguments) {
  const Tensor& q = arguments.q;
  const Tensor& cache = arguments.kv_cache;
  if (!q.is_defined()) violate("tensor.missing", {{"name", "q"}});
  if (!cache.is_defined()) violate("tensor.missing", {{"name", "kv_cache"}});
  check_device(cache, "kv_cache", q, "q");
  if (q.description() != nullptr && q.device_type() < 0) violate("attention.device", {{"device", describe_device(q)}});
  const bool is_cuda = q.device_type() == aoti_torch_device_type_cuda();
  const std::optional<Dtype> dtype = host::dtype_of(q.dtype());
  if (!dtype.has_value() || (*dtype == Dtype::kFloat32 && is_cuda)) {
    violate("mla.dtype", {{"dtype", describe_dtype(q.dtype())},
                          {"device", describe_device(q)},
                          {"supported", is_cuda ? "float16, bfloat16" : "float16, bfloat16, float32"}});
  }
  arguments.dtype = *dtype;
  arguments.is_fp8 = is_fp8_dtype(cache);
  if (arguments.is_fp8 && *dtype == Dtype::kFloat32) {
    violate("mla.coded_q", {{"q", describe_dtype(q.dtype())}});
  }
  if (!arguments.is_fp8 && cache.dtype() != q.dtype()) {
    violate("mla.dtypes", {{"q", describe_dtype(q.dtype())}, {"kv_cache", describe_dtype(cache.dtype())}});
  }
  if (q.dim() != 4 || q.sizes()[3] != kHeadDim || q.sizes()[2] < 1 || q.sizes()[2] > kMaxHeads ||
      q.sizes()[1] > kMaxTokens) {
    violate("mla.q", {{"found", describe_sizes(q)}, {"tokens", kMaxTokens}, {"heads", kMaxHeads}});
  }
  check_last_stride(q, "q");
  check_cache(arguments);
}

void check_numbers(const DecodeArguments& arguments) {
  const double scale = arguments.scale;
  if (!(scale >= std::numeric_limits<float>::min() && scale <= std::numeric_limits<float>::max() / 2)) {
    violate("mla.scale", {{"found", scale}});
  }
  if (arguments.num_splits < 0 || arguments.num_splits > kMaxSplits) {
    violate("mla.num_splits", {{"found", arguments.num_splits}, {"most", kMaxSplits}});
  }
  if (arguments.max_keys() > kMaxKeys || arguments.kv_cache.sizes()[0] > std::numeric_limits<int32_t>::max()) {
    violate("mla.max_keys", {{"found", arguments.max_keys()}, {"most", kMaxKeys}});
  }
}

}  // namespace

DecodeArguments parse_decode(host::Arguments& given) {
  DecodeArguments arguments;
  given.tensors(arguments.q, arguments.kv_cache);
  given.optional_tensors(arguments.cache_seqlens, arguments.block_table, arguments.sinks);
  arguments.scale = given.number();
  arguments.is_causal = given.flag();
  arguments.num_splits = given.integer();
  arguments.indices = given.optional_tensor();
  if (!arguments.is_sparse() && !arguments.cache_seqlens.is_given()) violate("mla.no_lengths", {});
  check_operands(arguments);
  check_keys(arguments);
  if (arguments.sinks.is_given()) {
    check_companion(arguments.sinks, "sinks", arguments.q, "q", aoti_torch_dtype_float32(), 1, arguments.heads());
  }
  check_numbers(arguments);
  return arguments;
}

}  // namespace flashmoe::mla
