#include "attention/host/e4m3.h"

#include <algorithm>
#include <array>
#include <cstdint>

#include "attention/host/backends.h"
#include "attention/host/select.h"
#include "attention/host/varlen.h"
#include "host/copies.h"
#include "host/last_kernel.h"
#include "host/launch.h"

namespace flashmoe::attention {
namespace {

using host::describe_sizes;
using host::violate;

constexpr int64_t kRowAlignBytes = 16;
constexpr int64_t kScaledKeys = 16;  // page sizes with scales are a multiple of this, and so of a warp's keys
constexpr int64_t kCopiedKeys = 32;  // copied at a time by a thread block
// A kernel may read up to this many keys before a window: the largest block of any kernel.
constexpr int64_t kLargestBlock = 256;
// Every tile of a chunk converts all codes again: with more tiles per key head than this, one copy is cheaper, however
// many keys there are. Converting to bf16 takes twice the instructions.
constexpr int64_t kMostCodedTiles = 8;
constexpr int64_t kMostWideCodedTiles = 6;          // for bf16 above head dim 64
constexpr int64_t kMostTallCodedTiles = 3;          // above head dim 128
constexpr int64_t kMostScaledTiles = 2;             // if pages have scales, by which elements are multiplied in float32
constexpr int64_t kMostOfSlice = int64_t{1} << 30;  // elements of the smallest slice that can be copied
constexpr int64_t kWidest = 256;                    // the largest head dim of any kernel for codes
constexpr int32_t kFirstThatDecodes = 80;           // lowest compute capability with a kernel for codes

// Whether rows of codes can be loaded in place, 16 bytes at a time.
bool is_loadable(const Tensor& codes, bool may_repeat) {
  const int64_t last = codes.dim() - 1;
  if (reinterpret_cast<std::uintptr_t>(codes.data()) % kRowAlignBytes != 0) return false;
  if (codes.sizes()[last] % kRowAlignBytes != 0) return false;
  for (int64_t axis = 0; axis < last; ++axis) {
    if (codes.sizes()[axis] <= 1) continue;
    const int64_t stride = codes.strides()[axis];
    if (stride % kRowAlignBytes != 0 || (stride == 0 && !may_repeat)) return false;
  }
  return true;
}

E4m3ForwardParams make_e4m3_params(const E4m3Arguments& arguments, const VarlenArguments& varlen,
                                   const ForwardOutputs& outputs) {
  E4m3ForwardParams params{};
  params.forward = make_varlen_params(varlen, outputs);
  params.k_scale = make_scale(arguments.k_scale, varlen.has_pages());
  params.v_scale = make_scale(arguments.v_scale, varlen.has_pages());
  return params;
}

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// The sequences and key heads of a cache that are copied at a time.
struct Slice {
  int64_t sequence;
  int64_t sequences;
  int64_t head;
  int64_t heads;
};

int64_t elements_of_head(const VarlenArguments& arguments) {
  return most_keys(arguments) * (arguments.head_dim() + arguments.head_dim_v());
}

// The first slice, which is the largest. A combine kernel's rows are those of all sequences if they are ragged, and
// log-sum-exps are contiguous: so a slice has all sequences, or one, or all heads.
Slice first_slice(const VarlenArguments& arguments) {
  const int64_t of_head = std::max<int64_t>(1, elements_of_head(arguments));
  const int64_t heads = arguments.heads_kv();
  const int64_t fitting = std::clamp<int64_t>(most_copied / (of_head * heads), 1, arguments.batch());
  const int64_t sequences = arguments.has_ragged_rows() ? arguments.batch() : fitting;
  return {0, sequences, 0, std::clamp<int64_t>(most_copied / (of_head * sequences), 1, heads)};
}

bool can_be_dequantized(const VarlenArguments& arguments) {
  const int64_t least = arguments.has_ragged_rows() ? arguments.batch() : 1;
  return std::max(arguments.head_dim(), arguments.head_dim_v()) <= kWidest && !arguments.has_ragged_keys() &&
         least * elements_of_head(arguments) <= kMostOfSlice;
}

ScaleArgument slice_of(const ScaleArgument& scale, const Slice& slice, bool has_pages) {
  ScaleArgument result{Tensor(), scale.factor};
  if (!scale.values.is_given()) return result;
  const int64_t rank = scale.values.dim();
  result.values = host::alias(scale.values);
  if (rank == 1) result.values = host::narrow(result.values, 0, slice.head, slice.heads);
  if (rank == 2 || (rank == 4 && !has_pages)) {
    result.values = host::narrow(result.values, 0, slice.sequence, slice.sequences);
    result.values = host::narrow(result.values, 1, slice.head, slice.heads);
  }
  if (rank == 4 && has_pages) result.values = host::narrow(result.values, 2, slice.head, slice.heads);
  return result;
}

// The same call for only these sequences and heads.
E4m3Arguments slice_of(const E4m3Arguments& arguments, const Slice& slice) {
  const VarlenArguments& whole = arguments.varlen;
  const int64_t group = whole.heads_q() / whole.heads_kv();
  const auto of_sequences = [&](const Tensor& tensor) {
    return tensor.is_given() ? host::narrow(tensor, 0, slice.sequence, slice.sequences) : Tensor();
  };
  const auto of_heads = [&](const Tensor& tensor, int64_t axis, int64_t heads) {
    return tensor.is_given() ? host::narrow(tensor, axis, slice.head * heads, slice.heads * heads) : Tensor();
  };
  const auto of_cache = [&](const Tensor& cache) {
    return whole.has_pages() ? of_heads(cache, 2, 1) : of_heads(of_sequences(cache), 1, 1);
  };
  const Tensor q = whole.has_ragged_rows() ? host::alias(whole.q) : of_sequences(whole.q);
  E4m3Arguments result{with_operands(whole, of_heads(q, 1, group), of_cache(whole.k), of_cache(whole.v)),
                       slice_of(arguments.k_scale, slice, whole.has_pages()),
                       slice_of(arguments.v_scale, slice, whole.has_pages())};
  result.varlen.seqused_k = of_sequences(whole.seqused_k);
  result.varlen.block_table = of_sequences(whole.block_table);
  result.varlen.sinks = of_heads(whole.sinks, 0, group);
  result.varlen.mask = of_heads(of_sequences(whole.mask), 1, group);
  return result;
}

// The same call on a dense 16-bit cache.
VarlenArguments dequantize(const E4m3Arguments& arguments, const host::Device& gpu) {
  const VarlenArguments& codes = arguments.varlen;
  const int64_t keys = most_keys(codes);
  // Rows have as many elements as loadable codes have; those beyond the head dim are zero.
  const auto empty = [&](int64_t columns) {
    const int64_t sizes[] = {codes.batch(), codes.heads_kv(), keys, columns};
    const Tensor whole = host::empty({sizes[0], sizes[1], keys, round_up(columns, kRowAlignBytes)}, codes.torch_dtype,
                                     codes.device_type, codes.device_index);
    return host::view_of(whole, sizes, whole.strides());
  };
  VarlenArguments wide = with_operands(codes, host::alias(codes.q), empty(codes.head_dim()), empty(codes.head_dim_v()));
  wide.block_table = Tensor();
  wide.max_seqlen_k = keys;
  wide.has_codes = false;
  const VarlenArguments read = with_operands(codes, host::alias(codes.q), loadable_codes(codes.k, /*may_repeat=*/true),
                                             loadable_codes(codes.v, /*may_repeat=*/true));
  const ForwardParams from = make_varlen_params(read, ForwardOutputs());
  const bool has_window = from.score_options.left < kUnbounded;
  const int64_t seen = has_window ? int64_t{from.seq_q} + from.score_options.left + kLargestBlock : keys;
  const DequantizeParams params{from.k,
                                from.v,
                                wide.k.data(),
                                wide.v.data(),
                                from.k_stride,
                                from.v_stride,
                                from.batch,
                                from.heads_kv,
                                from.seq_k,
                                static_cast<int32_t>(std::min<int64_t>(seen, from.seq_k)),
                                static_cast<int32_t>(round_up(codes.head_dim(), kRowAlignBytes)),
                                static_cast<int32_t>(round_up(codes.head_dim_v(), kRowAlignBytes)),
                                from.sequences,
                                make_scale(arguments.k_scale, codes.has_pages()),
                                make_scale(arguments.v_scale, codes.has_pages())};
  const Kernel& kernel = select_dequantize(host::make_request(gpu, codes.dtype));
  const int64_t units = (params.read_keys + kCopiedKeys - 1) / kCopiedKeys + (params.read_keys < params.seq_k);
  const int64_t grid = units * params.heads_kv * params.batch;
  const host::CudaCall call(gpu);
  host::LaunchList list;
  list.add({&kernel, grid, &params, nullptr, /*is_dependent=*/true});
  list.run(call);
  return wide;
}

// Runs `plan`, made for a 16-bit cache, on copies of the cache, one slice after the other.
void forward_copies(const E4m3Arguments& arguments, const ForwardOutputs& outputs, const VarlenPlan& plan,
                    const host::Device& gpu) {
  const VarlenArguments& varlen = arguments.varlen;
  const int64_t group = varlen.heads_q() / varlen.heads_kv();
  const bool is_ragged = varlen.has_ragged_rows();
  const auto result_of = [&](const Tensor& tensor, const Slice& slice, int64_t head_axis) {
    if (!tensor.is_given()) return Tensor();
    const Tensor own = is_ragged ? host::alias(tensor) : host::narrow(tensor, 0, slice.sequence, slice.sequences);
    return host::narrow(own, head_axis, slice.head * group, slice.heads * group);
  };
  const Slice first = first_slice(varlen);
  Slice slice = first;
  for (slice.sequence = 0; slice.sequence < varlen.batch(); slice.sequence += first.sequences) {
    slice.sequences = std::min(first.sequences, varlen.batch() - slice.sequence);
    for (slice.head = 0; slice.head < varlen.heads_kv(); slice.head += first.heads) {
      slice.heads = std::min(first.heads, varlen.heads_kv() - slice.head);
      ForwardOutputs own;
      own.out = result_of(outputs.out, slice, 1);
      own.lse = result_of(outputs.lse, slice, is_ragged ? 0 : 1);
      run_varlen(dequantize(slice_of(arguments, slice), gpu), own, plan, gpu);
    }
  }
}

// Runs a kernel that reads codes: the chunk kernel, or the decoding kernel if there is none.
void forward_codes(const E4m3Arguments& arguments, const ForwardOutputs& outputs, const KernelPlan& chunk,
                   int64_t num_splits, const host::Device& gpu) {
  const VarlenArguments& varlen = arguments.varlen;
  const auto head_dim = static_cast<int32_t>(std::max(varlen.head_dim(), varlen.head_dim_v()));
  const Kernel& kernel =
      chunk.forward != nullptr ? *chunk.forward : select_e4m3(host::make_request(gpu, varlen.dtype), head_dim);
  const bool is_aligned = varlen.head_dim_v() % host::kRowAlignElements == 0;
  VarlenArguments read =
      with_operands(varlen, host::loadable(varlen.q, kernel), loadable_codes(varlen.k, /*may_repeat=*/true),
                    loadable_codes(varlen.v, /*may_repeat=*/true));
  ForwardOutputs written;
  written.out = is_aligned ? host::alias(outputs.out) : host::empty_like(outputs.out, host::padded_sizes(outputs.out));
  if (outputs.lse.is_given()) written.lse = host::alias(outputs.lse);
  E4m3ForwardParams params = make_e4m3_params(arguments, read, written);
  // The output's columns, not those of a padded cache.
  params.forward.head_dim_v = static_cast<int32_t>(written.out.sizes()[written.out.dim() - 1]);
  const host::CudaCall call(gpu);
  if (chunk.forward != nullptr) {
    run_chunk(params.forward, chunk, call, &params);
  } else {
    if (num_splits < 0) params.forward.seq_q = static_cast<int32_t>(kMaxDecodingRows);
    params.forward.score_options.folded_heads = params.forward.heads_q / params.forward.heads_kv;
    run_decoding(params.forward, kernel, num_splits, call, &params);
  }
  host::set_last_kernel(kernel.symbol);
  if (!is_aligned) host::copy_unpadded(written.out, outputs.out);
}

// The chunk kernel for codes that matches `wide`, the plan for a 16-bit cache, with its tiles and splits.
KernelPlan choose_chunk(const E4m3Arguments& arguments, const KernelPlan& wide, const host::Device& gpu) {
  const VarlenArguments& varlen = arguments.varlen;
  if (varlen.head_dim() % kRowAlignBytes != 0 || varlen.head_dim_v() % kRowAlignBytes != 0) return {};
  const KernelPlan chunk = select_coded_chunk(host::make_request(gpu, varlen.dtype), wide);
  if (chunk.forward == nullptr || !can_be_dequantized(varlen)) return chunk;
  const int64_t rows = varlen.max_seqlen_q * (varlen.heads_q() / varlen.heads_kv());
  const bool is_conversion_slow = varlen.dtype == Dtype::kBFloat16 && varlen.head_dim() > 64;
  const bool is_scaled = make_scale(arguments.k_scale, varlen.has_pages()).is_of_pages != 0 ||
                         make_scale(arguments.v_scale, varlen.has_pages()).is_of_pages != 0;
  const bool has_wide_head = varlen.head_dim() > 128;
  const int64_t most = is_scaled            ? kMostScaledTiles
                       : has_wide_head      ? kMostTallCodedTiles
                       : is_conversion_slow ? kMostWideCodedTiles
                                            : kMostCodedTiles;
  return rows <= most * chunk.forward->block_m ? chunk : KernelPlan{};
}

}  // namespace

void check_scale(const ScaleArgument& scale, const char* name, const QueryKeyValue& operands, const Tensor& cache,
                 int64_t batch, bool has_pages) {
  if (!scale.values.is_given()) return;
  const Tensor& values = scale.values;
  const int64_t rank = values.dim();
  const int64_t heads = cache.sizes()[has_pages ? 2 : 1];
  check_device(values, name, operands);
  if (values.dtype() != aoti_torch_dtype_float32()) {
    violate("attention.companion_dtype",
            {{"name", name}, {"found", host::describe_dtype(values.dtype())}, {"needed", "float32"}});
  }
  const int64_t* sizes = values.sizes();
  const int64_t rows[] = {batch, heads};
  bool fits = rank == 0 || (rank == 1 && sizes[0] == heads) || (rank == 2 && std::equal(rows, rows + 2, sizes));
  if (rank == 4 && cache.dim() == 4) {
    const int64_t head_axis = has_pages ? 2 : 1;
    fits = true;
    for (int64_t axis = 0; axis < 4; ++axis) {
      const bool may_differ = axis == 0 || axis == head_axis;
      fits = fits && (sizes[axis] == 1 || (may_differ && sizes[axis] == cache.sizes()[axis]));
    }
  }
  if (!fits) {
    violate("attention.e4m3_scale_shape", {{"name", name},
                                           {"found", describe_sizes(values)},
                                           {"batch", batch},
                                           {"heads", heads},
                                           {"cache", describe_sizes(cache)}});
  }
  if (rank == 4 && has_pages && sizes[0] > 1 && cache.sizes()[1] % kScaledKeys != 0) {
    violate("attention.e4m3_page_scales", {{"name", name}, {"page_size", cache.sizes()[1]}, {"multiple", kScaledKeys}});
  }
}

int64_t most_copied = int64_t{1} << 28;

Tensor loadable_codes(const Tensor& codes, bool may_repeat) {
  if (is_loadable(codes, may_repeat)) return host::alias(codes);
  std::array<int64_t, 4> sizes{};
  std::copy_n(codes.sizes(), codes.dim(), sizes.begin());
  int64_t& columns = sizes[static_cast<std::size_t>(codes.dim() - 1)];
  columns = round_up(columns, kRowAlignBytes);
  Tensor result = host::empty(codes.dim(), sizes.data(), codes.dtype(), codes.device_type(), codes.device_index());
  host::check_shim(aoti_torch_zero_(result.get()), "zero_");
  const Tensor slice = host::view_of(result, codes.sizes(), result.strides());
  host::check_shim(aoti_torch_copy_(slice.get(), codes.get(), /*non_blocking=*/0), "copy_");
  return result;
}

void check_e4m3_scales(const E4m3Arguments& arguments) {
  const VarlenArguments& varlen = arguments.varlen;
  if (has_alibi(varlen) && varlen.has_ragged_keys()) violate("attention.e4m3_alibi");
  check_scale(arguments.k_scale, "k_scale", varlen, varlen.k, varlen.batch(), varlen.has_pages());
  check_scale(arguments.v_scale, "v_scale", varlen, varlen.v, varlen.batch(), varlen.has_pages());
}

void check_e4m3_scales(const E4m3AppendArguments& arguments) {
  const AppendArguments& append = arguments.append;
  QueryKeyValue operands;
  operands.q = host::alias(append.k_new);
  operands.device_type = append.device_type;
  operands.device_index = append.device_index;
  const int64_t batch = append.k_new.sizes()[0];
  check_scale(arguments.k_scale, "k_scale", operands, append.k_cache, batch, append.has_pages());
  check_scale(arguments.v_scale, "v_scale", operands, append.v_cache, batch, append.has_pages());
}

CacheScale make_scale(const ScaleArgument& scale, bool has_pages) {
  CacheScale result{};
  result.factor = static_cast<float>(scale.factor);
  if (!scale.values.is_given()) return result;
  const Tensor& values = scale.values;
  result.values = static_cast<const float*>(values.data());
  const auto stride_of = [&](int64_t axis) { return values.sizes()[axis] > 1 ? values.strides()[axis] : 0; };
  if (values.dim() == 1) result.head_stride = stride_of(0);
  if (values.dim() == 2 || values.dim() == 4) {
    result.stride = stride_of(0);
    result.head_stride = stride_of(values.dim() == 4 && has_pages ? 2 : 1);
  }
  result.is_of_pages = has_pages && values.dim() == 4 && result.stride != 0 ? 1 : 0;
  return result;
}

void forward_e4m3_cuda(const E4m3Arguments& arguments, const ForwardOutputs& outputs) {
  const VarlenArguments& varlen = arguments.varlen;
  const host::Device& gpu = host::device(varlen.device_index);
  if (varlen.max_seqlen_k == 0 || varlen.k.sizes()[0] == 0) {
    fill_without_keys(outputs, varlen.sinks, gpu);
    return;
  }
  const bool has_kernel = gpu.capability >= kFirstThatDecodes && !has_alibi(varlen);
  // A consistent row has the same bits in any call, and the rows may be few: nothing is copied if a kernel can read
  // codes.
  if (varlen.is_consistent() && has_kernel) return forward_codes(arguments, outputs, {}, /*num_splits=*/1, gpu);
  // The kernels for the same call on a 16-bit cache decide, so that the order of sums is the same.
  const VarlenPlan wide = choose_varlen(varlen, gpu);
  const KernelPlan chunk = choose_chunk(arguments, wide.chunk, gpu);
  if (has_alibi(varlen) && !can_be_dequantized(varlen)) violate("attention.e4m3_alibi");
  if (chunk.forward != nullptr || (has_kernel && wide.is_decoding) || !can_be_dequantized(varlen))
    return forward_codes(arguments, outputs, chunk, varlen.num_splits, gpu);
  VarlenPlan copied = wide;
  if (has_kernel && wide.short_seq_kernel != nullptr) {
    forward_codes(arguments, outputs, {}, /*num_splits=*/-1, gpu);
    copied.short_seq_kernel = nullptr;
  }
  forward_copies(arguments, outputs, copied, gpu);
}

void append_e4m3_cuda(const E4m3AppendArguments& arguments) {
  const host::Device& gpu = host::device(arguments.append.device_index);
  const Kernel& kernel = select_e4m3_append(host::make_request(gpu, arguments.append.dtype));
  const bool has_pages = arguments.append.has_pages();
  const E4m3AppendParams params{make_append_params(arguments.append), make_scale(arguments.k_scale, has_pages),
                                make_scale(arguments.v_scale, has_pages)};
  const int64_t rows = 2 * static_cast<int64_t>(params.append.batch) * params.append.new_keys * params.append.heads_kv;
  const int64_t warps = kernel.threads / 32;
  const host::CudaCall call(gpu);
  host::LaunchList list;
  list.add({&kernel, (rows + warps - 1) / warps, &params, nullptr, /*is_dependent=*/false});
  list.run(call);
  host::set_last_kernel(kernel.symbol);
}

}  // namespace flashmoe::attention
