// Chunks: when a kernel whose tiles hold all heads of a group, and whose keys several blocks may share, serves a ragged call, and in how many shares.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention/host/select.h"

namespace flashmoe {
namespace attention {
namespace {

constexpr const char* kFamily = "sm90";
constexpr int64_t kMostShares = 32;  // one for each lane of the combining warp
constexpr int64_t kLeastShare = 256;
constexpr int64_t kMostPartialBytes = int64_t{1} << 28;
constexpr int64_t kMostGroup = 64;  // the rows of a warpgroup
constexpr int64_t kMostRows = int64_t{1} << 24;
constexpr int64_t kMostKeyHeads = int64_t{1} << 16;
// Of a decoding tile. Measured on an H200, 64 sequences of 8192 keys, 32 heads on 8: 4 rows 484 us, and 8, whose keys it reads twice, 629.
constexpr int64_t kDecodingRows = 16;
// What the estimates below are off by, so that no call gets slower by them.
constexpr double kMargin = 0.95;

int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// Rows of a tile that a position takes.
int64_t rows_of_position(int64_t group) {
  int64_t rows = 1;
  while (rows < group) rows *= 2;
  return rows;
}

// Microseconds by the cost that the kernel's row states, of as many equal sequences as the rows are; `fold`: rows of a tile for each position.
double estimate(const VarlenSelectorInput& input, const Kernel& kernel, int64_t heads, int64_t fold, int64_t splits) {
  namespace cost = attention::cost;
  constexpr int64_t kWarpgroupRows = 64;
  const int64_t rows = std::max<int64_t>(1, input.longest_rows);
  const int64_t sequences =
      input.rows_total == 0 ? input.batch : std::min(input.batch, ceil_div(input.rows_total, rows));
  const int64_t positions = kernel.block_m / fold;
  const auto items = static_cast<double>(ceil_div(rows, positions) * sequences * heads * splits);
  const auto processors = static_cast<double>(input.request.num_multiprocessors);
  const int64_t busy_rows = ceil_div(std::min(rows, positions) * fold, kWarpgroupRows) * kWarpgroupRows;
  const double key = kernel.cost[cost::kKey] * (0.4 + 0.6 * static_cast<double>(busy_rows) / kernel.block_m);
  const auto time = [&](int64_t keys) {
    const int64_t seen = std::clamp<int64_t>(keys, 1, input.seen_keys + std::min(rows, positions));
    return static_cast<double>(seen) / static_cast<double>(splits) * key + kernel.cost[cost::kEnds];
  };
  const double longest = time(input.keys);
  const double mean = time(input.is_causal ? input.keys - rows / 2 + kernel.block_n / 2 : input.keys);
  const double in_rounds = std::ceil(items / processors) * longest;
  const double filled = items / processors * mean + time(input.is_causal ? input.keys - rows + positions : input.keys);
  double extra = 0.0;
  if (splits > 1) {
    const auto partial_rows = static_cast<double>(splits * sequences * rows * input.heads_q);
    extra = kernel.cost[cost::kSplit] + partial_rows * kernel.cost[cost::kShare] / 1000.0;
  }
  return std::max(longest, std::min(in_rounds, filled)) + extra;
}

}  // namespace

Choice select_chunk(const VarlenSelectorInput& input, const Kernel& otherwise) {
  const host::KernelRequest& request = input.request;
  if (input.is_consistent || input.is_batch_invariant || input.has_score_functions || input.has_alibi) return {};
  if (request.forced_family != nullptr && std::strcmp(request.forced_family, kFamily) != 0) return {};
  if (*values_variant(input.head_dim, input.head_dim_v) != '\0') return {};
  const int64_t group = input.heads_q / input.heads_kv;
  if (group > kMostGroup || input.heads_kv >= kMostKeyHeads || input.longest_rows > kMostRows) return {};
  const bool is_decoded = std::strcmp(otherwise.operation, "attention_decode") == 0;
  if (is_decoded && input.rows_of_key_head <= kDecodingRows) return {};
  const host::KernelList& loadable = host::loadable_kernels(request.capability);
  const Kernel* kernel = host::find_kernel({"attention_chunk_forward", kFamily, "", request.dtype, {input.head_dim}},
                                           axis::kHeadDim, loadable);
  if (kernel == nullptr || !can_load_pages(*kernel, input.page_size)) return {};
  const Kernel* combine = find_combine(request, input.head_dim);
  const int64_t fold = rows_of_position(group);
  const int64_t rows = input.rows_total == 0 ? input.longest_rows * input.batch : input.rows_total;
  const int64_t partial_bytes = rows * input.heads_q * kernel->axes[axis::kHeadDim] * int64_t{sizeof(float)};
  const int64_t wanted = input.num_splits > 1 ? std::min(input.num_splits, kMostShares) : kMostShares;
  Choice best;
  double least = 0.0;
  for (int64_t splits = 1; splits <= wanted; ++splits) {
    if (splits > 1 &&
        (combine == nullptr || input.keys / splits < kLeastShare || splits * partial_bytes > kMostPartialBytes)) {
      break;
    }
    const double time = estimate(input, *kernel, input.heads_kv, fold, splits);
    if (best.forward != nullptr && time >= least) continue;
    least = time;
    best = {kernel, splits > 1 ? combine : nullptr, static_cast<int32_t>(splits)};
  }
  if (is_decoded) return best;
  // Without a cost (of the sm80 family, for pages that no copy engine loads) there is nothing to compare with.
  if (!otherwise.has_cost) return {};
  return least < kMargin * estimate(input, otherwise, input.heads_q, 1, 1) ? best : Choice{};
}

}  // namespace attention
}  // namespace flashmoe
