// Shared by the backward passes of dense and of ragged attention: which gradients are needed, and the two ways to
// launch them.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <vector>

#include "attention/host/select.h"
#include "attention/params/dropout.h"
#include "host/ceil_div.h"
#include "host/last_kernel.h"
#include "host/launch.h"
#include "host/tensor_map.h"
#include "host/tile_counters.h"
#include "host/workspace.h"

namespace flashmoe::attention {

// The bits of the backward operators' `needs`.
constexpr int64_t kNeedsDq = 1;
constexpr int64_t kNeedsDk = 2;
constexpr int64_t kNeedsDv = 4;
constexpr int64_t kNeedsAll = kNeedsDq | kNeedsDk | kNeedsDv;
constexpr int64_t kNeedsMask = 16;  // 8: of the sinks, which Python computes

// For dense attention, where the caller never asks for row_dot.
inline int64_t num_rows(const BackwardParams& params) {
  return static_cast<int64_t>(params.batch) * params.heads_q * params.seq_q;
}

// The fields that FusedQueryParams and VarlenFusedQueryParams have in common; `sums` is set later.
template <class QueryParams>
QueryParams fused_query_params(const BackwardParams& params) {
  QueryParams queries{};
  queries.out = params.out;
  queries.dout = params.dout;
  queries.lse = params.lse;
  queries.dlse = params.dlse;
  queries.row_dot = params.row_dot;
  queries.dq = params.dq;
  queries.out_stride = params.out_stride;
  queries.dout_stride = params.dout_stride;
  queries.dq_stride = params.dq_stride;
  queries.batch = params.batch;
  queries.heads = params.heads_q;
  queries.rows = params.seq_q;
  queries.head_dim = params.head_dim;
  queries.scale = params.scale;
  return queries;
}

// The tensor maps that a kernel takes after its parameters; none outside the sm90 family. Dense and ragged attention
// describe the same tensors.
using MakeMaps = std::vector<CUtensorMap> (*)(const BackwardParams& params, const Kernel& kernel);

template <class Maps>
std::vector<CUtensorMap> encode_query_gradient_maps(const Maps& maps, Dtype dtype) {
  const auto encode = [dtype](const auto& map, const char* name) { return host::encode_tensor_map(map, dtype, name); };
  return {encode(maps.q, "q"), encode(maps.k, "k"), encode(maps.v, "v"), encode(maps.dout, "grad_out"),
          encode(maps.dq, "dq")};
}

template <class Maps>
std::vector<CUtensorMap> encode_key_value_gradient_maps(const Maps& maps, Dtype dtype) {
  const auto encode = [dtype](const auto& map, const char* name) { return host::encode_tensor_map(map, dtype, name); };
  return {encode(maps.q, "q"),           encode(maps.k, "k"),   encode(maps.v, "v"),
          encode(maps.dout, "grad_out"), encode(maps.dk, "dk"), encode(maps.dv, "dv")};
}

// The split form: two kernels. params.dq may be null, and so may dk and dv together: a kernel runs only if its gradient
// is needed; without dq a small kernel computes row_dot. Tiles: summed over all heads.
struct SplitTiles {
  int64_t dq;
  int64_t dkv;
};
// Kernels without dropout take the BackwardParams at the start of `launched`.
void run_split(DropoutBackwardParams launched, const BackwardKernels& kernels, SplitTiles tiles, int32_t head_dim_v,
               MakeMaps query_gradient_maps, MakeMaps key_value_gradient_maps, const host::Device& gpu);

// Memory for row_dot if the caller does not ask for it; it lives as long as `workspace`.
inline void allocate_row_dot(BackwardParams& params, int64_t row_dot, const host::Workspace& workspace) {
  if (params.row_dot == nullptr) params.row_dot = workspace.address<float>(row_dot);
}

// All three gradients from one kernel. The kernel before it computes row_dot and zeroes the semaphores of dq's
// partials; the kernel after it converts the partials to dq. partials: of all heads, partial_rows rows each. A kernel
// takes `launched`, for dropout or a mask, or the BackwardParams at its start. `next`, if it has a kernel, runs right
// after the fused one.
template <class Launched, class QueryParams, class MakeFusedMaps>
void run_fused(Launched launched, const BackwardKernels& kernels, QueryParams queries, int64_t partials,
               int64_t partial_rows, int64_t tiles, const MakeFusedMaps& key_value_gradient_maps,
               const host::Device& gpu, const host::Launch& next = {}) {
  BackwardParams& params = launched.backward;
  const Kernel& fused = *kernels.fused;
  const host::CudaCall call(gpu);
  const host::TileCounter counter = host::tile_counter(call);
  params.tile_counter = counter.address;
  host::Workspace workspace;
  const int64_t row_dot = workspace.add<float>(params.row_dot == nullptr ? num_rows(params) : 0);
  const int64_t sums =
      workspace.add<float>(partials * (partial_rows * fused.axes[axis::kHeadDim] + 1));  // and a semaphore each
  workspace.allocate(call);
  allocate_row_dot(params, row_dot, workspace);
  queries.row_dot = params.row_dot;
  queries.sums = workspace.address<float>(sums);
  params.dq = queries.sums;
  const std::vector<CUtensorMap> maps = key_value_gradient_maps(params, fused);
  host::LaunchList list;
  list.add({kernels.prepare, partials, &queries, nullptr, /*is_dependent=*/false});
  list.add({&fused, host::grid_for(fused, tiles, gpu), &launched, maps.data(), /*is_dependent=*/false});
  if (next.kernel != nullptr) list.add(next);
  list.add({kernels.convert, partials, &queries, nullptr, /*is_dependent=*/false});
  list.run(call);
  host::set_last_kernel(fused.symbol);
}

}  // namespace flashmoe::attention
