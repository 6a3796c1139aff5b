// Decoding of multi-head latent attention with mma.sync: any number of heads and query tokens, any page size.
//   grid   row_tiles * num_sm_parts blocks (tile_scheduler.cuh)
// Key blocks of kBlockN keys ascend from key 0; a row's rescaling depends on that row only.
#pragma once

#include "attention/forward/mma_sync/softmax.cuh"
#include "attention/softmax.cuh"
#include "device/convert.cuh"
#include "device/reduce.cuh"
#include "mla/finish.cuh"
#include "mla/params/decode.h"
#include "mla/tile_scheduler.cuh"
#include "mla/sm80/load.cuh"
#include "mla/sm80/spec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::mla::sm80 {

using attention::mma_sync::RowState;

// Moves the row's reference if its scores require it. Returns the factor for O; shift: what
// exp2(score * scale_log2 - shift) subtracts. block_max: over this thread's columns.
__device__ __forceinline__ float advance_reference(RowState& row, float block_max, float scale_log2, float& shift) {
  const float largest = quad_max(ptx::max_ftz(row.max, block_max));
  const float next = attention::reference_stays(largest, row.max, scale_log2) ? row.max : largest;
  // A row that has seen no key yet has the reference -inf, and -inf - -inf is NaN.
  shift = (next == ptx::negative_infinity() ? 0.0f : next) * scale_log2;
  // The old exponentials refer to the rounded product: a reference that stays gives exactly 1.
  const float rescale = ptx::exp2_approx(ptx::sub_rn(row.max * scale_log2, shift));
  row.max = next;
  row.sum = ptx::fma_rn(row.sum, rescale, 0.0f);  // an fma, so that the product is not contracted with a later addition
  return rescale;
}

template <typename Spec>
struct Warp {
  using Element = typename Spec::Element;

  const DecodeParams& params;
  const ptx::SmemPointer block_smem;
  const int row_tile;
  const int column_warp;  // 0 to 3: its quarter of the head dim, and of the output's columns
  const int row_warp;
  // [kWarpRows, kWarpColumns], not yet divided by the row sums. All four warps of a group have the same rows.
  float O_rmem[Spec::kMmaM][Spec::kMmaD][4];
  RowState rows[Spec::kMmaM][2];

  __device__ __forceinline__ Warp(const DecodeParams& params_, int row_tile_)
      : params(params_),
        block_smem(ptx::dynamic_shared_memory()),
        row_tile(row_tile_),
        column_warp(ptx::warp_index() % Spec::kColumnWarps),
        row_warp(ptx::warp_index() / Spec::kColumnWarps) {}

  // The warp's first row in the sequence.
  __device__ __forceinline__ int first_row() const { return row_tile * Spec::kBlockM + row_warp * Spec::kWarpRows; }
  __device__ __forceinline__ ptx::SmemPointer scores_of(int warp) const {
    return block_smem + (Spec::kScoreOffset + warp * Spec::kWarpScoreBytes) + ptx::lane_index() * 16;
  }

  // Stores Q K^T over this warp's columns to shared memory, in accumulator order.
  __device__ __forceinline__ void store_partial_scores(const uint32_t (&Q_rmem)[Spec::kMmaM][Spec::kSteps][4],
                                                       ptx::SmemPointer K_smem) const {
    float S_rmem[Spec::kMmaM][Spec::kMmaN][4];
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) S_rmem[m][n][i] = 0.0f;
    const int lane = ptx::lane_index();
    // Matrices: (keys 0-7, left), (keys 0-7, right), (keys 8-15, left), (keys 8-15, right) of 16 columns.
    const ptx::SmemPointer start_smem = (K_smem + swizzled_offset<kHeadDim>(lane % 8 + lane / 16 * 8, lane / 8 % 2)) ^
                                        (column_warp * (2 * kChunkBytes));
#pragma unroll
    for (int step = 0; step < Spec::kSteps; ++step)
#pragma unroll
      for (int pair = 0; pair < Spec::kMmaN / 2; ++pair) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, start_smem + (step * (kSegmentChunks * kChunkBytes) + pair * 16 * Spec::kRowBytes));
#pragma unroll
        for (int m = 0; m < Spec::kMmaM; ++m) {
          ptx::mma_m16n8k16<Element>(S_rmem[m][2 * pair], Q_rmem[m][step], b[0], b[1]);
          ptx::mma_m16n8k16<Element>(S_rmem[m][2 * pair + 1], Q_rmem[m][step], b[2], b[3]);
        }
      }
    const ptx::SmemPointer warp_smem = scores_of(ptx::warp_index());
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n) {
        const uint32_t words[4] = {ptx::float_bits(S_rmem[m][n][0]), ptx::float_bits(S_rmem[m][n][1]),
                                   ptx::float_bits(S_rmem[m][n][2]), ptx::float_bits(S_rmem[m][n][3])};
        ptx::st_shared_128(warp_smem + (m * Spec::kMmaN + n) * 512, words);
      }
  }

  // The scores of 16 rows: the sums of the four warps, in warp order.
  __device__ __forceinline__ void sum_partial_scores(float (&S_rmem)[Spec::kMmaN][4], int m) const {
#pragma unroll
    for (int n = 0; n < Spec::kMmaN; ++n) {
#pragma unroll
      for (int warp = 0; warp < Spec::kColumnWarps; ++warp) {
        const float4 partial =
            ptx::ld_shared_float4(scores_of(row_warp * Spec::kColumnWarps + warp) + (m * Spec::kMmaN + n) * 512);
        S_rmem[n][0] = warp == 0 ? partial.x : S_rmem[n][0] + partial.x;
        S_rmem[n][1] = warp == 0 ? partial.y : S_rmem[n][1] + partial.y;
        S_rmem[n][2] = warp == 0 ? partial.z : S_rmem[n][2] + partial.z;
        S_rmem[n][3] = warp == 0 ? partial.w : S_rmem[n][3] + partial.w;
      }
    }
  }

  __device__ __forceinline__ void apply_mask(float (&S_rmem)[Spec::kMmaN][4], int m, int keys, int first_key) const {
    const int lane = ptx::lane_index();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int end = visible_end(params, keys, first_row() + m * 16 + half * 8 + lane / 4) - first_key - lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (n * 8 + i >= end) S_rmem[n][2 * half + i] = ptx::negative_infinity();
    }
  }

  // Sparse: masks indices that select no key.
  __device__ __forceinline__ static void mask_invalid(float (&S_rmem)[Spec::kMmaN][4], uint32_t present) {
    const uint32_t of_thread = present >> ptx::lane_index() % 4 * 2;
#pragma unroll
    for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if ((of_thread >> (n * 8 + i % 2) & 1) == 0) S_rmem[n][i] = ptx::negative_infinity();
  }

  // Scores to probabilities, as the A operands of P V. Rescales the output of the same rows.
  __device__ __forceinline__ void softmax(uint32_t (&P_rmem)[Spec::kMmaN / 2][4], float (&S_rmem)[Spec::kMmaN][4],
                                          int m) {
    float shift[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float block_max = ptx::negative_infinity();
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n) {
        block_max = ptx::max_ftz(block_max, ptx::max_ftz(S_rmem[n][2 * half], S_rmem[n][2 * half + 1]));
      }
      const float rescale = advance_reference(rows[m][half], block_max, params.scale_log2, shift[half]);
#pragma unroll
      for (int d = 0; d < Spec::kMmaD; ++d) {
        O_rmem[m][d][2 * half] *= rescale;
        O_rmem[m][d][2 * half + 1] *= rescale;
      }
    }
#pragma unroll
    for (int n = 0; n < Spec::kMmaN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        S_rmem[n][i] = ptx::exp2_approx(ptx::fma_rn(S_rmem[n][i], params.scale_log2, -shift[i / 2]));
        rows[m][i / 2].sum += S_rmem[n][i];
      }
      P_rmem[n / 2][n % 2 * 2] = pack<Element>(S_rmem[n][0], S_rmem[n][1]);
      P_rmem[n / 2][n % 2 * 2 + 1] = pack<Element>(S_rmem[n][2], S_rmem[n][3]);
    }
  }

  // O += P V over the block's keys and the warp's columns; V is read transposed.
  __device__ __forceinline__ void multiply_value(const uint32_t (&P_rmem)[Spec::kMmaM][Spec::kMmaN / 2][4],
                                                 ptx::SmemPointer V_smem) {
    const int lane = ptx::lane_index();
    const ColumnWalk<kHeadDim> walk(V_smem + column_warp * (Spec::kWarpColumns * 2),
                                    swizzled_offset<kHeadDim>(lane % 16, lane / 16));
#pragma unroll
    for (int k = 0; k < Spec::kMmaN / 2; ++k)
#pragma unroll
      for (int pair = 0; pair < Spec::kMmaD / 2; ++pair) {
        uint32_t b[4];  // 16 keys, two 8-column blocks
        ptx::ldmatrix_x4_trans(b, walk.at(pair, k));
#pragma unroll
        for (int m = 0; m < Spec::kMmaM; ++m) {
          ptx::mma_m16n8k16<Element>(O_rmem[m][2 * pair], P_rmem[m][k], b[0], b[1]);
          ptx::mma_m16n8k16<Element>(O_rmem[m][2 * pair + 1], P_rmem[m][k], b[2], b[3]);
        }
      }
  }

  __device__ __forceinline__ void mainloop(const WorkTile& work) {
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m) {
      rows[m][0] = rows[m][1] = RowState();
#pragma unroll
      for (int d = 0; d < Spec::kMmaD; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i) O_rmem[m][d][i] = 0.0f;
    }
    typename LoaderOf<Spec>::Type loader(params, work);
    loader.locate(work.begin_block);
    const auto issue = [&](int block, int stage) {
      if (block < work.end_block) {
        loader.issue(block_smem + stage * Spec::kStageBytes);
        loader.locate(block + 1);
      }
      loader.commit();
    };
    const auto store_smem = [&](int block, int stage) {
      if (block < work.end_block) loader.store_smem(block_smem + stage * Spec::kStageBytes);
    };
    ptx::barrier_sync_block();  // write after read: the ring of the previous work tile
#pragma unroll 1
    for (int ahead = 0; ahead < Spec::kNumStages - 1; ++ahead) {
      issue(work.begin_block + ahead, ahead);
      store_smem(work.begin_block + ahead, ahead);
    }
    uint32_t Q_rmem[Spec::kMmaM][Spec::kSteps][4];
    load_query<Spec>(Q_rmem, params, work.batch, first_row(), column_warp);
    // Keys from here on are masked for some row of the tile.
    const int unmasked_end = visible_end(params, work.keys, row_tile * Spec::kBlockM);

    int stage = 0;
#pragma unroll 1
    for (int block = work.begin_block; block < work.end_block; ++block) {
      const ptx::SmemPointer K_smem = block_smem + stage * Spec::kStageBytes;
      const int refilled = stage == 0 ? Spec::kNumStages - 1 : stage - 1;
      loader.wait();
      ptx::
          barrier_sync_block();  // the block has arrived; all have finished the stage to refill and the previous scores
      issue(block + Spec::kNumStages - 1, refilled);
      store_partial_scores(Q_rmem, K_smem);
      const int index = Spec::kIsSparse ? lane_topk_index(params, work, block) : 0;
      ptx::barrier_sync_block();  // read after write: the scores
      uint32_t P_rmem[Spec::kMmaM][Spec::kMmaN / 2][4];
      const uint32_t present = Spec::kIsSparse ? ptx::vote_ballot(index >= 0) : 0;
#pragma unroll
      for (int m = 0; m < Spec::kMmaM; ++m) {
        float S_rmem[Spec::kMmaN][4];
        sum_partial_scores(S_rmem, m);
        if constexpr (Spec::kIsSparse) {
          mask_invalid(S_rmem, present);
        } else if ((block + 1) * Spec::kBlockN > unmasked_end) {
          apply_mask(S_rmem, m, work.keys, block * Spec::kBlockN);
        }
        softmax(P_rmem[m], S_rmem, m);
      }
      multiply_value(P_rmem, K_smem);
      store_smem(block + Spec::kNumStages - 1, refilled);
      stage = stage == Spec::kNumStages - 1 ? 0 : stage + 1;
    }
    loader.wait_all();
  }

  // Finishes the rows of a whole sequence; leaves the sums of a split one to combine.cuh.
  __device__ __forceinline__ void store(const WorkTile& work, int slot) const {
    const int lane = ptx::lane_index();
    const int num_rows = params.tokens * params.heads;
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row_of_tile = row_warp * Spec::kWarpRows + m * 16 + half * 8 + lane / 4;
        const int row = row_tile * Spec::kBlockM + row_of_tile;
        const float sum = quad_sum(rows[m][half].sum);
        if (row >= num_rows) continue;
        const float shift = rows[m][half].max * params.scale_log2;
        const bool is_first = column_warp == 0 && lane % 4 == 0;
        const int column = column_warp * Spec::kWarpColumns + lane % 4 * 2;
        if (work.is_whole()) {
          const FinishedRow finished = finish_row(params, row % params.heads, shift, sum);
          if (is_first && params.lse != nullptr) store_lse(params, work.batch, row, finished.lse);
          Element* out_gmem = static_cast<Element*>(params.out) +
                              (static_cast<int64_t>(work.batch) * num_rows + row) * kLatentDim + column;
#pragma unroll
          for (int d = 0; d < Spec::kMmaD; ++d) {
            ptx::st_global_32(out_gmem + d * 8, pack<Element>(O_rmem[m][d][2 * half] * finished.inverse,
                                                              O_rmem[m][d][2 * half + 1] * finished.inverse));
          }
          continue;
        }
        // Recomputed: registers are scarce in the loop of the FP8 kernel.
        const int recomputed_lane = ptx::recompute(lane);
        const int64_t first = partial_row(params, slot, row_tile, row_warp * Spec::kWarpRows + m * 16 + half * 8);
        if (is_first) {
          const uint32_t state[2] = {ptx::float_bits(shift), ptx::float_bits(sum)};
          ptx::st_global_64(params.state_partial + first * 2 + recomputed_lane / 4 * 2, state);
        }
        float* out_gmem = params.out_partial + partial_tile(first, ptx::recompute(column_warp) * Spec::kWarpColumns) +
                          recomputed_lane * 2;
#pragma unroll
        for (int d = 0; d < Spec::kMmaD; ++d) {
          const uint32_t words[2] = {ptx::float_bits(O_rmem[m][d][2 * half]),
                                     ptx::float_bits(O_rmem[m][d][2 * half + 1])};
          ptx::st_global_64(out_gmem + d * 64, words);
        }
      }
  }
};

template <typename Spec>
__device__ __forceinline__ void decode(const DecodeParams& params) {
  ptx::grid_dependency_wait();  // the preceding kernel may write lengths, pages, keys or Q
  ptx::grid_launch_dependents();
  const int sm_part = ptx::block_index() / params.row_tiles;
  TileScheduler scheduler(params, sm_part);
  Warp<Spec> warp(params, ptx::block_index() - sm_part * params.row_tiles);
  WorkTile work;
  while (scheduler.next(work)) {
    warp.mainloop(work);
    warp.store(work, scheduler.slot(work));
  }
}

}  // namespace flashmoe::mla::sm80
