// The backward pass of ragged and windowed attention on a GPU: selects the kernels and launches them, split or fused.
// Nothing here reads device memory: grids are sized for the most tiles possible.

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "attention/backward/sm90/tensor_map.h"
#include "attention/host/axes.h"
#include "attention/host/backends.h"
#include "attention/host/backward_launch.h"
#include "attention/host/select.h"
#include "attention/host/streamed_mask.h"
#include "attention/params/fused_backward.h"
#include "attention/params/scores_sum.h"
#include "host/copies.h"

namespace flashmoe::attention {
namespace {

BackwardKernels select_kernels(const VarlenArguments& arguments, const host::Device& gpu) {
  const auto head_dim = static_cast<int32_t>(std::max(arguments.head_dim(), arguments.head_dim_v()));
  const host::KernelRequest request = host::make_request(gpu, arguments.dtype);
  const bool has_score_mod = arguments.softcap > 0 || (VarlenArguments::has(arguments.mask) && !has_alibi(arguments));
  if (arguments.has_dropout()) return select_dropout_backward(request, head_dim, has_score_mod, has_alibi(arguments));
  return select_varlen_backward(request, head_dim, static_cast<int32_t>(arguments.head_dim_v()), has_score_mod,
                                has_alibi(arguments), streams_mask(arguments));
}

bool is_streaming(const Kernel& fused) { return std::strcmp(fused.operation, "attention_mask_backward_fused") == 0; }

// Tensor maps treat dense sequences as rows of one long tensor, so each sequence must begin a whole number of rows
// after the previous one. They need a row stride even if there is only one row.
bool has_whole_entries(const Tensor& tensor, const Kernel& kernel) {
  if (kernel.num_tensor_maps == 0) return true;
  const bool is_ragged = tensor.dim() == 3;
  const int64_t row = tensor.strides()[is_ragged ? 0 : 2];
  if (row <= 0 || row % host::kRowAlignElements != 0) return false;
  return is_ragged || tensor.sizes()[0] == 1 || tensor.strides()[0] % row == 0;
}

Tensor operand(const Tensor& tensor, const Kernel& kernel) {
  return host::is_loadable(tensor, kernel) && has_whole_entries(tensor, kernel) ? host::alias(tensor)
                                                                                : host::padded_copy(tensor);
}

// A gradient tensor that the kernels can store to: the caller's, or one padded to rows of whole 16 bytes.
Tensor result(const Tensor& tensor, const Kernel& kernel) {
  if (!VarlenArguments::has(tensor)) return Tensor();
  return host::is_loadable(tensor, kernel) && has_whole_entries(tensor, kernel)
             ? host::alias(tensor)
             : host::empty_like(tensor, host::padded_sizes(tensor));
}

VarlenBackwardArguments loadable_arguments(const VarlenBackwardArguments& arguments, const Kernel& kernel) {
  const VarlenArguments& forward = arguments.forward;
  VarlenBackwardArguments copied;
  copied.forward =
      with_operands(forward, operand(forward.q, kernel), operand(forward.k, kernel), operand(forward.v, kernel));
  copied.out = operand(arguments.out, kernel);
  copied.dout = operand(arguments.dout, kernel);
  copied.lse = host::alias(arguments.lse);
  if (VarlenArguments::has(arguments.dlse)) copied.dlse = host::alias(arguments.dlse);
  return copied;
}

// For tensor maps, whose operands have been copied if all their rows are one (the gradient of a mean over them).
int32_t rows_between_entries(const Strides& strides) {
  return strides.batch == 0 || strides.row == 0 ? 0 : static_cast<int32_t>(strides.batch / strides.row);
}

SequenceRows sequence_rows(const BackwardParams& params) {
  return {rows_between_entries(params.q_stride),  rows_between_entries(params.k_stride),
          rows_between_entries(params.v_stride),  rows_between_entries(params.dout_stride),
          rows_between_entries(params.dq_stride), rows_between_entries(params.dk_stride),
          rows_between_entries(params.dv_stride)};
}

// Tiles per head: the last tile of each sequence may be partial. In a ragged tensor the rows before the first and after
// the last sequence count for two more.
int64_t most_tiles(bool is_ragged, int64_t total, int64_t longest, int64_t sequences, int64_t block) {
  return is_ragged ? ceil_div(total, block) + sequences + 2 : ceil_div(longest, block) * sequences;
}

// For one block per tile; fewer if all sequences are short: then each has as many tiles as the longest, whatever its
// own length. Kernels can tell from the grid which layout it is.
int64_t most_blocks(bool is_ragged, int64_t total, int64_t longest, int64_t sequences, int64_t block,
                    bool is_persistent) {
  const int64_t tiles = most_tiles(is_ragged, total, longest, sequences, block);
  if (!is_ragged || is_persistent) return tiles;
  return std::min(tiles, ceil_div(longest, block) * sequences + kClearingSlots);
}

std::vector<CUtensorMap> query_gradient_maps(const BackwardParams& params, const Kernel& kernel) {
  if (kernel.num_tensor_maps == 0) return {};
  return encode_query_gradient_maps(backward::sm90::varlen_query_gradient_tensor_maps(params, kernel.block_n),
                                    kernel.dtype);
}

std::vector<CUtensorMap> key_value_gradient_maps(const BackwardParams& params, const Kernel& kernel) {
  if (kernel.num_tensor_maps == 0) return {};
  return encode_key_value_gradient_maps(backward::sm90::varlen_key_value_gradient_tensor_maps(params, kernel.block_m),
                                        kernel.dtype);
}

std::vector<CUtensorMap> mask_maps(const MaskBackwardParams& params, const Kernel& kernel) {
  const auto maps = backward::sm90::mask_fused_tensor_maps(params, kernel.block_m);
  std::vector<CUtensorMap> encoded = encode_key_value_gradient_maps(maps, kernel.dtype);
  encoded.push_back(host::encode_tensor_map(maps.mask, kernel.dtype, "attn_mask"));
  encoded.push_back(host::encode_tensor_map(maps.scores_gradient, kernel.dtype, "the gradient of attn_mask"));
  return encoded;
}

void run_split(const DropoutBackwardParams& launched, const BackwardKernels& kernels, const host::Device& gpu) {
  const BackwardParams& params = launched.backward;
  const Batch& sequences = params.sequences;
  const Kernel& dq = *kernels.dq;
  const Kernel& dkv = *kernels.dkv;
  const int64_t dq_blocks = most_blocks(sequences.cu_seqlens_q != nullptr, sequences.rows_total, params.seq_q,
                                        params.batch, dq.block_m, dq.is_persistent);
  const int64_t dkv_blocks = most_blocks(sequences.cu_seqlens_k != nullptr, sequences.keys_total, params.seq_k,
                                         params.batch, dkv.block_n, dkv.is_persistent);
  const SplitTiles tiles{dq_blocks * params.heads_q, dkv_blocks * params.heads_kv};
  run_split(launched, kernels, tiles, params.head_dim_v, query_gradient_maps, key_value_gradient_maps, gpu);
}

ScoresSumParams scores_sum_params(const Gradients& gradients) {
  const int64_t* sizes = gradients.scores.sizes();
  const int64_t* mask = gradients.mask.sizes();
  const bool adds_heads = mask[1] < sizes[1];
  const int64_t all = sizes[0] * sizes[1], num_sums = mask[0] * mask[1];
  return {gradients.scores.data(),
          gradients.mask.data(),
          sizes[2] * sizes[3],
          static_cast<int32_t>(num_sums),
          static_cast<int32_t>(all / num_sums),
          static_cast<int32_t>(adds_heads ? sizes[1] : 1),
          static_cast<int32_t>(adds_heads ? 1 : sizes[1])};
}

// visible: of a streamed mask.
void run_fused(const DropoutBackwardParams& launched, const BackwardKernels& kernels, const Gradients& gradients,
               const VisibleTiles& visible, const host::Device& gpu) {
  const BackwardParams& params = launched.backward;
  const Kernel& fused = *kernels.fused;
  const Batch& sequences = params.sequences;
  // Numbered as in attention/backward/sm90/dq_partials.cuh.
  const int64_t partials = sequences.cu_seqlens_q != nullptr ? sequences.rows_total / kDqPartialRows + params.batch + 2
                                                             : ceil_div(params.seq_q, kDqPartialRows) * params.batch;
  const int64_t tiles =
      most_tiles(sequences.cu_seqlens_k != nullptr, sequences.keys_total, params.seq_k, params.batch, fused.block_n);
  auto queries = fused_query_params<VarlenFusedQueryParams>(params);
  queries.cu_seqlens_q = sequences.cu_seqlens_q;
  queries.rows_total = sequences.rows_total;
  queries.head_dim_v = params.head_dim_v;
  queries.width = fused.axes[axis::kHeadDim];
  if (launched.dropout.rng_state != nullptr) queries.scale *= launched.dropout.scale;  // dS lacks this factor
  host::Launch sum;
  const auto run = [&](const auto& given, const auto& maps, const BackwardKernels& used) {
    run_fused(given, used, queries, partials * params.heads_q, kDqPartialRows, tiles * params.heads_kv, maps, gpu, sum);
  };
  if (!is_streaming(fused)) return run(launched, key_value_gradient_maps, kernels);
  MaskBackwardParams masked{params, nullptr, 0, visible};
  BackwardKernels used = kernels;
  ScoresSumParams sum_params;
  if (VarlenArguments::has(gradients.scores)) {
    const host::KernelRequest request = host::make_request(gpu, fused.dtype);
    used.fused = &select_storing(request, fused);
    masked.scores_gradient = gradients.scores.data();
    masked.scores_gradient_row = gradients.scores.strides()[2];
    if (VarlenArguments::has(gradients.mask)) {
      sum_params = scores_sum_params(gradients);
      const Kernel& kernel = select_scores_sum(request);
      const int64_t lanes = sum_params.num_sums * sum_params.size / host::kRowAlignElements;
      sum = {&kernel, ceil_div(lanes, kScoresSumChunks * kernel.threads), &sum_params, nullptr, /*is_dependent=*/false};
    }
  }
  run(
      masked,
      [&](const BackwardParams& backward, const Kernel& kernel) {
        return mask_maps({backward, masked.scores_gradient, masked.scores_gradient_row, {}}, kernel);
      },
      used);
}

SelectorInput make_selector_input(const BackwardParams& params, const host::KernelRequest& request) {
  const Batch& sequences = params.sequences;
  const ScoreOptions& options = params.score_options;
  const int64_t batch = params.batch;
  const SelectorInput longest{request,
                              options.right < kUnbounded ? Mask::kCausal : Mask::kFull,
                              std::max(params.head_dim, params.head_dim_v),
                              batch,
                              params.heads_q,
                              params.heads_kv,
                              params.seq_q,
                              params.seq_k};
  const int64_t rows_total = sequences.cu_seqlens_q != nullptr ? sequences.rows_total : batch * params.seq_q;
  const int64_t keys_total = sequences.cu_seqlens_k != nullptr ? sequences.keys_total : batch * params.seq_k;
  return as_equal_sequences(longest, rows_total, keys_total, static_cast<int64_t>(options.left) + options.right + 1);
}

bool prefers_fused(const BackwardKernels& kernels, const BackwardParams& params, const VarlenArguments& arguments,
                   const host::Device& gpu) {
  const bool is_split_slow = arguments.has_dropout() || streams_mask(arguments);
  return attention::prefers_fused(kernels, make_selector_input(params, host::make_request(gpu, arguments.dtype)),
                                  is_split_slow);
}

// Copies back a result that has another width or order.
void copy_back(const Tensor& from, const Tensor& to) {
  if (!VarlenArguments::has(to)) return;
  if (from.data() != to.data()) host::copy_unpadded(from, to);
}

}  // namespace

bool stores_scores_gradient(const VarlenBackwardArguments& arguments) {
  constexpr int64_t kMostBytes = int64_t{1} << 30;  // of dS, if it is summed to a smaller mask
  // At up to 64 columns these stores cost the fused kernel as much time as a separate kernel for a shared mask takes
  // (4 x 2048, 16 heads, H200: 148 us of 272), except where that kernel has too little work.
  constexpr int64_t kMostNarrowBytes = int64_t{1} << 27;
  const VarlenArguments& forward = arguments.forward;
  if (forward.has_dropout() || !streams_mask(forward)) return false;
  const int64_t* mask = forward.mask.sizes();
  const int64_t bytes = forward.batch() * forward.heads_q() * mask[2] * mask[3] * host::kElementBytes;
  const bool is_whole = mask[0] == forward.batch() && mask[1] == forward.heads_q();
  if (!is_whole && bytes > kMostBytes) return false;
  const BackwardParams params = make_backward_params(make_varlen_params(forward, {}), arguments, {});
  const bool sees_all = params.score_options.left == kUnbounded && params.score_options.right == kUnbounded;
  if (!sees_all) return false;  // tiles that no row sees would have to be cleared
  const host::Device& gpu = host::device(forward.device_index);
  const BackwardKernels kernels = select_kernels(forward, gpu);
  const bool is_narrow = kernels.fused != nullptr && kernels.fused->axes[axis::kHeadDim] <= 64;
  if (!is_whole && is_narrow && bytes > kMostNarrowBytes) return false;
  return prefers_fused(kernels, params, forward, gpu);
}

void allocate_mask_gradient(const VarlenArguments& forward, Gradients& gradients) {
  const int64_t* mask = forward.mask.sizes();
  const int64_t keys = ceil_div(forward.max_seqlen_k, host::kRowAlignElements) * host::kRowAlignElements;
  const auto matrices = [&](int64_t batch, int64_t heads) {
    return host::empty({batch, heads, forward.max_seqlen_q, keys}, forward.torch_dtype, forward.device_type,
                       forward.device_index);
  };
  gradients.scores = matrices(forward.batch(), forward.heads_q());
  if (mask[0] < forward.batch() || mask[1] < forward.heads_q()) gradients.mask = matrices(mask[0], mask[1]);
}

void backward_varlen_cuda(const VarlenBackwardArguments& arguments, const Gradients& gradients) {
  const host::Device& gpu = host::device(arguments.forward.device_index);
  const BackwardKernels kernels = select_kernels(arguments.forward, gpu);
  const Kernel& strictest =
      kernels.fused != nullptr ? *kernels.fused : *kernels.dq;  // a tensor that TMA can load, the others can load too
  VarlenBackwardArguments operands = loadable_arguments(arguments, strictest);
  Gradients results;
  results.dq = result(gradients.dq, strictest);
  results.dk = result(gradients.dk, strictest);
  results.dv = result(gradients.dv, strictest);
  results.row_dot = host::alias(gradients.row_dot);
  BackwardParams params = make_backward_params(make_varlen_params(operands.forward, {}), operands, results);
  params.sequence_rows = sequence_rows(params);
  const bool needs_all = params.dq != nullptr && params.dk != nullptr;
  const bool has_dropout = operands.forward.has_dropout();
  const Dropout dropout = has_dropout ? make_dropout(operands.forward) : Dropout{};
  if (needs_all && prefers_fused(kernels, params, operands.forward, gpu)) {
    StreamedMask streamed;
    if (is_streaming(*kernels.fused)) {
      streamed = streamed_mask(operands.forward, /*has_tiles=*/true);
      operands.forward.mask = host::alias(streamed.mask);
      params.score_options = make_varlen_params(operands.forward, {}).score_options;
    }
    run_fused({params, dropout}, kernels, gradients, streamed.tiles, gpu);
  } else {
    run_split({params, dropout}, kernels, gpu);
  }
  copy_back(results.dq, gradients.dq);
  copy_back(results.dk, gradients.dk);
  copy_back(results.dv, gradients.dv);
}

}  // namespace flashmoe::attention
