// Decoding with the bits of a prefill: when two kernels, of which the first splits the keys, run a consistent call.

#include <algorithm>

#include "attention/host/select.h"
#include "attention/params/ordered.h"
#include "host/ceil_div.h"

namespace flashmoe::attention {
int64_t count_scores(const Kernel& values, int64_t batch, int64_t heads_kv, int64_t rows, int64_t keys) {
  const int64_t row_blocks = ceil_div(rows, values.block_m);
  const int64_t rows_of_item = std::min<int64_t>(rows, values.block_m);
  return batch * heads_kv * row_blocks * rows_of_item * ceil_div(keys, values.block_n) * values.block_n;
}

OrderedDecoding select_ordered_decoding(const VarlenSelectorInput& input) {
  constexpr const char* kFamily = "sm90";
  constexpr int64_t kMostScores = int64_t{1} << 27;  // half a gigabyte of workspace
  const host::KernelRequest& request = input.request;
  if (!input.is_consistent || input.has_score_functions || input.has_alibi) return {};
  if (!is_allowed(request, kFamily)) return {};
  const host::KernelList& loadable = host::loadable_kernels(request.capability);
  const auto find = [&](const char* operation) {
    return host::find_kernel({operation, kFamily, "", request.dtype, {input.head_dim}}, axis::kHeadDim, loadable);
  };
  const OrderedDecoding found{find("attention_decode_scores"), find("attention_decode_values")};
  if (found.scores == nullptr || found.values == nullptr || input.rows_of_key_head > found.values->block_m) return {};
  const char* wanted = values_variant(input.head_dim, input.head_dim_v);
  if (found.values->block_n != consistent_block_n(request, input.head_dim, wanted)) return {};
  if (count_scores(*found.values, input.batch, input.heads_kv, input.rows_of_key_head, input.keys) > kMostScores)
    return {};
  // Measured on an H200: faster if all blocks of the second kernel run at once, except where the ragged kernel has a
  // tile for nearly every multiprocessor (head dim 64; us, ordered and ragged: 12 sequences of 8 key heads and 2048
  // keys 27, 28; 16 sequences 32, 28).
  const int64_t tiles = input.batch * input.heads_kv;
  const int64_t blocks = tiles * (found.values->axes[axis::kHeadDim] / kValueColumns);
  if (blocks > found.values->min_blocks * request.num_multiprocessors) return {};
  if (4 * tiles > 3 * request.num_multiprocessors) return {};
  return found;
}

}  // namespace flashmoe::attention
