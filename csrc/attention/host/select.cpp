#include "attention/host/select.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "host/ceil_div.h"
#include "host/error.h"

namespace flashmoe::attention {
namespace {

// The variants of a tile, as the kernel table names them.
enum Variant : std::size_t {
  kStandard,
  kShort,  // for short sequences
  kM128,   // for the last wave
  kM64,    // for fewer query tiles than multiprocessors
  kSplit,  // the keys of a query tile split over several blocks
  kNumVariants
};
constexpr std::array<const char*, kNumVariants> kVariantNames{"", "short", "m128", "m64", "split"};

// One family's kernels for a dtype, mask and head dim; null if it has none, except kStandard.
struct FamilyKernels {
  const char* family;
  std::array<const Kernel*, kNumVariants> tiles;
  const Kernel* combine;  // reduces the partial results of kSplit
  int32_t consistent_block_n;
};

using FamilyList = std::vector<FamilyKernels>;  // best first
using AllowedFamilies = std::array<const FamilyKernels*, std::extent_v<decltype(host::GpuFamilies::families)>>;

int32_t head_dim_of(const Kernel& kernel) { return kernel.axes[axis::kHeadDim]; }

// The smallest kernel that holds the tensor's head_dim.
const Kernel* find_forward(const SelectorInput& input, const char* family, const char* variant,
                           const host::KernelList& kernels) {
  const auto mask = static_cast<int32_t>(input.mask);
  return host::find_kernel({"attention_forward", family, variant, input.request.dtype, {input.head_dim, mask}},
                           axis::kHeadDim, kernels);
}

// The families with kernels for `input`'s capability, dtype, mask and head_dim; its other fields are not read.
FamilyList resolve_families(const SelectorInput& input) {
  const host::KernelList& kernels = host::loadable_kernels(input.request.capability);
  const Kernel* combine = find_combine(input.request, input.head_dim);
  const int32_t block_n = consistent_block_n(input.request, input.head_dim, "");
  FamilyList result;
  for (const char* const* family = host::families_of(input.request.capability); *family != nullptr; ++family) {
    FamilyKernels found{*family, {}, combine, block_n};
    for (std::size_t variant = 0; variant < kNumVariants; ++variant) {
      found.tiles[variant] = find_forward(input, *family, kVariantNames[variant], kernels);
    }
    if (found.tiles[kStandard] != nullptr) result.push_back(found);
  }
  return result;
}

int64_t query_tiles(const SelectorInput& input, const Kernel& kernel) {
  return ceil_div(input.seq_q, kernel.block_m) * input.heads_q * input.batch;
}

// Measured on an H100, 64-row query tiles, D = 64 and 128, 8 to 128 tiles, 512 to 8192 keys: below 1024 keys the second
// pass costs more than the idle multiprocessors. Above, the best number of splits is one block per multiprocessor, at
// most 16, with at least 128 keys per block. With one tile per multiprocessor, splitting gains at most 10%
// (4096 keys and more) or loses.
constexpr int64_t kMinKeysToSplit = 1024;
constexpr int64_t kMinKeysPerSplit = 128;
constexpr int64_t kMaxSplits = 16;  // the combining warp could reduce 32
constexpr int64_t kWarpgroupRows = 64;
constexpr int64_t kMaxTimedSplits = 32;  // one per lane of the combining warp

// The number of blocks that should share the keys of one query tile so that all multiprocessors have work; 1 for no
// split.
int64_t wanted_splits(const SelectorInput& input, const Kernel& split) {
  if (input.seq_k < kMinKeysToSplit) return 1;
  const int64_t by_machine = input.request.num_multiprocessors / query_tiles(input, split);
  const int64_t by_keys = input.seq_k / kMinKeysPerSplit;
  return std::max<int64_t>(1, std::min({by_machine, by_keys, kMaxSplits}));
}

// Kernels for problems with fewer query tiles than multiprocessors; an empty plan where none applies.
KernelPlan choose_for_few_tiles(const SelectorInput& input, const FamilyKernels& family) {
  if (family.tiles[kSplit] != nullptr && family.combine != nullptr) {
    const int64_t splits = wanted_splits(input, *family.tiles[kSplit]);
    if (splits > 1) return {family.tiles[kSplit], family.combine, static_cast<int32_t>(splits)};
  }
  KernelPlan plan;
  if (family.tiles[kM64] != nullptr &&
      query_tiles(input, *family.tiles[kStandard]) < input.request.num_multiprocessors) {
    plan.forward = family.tiles[kM64];
  }
  return plan;
}

}  // namespace

double forward_microseconds(const SelectorInput& input, const Kernel& kernel, int64_t splits) {
  namespace cost = attention::cost;
  if (!kernel.has_cost) return std::numeric_limits<double>::infinity();
  // The computing warpgroups that have rows share the throughput of the tensor cores and the exponential units.
  const auto tile_time = [&](int64_t keys, int64_t rows) {
    const double busy = static_cast<double>(ceil_div(rows, kWarpgroupRows) * kWarpgroupRows) / kernel.block_m;
    return static_cast<double>(keys) / static_cast<double>(splits) * kernel.cost[cost::kKey] * (0.4 + 0.6 * busy) +
           kernel.cost[cost::kEnds];
  };
  const int64_t tiles_of_head = ceil_div(input.seq_q, kernel.block_m);
  const int64_t last_rows = input.seq_q - (tiles_of_head - 1) * kernel.block_m;
  const int64_t first_rows = tiles_of_head > 1 ? kernel.block_m : last_rows;
  const auto items = static_cast<double>(query_tiles(input, kernel) * splits);
  const auto processors = static_cast<double>(input.request.num_multiprocessors);
  const double extra =
      splits > 1 ? kernel.cost[cost::kSplit] + static_cast<double>(splits) * kernel.cost[cost::kShare] : 0.0;
  if (input.mask != Mask::kCausal) return std::ceil(items / processors) * tile_time(input.seq_k, first_rows) + extra;
  // The longest tiles come first, so that short ones fill the end. Half a block of keys per tile is masked.
  const auto visible = [&input](int64_t rows) {
    return std::clamp<int64_t>(input.seq_k - input.seq_q + rows, 1, input.seq_k);
  };
  const double longest =
      std::max(tile_time(visible(input.seq_q), last_rows), tile_time(visible(input.seq_q - last_rows), kernel.block_m));
  const double shortest = tile_time(visible(first_rows), first_rows);
  const int64_t mean_keys = (visible(input.seq_q) + visible(first_rows) + kernel.block_n) / 2;
  const double filled = items * tile_time(mean_keys, first_rows) / processors + shortest;
  const double in_rounds = std::ceil(items / processors) * std::max(longest, shortest);
  return std::max(longest, std::min(in_rounds, filled)) + extra;
}

namespace {

// The fastest by estimate of: the tiles of a family whose table rows state a cost, and the 64-row tile of the next
// family.
KernelPlan choose_by_time(const SelectorInput& input, const FamilyKernels& family, const FamilyKernels* next) {
  KernelPlan best{family.tiles[kStandard], nullptr, 1};
  double least = forward_microseconds(input, *family.tiles[kStandard], 1);
  const auto offer = [&](const Kernel* kernel, int64_t splits) {
    if (kernel == nullptr || head_dim_of(*kernel) != head_dim_of(*family.tiles[kStandard])) return;
    const double time = forward_microseconds(input, *kernel, splits);
    if (time >= least) return;
    least = time;
    best = {kernel, splits > 1 ? family.combine : nullptr, static_cast<int32_t>(splits)};
  };
  offer(family.tiles[kShort], 1);
  offer(family.tiles[kM128], 1);
  if (next != nullptr) offer(next->tiles[kM64], 1);
  if (family.tiles[kSplit] == nullptr || family.combine == nullptr) return best;
  const int64_t tiles = query_tiles(input, *family.tiles[kSplit]);
  for (int64_t splits = 2; splits <= kMaxTimedSplits && splits * tiles <= input.request.num_multiprocessors; ++splits) {
    if (input.seq_k / splits >= kMinKeysPerSplit) offer(family.tiles[kSplit], splits);
  }
  return best;
}

// The fastest by estimate of a family's tiles with the block width of consistent calls; the first if no costs are
// stated.
const Kernel* choose_consistent(const SelectorInput& input, const FamilyKernels& family) {
  const Kernel* best = nullptr;
  double shortest = 0.0;
  for (const Variant variant : {kStandard, kShort, kM128, kM64}) {
    const Kernel* kernel = family.tiles[variant];
    if (kernel == nullptr || kernel->block_n != family.consistent_block_n) continue;
    const double time = forward_microseconds(input, *kernel, 1);
    if (best != nullptr && time >= shortest) continue;
    best = kernel;
    shortest = time;
  }
  return best;
}

// Cached resolve_families: searching the whole table takes longer than the rest of the selection.
const FamilyList& families_for(const SelectorInput& input) {
  constexpr int64_t kGranularity = 8;  // kernels differ only at multiples of this head_dim
  constexpr int64_t kHeadDims = kMaxDenseHeadDim / kGranularity + 1;
  struct Memory {
    int32_t capability = 0;
    std::array<FamilyList, 2 * 2 * kHeadDims> families;
    std::array<bool, 2 * 2 * kHeadDims> is_known{};
  };
  thread_local Memory memory;
  if (memory.capability != input.request.capability) {
    memory.is_known.fill(false);
    memory.capability = input.request.capability;
  }
  const int64_t mask = input.mask == Mask::kCausal ? 1 : 0;
  const int64_t dtype = input.request.dtype == Dtype::kBFloat16 ? 1 : 0;
  const auto slot = static_cast<std::size_t>((2 * mask + dtype) * kHeadDims + ceil_div(input.head_dim, kGranularity));
  if (!memory.is_known[slot]) {
    memory.families[slot] = resolve_families(input);
    memory.is_known[slot] = true;
  }
  return memory.families[slot];
}

}  // namespace

bool is_allowed(const host::KernelRequest& request, const char* family) {
  return request.forced_family == nullptr || std::strcmp(request.forced_family, family) == 0;
}

int32_t consistent_block_n(const host::KernelRequest& request, int32_t head_dim, const char* wanted) {
  const host::KernelList& kernels = host::loadable_kernels(request.capability);
  for (const char* const* family = host::families_of(request.capability); *family != nullptr; ++family) {
    const auto find = [&](const char* variant) {
      return host::find_kernel({"attention_varlen_forward", *family, variant, request.dtype, {head_dim}},
                               axis::kHeadDim, kernels);
    };
    const Kernel* kernel = find(wanted);
    if (kernel == nullptr) kernel = find("");
    if (kernel != nullptr) return kernel->block_n;
  }
  return 0;
}

const char* values_variant(int32_t head_dim, int32_t head_dim_v) {
  return head_dim > 128 && head_dim <= 192 && head_dim_v <= 128 ? "v128" : "";
}

KernelPlan select_forward(const SelectorInput& input) {
  AllowedFamilies allowed{};
  std::size_t count = 0;
  for (const FamilyKernels& family : families_for(input)) {
    if (!is_allowed(input.request, family.family)) continue;
    allowed[count] = &family;
    ++count;
  }
  if (input.is_consistent) {
    for (std::size_t index = 0; index < count; ++index) {
      const Kernel* kernel = choose_consistent(input, *allowed[index]);
      if (kernel != nullptr) return {kernel, nullptr, 1};
    }
    host::refuse(input.request, "head_dim " + std::to_string(input.head_dim) + ", batch-invariant (consistent=True)");
  }
  if (count == 0) host::refuse(input.request, "head_dim " + std::to_string(input.head_dim));
  const Kernel* standard = allowed[0]->tiles[kStandard];
  if (standard->has_cost) return choose_by_time(input, *allowed[0], allowed[1]);
  for (std::size_t index = 0; index < count; ++index) {
    const KernelPlan plan = choose_for_few_tiles(input, *allowed[index]);
    if (plan.forward != nullptr) return plan;
  }
  return {standard, nullptr, 1};
}

const Kernel* find_combine(const host::KernelRequest& request, int32_t head_dim) {
  const host::KernelList& kernels = host::loadable_kernels(request.capability);
  const Kernel* combine = nullptr;
  for (const char* const* family = host::families_of(request.capability); combine == nullptr && *family != nullptr;
       ++family) {
    combine = host::find_kernel({"attention_combine", *family, "", request.dtype, {head_dim}}, axis::kHeadDim, kernels);
  }
  return combine;
}

bool can_load_pages(const Kernel& kernel, int32_t page_size) {
  constexpr int32_t kLeastBoxRows = 8;
  return kernel.num_tensor_maps == 0 || page_size % kLeastBoxRows == 0;
}

int64_t most_row_blocks(int64_t rows, int64_t batch, int64_t rows_total, int64_t block_m) {
  const int64_t of_longest = ceil_div(rows, block_m) * batch;
  return rows_total == 0 ? of_longest : std::min(of_longest, ceil_div(rows_total, block_m) + batch);
}

namespace {

// The bits must not depend on which of the two kernels a batch runs on.
bool has_the_bits_of(const Kernel& kernel, const Kernel& other) {
  return kernel.axes[axis::kHeadDim] == other.axes[axis::kHeadDim] && kernel.block_n == other.block_n;
}

// All rows of a key head in one 64-row tile, of which a multiprocessor holds more. Measured on an H200 for consistent
// calls, 32 heads on 8, 64 sequences: D=64, 4096 keys 213 -> 169 us, D=128, 2048 keys 148 -> 143.
bool reads_keys_once(const VarlenSelectorInput& input) {
  return input.is_consistent && input.heads == input.heads_kv && input.rows <= kWarpgroupRows;
}

// Tiles with half the rows. On an H100 they win if sequences have no more rows than that, if there are fewer tiles than
// multiprocessors, or, if more of them fit on a multiprocessor, if a block's start and end cost more than its loop.
bool prefers_shorter(const VarlenSelectorInput& input, const Kernel& kernel, const Kernel& shorter) {
  constexpr int64_t kMostShortKeys = 256;
  if (!has_the_bits_of(shorter, kernel)) return false;
  const int64_t tiles = most_row_blocks(input.rows, input.batch, input.rows_total, kernel.block_m) * input.heads;
  const bool is_short = std::max(input.rows, input.keys) <= kMostShortKeys;
  return input.rows <= shorter.block_m || tiles < input.request.num_multiprocessors ||
         (is_short && shorter.min_blocks > kernel.min_blocks);
}

}  // namespace

const Kernel& select_by_head_dim(const host::KernelRequest& request, const char* operation, const char* variant,
                                 int32_t head_dim, const char* what) {
  const host::KernelList& loadable = host::loadable_kernels(request.capability);
  for (const char* const* family = host::families_of(request.capability); *family != nullptr; ++family) {
    if (!is_allowed(request, *family)) continue;
    const Kernel* kernel =
        host::find_kernel({operation, *family, variant, request.dtype, {head_dim}}, axis::kHeadDim, loadable);
    if (kernel != nullptr) return *kernel;
  }
  refuse_head_dim(request, what, head_dim);
}

namespace {

// Rows to decode because ragged tiles, which do not split keys, would leave half of the multiprocessors idle for the
// time of all keys. Compute capability 9.0 runs these rows on chunk kernels instead.
bool leaves_idle(const VarlenSelectorInput& input) {
  constexpr int64_t kMostRows = 127, kLeastKeys = 1024;
  const bool has_chunks = input.request.capability == kMeasuredCapability &&
                          is_allowed(input.request, host::families_of(kMeasuredCapability)[0]);
  return !has_chunks && !input.is_batch_invariant && input.rows_of_key_head <= kMostRows && input.keys >= kLeastKeys &&
         2 * input.batch * input.heads <= input.request.num_multiprocessors;
}

// A decoding tile has 16 rows, over all heads of a group, and every further tile reads the keys again. Measured on an
// H200, 32 heads on 8: 8 rows of 64 sequences of 8192 keys 629 us, with tiles of one to three heads 938; 16 rows 1161
// and 922, of 8 sequences 133 and 168.
bool is_decoding(const VarlenSelectorInput& input) {
  if (input.is_consistent) return false;
  if (input.rows > kMaxDecodingRows) return leaves_idle(input);
  const bool is_wide = input.rows_of_key_head > 2 * kMaxDecodingRows && input.request.capability == kMeasuredCapability;
  return !is_wide || input.is_batch_invariant || input.batch * input.heads_kv <= input.request.num_multiprocessors;
}

}  // namespace

const Kernel* select_varlen_forward(const VarlenSelectorInput& input) {
  const host::KernelRequest& request = input.request;
  const host::KernelList& loadable = host::loadable_kernels(request.capability);
  const char* const operations[] = {is_decoding(input) ? "attention_decode" : nullptr, "attention_varlen_forward"};
  const char* wanted = input.has_alibi             ? "alibi"
                       : input.has_score_functions ? "scores"
                                                   : values_variant(input.head_dim, input.head_dim_v);
  const int32_t block_n = input.is_consistent ? consistent_block_n(request, input.head_dim, wanted) : 0;
  bool has_other_bits = false;
  for (const char* operation : operations) {
    if (operation == nullptr) continue;
    for (const char* const* family = host::families_of(request.capability); *family != nullptr; ++family) {
      if (!is_allowed(request, *family)) continue;
      const auto find = [&](const char* variant) {
        return host::find_kernel({operation, *family, variant, request.dtype, {input.head_dim}}, axis::kHeadDim,
                                 loadable);
      };
      // A family with separate kernels for score functions or narrow values has no support for these in its other
      // kernels.
      const Kernel* found = find(wanted);
      if (found == nullptr && !input.has_alibi) found = find("");
      if (found != nullptr && found->num_tensor_maps == 0 && !input.has_alibi) {
        const Kernel* shorter = find(kVariantNames[kM64]);
        if (shorter != nullptr && prefers_shorter(input, *found, *shorter)) found = shorter;
        const Kernel* split_kernel = find_split_kernel(input, *found, loadable);
        if (split_kernel != nullptr) found = split_kernel;
      } else if (found != nullptr && *wanted == '\0' && reads_keys_once(input)) {
        const Kernel* shorter = find(kVariantNames[kM64]);
        if (shorter != nullptr && has_the_bits_of(*shorter, *found)) found = shorter;
      }
      if (found != nullptr && !supports_wide(input, *found)) continue;
      if (found != nullptr && can_load_pages(*found, input.page_size) && (block_n == 0 || found->block_n == block_n)) {
        return found;
      }
      has_other_bits |= found != nullptr && input.is_consistent;
      if (has_other_bits && input.has_alibi) break;  // in another family ALiBi's reference maxima move at other blocks
    }
  }
  if (has_other_bits && input.page_size > 0 && request.forced_family == nullptr) {
    host::fail(host::ErrorCode::kArgument, "consistent=True with ", input.has_alibi ? "ALiBi" : "a softcap or a mask",
               ", head_dim ", input.head_dim, " and pages of ", input.page_size,
               " keys: no kernel of compute capability ", request.capability / 10, ".", request.capability % 10,
               " gives batch-invariant results; use pages of a multiple of 8 keys, or consistent=False");
  }
  if (input.has_alibi && !has_other_bits) refuse_head_dim(request, "ALiBi", input.head_dim);
  const std::string pages = input.page_size > 0 ? ", pages of " + std::to_string(input.page_size) + " keys" : "";
  const char* what = input.is_consistent ? ", batch-invariant (consistent=True)" : "";
  host::refuse(request, "head_dim " + std::to_string(input.head_dim) + pages + what);
}

const Kernel* select_decoding(const SelectorInput& input) {
  // Measured only on an H100; with fewer keys one pass over them is as fast.
  constexpr int64_t kMinKeys = 512;
  constexpr const char* kFamily = "sm80";
  const host::KernelRequest& request = input.request;
  if (request.capability != kMeasuredCapability || request.forced_family != nullptr) return nullptr;
  if (input.seq_q > kMaxDecodingRows || input.seq_k < kMinKeys || input.is_consistent) return nullptr;
  return host::find_kernel({"attention_decode", kFamily, "", request.dtype, {input.head_dim}}, axis::kHeadDim,
                           host::loadable_kernels(request.capability));
}

const Kernel* find_mask_forward(const VarlenSelectorInput& input, const Kernel& otherwise) {
  constexpr int64_t kMinLength = 512;  // shorter ones were not measured
  if (std::strcmp(otherwise.operation, "attention_varlen_forward") != 0) return nullptr;
  if (input.rows < kMinLength || input.keys < kMinLength) return nullptr;
  const host::KernelList& loadable = host::loadable_kernels(input.request.capability);
  const Kernel* own = host::find_kernel({kMaskForward, otherwise.family, "", input.request.dtype, {input.head_dim}},
                                        axis::kHeadDim, loadable);
  const bool is_as_wide = own != nullptr && own->axes[axis::kHeadDim] == otherwise.axes[axis::kHeadDim];
  if (!is_as_wide) return nullptr;
  // The rows that the busiest multiprocessor processes, in whole tiles.
  const auto rounds = [&](const Kernel& kernel) {
    const int64_t tiles = ceil_div(input.rows, kernel.block_m) * input.heads * input.batch;
    return ceil_div(tiles, input.request.num_multiprocessors) * kernel.block_m;
  };
  const Kernel* taller = host::find_kernel(
      {kMaskForward, otherwise.family, "m256", input.request.dtype, {input.head_dim}}, axis::kHeadDim, loadable);
  const bool is_taller = taller != nullptr && taller->axes[axis::kHeadDim] == own->axes[axis::kHeadDim];
  return is_taller && rounds(*taller) < rounds(*own) ? taller : own;
}

const Kernel& select_first(const host::KernelRequest& request, const char* operation, const char* what) {
  const host::KernelList& loadable = host::loadable_kernels(request.capability);
  for (const char* const* family = host::families_of(request.capability); *family != nullptr; ++family) {
    const Kernel* kernel = host::find_kernel({operation, *family, "", request.dtype, {}}, host::kNoAxis, loadable);
    if (kernel != nullptr) return *kernel;
  }
  host::refuse(request, what);
}

const Kernel& select_bool_mask(const host::KernelRequest& request) {
  return select_first(request, "attention_bool_mask", "a bool attn_mask");
}

const Kernel& select_bool_mask_tiles(const host::KernelRequest& request) {
  return select_first(request, "attention_bool_mask_tiles", "a bool attn_mask");
}

const Kernel& select_append(const host::KernelRequest& request) {
  return select_first(request, "attention_append", "appending to a cache");
}

}  // namespace flashmoe::attention
