// Turns checked arguments into parameter blocks, and makes the copies of q and of the mask that kernels need.

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "attention/host/varlen_arguments.h"
#include "host/copies.h"

namespace flashmoe::attention {
namespace {

bool is_usable(double scale) { return static_cast<float>(scale) >= std::numeric_limits<float>::min(); }

int32_t window_side(int64_t side) { return side < 0 || side >= kUnbounded ? kUnbounded : static_cast<int32_t>(side); }

const int32_t* ints_of(const Tensor& tensor) {
  return VarlenArguments::has(tensor) ? static_cast<const int32_t*>(tensor.data()) : nullptr;
}

bool is_bool(const Tensor& mask) { return mask.dtype() == aoti_torch_dtype_bool(); }

Batch make_batch(const VarlenArguments& arguments) {
  Batch batch{};
  batch.cu_seqlens_q = ints_of(arguments.cu_seqlens_q);
  batch.cu_seqlens_k = ints_of(arguments.cu_seqlens_k);
  batch.seqused_k = ints_of(arguments.seqused_k);
  batch.block_table = ints_of(arguments.block_table);
  if (arguments.has_pages()) {
    batch.block_table_stride = arguments.block_table.strides()[0];
    batch.page_size = static_cast<int32_t>(arguments.k.sizes()[1]);
    batch.num_pages = static_cast<int32_t>(arguments.k.sizes()[0]);
  }
  if (arguments.has_ragged_rows()) batch.rows_total = static_cast<int32_t>(arguments.q.sizes()[0]);
  if (arguments.has_ragged_keys()) batch.keys_total = static_cast<int32_t>(arguments.k.sizes()[0]);
  return batch;
}

ScoreOptions make_score_options(const VarlenArguments& arguments) {
  ScoreOptions options{};
  options.left = window_side(arguments.window_left);
  options.right = window_side(arguments.window_right);
  const bool is_capped = has_softcap(arguments);
  options.score_factor = is_capped ? static_cast<float>(arguments.scale / arguments.softcap) : 0.0F;
  options.mask_factor = static_cast<float>(1.0 / (is_capped ? arguments.softcap : arguments.scale));
  if (VarlenArguments::has(arguments.sinks)) options.sinks = static_cast<const float*>(arguments.sinks.data());
  if (VarlenArguments::has(arguments.mask)) {
    const int64_t* strides = arguments.mask.strides();
    options.mask = arguments.mask.data();
    if (has_alibi(arguments)) {
      options.mask_stride_batch = strides[0];
      options.mask_stride_head = strides[1];
      options.mask_type = MaskTensor::kAlibi;
    } else {
      const int64_t* sizes = arguments.mask.sizes();
      const auto stride = [&](int axis) { return sizes[axis] == 1 ? 0 : strides[axis]; };
      options.mask_stride_batch = stride(0);
      options.mask_stride_head = stride(1);
      options.mask_stride_row = stride(2);
      options.mask_stride_key = stride(3);
      options.mask_type = is_bool(arguments.mask) ? MaskTensor::kBool : MaskTensor::kAdditive;
    }
  }
  options.folded_heads = 1;
  return options;
}

int32_t rows_of(const VarlenArguments& arguments) {
  const int64_t rows = arguments.max_seqlen_q;
  return static_cast<int32_t>(arguments.has_ragged_rows() ? std::min(rows, arguments.q.sizes()[0]) : rows);
}

}  // namespace

int32_t most_keys(const VarlenArguments& arguments) {
  const int64_t keys = arguments.max_seqlen_k;
  if (arguments.has_ragged_keys()) return static_cast<int32_t>(std::min(keys, arguments.k.sizes()[0]));
  if (!arguments.has_pages()) return static_cast<int32_t>(keys);
  return static_cast<int32_t>(std::min(keys, arguments.block_table.sizes()[1] * arguments.k.sizes()[1]));
}

VarlenArguments with_operands(const VarlenArguments& arguments, Tensor q, Tensor k, Tensor v) {
  const auto same = [](const Tensor& tensor) { return VarlenArguments::has(tensor) ? host::alias(tensor) : Tensor(); };
  VarlenArguments result;
  result.q = std::move(q);
  result.k = std::move(k);
  result.v = std::move(v);
  result.dtype = arguments.dtype;
  result.torch_dtype = arguments.torch_dtype;
  result.device_type = arguments.device_type;
  result.device_index = arguments.device_index;
  result.cu_seqlens_q = same(arguments.cu_seqlens_q);
  result.cu_seqlens_k = same(arguments.cu_seqlens_k);
  result.seqused_k = same(arguments.seqused_k);
  result.block_table = same(arguments.block_table);
  result.sinks = same(arguments.sinks);
  result.mask = same(arguments.mask);
  result.max_seqlen_q = arguments.max_seqlen_q;
  result.max_seqlen_k = arguments.max_seqlen_k;
  result.scale = arguments.scale;
  result.softcap = arguments.softcap;
  result.window_left = arguments.window_left;
  result.window_right = arguments.window_right;
  result.num_splits = arguments.num_splits;
  result.has_codes = arguments.has_codes;
  result.dropout_p = arguments.dropout_p;
  result.rng_state = same(arguments.rng_state);
  return result;
}

void make_scale_positive(VarlenArguments& arguments) {
  if (is_usable(arguments.scale)) return;
  AtenTensorHandle scaled = nullptr;
  if (is_usable(-arguments.scale)) {
    StableIValue stack[1] = {torch::stable::detail::from(host::alias(arguments.q).release())};
    host::check_shim(torch_call_dispatcher("aten::neg", "", stack, TORCH_ABI_VERSION), "neg");
    scaled = torch::stable::detail::to<AtenTensorHandle>(stack[0]);
    arguments.scale = -arguments.scale;
  } else {  // zero, or NaN where q is not finite
    host::check_shim(aoti_torch_aten_subtract_Tensor(arguments.q.get(), arguments.q.get(), 1.0, &scaled), "subtract");
    arguments.scale = 1.0;
  }
  arguments.q = Tensor(scaled);
}

bool has_alibi(const VarlenArguments& arguments) {
  return VarlenArguments::has(arguments.mask) && arguments.mask.dim() == 2 &&
         arguments.mask.dtype() == aoti_torch_dtype_float32();
}

bool has_softcap(const VarlenArguments& arguments) {
  return arguments.softcap > 0.0 && is_usable(arguments.scale / arguments.softcap);
}

Dropout make_dropout(const VarlenArguments& arguments) {
  constexpr double kUnits = 65536.0;
  return {static_cast<const int64_t*>(arguments.rng_state.data()),
          static_cast<int32_t>(std::min(kUnits - 1.0, std::floor(arguments.dropout_p * kUnits + 0.5))),
          static_cast<float>(1.0 / (1.0 - arguments.dropout_p))};
}

ForwardParams make_varlen_params(const VarlenArguments& arguments, const ForwardOutputs& outputs) {
  ForwardParams params = make_operand_params(arguments, outputs, arguments.has_pages());
  params.batch = static_cast<int32_t>(arguments.batch());
  params.seq_q = rows_of(arguments);
  params.seq_k = most_keys(arguments);
  params.head_dim_v = static_cast<int32_t>(arguments.head_dim_v());
  params.scale = static_cast<float>(arguments.scale);
  params.scale_log2 = static_cast<float>((has_softcap(arguments) ? arguments.softcap : arguments.scale) * kLog2E);
  params.is_consistent = arguments.is_consistent() ? 1 : 0;
  params.sequences = make_batch(arguments);
  params.score_options = make_score_options(arguments);
  return params;
}

}  // namespace flashmoe::attention
