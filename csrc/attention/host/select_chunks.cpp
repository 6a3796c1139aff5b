// Chunk kernels hold all heads of a group in one tile, and several blocks may split the keys. Decides when they run a
// ragged call, and with how many splits.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention/host/select.h"
#include "host/ceil_div.h"

namespace flashmoe::attention {
namespace {

constexpr const char* kFamily = "sm90";
constexpr int64_t kMaxSplits = 32;  // one per lane of the combining warp
constexpr int64_t kMinKeysPerSplit = 256;
constexpr int64_t kMostPartialBytes = int64_t{1} << 28;
constexpr int64_t kMostGroup = 64;  // the rows of a warpgroup
constexpr int64_t kMostRows = int64_t{1} << 24;
constexpr int64_t kMostKeyHeads = int64_t{1} << 16;
// Rows of a decoding tile. Measured on an H200, 64 sequences of 8192 keys, 32 heads on 8: 4 rows 484 us, and 8, for
// which it reads the keys twice, 629.
constexpr int64_t kDecodingRows = 16;
// Head dim 256, 32 heads on 8, us by decoding and as a chunk: 4 rows of 4096 keys 37 and 17, of 16384 60 and 45,
// 16 x 1024 51 and 40.
constexpr int64_t kWideDecodingRows = 8;
// Head dim 128, one or two sequences of 8 key heads with 13 to 16 rows each, us by decoding and as a chunk: 1 x 4096
// 15.4 and 13.6, 2 x 4096 16.2 and 14.9; 2 x 1024 11.7 and 12.5, 2 x 16384 41 and 42, 4 x 4096 26 and 27.
constexpr int64_t kFewRows = 12;
constexpr int64_t kFewKeyHeads = 16;
constexpr int64_t kFewKeys = 2048;
constexpr int64_t kManyKeys = 8192;
// The error of the estimates below: with this margin they make no call slower.
constexpr double kMargin = 0.955;
// Dense kernels are less slow than estimated if their tiles are mostly empty. Of 183 dense problems with grouped heads
// and 2 to 64 rows, measured on an H200, those that these margins select are 1.02 to 5 times as fast as with the dense
// kernels.
constexpr double kDenseMargin = 0.65;
constexpr double kWideDenseMargin = 0.45;
constexpr int32_t kWide = 128;  // for head dims above this
// With a softcap or a mask tensor: only where the ragged kernels, whose tiles hold one head's rows, are mostly empty.
// (A dense mask with more rows is streamed.)
constexpr int64_t kMostScoredRows = 127;
constexpr int64_t kLeastScoredKeys =
    512;  // if heads share no keys: 32 x 100 rows over 100 keys take 1.13 times as long, over 512 0.96

// Tile rows per query position.
int64_t rows_of_position(int64_t group) {
  int64_t rows = 1;
  while (rows < group) rows *= 2;
  return rows;
}

// Microseconds, from the cost in the kernel's table row, for as many equal sequences as the rows make; `fold`: tile
// rows per query position.
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

struct TimedPlan {
  KernelPlan plan;
  double microseconds = 0.0;
};

// Whether decoding is faster than a chunk, for a call that the decoding kernels can run.
bool is_decoded_faster(const VarlenSelectorInput& input) {
  if (input.rows_of_key_head > (input.head_dim > kWide ? kWideDecodingRows : kDecodingRows)) return false;
  const bool is_short = input.head_dim > 64 && input.rows_of_key_head > kFewRows && input.keys >= kFewKeys &&
                        input.keys <= kManyKeys && input.batch * input.heads_kv <= kFewKeyHeads;
  return !is_short;
}

TimedPlan fastest_chunk(const VarlenSelectorInput& input) {
  const host::KernelRequest& request = input.request;
  if (input.is_consistent || input.is_batch_invariant || input.has_alibi) return {};
  if (input.has_score_functions && input.rows_of_key_head > kMostScoredRows) return {};
  if (input.has_score_functions && input.heads_q == input.heads_kv && input.keys < kLeastScoredKeys) return {};
  if (!is_allowed(request, kFamily)) return {};
  if (*values_variant(input.head_dim, input.head_dim_v) != '\0') return {};
  const int64_t group = input.heads_q / input.heads_kv;
  if (group > kMostGroup || input.heads_kv >= kMostKeyHeads || input.longest_rows > kMostRows) return {};
  const host::KernelList& loadable = host::loadable_kernels(request.capability);
  const char* variant = input.has_score_functions ? "scores" : "";
  const Kernel* kernel = host::find_kernel(
      {"attention_chunk_forward", kFamily, variant, request.dtype, {input.head_dim}}, axis::kHeadDim, loadable);
  if (kernel == nullptr || !can_load_pages(*kernel, input.page_size)) return {};
  const Kernel* combine = find_combine(request, input.head_dim);
  const int64_t fold = rows_of_position(group);
  const int64_t rows = input.rows_total == 0 ? input.longest_rows * input.batch : input.rows_total;
  const int64_t partial_bytes = rows * input.heads_q * kernel->axes[axis::kHeadDim] * int64_t{sizeof(float)};
  const int64_t wanted = input.num_splits > 1 ? std::min(input.num_splits, kMaxSplits) : kMaxSplits;
  TimedPlan best;
  for (int64_t splits = 1; splits <= wanted; ++splits) {
    if (splits > 1 &&
        (combine == nullptr || input.keys / splits < kMinKeysPerSplit || splits * partial_bytes > kMostPartialBytes)) {
      break;
    }
    const double time = estimate(input, *kernel, input.heads_kv, fold, splits);
    if (best.plan.forward != nullptr && time >= best.microseconds) continue;
    best = {{kernel, splits > 1 ? combine : nullptr, static_cast<int32_t>(splits)}, time};
  }
  return best;
}

bool decodes(const Kernel& kernel) { return std::strcmp(kernel.operation, "attention_decode") == 0; }

}  // namespace

KernelPlan select_chunk(const VarlenSelectorInput& input, const Kernel& otherwise) {
  if (decodes(otherwise) && (input.has_score_functions || is_decoded_faster(input))) return {};
  const TimedPlan chunk = fastest_chunk(input);
  if (chunk.plan.forward == nullptr || decodes(otherwise) || input.has_score_functions) return chunk.plan;
  // Without a cost (sm80 kernels, for pages that TMA cannot load) there is nothing to compare with.
  if (!otherwise.has_cost) return {};
  const double limit = kMargin * estimate(input, otherwise, input.heads_q, 1, 1);
  return chunk.microseconds < limit ? chunk.plan : KernelPlan{};
}

bool prefers_folded_rows(const SelectorInput& dense, const KernelPlan& plan) {
  // Head dim 128, heads that share no keys: 2 to 8 rows are 9 to 25% faster by decoding; at 64 and 256 from 36% faster
  // to 17% slower.
  constexpr int64_t kUngroupedRows = 8;
  constexpr int64_t kMostFoldedRows = 64;
  const int64_t group = dense.heads_q / dense.heads_kv;
  if (dense.is_consistent || dense.request.forced_family != nullptr || dense.seq_q < 2 ||
      dense.seq_q > kMostFoldedRows || dense.request.capability != kMeasuredCapability) {
    return false;
  }
  VarlenSelectorInput input{};
  input.request = dense.request;
  input.head_dim = input.head_dim_v = dense.head_dim;
  input.rows = input.longest_rows = dense.seq_q;
  input.keys = input.seen_keys = dense.seq_k;
  input.heads = input.heads_q = dense.heads_q;
  input.heads_kv = dense.heads_kv;
  input.rows_of_key_head = dense.seq_q * group;
  input.batch = dense.batch;
  input.is_causal = dense.mask == Mask::kCausal;
  if (group == 1) return dense.head_dim > 64 && dense.head_dim <= kWide && dense.seq_q <= kUngroupedRows;
  if (dense.head_dim <= kWide && input.rows_of_key_head <= kDecodingRows && is_decoded_faster(input)) return true;
  const TimedPlan chunk = fastest_chunk(input);
  const double margin = dense.head_dim > kWide ? kWideDenseMargin : kDenseMargin;
  return chunk.plan.forward != nullptr &&
         chunk.microseconds < margin * forward_microseconds(dense, *plan.forward, plan.num_splits);
}

}  // namespace flashmoe::attention
