#include "attention/host/varlen_arguments.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <utility>

#include "attention/host/varlen_lengths.h"
#include "host/copies.h"

namespace flashmoe::attention {
namespace {

using host::describe_device;
using host::describe_dtype;
using host::describe_sizes;
using host::violate;

constexpr int64_t kMaxLength = (int64_t{1} << 30) - 1;  // the kernels add windows and lengths in 32 bits
constexpr int64_t kMaxSplits = 32;
// The kernels' tanh has an error of up to 7e-7, which the softcap multiplies.
constexpr double kMaxSoftcap = 4096.0;
constexpr std::uintptr_t kOutAlign = 16;  // bytes that the kernels store at once
constexpr Layout kRaggedLayout{"[tokens, heads, head_dim]", 3};
constexpr Layout kPageLayout{"[pages, page_size, heads, head_dim]", 4};

// `rule`: the rule that is broken if the first dimension is not `length`.
void check_length(const Tensor& tensor, const char* rule, int64_t length) {
  if (tensor.sizes()[0] != length) violate(rule, {{"found", tensor.sizes()[0]}, {"needed", length}});
}

void check_layouts(const VarlenArguments& arguments) {
  const bool is_ragged = arguments.has_ragged_keys();
  if (is_ragged && arguments.has_pages()) violate("attention.pages_and_cu_seqlens");
  if (arguments.has_pages() && !arguments.seqused_k.is_given()) violate("attention.pages_without_lengths");
  const Layout& key_layout = is_ragged ? kRaggedLayout : arguments.has_pages() ? kPageLayout : kDenseLayout;
  check_layout(arguments.q, "q", arguments.has_ragged_rows() ? kRaggedLayout : kDenseLayout);
  check_layout(arguments.k, "k", key_layout);
  check_layout(arguments.v, "v", key_layout);
}

void check_lengths(const VarlenArguments& arguments) {
  const int32_t int32 = aoti_torch_dtype_int32();
  if (arguments.has_ragged_rows()) {
    check_companion(arguments.cu_seqlens_q, "cu_seqlens_q", arguments, int32, 1);
    if (arguments.cu_seqlens_q.sizes()[0] < 1) violate("attention.cu_seqlens_q");
  }
  const int64_t batch = arguments.batch();
  if (arguments.has_ragged_keys()) {
    check_companion(arguments.cu_seqlens_k, "cu_seqlens_k", arguments, int32, 1);
    check_length(arguments.cu_seqlens_k, "attention.cu_seqlens_k", batch + 1);
  }
  if (arguments.seqused_k.is_given()) {
    check_companion(arguments.seqused_k, "seqused_k", arguments, int32, 1);
    check_length(arguments.seqused_k, "attention.seqused_k", batch);
  }
  if (arguments.has_pages()) {
    check_companion(arguments.block_table, "block_table", arguments, int32, 2);
    check_length(arguments.block_table, "attention.block_table", batch);
    if (arguments.k.sizes()[1] < 1) violate("attention.page_size", {{"k", describe_sizes(arguments.k)}});
  } else if (!arguments.has_ragged_keys()) {
    check_batch(batch, arguments.k.sizes()[0]);
  }
}

void check_sizes(const VarlenArguments& arguments) {
  const Tensor& k = arguments.k;
  const Tensor& v = arguments.v;
  if (!std::equal(k.sizes(), k.sizes() + k.dim() - 1, v.sizes())) {
    violate("attention.key_value_sizes", {{"k", describe_sizes(k)}, {"v", describe_sizes(v)}});
  }
  check_heads(arguments, arguments.heads_kv());
}

void check_numbers(const VarlenArguments& arguments) {
  for (const auto& [value, name] :
       {std::pair(arguments.max_seqlen_q, "max_seqlen_q"), std::pair(arguments.max_seqlen_k, "max_seqlen_k")}) {
    if (value < 0 || value > kMaxLength) {
      violate("attention.max_seqlen", {{"name", name}, {"found", value}, {"most", kMaxLength}});
    }
  }
  if (arguments.window_left < -1 || arguments.window_right < -1) {
    violate("attention.window", {{"left", arguments.window_left}, {"right", arguments.window_right}});
  }
  check_scale(arguments.scale);
  const double softcap = arguments.softcap;
  if (!(softcap >= 0.0) || !is_possible_scale(softcap) ||
      (softcap > 0.0 && !is_possible_scale(arguments.scale / softcap))) {
    violate("attention.softcap", {{"softcap", softcap}});
  }
  if (softcap > kMaxSoftcap) violate("attention.softcap_too_large", {{"softcap", softcap}, {"most", kMaxSoftcap}});
  if (arguments.num_splits < kConsistent || arguments.num_splits > kMaxSplits) {
    violate("attention.num_splits", {{"found", arguments.num_splits}, {"most", kMaxSplits}});
  }
}

void check_dropout(const VarlenArguments& arguments) {
  if (!arguments.has_dropout()) return;
  if (!(arguments.dropout_p >= 0.0 && arguments.dropout_p < 1.0)) {
    violate("attention.dropout_p", {{"found", arguments.dropout_p}});
  }
  if (arguments.has_pages()) violate("attention.dropout_pages");
  const Tensor& state = arguments.rng_state;
  check_companion(state, "rng_state", arguments, aoti_torch_dtype_int64(), 1);
  if (state.sizes()[0] != 2) violate("attention.rng_state", {{"found", state.sizes()[0]}});
}

void check_scores(const VarlenArguments& arguments) {
  if (arguments.sinks.is_given()) {
    check_companion(arguments.sinks, "sinks", arguments, aoti_torch_dtype_float32(), 1);
    check_length(arguments.sinks, "attention.sinks", arguments.heads_q());
  }
  const Tensor& mask = arguments.mask;
  if (!mask.is_given()) return;
  if (has_alibi(arguments)) {
    const int64_t heads[] = {arguments.batch(), arguments.heads_q()};
    check_device(mask, "alibi_slopes", arguments);
    if (!std::equal(heads, heads + 2, mask.sizes())) {
      violate("attention.alibi_slopes", {{"found", describe_sizes(mask)}, {"needed", describe_sizes(heads, 2)}});
    }
    return;
  }
  check_device(mask, "attn_mask", arguments);
  if (mask.dtype() != arguments.torch_dtype && mask.dtype() != aoti_torch_dtype_bool()) {
    violate("attention.mask_dtype",
            {{"found", describe_dtype(mask.dtype())}, {"q", describe_dtype(arguments.torch_dtype)}});
  }
  const int64_t sizes[] = {arguments.batch(), arguments.heads_q(), arguments.max_seqlen_q, arguments.max_seqlen_k};
  const auto fits = [](int64_t needed, int64_t found) { return found == needed || found == 1; };
  if (mask.dim() != 4 || !std::equal(sizes, sizes + 4, mask.sizes(), fits)) {
    const bool is_padding = mask.dim() == 2 && mask.sizes()[0] == sizes[0] && mask.sizes()[1] == sizes[3];
    violate(is_padding ? "attention.padding_mask" : "attention.mask_shape",
            {{"found", describe_sizes(mask)}, {"needed", describe_sizes(sizes, 4)}});
  }
}

// New keys of two sequences or heads would overwrite each other.
void check_not_expanded(const Tensor& cache, const char* name) {
  for (int64_t axis = 0; axis < cache.dim(); ++axis) {
    if (cache.sizes()[axis] > 1 && cache.strides()[axis] == 0) {
      violate("attention.expanded_cache",
              {{"name", name}, {"sizes", describe_sizes(cache)}, {"strides", host::describe_strides(cache)}});
    }
  }
}

// Rows are copied in any order. If values share memory with their keys (v is a part of k) in the caches, they must in
// the new rows too, or the last row written would win.
void check_apart(const AppendArguments& arguments) {
  struct Memory {
    explicit Memory(const Tensor& of, const char* its_name) : tensor(of), name(its_name), range(memory_range(of)) {}
    const Tensor& tensor;
    const char* name;
    host::MemoryRange range;
  };
  const Memory caches[] = {Memory(arguments.k_cache, "k_cache"), Memory(arguments.v_cache, "v_cache")};
  for (const Memory& rows : {Memory(arguments.k_new, "k_new"), Memory(arguments.v_new, "v_new")}) {
    for (const Memory& cache : caches) {
      if (cache.range.meets(rows.range) && host::may_overlap(cache.tensor, rows.tensor)) {
        violate("attention.shared_memory", {{"name", rows.name}, {"cache", cache.name}});
      }
    }
  }
  if (host::is_same_memory(arguments.k_cache, arguments.v_cache) &&
      !host::is_same_memory(arguments.k_new, arguments.v_new)) {
    violate("attention.same_cache");
  }
}

}  // namespace

void check_varlen_arguments(VarlenArguments& arguments) {
  if (!arguments.has_code_queries) check_operands(arguments, arguments.has_codes);
  check_layouts(arguments);
  check_lengths(arguments);
  check_sizes(arguments);
  if (!arguments.has_ragged_rows()) arguments.max_seqlen_q = arguments.q.sizes()[2];
  if (!arguments.has_ragged_keys() && !arguments.has_pages()) arguments.max_seqlen_k = arguments.k.sizes()[2];
  check_numbers(arguments);
  check_scores(arguments);
  check_dropout(arguments);
  if (arguments.q.description() == nullptr) check_varlen_lengths(arguments);
}

void check_out(const VarlenArguments& arguments, const Tensor& out) {
  if (!out.is_defined()) violate("tensor.missing", {{"name", "out"}});
  const int64_t rank = arguments.q.dim();
  check_companion(out, "out", arguments, arguments.torch_dtype, rank);
  std::array<int64_t, 4> sizes{};
  std::copy_n(arguments.q.sizes(), rank, sizes.begin());
  sizes[static_cast<std::size_t>(rank - 1)] = arguments.head_dim_v();
  if (!std::equal(sizes.data(), sizes.data() + rank, out.sizes())) {
    violate("attention.out_shape", {{"needed", describe_sizes(sizes.data(), rank)}, {"found", describe_sizes(out)}});
  }
  const int64_t* strides = out.strides();
  std::array<int64_t, 4> order{0, 1, 2, 3};
  std::stable_sort(order.begin(), order.begin() + rank - 1,
                   [&](int64_t left, int64_t right) { return strides[left] > strides[right]; });
  int64_t step = 1;
  bool is_dense = true;
  for (int64_t position = rank - 1; position >= 0; --position) {
    const int64_t axis = order[static_cast<std::size_t>(position)];
    is_dense = is_dense && (sizes[static_cast<std::size_t>(axis)] <= 1 || strides[axis] == step);
    step *= sizes[static_cast<std::size_t>(axis)];
  }
  if (step == 0) return;
  if (!is_dense) violate("attention.out_strides", {{"strides", host::describe_strides(out)}});
  if (out.description() != nullptr) return;
  const bool is_written_whole =
      arguments.device_type == aoti_torch_device_type_cuda() && arguments.head_dim_v() % host::kRowAlignElements == 0;
  if (is_written_whole && reinterpret_cast<std::uintptr_t>(out.data()) % kOutAlign != 0) {
    violate("attention.out_alignment", {{"multiple", kOutAlign}});
  }
  for (const auto& [tensor, name] :
       {std::pair(&arguments.q, "q"), std::pair(&arguments.k, "k"), std::pair(&arguments.v, "v")}) {
    if (host::may_overlap(out, *tensor)) violate("attention.out_overlap", {{"name", name}});
  }
}

void check_varlen_backward_arguments(VarlenBackwardArguments& arguments) {
  VarlenArguments& forward = arguments.forward;
  check_varlen_arguments(forward);
  if (!(static_cast<float>(forward.scale) >= std::numeric_limits<float>::min())) {
    violate("attention.backward_scale", {{"scale", forward.scale}});
  }
  const int64_t rank = forward.q.dim();
  int64_t sizes[4] = {};
  std::copy_n(forward.q.sizes(), rank, sizes);
  sizes[rank - 1] = forward.head_dim_v();
  check_backward_tensors(arguments, forward, sizes);
}

void check_append_arguments(AppendArguments& arguments) {
  const Tensor &k_cache = arguments.k_cache, &v_cache = arguments.v_cache;
  const Tensor &k_new = arguments.k_new, &v_new = arguments.v_new;
  for (const auto& [tensor, name] : {std::pair(&k_cache, "k_cache"), std::pair(&v_cache, "v_cache"),
                                     std::pair(&k_new, "k_new"), std::pair(&v_new, "v_new")}) {
    if (!tensor->is_defined()) violate("tensor.missing", {{"name", name}});
    const Tensor& first = arguments.has_codes && (tensor == &k_new || tensor == &v_new) ? k_new : k_cache;
    const bool is_alike = tensor->dtype() == first.dtype();
    if (is_alike && tensor->device_type() == first.device_type() && tensor->device_index() == first.device_index()) {
      continue;
    }
    violate(is_alike ? "attention.append_device" : "attention.append_dtype",
            {{"name", name},
             {"dtype", describe_dtype(tensor->dtype())},
             {"device", describe_device(*tensor)},
             {"cache_dtype", describe_dtype(first.dtype())},
             {"cache_device", describe_device(first)}});
  }
  if (!arguments.cache_seqlens.is_given()) violate("tensor.missing", {{"name", "cache_seqlens"}});
  // k_new takes the place of a dense q with the same number of heads: the rules are the same.
  VarlenArguments cache;
  cache.q = host::alias(k_new);
  cache.k = host::alias(k_cache);
  cache.v = host::alias(v_cache);
  cache.block_table = arguments.has_pages() ? host::alias(arguments.block_table) : Tensor();
  cache.seqused_k = host::alias(arguments.cache_seqlens);
  check_operands(cache, arguments.has_codes);
  check_layout(k_new, "k_new", kDenseLayout);
  check_layout(v_new, "v_new", kDenseLayout);
  for (const auto& [tensor, name] : {std::pair(&k_cache, "k_cache"), std::pair(&v_cache, "v_cache")}) {
    check_layout(*tensor, name, arguments.has_pages() ? kPageLayout : kDenseLayout);
  }
  const int64_t batch = k_new.sizes()[0];
  if (!arguments.has_pages() && k_cache.sizes()[0] != batch) {
    violate("attention.append_batch", {{"k_new", batch}, {"k_cache", k_cache.sizes()[0]}});
  }
  check_lengths(cache);
  for (const auto& [rows, stored, name] :
       {std::tuple(&k_new, &k_cache, "k_new"), std::tuple(&v_new, &v_cache, "v_new")}) {
    if (rows->sizes()[1] == cache.heads_kv() && rows->sizes()[3] == stored->sizes()[3] &&
        std::equal(k_new.sizes(), k_new.sizes() + 3, rows->sizes())) {
      continue;
    }
    violate("attention.append_shape",
            {{"name", name}, {"found", describe_sizes(*rows)}, {"cache", describe_sizes(*stored)}});
  }
  check_sizes(cache);
  if (k_new.sizes()[2] > 0) {
    check_not_expanded(k_cache, "k_cache");
    check_not_expanded(v_cache, "v_cache");
    if (k_new.description() == nullptr) check_apart(arguments);
  }
  arguments.dtype = cache.dtype;
  arguments.device_type = cache.device_type;
  arguments.device_index = cache.device_index;
  if (k_new.description() == nullptr) check_append_lengths(arguments);
}

}  // namespace flashmoe::attention
