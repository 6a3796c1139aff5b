#include "attention/host/backward_launch.h"

#include "attention/params/row_dot.h"

namespace flashmoe::attention {
namespace {

// For a launch without the dq kernel. Ragged rows: one batch entry of rows_total rows.
RowDotParams make_row_dot_params(const BackwardParams& params, int32_t head_dim) {
  const bool is_ragged = params.sequences.cu_seqlens_q != nullptr;
  return {params.out,
          params.dout,
          params.lse,
          params.dlse,
          params.row_dot,
          params.out_stride,
          params.dout_stride,
          is_ragged ? 1 : params.batch,
          params.heads_q,
          is_ragged ? params.sequences.rows_total : params.seq_q,
          head_dim};
}

}  // namespace

void run_split(DropoutBackwardParams launched, const BackwardKernels& kernels, SplitTiles tiles, int32_t head_dim_v,
               MakeMaps query_gradient_maps, MakeMaps key_value_gradient_maps, const host::Device& gpu) {
  BackwardParams& params = launched.backward;
  const bool with_dq = params.dq != nullptr;
  const bool with_dkv = params.dk != nullptr;
  const Kernel& dq = *kernels.dq;
  const Kernel& dkv = *kernels.dkv;
  const int64_t dq_grid = host::grid_for(dq, tiles.dq, gpu);
  const int64_t dkv_grid = host::grid_for(dkv, tiles.dkv, gpu);
  const host::CudaCall call(gpu);
  host::TileCounter counter;
  if (dq.is_persistent || dkv.is_persistent) {
    counter = host::tile_counter(call);  // one for both, which run one after the other
    params.tile_counter = counter.address;
  }
  host::Workspace workspace;
  if (params.row_dot == nullptr) {
    const int64_t row_dot = workspace.add<float>(num_rows(params));
    workspace.allocate(call);
    allocate_row_dot(params, row_dot, workspace);
  }
  const RowDotParams row_dot_params = make_row_dot_params(params, head_dim_v);
  std::vector<CUtensorMap> dq_maps, dkv_maps;
  host::LaunchList list;
  if (with_dq) {
    dq_maps = query_gradient_maps(params, dq);
    list.add({&dq, dq_grid, &launched, dq_maps.data(), /*is_dependent=*/false});
  } else {
    const Kernel& kernel = select_row_dot(host::make_request(gpu, dq.dtype));
    const int64_t rows = static_cast<int64_t>(row_dot_params.batch) * row_dot_params.heads * row_dot_params.rows;
    list.add({&kernel, ceil_div(rows, kernel.threads / 4), &row_dot_params, nullptr, /*is_dependent=*/false});
  }
  if (with_dkv) {
    dkv_maps = key_value_gradient_maps(params, dkv);
    list.add({&dkv, dkv_grid, &launched, dkv_maps.data(), /*is_dependent=*/false});
  }
  list.run(call);
  host::set_last_kernel(with_dkv ? dkv.symbol : with_dq ? dq.symbol : "");
}

}  // namespace flashmoe::attention
