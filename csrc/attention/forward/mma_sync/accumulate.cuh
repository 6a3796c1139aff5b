// What a warp does with the scores of one key tile: mask, online softmax, O += P V.
#pragma once

#include "attention/dropout.cuh"
#include "attention/forward/mma_sync/multiply.cuh"
#include "attention/forward/mma_sync/softmax.cuh"
#include "attention/masks.cuh"
#include "attention/scores.cuh"
#include "attention/softmax.cuh"
#include "device/reduce.cuh"
#include "ptx/math.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention::mma_sync {

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

// Sets the scores of columns that a row does not see to -inf.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void mask_scores(float (&S_rmem)[Spec::kMmaM][Spec::kMmaN][4], int lane,
                                            TileMask<kMask> mask) {
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m * 16 + half * 8 + lane / 4;
      const int last_column = mask.last_column(row) - lane % 4 * 2;  // from this thread's first
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (n * 8 + i > last_column) S_rmem[m][n][2 * half + i] = ptx::negative_infinity();
      if constexpr (kMask == MaskKind::kRuntime) {
        const int first_column = mask.first_column(row) - lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (n * 8 + i < first_column) S_rmem[m][n][2 * half + i] = ptx::negative_infinity();
      }
    }
}

// Applies the softcap, then the mask tensor or ALiBi of ScoreOptions. Must run before mask_scores. first_row: the
// warp's first row in the sequence.
template <typename Spec>
__device__ __forceinline__ void shape_scores(float (&S_rmem)[Spec::kMmaM][Spec::kMmaN][4],
                                             const Sequence<MaskKind::kRuntime>& sequence, int head_q, int first_row,
                                             int first_key) {
  const ScoreOptions& options = sequence.params.score_options;
  if (options.score_factor > 0.0f) {
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) S_rmem[m][n][i] = capped_score(options, S_rmem[m][n][i]);
  }
  if constexpr (Spec::kHasAlibi) {
    const int own_lane = ptx::recompute(ptx::lane_index());
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m) {
      const int row = first_row + m * 16 + own_lane / 4;
      const int column = diagonal_key(sequence, row) - first_key - own_lane % 4 * 2;
      const Alibi alibi{alibi_slope(options, options.mask_factor, sequence.batch, head_q, row),
                        static_cast<float>(column)};
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) S_rmem[m][n][i] = alibi.add(S_rmem[m][n][i], i / 2, n * 8 + i % 2);
    }
    return;
  }
  if (options.mask == nullptr) return;
  const int lane = ptx::recompute(ptx::lane_index());
  const int64_t head = sequence.batch * options.mask_stride_batch + head_q * options.mask_stride_head;
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + m * 16 + half * 8 + lane / 4;
      if (row >= sequence.rows()) continue;
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = first_key + n * 8 + lane % 4 * 2 + i;
          float& score = S_rmem[m][n][2 * half + i];
          if (key < sequence.keys()) {
            score = masked_score<typename Spec::Element>(
                options, score, head + row * options.mask_stride_row + key * options.mask_stride_key);
          }
        }
    }
}

// V of one key tile in shared memory.
template <typename Spec>
struct SharedValues {
  static constexpr bool kMaySkip = false;  // true: skips(half) names the halves of rows that are never stored
  static constexpr bool kDrops = false;    // true: drop() drops weights after they have been added to the sums

  ptx::SmemPointer V_smem;

  __device__ __forceinline__ void change_units(float (&)[Spec::kMmaM][Spec::kMmaD][4]) const {
  }  // rescales O before the tile
  __device__ __forceinline__ float scale_probability(float p) const { return p; }
  __device__ __forceinline__ ColumnWalk<Spec::kHeadDim> walk() const { return rows_first_walk<Spec>(V_smem); }
  __device__ __forceinline__ void multiply(float (&O_rmem)[Spec::kMmaM][Spec::kMmaD][4],
                                           const uint32_t (&P_rmem)[Spec::kMmaM][4],
                                           const ColumnWalk<Spec::kHeadDim>& V_walk, int key_block) const {
    multiply_probability_value<Spec>(O_rmem, P_rmem, V_walk, key_block);
  }
};

// The same with dropout.
template <typename Spec>
struct DroppedValues : SharedValues<Spec> {
  static constexpr bool kDrops = true;
  static constexpr int kKeys = Spec::kBlockN % 32 == 0 ? 32 : 16;  // keys whose weights are dropped together

  HeadDropout dropout;
  int row;  // the warp's first row in the sequence
  int first_key;

  // Drops weights of the warp's rows 16 m to 16 m + 15 and of kKeys keys from 16 key_block on. The scale of the kept
  // weights is applied to the output.
  __device__ __forceinline__ void drop(float (&P_rmem)[Spec::kMmaN][4], int m, int key_block) const {
    for_each_pair<kKeys>(dropout, row + m * 16, first_key + key_block * 16, [&](int n, int half, KeptPair pair) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& p = P_rmem[2 * key_block + n][2 * half + c];
        p = pair.keep(p, c);
      }
    });
  }
};

// A warp's dropout state during its walk over the keys. Empty without dropout.
template <typename Spec, bool kHasDropout = Spec::kHasDropout>
struct WalkDropout {
  template <typename Tile>
  __device__ __forceinline__ WalkDropout(const ForwardParams&, const Tile&) {}
};
template <typename Spec>
struct WalkDropout<Spec, true> {
  HeadDropout of_head;

  template <typename Tile>
  __device__ __forceinline__ WalkDropout(const ForwardParams& params, const Tile& tile)
      : of_head(dropout_of(params), tile.head_q, tile.batch) {}
};

template <typename Values>
__device__ __forceinline__ bool skips(const Values& values, int half) {
  if constexpr (Values::kMaySkip) return values.skips(half);
  return false;
}

// Moves the references of rows whose new scores require it, and rescales their O and sums. A warp without such rows
// returns early: all factors would be 1.
template <typename Spec, typename Values>
__device__ __forceinline__ void advance_references(Accumulator<Spec>& accumulator,
                                                   const float (&S_rmem)[Spec::kMmaM][Spec::kMmaN][4],
                                                   const Values& values, float scale_log2, bool may_be_empty) {
  float largest[Spec::kMmaM][2];  // of this thread's columns
  bool stays = true;
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float reference = accumulator.rows[m][half].max;
      largest[m][half] = reference;
      if (skips(values, half)) continue;
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n) {
        largest[m][half] = ptx::max_ftz(largest[m][half], S_rmem[m][n][2 * half]);
        largest[m][half] = ptx::max_ftz(largest[m][half], S_rmem[m][n][2 * half + 1]);
      }
      stays = stays && reference_stays(largest[m][half], reference, scale_log2);
    }
  if (!ptx::vote_any(!stays)) return;
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      RowState& row = accumulator.rows[m][half];
      const float of_row = quad_max(largest[m][half]);
      const float next = reference_stays(of_row, row.max, scale_log2) ? row.max : of_row;
      // A row that has seen no key yet has the maximum -inf, and -inf - -inf is NaN. Only masked tiles can leave a row
      // in this state; -inf scores that come from the inputs are treated as in a plain softmax.
      const float shift = (may_be_empty && next == ptx::negative_infinity() ? 0.0f : next) * scale_log2;
      // The old exponentials refer to the rounded product. An fma here would add a rounding error in every tile: at
      // scores of 2^14, up to 9% after 128 tiles. With rounded products a reference that stays gives exactly 1.
      const float rescale = ptx::exp2_approx(ptx::sub_rn(row.max * scale_log2, shift));
      row.max = next;
      row.sum *= rescale;
#pragma unroll
      for (int d = 0; d < Spec::kMmaD; ++d) {
        accumulator.O_rmem[m][d][2 * half] *= rescale;
        accumulator.O_rmem[m][d][2 * half + 1] *= rescale;
      }
    }
}

// Folds the tile's scores into the row states, and adds P V. The exponentials of 16 keys are taken just before their
// product, so that the two can overlap. Values: SharedValues or any type with its functions.
template <typename Spec, typename Values>
__device__ __forceinline__ void accumulate_tile(Accumulator<Spec>& accumulator,
                                                float (&S_rmem)[Spec::kMmaM][Spec::kMmaN][4], const Values& values,
                                                float scale_log2, bool is_masked) {
  advance_references<Spec>(accumulator, S_rmem, values, scale_log2, is_masked);
  values.change_units(accumulator.O_rmem);
  float shift[Spec::kMmaM][2];
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float reference = accumulator.rows[m][half].max;
      shift[m][half] = (is_masked && reference == ptx::negative_infinity() ? 0.0f : reference) * scale_log2;
    }
  const auto V_walk = values.walk();
#pragma unroll
  for (int k = 0; k < Spec::kBlockN / 16; ++k) {
    uint32_t P_rmem[Spec::kMmaM][4];
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m) {
      const auto exponentiate = [&](int n, int i) {
        const float p = ptx::exp2_approx(ptx::fma_rn(S_rmem[m][n][i], scale_log2, -shift[m][i / 2]));
        S_rmem[m][n][i] = values.scale_probability(p);
        accumulator.rows[m][i / 2].sum += p;
      };
      if constexpr (Values::kDrops) {
        constexpr int kBlocks = Values::kKeys / 16;
        if (k % kBlocks == 0) {
#pragma unroll
          for (int n = 2 * k; n < 2 * (k + kBlocks); ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) exponentiate(n, i);
          values.drop(S_rmem[m], m, k);
        }
      } else if constexpr (Values::kMaySkip) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (values.skips(half)) continue;
#pragma unroll
          for (int i = 0; i < 4; ++i) exponentiate(2 * k + i / 2, 2 * half + i % 2);
        }
      } else {
#pragma unroll
        for (int n = 2 * k; n < 2 * k + 2; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) exponentiate(n, i);
      }
      probability_operand<Spec>(P_rmem[m], S_rmem[m][2 * k], S_rmem[m][2 * k + 1]);
    }
    values.multiply(accumulator.O_rmem, P_rmem, V_walk, k);
  }
}

template <typename Spec>
__device__ __forceinline__ void accumulate_tile(Accumulator<Spec>& accumulator,
                                                float (&S_rmem)[Spec::kMmaM][Spec::kMmaN][4], ptx::SmemPointer V_smem,
                                                float scale_log2, bool is_masked) {
  accumulate_tile<Spec, SharedValues<Spec>>(accumulator, S_rmem, SharedValues<Spec>{V_smem}, scale_log2, is_masked);
}

// With dropout. row: the warp's first row, first_key: the tile's first key.
template <typename Spec>
__device__ __forceinline__ void accumulate_tile(Accumulator<Spec>& accumulator,
                                                float (&S_rmem)[Spec::kMmaM][Spec::kMmaN][4], ptx::SmemPointer V_smem,
                                                float scale_log2, bool is_masked, const WalkDropout<Spec>& dropout,
                                                int row, int first_key) {
  const DroppedValues<Spec> values{{V_smem}, dropout.of_head, row, first_key};
  accumulate_tile<Spec, DroppedValues<Spec>>(accumulator, S_rmem, values, scale_log2, is_masked);
}

}  // namespace flashmoe::attention::mma_sync
