// The second of the two kernels that decode with the same bits as a prefill: softmax and P V over all keys in the
// prefill's order, from the scores that scores.cuh has written. A block computes kColumns columns of an item's output,
// over all its keys.
//
// What a prefill does sequentially is divided over warps, so that only two dependency chains are left, each in one
// warp: products of 16 keys each, and the sum of a row's exponentials. Each loading warp takes every sixth key block.
// Each warp that computes exponentials takes every fourth: these warps exchange the largest scores of four blocks, and
// follow the references through all of them.
//
// The stages that fit are filled with values before the preceding kernel has ended: it writes only scores, and the
// kernels that write values and lengths ended before its blocks let this kernel start.
#pragma once

#include "attention/decode/values_load.cuh"
#include "attention/params/forward.h"
#include "attention/scores.cuh"
#include "attention/sequences.cuh"
#include "attention/softmax.cuh"
#include "device/convert.cuh"
#include "device/named_barriers.cuh"
#include "device/reduce.cuh"
#include "device/ring.cuh"
#include "ptx/barrier.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/register_control.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention::decode {

// Warp `own` of the kTeam warps that compute exponentials. In a round each has one block; all of them follow a row's
// reference through all four, as advance_references does in a prefill (mma_sync/accumulate.cuh).
template <typename Spec>
__device__ __forceinline__ void compute_exponentials(const ForwardParams& params, const ValueItem<Spec>& item,
                                                     const ValueRing<Spec>& ring, int own) {
  constexpr int kTeam = Spec::kTeam;
  const float scale_log2 = params.scale_log2;
  const int score_rows = min(Spec::kBlockM, params.seq_q * params.score_options.folded_heads);
  const int row = ptx::lane_index() / 4;
  // Lanes whose row the item does not have read its last row.
  const int lane_bytes = min(score_rows - 1, row) * Spec::kScoreRowBytes + ptx::lane_index() % 4 * kChunkBytes;
  const int group_bytes = score_rows * Spec::kScoreRowBytes;
  float reference = ptx::negative_infinity();
  RingPosition<Spec::kNumStages> at;
  RingPosition<Spec::kWeightStages> weights;
  at.advance_by(own);
  weights.advance_by(own);
#pragma unroll 1
  for (int first = item.blocks.begin, round = 0; first < item.blocks.end; first += kTeam, ++round) {
    const bool has_block = first + own < item.blocks.end;
    float4 S_rmem[Spec::kGroups];
    float largest = ptx::negative_infinity();
    if (has_block) {
      ptx::mbarrier_wait(ring.full(at.stage), at.parity);
      const ptx::SmemPointer scores_smem = ring.scores(at.stage) + lane_bytes;
#pragma unroll
      for (int group = 0; group < Spec::kGroups; ++group) {
        S_rmem[group] = ptx::ld_shared_float4(scores_smem + group * group_bytes);
        largest = ptx::max_ftz(largest, ptx::max_ftz(ptx::max_ftz(S_rmem[group].x, S_rmem[group].y),
                                                     ptx::max_ftz(S_rmem[group].z, S_rmem[group].w)));
      }
      arrive_as_warp(ring.empty(at.stage));
      at.advance_by(kTeam);
    }
    largest = quad_max(largest);
    if (ptx::lane_index() % 4 == 0) {
      ptx::st_shared_32(ring.maxima(round, row) + own * 4, ptx::float_bits(largest));
    }
    // Read after write: the maxima, which are stored for two rounds.
    ptx::named_barrier_sync(barrier_id(Spec::Barrier::kMaximaStored), 32 * kTeam);
    const float4 maxima = ptx::ld_shared_float4(ring.maxima(round, row));
    const float of_block[kTeam] = {maxima.x, maxima.y, maxima.z, maxima.w};
    float factor = 1.0f;
    float own_reference = reference;
    const float of_round =
        ptx::max_ftz(ptx::max_ftz(reference, ptx::max_ftz(maxima.x, maxima.y)), ptx::max_ftz(maxima.z, maxima.w));
    if (ptx::vote_any(!reference_stays(of_round, reference, scale_log2))) {
#pragma unroll
      for (int block = 0; block < kTeam; ++block) {
        const float of_row = ptx::max_ftz(reference, of_block[block]);
        const float next = reference_stays(of_row, reference, scale_log2) ? reference : of_row;
        if (block == own) {
          const float next_shift = (next == ptx::negative_infinity() ? 0.0f : next) * scale_log2;
          factor = ptx::exp2_approx(ptx::sub_rn(reference * scale_log2, next_shift));
          own_reference = next;
        }
        reference = next;
      }
    }
    if (!has_block) continue;
    const float shift = (own_reference == ptx::negative_infinity() ? 0.0f : own_reference) * scale_log2;
    const auto exponential = [&](float score) { return ptx::exp2_approx(ptx::fma_rn(score, scale_log2, -shift)); };
    ptx::mbarrier_wait(ring.weights_empty(weights.stage), weights.parity ^ 1);
#pragma unroll
    for (int group = 0; group < Spec::kGroups; ++group) {
      const float p[4] = {exponential(S_rmem[group].x), exponential(S_rmem[group].y), exponential(S_rmem[group].z),
                          exponential(S_rmem[group].w)};
      const uint32_t floats[4] = {ptx::float_bits(p[0]), ptx::float_bits(p[1]), ptx::float_bits(p[2]),
                                  ptx::float_bits(p[3])};
      ptx::st_shared_128(ring.weights(weights.stage, group), floats);
      const uint32_t operand[4] = {pack<typename Spec::Element>(p[0], p[1]), 0,
                                   pack<typename Spec::Element>(p[2], p[3]), 0};
      ptx::st_shared_128(ring.operand(weights.stage, group), operand);
    }
    if (ptx::lane_index() % 4 == 0) ptx::st_shared_32(ring.factor(weights.stage, row), ptx::float_bits(factor));
    arrive_as_warp(ring.weights_full(weights.stage));
    weights.advance_by(kTeam);
  }
  if (own != 0) return;
  if (ptx::lane_index() % 4 == 0) ptx::st_shared_32(ring.reference(row), ptx::float_bits(reference));
  arrive_as_warp(ring.states_full());
}

// The warp that sums a row's exponentials: each lane of a quad adds those of its columns, in the order of keys.
template <typename Spec>
__device__ __forceinline__ void add_exponentials(const ValueItem<Spec>& item, const ValueRing<Spec>& ring) {
  const int row = ptx::lane_index() / 4;
  float sum = 0.0f;
  RingPosition<Spec::kWeightStages> at;
#pragma unroll 1
  for (int block = item.blocks.begin; block < item.blocks.end; ++block) {
    ptx::mbarrier_wait(ring.weights_full(at.stage), at.parity);
    float4 p[Spec::kGroups];
#pragma unroll
    for (int group = 0; group < Spec::kGroups; ++group) p[group] = ptx::ld_shared_float4(ring.weights(at.stage, group));
    // A separate product: the compiler would fuse it with the first addition, with one rounding instead of two.
    sum = ptx::fma_rn(sum, ptx::bits_float(ptx::ld_shared_32(ring.factor(at.stage, row))), 0.0f);
    arrive_as_warp(ring.weights_empty(at.stage));
#pragma unroll
    for (int group = 0; group < Spec::kGroups; ++group) {
      sum += p[group].x;
      sum += p[group].y;
      sum += p[group].z;
      sum += p[group].w;
    }
    at.advance();
  }
  sum = quad_sum(sum);
  if (ptx::lane_index() % 4 == 0) ptx::st_shared_32(ring.sum(row), ptx::float_bits(sum));
  arrive_as_warp(ring.states_full());
}

// The warp that computes O += P V and stores the output.
template <typename Spec>
__device__ __forceinline__ void add_values(const ForwardParams& params, const Sequence<MaskKind::kRuntime>& sequence,
                                           const ValueItem<Spec>& item, const ValueRing<Spec>& ring) {
  using Element = typename Spec::Element;
  const int lane = ptx::lane_index();
  float O_rmem[Spec::kMmaD][4];
#pragma unroll
  for (int d = 0; d < Spec::kMmaD; ++d)
#pragma unroll
    for (int i = 0; i < 4; ++i) O_rmem[d][i] = 0.0f;
  RingPosition<Spec::kNumStages> at;
  RingPosition<Spec::kWeightStages> weights;
  uint32_t P_rmem[Spec::kGroups][4];
  uint32_t V_rmem[Spec::kGroups][Spec::kMmaD / 2][4];  // 16 keys, two 8-column blocks each
  float factor;
  int lane_offset[Spec::kMmaD / 2];
#pragma unroll
  for (int pair = 0; pair < Spec::kMmaD / 2; ++pair) {
    lane_offset[pair] = Spec::Tile::offset(lane % 16, pair * 2 + lane / 16);
  }
  // The weights of a block are made from its scores, which arrive at the same barrier as its values, so the values are
  // complete as well. Addresses are computed once per block: nearly all of this warp's instructions wait for another,
  // so each one saved shortens the chain.
  const auto wait = [&] { ptx::mbarrier_wait(ring.weights_full(weights.stage), weights.parity); };
  ptx::SmemPointer P_smem, V_smem[Spec::kMmaD / 2];
  const auto locate = [&] {
    P_smem = ring.operand(weights.stage, 0);
#pragma unroll
    for (int pair = 0; pair < Spec::kMmaD / 2; ++pair) V_smem[pair] = ring.values(at.stage) + lane_offset[pair];
  };
  const auto read = [&](int group) {
    ptx::ld_shared_128(P_rmem[group], P_smem + group * (32 * 16));
#pragma unroll
    for (int pair = 0; pair < Spec::kMmaD / 2; ++pair) {
      ptx::ldmatrix_x4_trans(V_rmem[group][pair], V_smem[pair] + group * Spec::kGroupBytes);
    }
  };
  const auto release = [&] {
    factor = ptx::bits_float(ptx::ld_shared_32(ring.factor(weights.stage, lane / 4)));
    ptx::warp_sync();  // all lanes have read
    if (lane == 0) {
      ptx::mbarrier_arrive(ring.empty(at.stage));
      ptx::mbarrier_arrive(ring.weights_empty(weights.stage));
    }
    at.advance();
    weights.advance();
  };
  const auto rescale = [&] {
    if (!ptx::vote_any(factor != 1.0f)) return;
#pragma unroll
    for (int d = 0; d < Spec::kMmaD; ++d) {
      O_rmem[d][0] *= factor;
      O_rmem[d][1] *= factor;
    }
  };
  const auto multiply = [&](int group) {
#pragma unroll
    for (int d = 0; d < Spec::kMmaD; ++d) {
      Spec::multiply(O_rmem[d], P_rmem[group], V_rmem[group][d / 2][d % 2 * 2], V_rmem[group][d / 2][d % 2 * 2 + 1]);
    }
  };
  locate();
  wait();
#pragma unroll
  for (int group = 0; group < Spec::kGroups; ++group) read(group);
  release();
#pragma unroll 1
  for (int block = item.blocks.begin + 1; block < item.blocks.end; ++block) {
    rescale();
    locate();
    // While products wait for earlier ones, this block's operands replace theirs.
#pragma unroll
    for (int group = 0; group < Spec::kGroups; ++group) {
      multiply(group);
      if (group == 0) wait();
      read(group);
    }
    release();
  }
  rescale();
#pragma unroll
  for (int group = 0; group < Spec::kGroups; ++group) multiply(group);

  ptx::mbarrier_wait(ring.states_full(), 0);
  if (lane / 4 >= item.rows) return;
  const int group = params.score_options.folded_heads;
  const int position = (item.row + lane / 4) / group;
  const int folded = item.row + lane / 4 - position * group;
  const int head_q = item.head_kv * group + folded;
  const float reference = ptx::bits_float(ptx::ld_shared_32(ring.reference(lane / 4)));
  const float sum = ptx::bits_float(ptx::ld_shared_32(ring.sum(lane / 4)));
  const FinishedRow finished =
      finish_row(reference * params.scale_log2, sum, sink_log2(params.score_options, item.head_kv, folded));
  if (item.first_column == 0 && lane % 4 == 0 && params.lse != nullptr) {
    const int64_t at_row = sequence.result_row(sequence.template result_head<false>(head_q, 0)) + position;
    ptx::st_global_float(params.lse + at_row, finished.lse);
  }
  Element* out_gmem = static_cast<Element*>(params.out) + sequence.row_offset(params.out_stride, head_q) +
                      position * params.out_stride.row + item.first_column;
#pragma unroll
  for (int d = 0; d < Spec::kMmaD; ++d) {
    const int column = d * 8 + lane % 4 * 2;
    if (item.first_column + column >= params.head_dim_v) continue;
    ptx::st_global_32(out_gmem + column,
                      pack<Element>(O_rmem[d][0] * finished.inverse, O_rmem[d][1] * finished.inverse));
  }
}

// Grid: the slices of an item are adjacent, because they read the same scores; items are ordered by sequence, head and
// row.
template <typename Spec>
__device__ __forceinline__ void decode_values(const ForwardParams& params) {
  const ValueRing<Spec> ring{ptx::dynamic_shared_memory()};
  if (ptx::thread_index() == 0) ring.init();
  const int index = ptx::block_index() / Spec::kSlices;
  const int rows = params.seq_q * params.score_options.folded_heads;
  const int items = params.heads_kv * ceil_div(rows, Spec::kBlockM);  // of a sequence, at most
  const int batch = index / items;
  const Sequence<MaskKind::kRuntime> sequence(params, batch);
  const ValueItem<Spec> item(params, batch, index - batch * items, sequence,
                             ptx::block_index() - index * Spec::kSlices);
  if (item.rows == 0) {
    ptx::grid_dependency_wait();  // the next kernel may take the end of this one for the end of both
    return;
  }
  ptx::barrier_sync_block();  // the mbarriers are initialised
  // The shuffle tells the compiler that the role is uniform across the warp. The warp of the products is in the third
  // warpgroup, which takes registers from the other two.
  const int warp = ptx::shuffle_index(ptx::warp_index(), 0);
  if (warp < 4) {
    ptx::setmaxnreg_dec<Spec::kFewRegisters>();
    ValueLoader<Spec>(params, sequence, item, ring).run(warp);
  } else if (warp < 8) {
    ptx::setmaxnreg_dec<Spec::kFewRegisters>();
    compute_exponentials<Spec>(params, item, ring, warp - 4);
  } else {
    ptx::setmaxnreg_inc<Spec::kMoreRegisters>();
    if (warp < 4 + Spec::kLoaders) {
      ValueLoader<Spec>(params, sequence, item, ring).run(warp - 4);
    } else if (warp == 4 + Spec::kLoaders) {
      add_values<Spec>(params, sequence, item, ring);
    } else {
      add_exponentials<Spec>(item, ring);
    }
  }
}

}  // namespace flashmoe::attention::decode
