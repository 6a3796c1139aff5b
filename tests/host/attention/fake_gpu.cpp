// The extension on a driver without a GPU. "CUDA" memory is the CPU's; a "kernel" is a few plain loops over its launch
// parameters, in bf16, so that results can be compared; every launch is logged.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "../fake_driver.h"
#include "attention/host/backends.h"
#include "attention/host/e4m3.h"
#include "host/tile_counters.h"
#include "loops.h"
#include "mask_loops.h"

namespace flashmoe {
namespace attention {

// Never called.
void forward_cpu(const ForwardArguments&, const ForwardOutputs&) {}
void backward_cpu(const BackwardParams&, const ForwardArguments&) {}
void forward_varlen_cpu(const VarlenArguments&, const ForwardOutputs&) {}
void backward_varlen_cpu(const VarlenBackwardArguments&, const Gradients&) {}
void append_cpu(const AppendArguments&) {}
void forward_e4m3_cpu(const E4m3Arguments&, const ForwardOutputs&) {}
void append_e4m3_cpu(const E4m3AppendArguments&) {}

namespace {

using host::grid_of;

// Over all sequences: if only the GPU knows their lengths, each may have one partial tile.
int64_t row_blocks(const ForwardParams& p, const host::Kernel& kernel, int64_t block) {
  const int64_t dense = ceil_div(p.seq_q, block) * p.batch, total = p.sequences.rows_total;
  return kernel.axes[axis::kMask] >= 0 || total == 0 ? dense : std::min(dense, ceil_div(total, block) + p.batch);
}

// Tiles of a backward kernel; separate tiles clear a ragged tensor's rows before the first and after the last sequence.
int64_t tiles(const BackwardParams& p, bool is_runtime, bool of_rows, int32_t block, bool draws_all) {
  const Batch& entries = p.sequences;
  const int64_t heads = of_rows ? p.heads_q : p.heads_kv, total = of_rows ? entries.rows_total : entries.keys_total;
  const int64_t dense = ceil_div(of_rows ? p.seq_q : p.seq_k, block) * p.batch;
  if (!is_runtime || (of_rows ? entries.cu_seqlens_q : entries.cu_seqlens_k) == nullptr) return dense * heads;
  const int64_t ragged = ceil_div(total, block) + p.batch + 2;
  return heads * (draws_all ? ragged : std::min(ragged, dense + kClearingSlots));
}

std::vector<const void*> g_tensors;  // tensors that the last kernel read and wrote
bool g_computes = true;              // whether kernels write results

std::string check_maps(void** arguments, const host::Kernel& kernel, const std::vector<const void*>& tensors) {
  g_tensors = tensors;
  for (int32_t map = 0; map < kernel.num_tensor_maps; ++map) {
    if (std::memcmp(arguments[1 + map], &tensors[map], sizeof(void*)) != 0)
      return "map " + std::to_string(map) + " of another tensor";
  }
  return "";
}

std::string text_of(bool is_wrong, const char* what) { return is_wrong ? what : ""; }

// A decoding kernel has a counter and two partial results for each block, or none.
std::string check_partials(const ForwardParams& p, const host::Kernel& kernel, int64_t grid) {
  if (std::abs(p.num_splits) == 1)
    return text_of(p.out_partial != nullptr || p.tile_counter != nullptr, "partial results of one");
  if (p.tile_counter == nullptr || std::any_of(p.tile_counter, p.tile_counter + grid, [](int32_t n) { return n != 0; }))
    return "counters that are not zero";
  const int64_t rows = 2 * grid * std::min<int64_t>(kernel.block_m, int64_t{p.seq_q} * p.score_options.folded_heads);
  const int64_t floats = rows * kernel.axes[axis::kHeadDim];
  if (p.lse_partial - p.out_partial < floats) return "partial results that overlap";
  std::fill_n(p.out_partial, floats, NAN);
  std::fill_n(p.lse_partial, 2 * rows, NAN);
  return "";
}

// The grid has the tiles of a key head's rows, and blocks of keys if several share a tile.
std::string check_decoding(const ForwardParams& p, const host::Kernel& kernel, int64_t grid) {
  if (p.heads_q != p.heads_kv * p.score_options.folded_heads) return "rows of other heads";
  const int64_t rows_of_head = int64_t{p.seq_q} * p.score_options.folded_heads;
  const int64_t items = ceil_div(rows_of_head, kernel.block_m) * p.heads_kv * p.batch;
  const int64_t tiles = p.num_splits <= 1 ? items : items * (ceil_div(p.seq_k, kernel.block_n) + 1);
  if (grid != std::min(grid_of(kernel, tiles), host::kMaxCounters)) return "another grid";
  return check_partials(p, kernel, grid);
}

bool is_additive_of_every_head(const ScoreOptions& options) {
  return options.mask != nullptr && options.mask_type == MaskTensor::kAdditive && options.folded_heads == 1;
}

// Kernels with tensor maps apply a softcap or a mask in a separate variant; all kernels have a variant for ALiBi
// slopes, with or without a softcap.
bool is_of_other_scores(const ScoreOptions& options, const host::Kernel& kernel) {
  const bool has_alibi = options.mask != nullptr && options.mask_type == MaskTensor::kAlibi;
  const bool bends = !has_alibi && (options.score_factor != 0.0F || options.mask != nullptr);
  const bool is_apart = std::strncmp(kernel.operation, "attention_chunk_", 16) == 0 ||
                        (kernel.num_tensor_maps > 0 && std::strncmp(kernel.operation, "attention_varlen_", 17) == 0);
  return has_alibi != (std::strcmp(kernel.variant, "alibi") == 0) ||
         (is_apart && bends != (std::strcmp(kernel.variant, "scores") == 0));
}

std::string run_forward(const std::string& kind, const host::Kernel& kernel, int64_t grid, void** arguments) {
  const auto& p = *static_cast<const ForwardParams*>(arguments[0]);
  if (kind == "combine") {
    if (g_computes) combine(p);
    return text_of(grid != ceil_div(int64_t{p.batch} * p.heads_q * p.seq_q, kernel.block_m), "another grid");
  }
  const int64_t items =
      ceil_div(int64_t{p.seq_q} * p.score_options.folded_heads, kernel.block_m) * p.heads_kv * p.batch;
  if (kind == "decode_scores") {
    const int64_t tiles = items * (ceil_div(p.seq_k, kernel.block_n) + 1);
    return text_of(p.out_partial == nullptr || grid != grid_of(kernel, tiles), "no place for scores, or another grid");
  }
  if (kind == "decode_values" && grid != items * (kernel.axes[axis::kHeadDim] / 32)) return "another grid";
  Beside beside;
  const bool is_dropout = std::strncmp(kernel.operation, "attention_dropout", 17) == 0;
  if (is_dropout) beside.dropout = &static_cast<const DropoutForwardParams*>(arguments[0])->dropout;
  const bool is_chunk = kind.rfind("chunk_forward", 0) == 0;
  if (kind == "decode_e4m3" || kind == "chunk_forward_e4m3")
    beside.cache = static_cast<const E4m3ForwardParams*>(arguments[0]);
  if (kind == "forward_e4m3") beside.codes = static_cast<const E4m3AttentionParams*>(arguments[0]);
  const bool decodes = kind == "decode" || kind == "decode_e4m3";
  const std::string wrong = decodes ? check_decoding(p, kernel, grid) : "";
  if (!wrong.empty()) return wrong;
  if (p.head_dim > kernel.axes[axis::kHeadDim] ||
      (kernel.axes[axis::kMask] < 0 && std::strcmp(kernel.variant, "v128") != 0 &&
       p.head_dim_v > kernel.axes[axis::kHeadDim]))
    return "a kernel for narrower heads";
  if ((kind == "forward" || is_chunk) && kernel.axes[axis::kMask] < 0 && is_of_other_scores(p.score_options, kernel))
    return "a kernel of other scores";
  const int32_t width = kernel.axes[axis::kHeadDim];
  const int64_t parts = kernel.num_tensor_maps > 0 && width > 256 ? width / 256 : 1;  // of a wide head's values
  const int64_t splits = std::strcmp(kernel.variant, "split") == 0 ? p.num_splits : 1;
  int64_t tiles = row_blocks(p, kernel, kernel.block_m) * p.heads_q * parts * splits;
  if (is_chunk) {
    if (p.score_options.folded_heads != 1) return "heads are the kernel's to fold";
    int32_t fold = 1;
    while (fold < p.heads_q / p.heads_kv) fold *= 2;
    tiles = row_blocks(p, kernel, kernel.block_m / fold) * p.heads_kv * p.num_splits;
  }
  if (!decodes && kind != "decode_values") {
    if (grid != grid_of(kernel, tiles)) return "another grid";
    if ((tiles > grid) != (p.tile_counter != nullptr)) return "a counter of tiles that are not drawn, or none";
    if (p.tile_counter != nullptr && *p.tile_counter != 0) return "a counter that is not zero";
  }
  const bool is_streamed = std::strcmp(kernel.operation, kMaskForward) == 0;
  if (is_streamed && !is_additive_of_every_head(p.score_options)) return "no additive mask of every head";
  if (g_computes && is_streamed) {
    const std::string hidden = check_visible(static_cast<const MaskForwardParams*>(arguments[0])->visible, p);
    if (!hidden.empty()) return hidden;
  }
  if (g_computes) forward(p, kernel, beside);
  std::vector<const void*> tensors{p.q, p.k, p.v, p.out};
  if (is_streamed) tensors.push_back(p.score_options.mask);
  return check_maps(arguments, kernel, tensors);
}

// Does what the kernel would do; returns what is wrong, or an empty text.
std::string run_kernel(const host::Kernel& kernel, int64_t grid, void** arguments) {
  static DropoutBackwardParams g_fused;  // between the kernels of the fused form
  static int64_t g_rows_of_sums = 0;
  const std::string operation = kernel.operation;
  const bool is_dropout = operation.rfind("attention_dropout_", 0) == 0;
  const bool is_streamed = operation.rfind("attention_mask_", 0) == 0;
  const bool is_varlen = operation.rfind("attention_varlen_", 0) == 0 || is_dropout || is_streamed;
  const std::string kind = operation.substr(std::strlen(is_dropout    ? "attention_dropout_"
                                                        : is_streamed ? "attention_mask_"
                                                        : is_varlen   ? "attention_varlen_"
                                                                      : "attention_"));
  const int32_t width = kernel.axes[axis::kHeadDim];
  if (kind == "combine" || kind.rfind("chunk_forward", 0) == 0 || kind.rfind("forward", 0) == 0 ||
      kind.rfind("decode", 0) == 0)
    return run_forward(kind, kernel, grid, arguments);
  if (kind == "transpose_e4m3") {
    const auto& p = *static_cast<const TransposeParams*>(arguments[0]);
    transpose(p);
    g_tensors = {p.v};
    const int64_t heads = (p.sequences.cu_seqlens_k != nullptr ? int64_t{1} : p.batch) * p.heads_kv;
    return text_of(grid * kernel.threads < heads * p.value_blocks * p.value_rows, "few threads");
  }
  if (kind == "dequantize_e4m3") {
    const auto& p = *static_cast<const DequantizeParams*>(arguments[0]);
    if (g_computes) dequantize(p);
    g_tensors = {p.k, p.v};
    const int64_t copied = 32;  // keys per block
    const int64_t units = ceil_div(p.read_keys, copied) + (p.read_keys < p.seq_k);
    return text_of(grid != units * p.heads_kv * p.batch, "not a block for each 32 keys of a head");
  }
  if (kind == "merge") {
    const auto& p = *static_cast<const MergeParams*>(arguments[0]);
    merge(p);
    if (16 << p.lanes_shift < p.head_dim || p.lanes_shift > 5 || p.head_dim % 8 != 0) return "not the lanes of a row";
    for (const void* tensor : {p.out_a, p.out_b, static_cast<const void*>(p.out)})
      if (reinterpret_cast<uintptr_t>(tensor) % 16 != 0) return "rows that no lane can load";
    const int64_t blocks = ceil_div(int64_t{p.batch} * p.heads * p.rows << p.lanes_shift, kernel.threads);
    return text_of(grid != blocks, "not as many blocks as the rows need");
  }
  if (kind == "append" || kind == "append_e4m3") {
    const auto& p = *static_cast<const AppendParams*>(arguments[0]);
    const int64_t rows = int64_t{2} * p.batch * p.new_keys * p.heads_kv;
    if (grid != ceil_div(rows, kernel.threads / 32)) return "not a warp for each row";
    bool is_aligned = p.head_dim % 8 == 0 && p.head_dim_v % 8 == 0;
    for (const void* tensor :
         {static_cast<const void*>(p.k_cache), static_cast<const void*>(p.v_cache), p.k_new, p.v_new})
      is_aligned = is_aligned && reinterpret_cast<uintptr_t>(tensor) % 16 == 0;
    for (const Strides& stride : {p.k_cache_stride, p.v_cache_stride, p.k_new_stride, p.v_new_stride})
      is_aligned = is_aligned && stride.batch % 8 == 0 && stride.head % 8 == 0 && stride.row % 8 == 0;
    if ((p.is_aligned != 0) != is_aligned) return "rows said to lie otherwise than they do";
    if (kind == "append") {
      append(p, [](void* cache, int64_t at, float value, int64_t, int64_t, int64_t) { store(cache, at, value); });
      return "";
    }
    const auto& codes = *static_cast<const E4m3AppendParams*>(arguments[0]);
    append(p, [&](void* cache, int64_t at, float value, int64_t number, int64_t page, int64_t head) {
      const CacheScale& scale = cache == p.k_cache ? codes.k_scale : codes.v_scale;
      static_cast<uint8_t*>(cache)[at] = code_of(value / scale_of(scale, number, page, head));
    });
  } else if (kind == "row_dot") {
    const auto& p = *static_cast<const RowDotParams*>(arguments[0]);
    if (grid != ceil_div(int64_t{p.batch} * p.heads * p.rows, kernel.threads / 4)) return "not four threads for a row";
    if (g_computes) row_dots(p);
  } else if (kind == "scores_sum") {
    const auto& p = *static_cast<const ScoresSumParams*>(arguments[0]);
    const int64_t chunks = p.num_sums * p.size / 8;
    if (p.size % 8 != 0 || grid != ceil_div(chunks, int64_t{kernel.threads} * kScoresSumChunks)) return "another grid";
    if (g_computes) scores_sum(p);
  } else if (kind == "bool_mask") {
    const auto& p = *static_cast<const BoolMaskParams*>(arguments[0]);
    const int64_t blocks =
        ceil_div(p.rows, int64_t{kMaskBlock}) * ceil_div(p.keys, int64_t{kMaskBlock} * kMaskWordBlocks);
    if (p.additive_row % 8 != 0 || p.additive_row < p.keys || grid % blocks != 0) return "rows or a grid that is none";
    if (g_computes) bool_mask(p, grid);
  } else if (kind == "bool_mask_tiles") {
    if (g_computes) return bool_mask_tiles(*static_cast<const BoolMaskTilesParams*>(arguments[0]), grid);
  } else if (kind == "bias_gradient") {
    const auto& p = *static_cast<const BiasGradientParams*>(arguments[0]);
    const bool has_dropout = std::strcmp(kernel.variant, "dropout") == 0;
    const int64_t tiles = ceil_div(p.rows, kernel.block_m) * ceil_div(p.keys, kernel.block_n);
    const int64_t sums = tiles * p.batches * p.heads;
    const BackwardParams& of = p.launched.backward;
    const int64_t items = of.batch / p.batches * (of.heads_q / p.heads) *
                          (p.folds_rows != 0 ? ceil_div(of.seq_q, kernel.block_m) : 1) *
                          (p.folds_keys != 0 ? ceil_div(of.seq_k, kernel.block_n) : 1);
    if (p.splits != std::clamp<int64_t>(4 * host::g_gpu.num_multiprocessors / sums, 1, items)) return "other splits";
    if ((p.is_float != 0) != (p.splits > 1 || p.folds_rows != 0 || p.folds_keys != 0)) return "sums of another type";
    if (grid != grid_of(kernel, sums * p.splits)) return "not a block for each part";
    if (g_computes) bias_gradient(p, has_dropout ? &p.launched.dropout : nullptr, kernel);
  } else if (kind == "backward_dq" || kind == "backward_dkv") {
    const auto& p = *static_cast<const BackwardParams*>(arguments[0]);
    const Dropout* dropout = is_dropout ? &static_cast<const DropoutBackwardParams*>(arguments[0])->dropout : nullptr;
    const bool is_dq = kind == "backward_dq";
    if (std::max(p.head_dim, width_v(p, kernel)) > width) return "a kernel for narrower heads";
    const int32_t block = is_dq ? kernel.block_m : kernel.block_n;
    if (grid != grid_of(kernel, tiles(p, is_varlen, is_dq, block, kernel.is_persistent))) return "another grid";
    if (kernel.is_persistent && (p.tile_counter == nullptr || *p.tile_counter != 0)) return "no counter of tiles";
    if (is_varlen && is_of_other_scores(p.score_options, kernel)) return "a kernel of other scores";
    is_dq ? query_gradient(p, dropout, kernel) : key_value_gradient(p, dropout, kernel, nullptr, 0);
    if (is_dq) return check_maps(arguments, kernel, {p.q, p.k, p.v, p.dout, p.dq});
    return check_maps(arguments, kernel, {p.q, p.k, p.v, p.dout, p.dk, p.dv});
  } else if (kind == "backward_fused_prepare" || kind == "backward_fused_convert") {
    const auto run = [&](const auto& p, int64_t columns) {
      const int64_t rows = rows_of_sums(p) * (ragged_rows(p) > 0 ? 1 : p.batch);
      if (grid != rows / kDqPartialRows * p.heads) return "not a block for each partial";
      g_rows_of_sums = rows_of_sums(p);
      if (g_computes) kind == "backward_fused_prepare" ? prepare(p, columns) : convert(p, columns);
      return "";
    };
    if (is_varlen) {
      const auto& p = *static_cast<const VarlenFusedQueryParams*>(arguments[0]);
      return run(p, p.width);
    }
    return run(*static_cast<const FusedQueryParams*>(arguments[0]), width);
  } else if (kind == "backward_fused") {
    const BackwardParams& p = g_fused.backward;
    g_fused.backward = *static_cast<const BackwardParams*>(arguments[0]);
    if (is_dropout) g_fused.dropout = static_cast<const DropoutBackwardParams*>(arguments[0])->dropout;
    if (p.tile_counter == nullptr || *p.tile_counter != 0) return "no counter of tiles";
    if (grid != grid_of(kernel, tiles(p, is_varlen, false, kernel.block_n, true))) return "another grid";
    if (g_computes)
      key_value_gradient(p, is_dropout ? &g_fused.dropout : nullptr, kernel, static_cast<float*>(p.dq), g_rows_of_sums);
    std::vector<const void*> tensors{p.q, p.k, p.v, p.dout, p.dk, p.dv};
    if (is_streamed) {
      if (!is_additive_of_every_head(p.score_options)) return "no additive mask of every head";
      const auto& masked = *static_cast<const MaskBackwardParams*>(arguments[0]);
      if ((masked.scores_gradient != nullptr) != (std::strcmp(kernel.variant, "gradient") == 0))
        return "not its kernel";
      const std::string hidden = check_visible(masked.visible, p);
      if (!hidden.empty()) return hidden;
      if (g_computes) scores_gradient(masked, kernel);
      tensors.push_back(p.score_options.mask);
      tensors.push_back(masked.scores_gradient != nullptr ? masked.scores_gradient : p.score_options.mask);
    }
    return check_maps(arguments, kernel, tensors);
  } else {
    return "no loops for it";
  }
  return "";
}

}  // namespace
}  // namespace attention

namespace host {
namespace {

CUresult launch(CUfunction function, unsigned grid, unsigned, unsigned, bool is_dependent, void** arguments) {
  const Kernel& kernel = kernel_of(function);
  attention::g_tensors.clear();
  const std::string problem = attention::run_kernel(kernel, grid, arguments);
  std::string addresses;
  for (const void* tensor : attention::g_tensors) {
    addresses += (addresses.empty() ? "" : ", ") + std::to_string(reinterpret_cast<uintptr_t>(tensor));
  }
  const bool has_hints = std::strncmp(kernel.operation, "attention_decode", 16) == 0 ||
                         std::strcmp(kernel.operation, "attention_chunk_forward") == 0;
  const bool is_forward = std::strstr(kernel.operation, "forward") != nullptr || has_hints ||
                          std::strcmp(kernel.operation, "attention_combine") == 0;
  const int splits = is_forward ? static_cast<const attention::ForwardParams*>(arguments[0])->num_splits : 0;
  const bool waits = kernel_table().binaries[static_cast<std::size_t>(kernel.binary)].virtual_capability >= 90;
  const int unhinted = has_hints ? static_cast<const attention::ForwardParams*>(arguments[0])->hints : -1;
  g_log += std::string("{\"symbol\": \"") + kernel.symbol + "\", \"operation\": \"" + kernel.operation +
           "\", \"grid\": " + std::to_string(grid) + ", \"splits\": " + std::to_string(splits) +
           ", \"unhinted\": " + std::to_string(unhinted) + ", \"is_dependent\": " + (is_dependent ? "true" : "false") +
           ", \"waits\": " + (waits ? "true" : "false") + ", \"tensors\": [" + addresses + "], \"problem\": \"" +
           problem + "\"}\n";
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace host
}  // namespace flashmoe

FAKE_EXPORT void fake_gpu(int capability, int multiprocessors, int is_capturing) {
  flashmoe::host::begin_call(capability, multiprocessors, is_capturing != 0);
}

FAKE_EXPORT void fake_computing(int computes) { flashmoe::attention::g_computes = computes != 0; }

// Returns the previous limit.
FAKE_EXPORT int64_t fake_copies(int64_t elements) { return std::exchange(flashmoe::attention::most_copied, elements); }

FAKE_EXPORT void fake_memory(int rate, int l2_bytes) {
  flashmoe::host::g_gpu.memory_bandwidth = rate;
  flashmoe::host::g_gpu.l2_bytes = l2_bytes;
}
