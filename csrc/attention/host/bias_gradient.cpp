// The gradient of an additive mask on a GPU, from the results of the backward pass: selects the kernel and launches it.

#include <algorithm>
#include <utility>
#include <vector>

#include "attention/backward/sm90/tensor_map.h"
#include "attention/host/backward_launch.h"
#include "attention/host/varlen_arguments.h"
#include "attention/params/bias_gradient.h"
#include "host/arguments.h"
#include "host/copies.h"
#include "host/error.h"

namespace flashmoe::attention {
namespace {

// Blocks per multiprocessor: if there are fewer tiles than this, the items of a tile are split.
constexpr int64_t kMinBlocks = 4;

struct BiasGradientArguments : VarlenBackwardArguments {
  Tensor row_dot;  // as lse
};

BiasGradientArguments parse_bias_gradient(host::Arguments& given) {
  BiasGradientArguments arguments;
  VarlenArguments& forward = arguments.forward;
  given.tensors(arguments.dout, forward.q, forward.k, forward.v, forward.mask, arguments.lse, arguments.row_dot);
  forward.scale = given.number();
  given.integers(forward.window_left, forward.window_right);
  given.numbers(forward.softcap, forward.dropout_p);
  forward.rng_state = given.optional_tensor();
  arguments.out = host::alias(arguments.dout);  // not read
  arguments.dlse = host::alias(arguments.row_dot);
  check_varlen_backward_arguments(arguments);
  if (forward.mask.dtype() != forward.torch_dtype || forward.mask.dim() != 4) {
    host::violate("attention.companion_dtype", {{"name", "attn_mask"},
                                                {"needed", host::describe_dtype(forward.torch_dtype)},
                                                {"found", host::describe_dtype(forward.mask.dtype())}});
  }
  return arguments;
}

// All parameters except the tensors' memory.
BiasGradientParams make_bias_params(const VarlenArguments& forward, const Kernel& kernel, const host::Device& gpu) {
  const int64_t* mask = forward.mask.sizes();
  const int64_t rows = forward.max_seqlen_q, keys = forward.max_seqlen_k;
  BiasGradientParams params{};
  params.folds_rows = mask[2] < rows ? 1 : 0;
  params.folds_keys = mask[3] < keys ? 1 : 0;
  params.batches = static_cast<int32_t>(mask[0]);
  params.heads = static_cast<int32_t>(mask[1]);
  params.rows = params.folds_rows != 0 ? kernel.block_m : static_cast<int32_t>(rows);
  params.keys = params.folds_keys != 0 ? kernel.block_n : static_cast<int32_t>(keys);
  const auto tiles_of = [](int64_t length, int64_t block, bool is_own) { return is_own ? ceil_div(length, block) : 1; };
  const bool folds_rows = params.folds_rows != 0, folds_keys = params.folds_keys != 0;
  const int64_t tiles =
      mask[0] * mask[1] * tiles_of(rows, kernel.block_m, !folds_rows) * tiles_of(keys, kernel.block_n, !folds_keys);
  const int64_t items = forward.batch() / mask[0] * (forward.heads_q() / mask[1]) *
                        tiles_of(rows, kernel.block_m, folds_rows) * tiles_of(keys, kernel.block_n, folds_keys);
  const int64_t blocks = kMinBlocks * host::make_request(gpu, forward.dtype).num_multiprocessors;
  params.splits = static_cast<int32_t>(std::clamp<int64_t>(blocks / tiles, 1, items));
  params.is_float = params.splits > 1 || folds_rows || folds_keys ? 1 : 0;
  return params;
}

std::vector<CUtensorMap> bias_gradient_maps(const BiasGradientParams& params, const Kernel& kernel) {
  const auto maps = backward::sm90::bias_gradient_tensor_maps(params, kernel.block_n);
  const auto encode = [&](const auto& map, const char* name) {
    return host::encode_tensor_map(map, kernel.dtype, name);
  };
  return {encode(maps.q, "q"), encode(maps.k, "k"), encode(maps.v, "v"), encode(maps.dout, "grad_out"),
          encode(maps.mask, "attn_mask")};
}

Tensor bias_gradient_cuda(const BiasGradientArguments& arguments) {
  const VarlenArguments& forward = arguments.forward;
  const host::Device& gpu = host::device(forward.device_index);
  const auto head_dim = static_cast<int32_t>(std::max(forward.head_dim(), forward.head_dim_v()));
  const int64_t* mask = forward.mask.sizes();
  const bool folds = mask[2] < forward.max_seqlen_q || mask[3] < forward.max_seqlen_k;
  const Kernel& kernel =
      select_bias_gradient(host::make_request(gpu, forward.dtype), head_dim, forward.has_dropout(), folds);
  VarlenBackwardArguments operands;
  operands.forward = with_operands(forward, host::loadable(forward.q, kernel), host::loadable(forward.k, kernel),
                                   host::loadable(forward.v, kernel));
  const bool has_maps = kernel.num_tensor_maps > 0;
  if (has_maps) operands.forward.mask = host::loadable(forward.mask, kernel);
  operands.dout = host::loadable(arguments.dout, kernel);
  operands.out = host::alias(operands.dout);
  operands.lse = host::alias(arguments.lse);
  Gradients statistics;
  statistics.row_dot = host::alias(arguments.row_dot);
  BiasGradientParams params = make_bias_params(forward, kernel, gpu);
  params.launched.backward = make_backward_params(make_varlen_params(operands.forward, {}), operands, statistics);
  if (forward.has_dropout()) params.launched.dropout = make_dropout(forward);
  const int32_t dtype = params.is_float != 0 ? aoti_torch_dtype_float32() : forward.torch_dtype;
  Tensor sums = host::empty({params.splits, params.batches, params.heads, params.rows, params.keys}, dtype,
                            forward.device_type, forward.device_index);
  params.sums = sums.data();
  const int64_t tiles = ceil_div(params.rows, kernel.block_m) * ceil_div(params.keys, kernel.block_n);
  const int64_t parts = tiles * params.splits * params.batches * params.heads;
  const host::CudaCall call(gpu);
  std::vector<CUtensorMap> maps;
  if (has_maps) maps = bias_gradient_maps(params, kernel);
  host::LaunchList list;
  list.add({&kernel, host::grid_for(kernel, parts, gpu), &params, maps.data(), /*is_dependent=*/false});
  list.run(call);
  return sums;
}

void boxed_bias_gradient(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs) {
  host::check_counts("attention_bias_gradient", num_arguments, 13, num_outputs, 1);
  host::Arguments given(stack);
  stack[0] = host::box(bias_gradient_cuda(parse_bias_gradient(given)));
}

}  // namespace
}  // namespace flashmoe::attention

STABLE_TORCH_LIBRARY_IMPL(flashmoe, CUDA, library) {
  library.impl("_attention_bias_gradient", &flashmoe::attention::boxed_bias_gradient);
}
