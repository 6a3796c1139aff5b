// The forward pass of ragged, paged and windowed attention on a GPU. Nothing here reads device memory: the kernels read
// lengths, offsets and page numbers, and grids are sized for the largest possible batch.

#include "attention/host/varlen.h"

#include <algorithm>
#include <cstring>

#include "attention/forward/sm90/varlen/chunk_words.h"
#include "attention/forward/sm90/varlen/tensor_map.h"
#include "attention/host/backends.h"
#include "attention/host/prepare.h"
#include "attention/host/select.h"
#include "attention/host/streamed_mask.h"
#include "attention/params/ordered.h"
#include "host/ceil_div.h"
#include "host/copies.h"
#include "host/last_kernel.h"
#include "host/launch.h"
#include "host/tensor_map.h"
#include "host/tile_counters.h"
#include "host/workspace.h"

namespace flashmoe::attention {
namespace {

constexpr int64_t kMostSplits = 64;            // more blocks per item are not worth combining
constexpr int32_t kUnboundedSplits = 1 << 20;  // if nothing is combined
// L2 fetch size for keys and values that few rows read: with 256 bytes per miss an H200 delivers 4.15 TB/s of them,
// with 128 bytes 4.4 (docs/notebook/2026-11-29-rows-to-verify.md). Elsewhere it makes no difference, or, for 16-bit
// weights, the opposite one.
constexpr CUtensorMapL2promotion kKeyPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;

bool has_keys(const VarlenArguments& arguments) {
  return arguments.max_seqlen_k > 0 && arguments.k.sizes()[0] > 0;  // of all sequences, or pages
}

// Another view of the same memory, possibly with another rank.
Tensor view_as(const Tensor& tensor, int64_t rank, const int64_t* sizes, const int64_t* strides) {
  AtenTensorHandle handle = nullptr;
  host::check_shim(aoti_torch__reinterpret_tensor(tensor.get(), rank, sizes, strides, 0, &handle),
                   "_reinterpret_tensor");
  return Tensor(handle);
}

void copy(const Tensor& from, const Tensor& to) {
  host::check_shim(aoti_torch_copy_(to.get(), from.get(), /*non_blocking=*/0), "copy_");
}

bool is_streaming(const Kernel& kernel) { return std::strcmp(kernel.operation, kMaskForward) == 0; }

// The same tensors, with copies of those that the kernel cannot load in place.
VarlenArguments loadable_arguments(const VarlenArguments& arguments, const Kernel& kernel) {
  return with_operands(arguments, host::loadable(arguments.q, kernel), host::loadable(arguments.k, kernel),
                       host::loadable(arguments.v, kernel));
}

// `launched`: params, or a block that begins with them.
void run_tiles(ForwardParams& params, const Kernel& kernel, const host::CudaCall& call, const void* launched) {
  const int64_t tiles = most_row_blocks(params, kernel.block_m) * params.heads_q * num_value_slices(kernel);
  const int64_t grid = host::grid_for(kernel, tiles, call.gpu);
  host::TileCounter counter;
  if (tiles > grid) {
    counter = host::tile_counter(call);
    params.tile_counter = counter.address;
  }
  TensorMaps maps;
  if (kernel.num_tensor_maps > 0) {
    const sm90::MaskForwardTensorMaps described = sm90::mask_forward_tensor_maps({params, {}}, kernel.block_n);
    maps = encode(described, kernel.dtype, kKeyPromotion);
    if (is_streaming(kernel)) {
      maps[4] = host::encode_tensor_map(described.mask, kernel.dtype, "attn_mask");
    }
  }
  host::LaunchList list;
  list.add({&kernel, grid, launched, maps.data(), /*is_dependent=*/false});
  list.run(call);
}

// Memory bandwidth in bytes per ns: an H100 has 3352, an H200 4916. With 1 to 2 GB of keys loaded as evict-first, an
// H200 decodes 2% to 6% faster (64 sequences of 8192 keys, pages of 256: 518 to 490 us), an H100 up to 4% slower.
constexpr int32_t kFastMemory = 4000;
// Lines that other kernels have written stay in the L2 while keys loaded as evict-first replace only each other; this
// costs 5% for any batch. So blocks start without a hint, until together they have read kRefills times the L2's size.
// For batches of at most kFewRefills times that size, writing the lines back costs what it gains.
constexpr int64_t kRefills = 2;
constexpr int64_t kFewRefills = 6;

// Bytes of K and V if all sequences are as long as the longest.
int64_t bytes_of_keys(const ForwardParams& params, const Kernel& kernel) {
  const int64_t key_bytes = int64_t{2} * sizeof(uint16_t) * kernel.axes[axis::kHeadDim];
  return key_bytes * params.seq_k * params.heads_kv * params.batch;
}

// Whether a chunk's keys, each read by one tile, should replace each other in the L2 (evict-first): 1% to 11% faster if
// they are 0.67 to 4.5 times the L2's size, up to 2% slower above that, and 1% to 8% slower if they fit.
bool streams_keys(const ForwardParams& params, const Kernel& kernel, const host::Device& gpu) {
  if (gpu.memory_bandwidth <= kFastMemory || kernel.axes[axis::kHeadDim] <= 64) return false;
  const int64_t bytes = bytes_of_keys(params, kernel);
  return 5 * bytes > 3 * int64_t{gpu.l2_bytes} && bytes <= kFewRefills * gpu.l2_bytes;
}

// At D=64 evict_first costs 1%.
int32_t hints_of(const ForwardParams& params, const Kernel& kernel, int64_t grid, const host::Device& gpu) {
  const int64_t head_dim = kernel.axes[axis::kHeadDim];
  if (gpu.memory_bandwidth <= kFastMemory || head_dim <= 64) return 0;
  const int64_t key_bytes = int64_t{2} * sizeof(uint16_t) * head_dim;
  if (bytes_of_keys(params, kernel) <= kFewRefills * gpu.l2_bytes) return 1;
  return static_cast<int32_t>(ceil_div(kRefills * gpu.l2_bytes, grid * kernel.block_n * key_bytes));
}

// Whether an early start of the combine kernel, with `blocks` blocks, pays off: 3% to 6% for one sequence of 2048 keys.
// It starts on the free multiprocessors, and if these are few, all of its blocks may land on them
// (1 x 8192: 15.4 us and 19.3).
bool adds_up_early(int64_t blocks, int64_t grid, const host::Device& gpu) {
  constexpr int64_t kResident = 16;  // combine blocks per multiprocessor
  const int64_t free = gpu.num_multiprocessors - grid;
  return free > 0 &&
         std::min(kResident, ceil_div(blocks, free)) <= 2 * ceil_div(blocks, int64_t{gpu.num_multiprocessors});
}

// Runs the splits of each tile, then the combine kernel. Rows are dense.
void run_split(ForwardParams& params, const Kernel& kernel, const SplitPlan& split_plan, const host::CudaCall& call) {
  params.num_splits = split_plan.num_splits;
  const int64_t rows = static_cast<int64_t>(params.batch) * params.heads_q * params.seq_q;
  const host::Workspace partials = allocate_partials(params, rows, params.head_dim_v, call);
  ForwardParams sums = params;
  sums.head_dim = params.head_dim_v;
  const int64_t grid = most_row_blocks(params, kernel.block_m) * params.heads_q * params.num_splits;
  host::LaunchList list;
  list.add({&kernel, grid, &params, nullptr, /*is_dependent=*/false});
  list.add({split_plan.combine, ceil_div(rows, split_plan.combine->block_m), &sums, nullptr, /*is_dependent=*/true});
  list.run(call);
}

}  // namespace

host::Workspace allocate_partials(ForwardParams& params, int64_t rows, int64_t columns, const host::CudaCall& call) {
  host::Workspace partials;
  const int64_t out = partials.add<float>(params.num_splits * rows * columns);
  const int64_t lse = partials.add<float>(params.num_splits * rows);
  partials.allocate(call);
  params.out_partial = partials.address<float>(out);
  params.lse_partial = partials.address<float>(lse);
  return partials;
}

// Few rows over many keys. The heads of a position are rows of a tile; the kernel and its tensor maps arrange that.
// With num_splits above 1 its results are partial, with rows numbered like those of the log-sum-exp: for the combine
// kernel, ragged rows are one sequence.
void run_chunk(ForwardParams& params, const KernelPlan& plan, const host::CudaCall& call,
               const E4m3ForwardParams* codes) {
  const Kernel& kernel = *plan.forward;
  params.num_splits = plan.num_splits;
  int32_t fold = 1;
  while (fold < params.heads_q / params.heads_kv) fold *= 2;
  const int64_t tiles = most_row_blocks(params, kernel.block_m / fold) * params.heads_kv * params.num_splits;
  const int64_t grid = host::grid_for(kernel, tiles, call.gpu);
  const bool is_read_once = codes == nullptr && params.seq_q <= kernel.block_m / fold;
  params.hints = is_read_once && streams_keys(params, kernel, call.gpu) ? sm90::kReadsKeysOnce : 0;
  host::TileCounter counter;
  if (tiles > grid) {
    counter = host::tile_counter(call);
    params.tile_counter = counter.address;
  }
  const bool is_ragged = params.sequences.cu_seqlens_q != nullptr;
  const int32_t rows_of_head = is_ragged ? params.sequences.rows_total : params.seq_q;
  const int64_t rows = (is_ragged ? int64_t{1} : params.batch) * params.heads_q * rows_of_head;
  host::Workspace partials;
  int64_t combine_grid = 0;
  if (plan.combine != nullptr) {
    partials = allocate_partials(params, rows, params.head_dim_v, call);
    combine_grid = ceil_div(rows, plan.combine->block_m);
    if (adds_up_early(combine_grid, grid, call.gpu)) params.hints += sm90::kStartsNext;
  }
  const sm90::ChunkTensorMaps described = codes == nullptr ? sm90::chunk_tensor_maps(params, kernel.block_n)
                                                           : sm90::coded_chunk_tensor_maps(*codes, kernel.block_n);
  const TensorMaps maps = encode(described, kernel.dtype, kKeyPromotion);
  host::LaunchList list;
  const void* launched = codes == nullptr ? static_cast<const void*>(&params) : codes;
  list.add({&kernel, grid, launched, maps.data(), /*is_dependent=*/true});
  ForwardParams whole = params;
  if (plan.combine != nullptr) {
    whole.batch = is_ragged ? 1 : params.batch;
    whole.seq_q = rows_of_head;
    whole.head_dim = params.head_dim_v;
    list.add({plan.combine, combine_grid, &whole, nullptr, /*is_dependent=*/true});
  }
  list.run(call);
}

namespace {

// visible: of a streamed mask.
void run(const VarlenArguments& arguments, const ForwardOutputs& outputs, const VarlenPlan& plan,
         const host::Device& gpu, const VisibleBlocks& visible = {}) {
  const Kernel& kernel = *plan.kernel;
  const bool is_decoding = plan.is_decoding;
  ForwardParams params = make_varlen_params(arguments, outputs);
  const host::CudaCall call(gpu);
  // ALiBi does not fold: each row of folded heads would have its own slope.
  if (is_decoding) {
    params.score_options.folded_heads = params.heads_q / params.heads_kv;
  } else if (plan.chunk.forward == nullptr && has_one_row_each(arguments) && !has_alibi(arguments) &&
             !arguments.has_dropout()) {
    fold_heads(params);
  }
  if (arguments.has_dropout()) {
    DropoutForwardParams dropped{params, make_dropout(arguments)};
    run_tiles(dropped.forward, kernel, call, &dropped);
  } else if (is_streaming(kernel)) {
    MaskForwardParams masked{params, visible};
    run_tiles(masked.forward, kernel, call, &masked);
  } else if (plan.ordered.values != nullptr) {
    run_ordered_decoding(params, plan.ordered, call);
  } else if (plan.chunk.forward != nullptr) {
    run_chunk(params, plan.chunk, call, /*codes=*/nullptr);
  } else if (is_decoding) {
    run_decoding(params, kernel, arguments.num_splits, call);
  } else if (plan.split_plan.combine != nullptr) {
    run_split(params, kernel, plan.split_plan, call);
  } else {
    ForwardParams few = params;
    if (plan.skips_short_seqs) params.num_splits = -static_cast<int32_t>(kMaxDecodingRows);
    run_tiles(params, kernel, call, &params);
    if (plan.short_seq_kernel != nullptr) {
      few.seq_q = static_cast<int32_t>(kMaxDecodingRows);
      few.score_options.folded_heads = few.heads_q / few.heads_kv;
      run_decoding(few, *plan.short_seq_kernel, /*num_splits=*/-1, call);
    }
  }
  host::set_last_kernel(kernel.symbol);
}

VarlenSelectorInput selector_input(const VarlenArguments& arguments, const host::Device& gpu) {
  const int64_t group = arguments.heads_q() / arguments.heads_kv();
  VarlenSelectorInput input{};
  input.request = host::make_request(gpu, arguments.dtype);
  input.head_dim = static_cast<int32_t>(std::max(arguments.head_dim(), arguments.head_dim_v()));
  input.head_dim_v = static_cast<int32_t>(arguments.head_dim_v());
  input.page_size = arguments.has_pages() ? static_cast<int32_t>(arguments.k.sizes()[1]) : 0;
  // Decoding counts one row per sequence as one row, as it does two rows, even with more heads than a chunk's tile
  // holds: for few sequences, and whenever the bits must not depend on their number. H200, D=64, 4096 keys, 71 heads on
  // one, 8 and 64 sequences: decoded 18 and 87 us, as rows of a ragged tile 51 and 54.
  constexpr int64_t kMostFoldedHeads = 64;
  const bool has_many = 4 * arguments.batch() * arguments.heads_kv() > gpu.num_multiprocessors;
  const bool is_folded =
      has_one_row_each(arguments) && (group <= kMostFoldedHeads || (has_many && arguments.num_splits != 1));
  input.rows = is_folded ? group : arguments.max_seqlen_q;
  input.keys = arguments.max_seqlen_k;
  input.heads = is_folded ? arguments.heads_kv() : arguments.heads_q();
  input.heads_kv = arguments.heads_kv();
  input.rows_of_key_head = arguments.max_seqlen_q * group;
  input.batch = arguments.batch();
  input.rows_total = arguments.has_ragged_rows() ? arguments.q.sizes()[0] : 0;
  input.has_score_functions = has_softcap(arguments) || VarlenArguments::has(arguments.mask);
  input.has_alibi = has_alibi(arguments);
  input.is_consistent = arguments.is_consistent();
  input.is_batch_invariant = arguments.num_splits == 1;
  input.heads_q = arguments.heads_q();
  input.longest_rows = arguments.max_seqlen_q;
  input.num_splits = arguments.num_splits;
  input.is_causal = arguments.window_right == 0;
  const bool has_window = arguments.window_left >= 0 && arguments.window_right >= 0;
  input.seen_keys = arguments.max_seqlen_k;
  if (has_window) input.seen_keys = std::min(input.seen_keys, arguments.window_left + arguments.window_right + 1);
  return input;
}

}  // namespace

VarlenPlan choose_varlen(const VarlenArguments& arguments, const host::Device& gpu) {
  const VarlenSelectorInput input = selector_input(arguments, gpu);
  if (arguments.has_dropout()) {
    const bool alibi = has_alibi(arguments);
    const bool has_score_mod = !alibi && (has_softcap(arguments) || VarlenArguments::has(arguments.mask));
    return {{}, &select_dropout_forward(input.request, input.head_dim, has_score_mod, alibi), false};
  }
  const OrderedDecoding ordered = select_ordered_decoding(input);
  if (ordered.values != nullptr) return {ordered, ordered.values, true};
  const Kernel* kernel = select_varlen_forward(input);
  const KernelPlan chunk = select_chunk(input, *kernel);
  if (chunk.forward != nullptr) return {{}, chunk.forward, false, {}, chunk};
  const bool may_stream = arguments.num_splits == 0 && !input.is_consistent && streams_mask(arguments);
  const Kernel* streaming = may_stream ? find_mask_forward(input, *kernel) : nullptr;
  if (streaming != nullptr) return {{}, streaming, false};
  const auto decodes = [](const Kernel* found) { return std::strcmp(found->operation, "attention_decode") == 0; };
  const Kernel* short_seq_kernel = nullptr;
  if (input.is_batch_invariant && input.rows_total > 0 && !decodes(kernel)) {
    VarlenSelectorInput few = input;
    few.rows = kMaxDecodingRows;
    short_seq_kernel = select_varlen_forward(few);
    if (!decodes(short_seq_kernel)) short_seq_kernel = nullptr;
  }
  return {{}, kernel, decodes(kernel), plan_split(input, *kernel), {}, short_seq_kernel, short_seq_kernel != nullptr};
}

void fill_without_keys(const ForwardOutputs& outputs, const Tensor& sinks, const host::Device& gpu) {
  const host::CudaCall call(gpu);
  const int64_t last = outputs.out.dim() - 1;
  const int64_t* sizes = outputs.out.sizes();
  int64_t rows = 1;
  for (int64_t axis = 0; axis < last; ++axis) rows *= sizes[axis];
  constexpr uint32_t kMinusInfinity = 0xff800000U;
  host::fill_bytes(outputs.out.data(), 0, rows * sizes[last] * host::kElementBytes, call.stream, "output of ", rows,
                   " rows");
  if (!outputs.lse.is_given()) return;
  if (!sinks.is_given()) {
    host::fill_words(outputs.lse.data(), kMinusInfinity, rows, call.stream, "log-sum-exp of ", rows, " rows");
    return;
  }
  const int64_t ragged[] = {1, 0};
  const int64_t dense[] = {0, 1, 0};
  copy(view_as(sinks, outputs.lse.dim(), outputs.lse.sizes(), last == 2 ? ragged : dense), outputs.lse);
}

bool has_one_row_each(const VarlenArguments& arguments) {
  // For ragged rows only the GPU knows which sequences have one row and which have none.
  return !arguments.has_ragged_rows() && arguments.max_seqlen_q == 1;
}

void fold_heads(ForwardParams& params) {
  const int32_t group = params.heads_q / params.heads_kv;
  params.seq_q = group;
  if (group == 1) return;
  for (Strides* stride : {&params.q_stride, &params.out_stride}) {
    stride->row = stride->head;
    stride->head *= group;
  }
  ScoreOptions& options = params.score_options;
  options.mask_stride_row = options.mask_stride_head;
  options.mask_stride_head *= group;
  options.folded_heads = group;
  params.heads_q = params.heads_kv;
}

void describe_as_varlen(ForwardParams& params) {
  params.head_dim_v = params.head_dim;
  params.sequences = Batch{};
  params.score_options = ScoreOptions{};
  params.score_options.left = kUnbounded;
  params.score_options.right = kUnbounded;
  params.score_options.mask_factor = 1.0F;
  params.score_options.folded_heads = 1;
}

// Each block has up to two partial results: the end of one item and the start of another. The counters are zero again
// at the end.
void run_decoding(ForwardParams& params, const Kernel& kernel, int64_t num_splits, const host::CudaCall& call,
                  const void* launched) {
  params.num_splits = static_cast<int32_t>(num_splits == 0 ? kMostSplits : num_splits);
  const int64_t rows_of_head = static_cast<int64_t>(params.seq_q) * params.score_options.folded_heads;
  const int64_t items = ceil_div(rows_of_head, kernel.block_m) * params.heads_kv * params.batch;
  const int64_t tiles = params.num_splits <= 1 ? items : items * (ceil_div(params.seq_k, kernel.block_n) + 1);
  const int64_t grid = std::min(host::grid_for(kernel, tiles, call.gpu), host::kMaxCounters);
  params.hints = hints_of(params, kernel, grid, call.gpu);
  host::TileCounter counters;
  host::Workspace workspace;
  if (params.num_splits > 1) {
    const int64_t rows = 2 * grid * std::min<int64_t>(kernel.block_m, rows_of_head);
    const int64_t out = workspace.add<float>(rows * kernel.axes[axis::kHeadDim]);
    const int64_t states = workspace.add<float>(rows * 2);
    workspace.allocate(call);
    params.out_partial = workspace.address<float>(out);
    params.lse_partial = workspace.address<float>(states);
    counters = host::tile_counter(call, grid);
    params.tile_counter = counters.address;
  }
  // May overlap the kernel before it in the stream: the kernel waits for its end before its first access to memory.
  host::LaunchList list;
  list.add({&kernel, grid, launched == nullptr ? &params : launched, nullptr, /*is_dependent=*/true});
  list.run(call);
}

void run_ordered_decoding(ForwardParams& params, const OrderedDecoding& kernels, const host::CudaCall& call) {
  const Kernel& scores = *kernels.scores;
  const Kernel& values = *kernels.values;
  params.num_splits = kUnboundedSplits;
  params.hints = scores.axes[axis::kHeadDim] > 64 ? 1 : 0;
  const int64_t rows_of_head = static_cast<int64_t>(params.seq_q) * params.score_options.folded_heads;
  const int64_t items = ceil_div(rows_of_head, values.block_m) * params.heads_kv * params.batch;
  const int64_t tiles = items * (ceil_div(params.seq_k, scores.block_n) + 1);
  host::Workspace workspace;
  const int64_t floats =
      workspace.add<float>(count_scores(values, params.batch, params.heads_kv, rows_of_head, params.seq_k));
  workspace.allocate(call);
  params.out_partial = workspace.address<float>(floats);
  const int64_t slices = values.axes[axis::kHeadDim] / kValueColumns;
  host::LaunchList list;
  list.add({&scores, host::grid_for(scores, tiles, call.gpu), &params, nullptr, /*is_dependent=*/true});
  list.add({&values, items * slices, &params, nullptr, /*is_dependent=*/true});
  list.run(call);
}

int64_t most_row_blocks(const ForwardParams& params, int64_t block_m) {
  return most_row_blocks(params.seq_q, params.batch, params.sequences.rows_total, block_m);
}

// Whether the dense kernels, which are faster, compute the same result. Few rows stay here, where their heads fold
// better.
bool is_plain(const VarlenArguments& arguments) {
  for (const Tensor* tensor : {&arguments.cu_seqlens_q, &arguments.cu_seqlens_k, &arguments.seqused_k,
                               &arguments.block_table, &arguments.sinks, &arguments.mask}) {
    if (VarlenArguments::has(*tensor)) return false;
  }
  return arguments.window_left < 0 && arguments.window_right <= 0 && !has_softcap(arguments) &&
         arguments.head_dim() == arguments.head_dim_v() && arguments.head_dim() <= kMaxDenseHeadDim &&
         arguments.max_seqlen_q > 1 && !arguments.has_dropout();
}

void forward_dense(const VarlenArguments& arguments, const ForwardOutputs& outputs) {
  ForwardArguments dense;
  dense.q = host::alias(arguments.q);
  dense.k = host::alias(arguments.k);
  dense.v = host::alias(arguments.v);
  dense.dtype = arguments.dtype;
  dense.torch_dtype = arguments.torch_dtype;
  dense.device_type = arguments.device_type;
  dense.device_index = arguments.device_index;
  dense.scale = arguments.scale;
  dense.is_causal = arguments.window_right == 0;
  dense.is_consistent = true;
  forward_cuda(dense, outputs);
}

void forward_as_ragged(const ForwardArguments& arguments, const ForwardOutputs& outputs) {
  VarlenArguments ragged;
  ragged.q = host::alias(arguments.q);
  ragged.k = host::alias(arguments.k);
  ragged.v = host::alias(arguments.v);
  ragged.dtype = arguments.dtype;
  ragged.torch_dtype = arguments.torch_dtype;
  ragged.device_type = arguments.device_type;
  ragged.device_index = arguments.device_index;
  ragged.max_seqlen_q = arguments.q.sizes()[2];
  ragged.max_seqlen_k = arguments.k.sizes()[2];
  ragged.scale = arguments.scale;
  ragged.window_right = arguments.is_causal ? 0 : -1;
  ragged.num_splits = arguments.is_consistent ? kConsistent : 0;
  make_scale_positive(ragged);
  forward_varlen_cuda(ragged, outputs);
}

void forward_varlen_cuda(const VarlenArguments& arguments, const ForwardOutputs& outputs) {
  if (arguments.is_consistent() && is_plain(arguments)) return forward_dense(arguments, outputs);
  const host::Device& gpu = host::device(arguments.device_index);
  if (!has_keys(arguments)) {
    fill_without_keys(outputs, arguments.sinks, gpu);
    return;
  }
  run_varlen(arguments, outputs, choose_varlen(arguments, gpu), gpu);
}

void run_varlen(const VarlenArguments& arguments, const ForwardOutputs& outputs, const VarlenPlan& plan,
                const host::Device& gpu) {
  const Kernel& kernel = *plan.kernel;
  const bool is_aligned = arguments.head_dim_v() % host::kRowAlignElements == 0;
  if (is_aligned && !is_streaming(kernel) && host::is_loadable(arguments.q, kernel) &&
      host::is_loadable(arguments.k, kernel) && host::is_loadable(arguments.v, kernel)) {
    run(arguments, outputs, plan, gpu);
    return;
  }
  VarlenArguments copied = loadable_arguments(arguments, kernel);
  StreamedMask streamed;
  if (is_streaming(kernel)) {
    streamed = streamed_mask(arguments, /*has_tiles=*/false);
    copied.mask = host::alias(streamed.mask);
  }
  ForwardOutputs padded;
  padded.out = is_aligned ? host::alias(outputs.out) : host::empty_like(outputs.out, host::padded_sizes(outputs.out));
  if (VarlenArguments::has(outputs.lse)) padded.lse = host::alias(outputs.lse);
  run(copied, padded, plan, gpu, streamed.blocks);
  if (!is_aligned) host::copy_unpadded(padded.out, outputs.out);
}

}  // namespace flashmoe::attention
