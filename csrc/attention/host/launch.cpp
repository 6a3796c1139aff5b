// The forward pass on a GPU: selects the kernels and launches them.

#include "host/launch.h"

#include <cstring>

#include "attention/host/backends.h"
#include "attention/host/prepare.h"
#include "attention/host/select.h"
#include "attention/host/varlen.h"
#include "host/ceil_div.h"
#include "host/copies.h"
#include "host/last_kernel.h"
#include "host/tile_counters.h"

namespace flashmoe::attention {
namespace {

// One query position, with the heads as rows.
VarlenSelectorInput as_decoding(const SelectorInput& input) {
  VarlenSelectorInput decoding{};
  decoding.request = input.request;
  decoding.head_dim = decoding.head_dim_v = input.head_dim;
  decoding.rows = decoding.rows_of_key_head = input.seq_q;
  decoding.keys = input.seq_k;
  decoding.heads = decoding.heads_kv = input.heads_q;
  decoding.batch = input.batch;
  decoding.is_consistent = input.is_consistent;
  return decoding;
}

SelectorInput describe(const ForwardArguments& arguments, const Problem& problem, const host::Device& gpu) {
  const ForwardParams& params = problem.params;
  SelectorInput input{};
  input.request = host::make_request(gpu, arguments.dtype);
  input.mask = problem.mask;
  input.head_dim = params.head_dim;
  input.batch = params.batch;
  input.heads_q = params.heads_q;
  input.heads_kv = params.heads_kv;
  input.seq_q = params.seq_q;
  input.seq_k = params.seq_k;
  input.is_consistent = params.is_consistent != 0;
  return input;
}

KernelPlan choose(const SelectorInput& input, bool has_one_row) {
  if (has_one_row) {
    const Kernel* decoding = select_decoding(input);
    if (decoding != nullptr) return {decoding, nullptr, 1};
    const OrderedDecoding ordered = select_ordered_decoding(as_decoding(input));
    if (ordered.values != nullptr) return {ordered.values, nullptr, 1, ordered};
  }
  return select_forward(input);
}

// The forward kernel, followed by the combine kernel if the keys are split.
void run(const Problem& problem, const KernelPlan& plan, const host::Device& gpu) {
  ForwardParams params = problem.params;
  const Kernel& kernel = *plan.forward;
  if (std::strcmp(kernel.operation, "attention_decode") == 0) {  // every row sees every key, folded or not
    describe_as_varlen(params);
    run_decoding(params, kernel, /*num_splits=*/0, host::CudaCall(gpu));
    host::set_last_kernel(kernel.symbol);
    return;
  }
  if (plan.ordered.values != nullptr) {
    describe_as_varlen(params);
    run_ordered_decoding(params, plan.ordered, host::CudaCall(gpu));
    host::set_last_kernel(kernel.symbol);
    return;
  }
  params.num_splits = plan.num_splits;
  const int64_t heads = static_cast<int64_t>(params.batch) * params.heads_q;
  const int64_t rows = heads * params.seq_q;
  const int64_t tiles = ceil_div(params.seq_q, kernel.block_m) * heads * params.num_splits;
  const int64_t grid = host::grid_for(kernel, tiles, gpu);
  const host::CudaCall call(gpu);
  host::TileCounter counter;
  if (tiles > grid) {
    counter = host::tile_counter(call);
    params.tile_counter = counter.address;
  }
  host::Workspace partials;
  if (plan.combine != nullptr) partials = allocate_partials(params, rows, params.head_dim, call);

  TensorMaps maps;
  if (kernel.num_tensor_maps > 0) maps = encode(sm90::forward_tensor_maps(params, kernel.block_n), kernel.dtype);
  host::LaunchList list;
  list.add({&kernel, grid, &params, maps.data(), /*is_dependent=*/false});
  if (plan.combine != nullptr) {
    list.add({plan.combine, ceil_div(rows, plan.combine->block_m), &params, nullptr, /*is_dependent=*/true});
  }
  list.run(call);
  host::set_last_kernel(kernel.symbol);
}

}  // namespace

void forward_cuda(const ForwardArguments& arguments, const ForwardOutputs& outputs) {
  const host::Device& gpu = host::device(arguments.device_index);
  if (arguments.k.sizes()[2] == 0) {
    fill_without_keys(outputs, /*sinks=*/Tensor(), gpu);
    return;
  }
  if (arguments.q.sizes()[3] > kMaxDenseHeadDim) return forward_as_ragged(arguments, outputs);
  const Problem problem = make_problem(arguments, outputs);
  const SelectorInput input = describe(arguments, problem, gpu);
  const bool has_one_row = arguments.q.sizes()[2] == 1;
  const KernelPlan plan = choose(input, has_one_row);
  if (!has_one_row && prefers_folded_rows(input, plan)) return forward_as_ragged(arguments, outputs);
  if (runs_in_place(arguments, *plan.forward)) {
    run(problem, plan, gpu);
    return;
  }
  const Operands operands = make_operands(arguments, outputs, *plan.forward);
  run(make_problem(operands.arguments, operands.outputs), plan, gpu);
  return_outputs(operands, outputs);
}

}  // namespace flashmoe::attention
