// Decoding with the bits of a prefill: when two kernels, of which the first divides the keys, serve a consistent call.

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "attention/host/select.h"

namespace flashmoe {
namespace attention {
namespace {

int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// Columns of a block of attention_decode_values; of the variant "wide" twice as many.
constexpr int32_t kNarrowColumns = 32;

}  // namespace

int64_t count_scores(const Kernel& values, int64_t batch, int64_t heads, int64_t rows, int64_t keys) {
  const int64_t row_blocks = ceil_div(rows, values.block_m);
  const int64_t rows_of_item = std::min<int64_t>(rows, values.block_m);
  return batch * heads * row_blocks * rows_of_item * ceil_div(keys, values.block_n) * values.block_n;
}

OrderedDecoding select_ordered_decoding(const VarlenSelectorInput& input) {
  constexpr const char* kFamily = "sm90";
  constexpr int64_t kMostScores = int64_t{1} << 27;  // half a gigabyte of workspace
  const host::KernelRequest& request = input.request;
  if (std::getenv("TMP_NO_ORDERED") != nullptr) return {};
  if (!input.is_consistent || input.has_score_functions || input.has_alibi) return {};
  if (request.forced_family != nullptr && std::strcmp(request.forced_family, kFamily) != 0) return {};
  const host::KernelList& loadable = host::loadable_kernels(request.capability);
  const auto find = [&](const char* operation, const char* variant) {
    return host::find_kernel({operation, kFamily, variant, request.dtype, {input.head_dim}}, axis::kHeadDim, loadable);
  };
  OrderedDecoding found{find("attention_decode_scores", ""), find("attention_decode_values", ""), kNarrowColumns};
  if (found.scores == nullptr || found.values == nullptr || input.rows > found.values->block_m) return {};
  const char* wanted = values_variant(input.head_dim, input.head_dim_v);
  if (found.values->block_n != consistent_block_n(request, input.head_dim, wanted)) return {};
  if (count_scores(*found.values, input.batch, input.heads, input.rows, input.keys) > kMostScores) return {};
  const int64_t items = input.batch * input.heads;
  const int64_t processors = request.num_multiprocessors;
  if (std::getenv("TMP_NARROW") == nullptr &&
      items * found.values->axes[axis::kHeadDim] / kNarrowColumns > processors) {
    found.values = find("attention_decode_values", "wide");
    found.columns = 2 * kNarrowColumns;
  }
  return found;
}

}  // namespace attention
}  // namespace flashmoe
