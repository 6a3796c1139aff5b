// The dk, dv kernel. A tile is kBlockN keys; Q and dO of every head of the group stream past it, from the first block
// with a query that sees a key (masked blocks come first) to the last. It runs after the dq kernel, which writes
// row_dot.
//   grid     min(tiles, multiprocessors) blocks; tiles = ceil(seq_k / kBlockN) * heads_kv * batch
//   maps     built by the host with tensor_map.h
//   counter  params.tile_counter is 0 at launch, and 0 again at the end
// The heads of a group are summed, in order, by the one block that owns the keys.
#pragma once

#include "attention/backward/sm90/varlen_producer.cuh"
#include "attention/backward/sm90/key_value_consumer.cuh"
#include "attention/backward/sm90/producer.cuh"
#include "attention/backward/sm90/shared_key_value_consumer.cuh"
#include "ptx/register_control.cuh"

namespace flashmoe::attention::backward::sm90 {

template <typename Spec, MaskKind kMask = MaskKind::kRuntime>
__device__ __forceinline__ void key_value_gradient(const BackwardParams& params, const ptx::TensorMap& q_map,
                                                   const ptx::TensorMap& k_map, const ptx::TensorMap& v_map,
                                                   const ptx::TensorMap& dout_map, const ptx::TensorMap& dk_map,
                                                   const ptx::TensorMap& dv_map) {
  const SharedMemory<Spec> shared{ptx::dynamic_shared_memory()};
  const int warp = begin_warp([&] { init_barriers(shared); }, q_map, k_map, v_map, dout_map, dk_map, dv_map);
  const int warpgroup = warp / 4;

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Spec::kProducerRegisters>();
    if constexpr (kMask == MaskKind::kRuntime) {
      if (warp == 0) {
        produce_varlen_queries<Spec>(params, shared, q_map, k_map, v_map, dout_map);
      } else if (warp <= 2) {
        produce_varlen_statistics<Spec>(params, shared, warp - 1);
      }
    } else if (warp == 0) {
      produce_queries<Spec, kMask>(params, shared, q_map, k_map, v_map, dout_map);
    }
  } else {
    ptx::setmaxnreg_inc<Spec::kConsumerRegisters>();
    if constexpr (Spec::kSharesRows) {
      if (warpgroup == 1) {
        ValueGradientConsumer<Spec, kMask>(params, shared).run(dv_map);
      } else {
        KeyGradientConsumer<Spec, kMask>(params, shared).run(dk_map);
      }
    } else {
      KeyValueGradientConsumer<Spec, kMask>(params, shared, warpgroup - 1).run(dk_map, dv_map);
    }
  }
}

template <typename Spec>
__device__ __forceinline__ void key_value_gradient_dropout(const DropoutBackwardParams& params,
                                                           const ptx::TensorMap& q_map, const ptx::TensorMap& k_map,
                                                           const ptx::TensorMap& v_map, const ptx::TensorMap& dout_map,
                                                           const ptx::TensorMap& dk_map, const ptx::TensorMap& dv_map) {
  static_assert(Spec::kHasDropout, "kernels without dropout take BackwardParams");
  key_value_gradient<Spec>(params.backward, q_map, k_map, v_map, dout_map, dk_map, dv_map);
}

}  // namespace flashmoe::attention::backward::sm90
