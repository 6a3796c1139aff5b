// Flash attention forward with mma.sync and cp.async: sm_80 and every later GPU.
//
// One thread block computes kBlockM query rows of one head; a warp owns kWarpRows of them and never exchanges a score
// with another warp. Key tiles are walked from the last visible one down to the first, so that the tiles that need a
// mask come first, in a loop of their own, and only the first load has rows past the end of the tensor.
#pragma once

#include "attention/params.h"
#include "attention/sm80/epilogue.cuh"
#include "attention/sm80/load.cuh"
#include "attention/sm80/multiply.cuh"
#include "attention/sm80/spec.cuh"
#include "attention/tile.cuh"
#include "common/softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe {
namespace attention {
namespace sm80 {

// What a warp carries from key tile to key tile.
template <typename Spec>
struct Accumulator {
  float O_rmem[Spec::kMmaM][Spec::kMmaD][4];  // [kWarpRows, kHeadDim], not yet divided by the row sums
  RowState rows[Spec::kMmaM][2];

  __device__ __forceinline__ Accumulator() {
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
      for (int d = 0; d < Spec::kMmaD; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i) O_rmem[m][d][i] = 0.0f;
  }
};

// Scores of keys past the end, or past the causal limit of their row, become -inf. `limit` is the last key that the
// first row of the warp may see (causal) or the last key at all, relative to the tile's first key.
template <typename Spec, bool kIsCausal>
__device__ __forceinline__ void mask_scores(float (&S_rmem)[Spec::kMmaM][Spec::kMmaN][4], int lane, int last_key,
                                            int causal_limit) {
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m * 16 + half * 8 + lane / 4;
      const int limit = (kIsCausal ? min(last_key, causal_limit + row) : last_key) - lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (n * 8 + i > limit) S_rmem[m][n][2 * half + i] = ptx::negative_infinity();
    }
}

// Folds the tile's scores into the running maxima and sums, rescales O, and adds P V. The exponentials of 16 keys are
// taken just before their product, so that the two can overlap.
template <typename Spec, bool kIsMasked>
__device__ __forceinline__ void accumulate_tile(Accumulator<Spec>& accumulator,
                                                float (&S_rmem)[Spec::kMmaM][Spec::kMmaN][4],
                                                ptx::SmemPointer V_smem, const ColumnWalk<Spec::kHeadDim>& walk,
                                                float scale_log2) {
  float shift[Spec::kMmaM][2];
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float tile_max = ptx::negative_infinity();
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n) {
        tile_max = ptx::max_ftz(tile_max, S_rmem[m][n][2 * half]);
        tile_max = ptx::max_ftz(tile_max, S_rmem[m][n][2 * half + 1]);
      }
      const float rescale =
          advance_max<kIsMasked>(accumulator.rows[m][half], tile_max, scale_log2, shift[m][half]);
#pragma unroll
      for (int d = 0; d < Spec::kMmaD; ++d) {
        accumulator.O_rmem[m][d][2 * half] *= rescale;
        accumulator.O_rmem[m][d][2 * half + 1] *= rescale;
      }
    }
#pragma unroll
  for (int k = 0; k < Spec::kBlockN / 16; ++k) {
    uint32_t P_rmem[Spec::kMmaM][4];
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m) {
#pragma unroll
      for (int n = 2 * k; n < 2 * k + 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float p = ptx::exp2_approx(ptx::fma_rn(S_rmem[m][n][i], scale_log2, -shift[m][i / 2]));
          S_rmem[m][n][i] = p;
          accumulator.rows[m][i / 2].sum += p;
        }
      probability_operand<Spec>(P_rmem[m], S_rmem[m][2 * k], S_rmem[m][2 * k + 1]);
    }
    multiply_probability_value<Spec>(accumulator.O_rmem, P_rmem, V_smem, walk, k);
  }
}

template <typename Spec, bool kIsCausal>
struct ForwardKernel {
  const ForwardParams& params;
  const QueryTile tile;
  const KeyTiles key_tiles;
  const ptx::SmemPointer Q_smem;   // [kBlockM, kHeadDim]
  const ptx::SmemPointer KV_smem;  // [kNumStages] of K [kBlockN, kHeadDim], then [kNumStages] of V
  const TileLoader<Spec> K_loader;
  const TileLoader<Spec> V_loader;
  const ColumnWalk<Spec::kHeadDim> rows_first;
  const ColumnWalk<Spec::kHeadDim> columns_first;
  const int lane;
  const int warp_row;  // first row of the warp in the tile

  static constexpr int kStages = Spec::kNumStages;

  __device__ __forceinline__ ForwardKernel(const ForwardParams& params_)
      : params(params_),
        tile(locate_query_tile<Spec::kBlockM, kIsCausal, Spec::kIsSplit>(params_)),
        key_tiles(visible_key_tiles<Spec::kBlockN, kIsCausal, Spec::kIsSplit>(params_, tile)),
        Q_smem(ptx::dynamic_shared_memory()),
        KV_smem(Q_smem + Spec::kQueryBytes),
        K_loader(params_.k, tile.batch * params_.k_stride.batch + tile.head_kv * params_.k_stride.head,
                 params_.k_stride.row, params_.head_dim),
        V_loader(params_.v, tile.batch * params_.v_stride.batch + tile.head_kv * params_.v_stride.head,
                 params_.v_stride.row, params_.head_dim),
        rows_first(rows_first_walk<Spec>(ptx::lane_index())),
        columns_first(columns_first_walk<Spec>(ptx::lane_index())),
        lane(ptx::lane_index()),
        warp_row(ptx::warp_index() * Spec::kWarpRows) {}

  __device__ __forceinline__ ptx::SmemPointer K_stage(int stage) const { return KV_smem + stage * Spec::kKeyBytes; }
  __device__ __forceinline__ ptx::SmemPointer V_stage(int stage) const {
    return KV_smem + (kStages + stage) * Spec::kKeyBytes;
  }

  template <bool kIsWhole>
  __device__ __forceinline__ void load_key(int n, int stage) const {
    K_loader.template load<Spec::kBlockN, kIsWhole>(K_stage(stage), n * Spec::kBlockN, params.seq_k - n * Spec::kBlockN);
  }

  template <bool kIsWhole>
  __device__ __forceinline__ void load_value(int n, int stage) const {
    V_loader.template load<Spec::kBlockN, kIsWhole>(V_stage(stage), n * Spec::kBlockN, params.seq_k - n * Spec::kBlockN);
  }

  __device__ __forceinline__ void load_query() const {
    const TileLoader<Spec> loader(params.q, tile.batch * params.q_stride.batch + tile.head_q * params.q_stride.head,
                                  params.q_stride.row, params.head_dim);
    loader.template load<Spec::kBlockM, false>(Q_smem, tile.row, tile.rows);
  }

  // Starts everything the first tile needs, and, with a ring, the kStages - 1 tiles that it runs ahead.
  __device__ __forceinline__ void prologue() const {
    load_query();
    const int last = key_tiles.end - 1;
    if constexpr (kStages == 1) {
      load_key<false>(last, 0);
      ptx::cp_async_commit();
    } else {
#pragma unroll
      for (int stage = 0; stage < kStages - 1; ++stage) {
        if (last - stage >= key_tiles.begin) {
          load_key<false>(last - stage, stage);
          load_value<false>(last - stage, stage);
        }
        ptx::cp_async_commit();
      }
    }
  }

  template <bool kIsMasked>
  __device__ __forceinline__ void step(Accumulator<Spec>& accumulator, const QueryOperand<Spec>& Q, int n, int& stage) const {
    float S_rmem[Spec::kMmaM][Spec::kMmaN][4];
    ptx::SmemPointer K_smem = K_stage(stage);
    ptx::SmemPointer V_smem = V_stage(stage);
    if constexpr (kStages == 1) {
      ptx::cp_async_wait<0>();
      ptx::barrier_sync_block();  // K of this tile is whole; all warps are done with V of the tile before
      if (kIsMasked) {
        load_value<false>(n, 0);
      } else {
        load_value<true>(n, 0);
      }
      ptx::cp_async_commit();
      multiply_query_key<Spec>(S_rmem, Q, K_smem, columns_first);
      ptx::cp_async_wait<0>();
      ptx::barrier_sync_block();  // V of this tile is whole; all warps are done with K
      if (n > key_tiles.begin) {
        load_key<true>(n - 1, 0);
        ptx::cp_async_commit();
      }
    } else {
      ptx::cp_async_wait<kStages - 2>();
      ptx::barrier_sync_block();  // this tile is whole; all warps are done with the tile before, whose buffers refill
      const int next = n - (kStages - 1);
      const int next_stage = stage == 0 ? kStages - 1 : stage - 1;
      if (next >= key_tiles.begin) {
        load_key<true>(next, next_stage);
        load_value<true>(next, next_stage);
      }
      ptx::cp_async_commit();
      stage = stage == kStages - 1 ? 0 : stage + 1;
      multiply_query_key<Spec>(S_rmem, Q, K_smem, columns_first);
    }
    if constexpr (kIsMasked) {
      const int first_key = n * Spec::kBlockN;
      mask_scores<Spec, kIsCausal>(S_rmem, lane, params.seq_k - 1 - first_key,
                                   tile.row + warp_row + params.seq_k - params.seq_q - first_key);
    }
    accumulate_tile<Spec, kIsMasked>(accumulator, S_rmem, V_smem, rows_first, params.scale_log2);
  }

  __device__ __forceinline__ void run() const {
    Accumulator<Spec> accumulator;
    ptx::SmemPointer warp_Q_smem = Q_smem + warp_row * Spec::kRowBytes;
    if (key_tiles.begin < key_tiles.end) {
      prologue();
      if constexpr (Spec::kQueryInRegisters) {
        ptx::cp_async_wait<kStages == 1 ? 0 : kStages - 2>();
        ptx::barrier_sync_block();  // Q is whole
      }
      const QueryOperand<Spec> Q(warp_Q_smem, rows_first);
      int n = key_tiles.end - 1;
      int stage = 0;
      for (; n >= key_tiles.masked; --n) step<true>(accumulator, Q, n, stage);
      for (; n >= key_tiles.begin; --n) step<false>(accumulator, Q, n, stage);
      ptx::cp_async_wait<0>();
    }
    finish_tile<Spec>(params, tile, warp_row, lane, accumulator.rows, accumulator.O_rmem, warp_Q_smem);
  }
};

template <typename Spec, bool kIsCausal>
__device__ __forceinline__ void forward(const ForwardParams& params) {
  ForwardKernel<Spec, kIsCausal>(params).run();
}

}  // namespace sm80
}  // namespace attention
}  // namespace flashmoe
