// The spec of the kernel in values.cuh, its shared memory, what a block computes, and its loading warps.
#pragma once

#include "attention/decode/load.cuh"
#include "attention/decode/plan.cuh"
#include "attention/decode/scores.cuh"
#include "attention/decode/spec.cuh"
#include "attention/params/forward.h"
#include "attention/params/ordered.h"
#include "attention/sequences.cuh"
#include "device/math.cuh"
#include "device/ring.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention::decode {

// kBlockN: the width of a prefill's key blocks, which determines its bits.
template <typename Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kNumStages_, int kNumWarps_>
struct ValuesSpec {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kNumStages = kNumStages_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kLoaders = 6;       // warps that load
  static constexpr int kTeam = 4;          // warps that compute exponentials
  static constexpr int kWeightStages = 8;  // key blocks whose exponentials wait for the two chains
  static constexpr int kColumns = kValueColumns;
  static constexpr int kSlices = kHeadDim / kColumns;
  static constexpr int kMmaD = kColumns / 8;
  static constexpr int kGroups = kBlockN / kWarpKeys;  // groups of 16 keys in a key block

  // Two blocks fit a multiprocessor: three warpgroups with 80 registers per thread.
  static constexpr int kFewRegisters = 64;
  static constexpr int kMoreRegisters = 112;

  enum class Barrier : int {
    kBlock = 0,
    kMaximaStored = 1,  // the warps that compute exponentials: a round's maxima are stored
  };

  using Tile = RowTile<Element, kColumns>;
  using Scores = ItemScores<kBlockM, kBlockN>;
  static constexpr int kGroupBytes = kWarpKeys * Tile::kRowBytes;
  static constexpr int kValueBytes = kGroups * kGroupBytes;
  static constexpr int kScoreRowBytes = Scores::kRow * 4;
  static constexpr int kScoreBytes = kGroups * kBlockM * kScoreRowBytes;
  static constexpr int kStageBytes = kValueBytes + kScoreBytes;
  static constexpr int kFactorBytes = kBlockM * 4;
  static constexpr int kWeightBytes =
      kGroups * 32 * (16 + 16) + kFactorBytes;            // each lane's four, in float32 and as an operand
  static constexpr int kMaximumBytes = 2 * kBlockM * 16;  // of a round's blocks, and of the next one's
  static constexpr int kWeightOffset = kNumStages * kStageBytes;
  static constexpr int kStateOffset = kWeightOffset + kWeightStages * kWeightBytes;
  static constexpr int kMaximumOffset = kStateOffset + kBlockM * 8;
  static constexpr int kBarrierOffset = kMaximumOffset + kMaximumBytes;
  static constexpr int kSharedBytes = kBarrierOffset + (2 * kNumStages + 2 * kWeightStages + 1) * 8;

  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_m16n8k16<Element>(d, a, b0, b1);
  }

  static_assert(sizeof(Element) == 2, "mma.m16n8k16 and ldmatrix here take 16-bit elements");
  static_assert(kBlockM == 8, "the lower half of an m16n8k16 product is zero");
  static_assert(kBlockN == 64, "a lane knows where two keys of a block are");
  static_assert(kColumns % 16 == 0 && kHeadDim % kColumns == 0, "ldmatrix loads 16 columns");
  static_assert(kNumWarps == kLoaders + kTeam + 2, "one more for the products, and one for the sums");
  static_assert(kTeam == 4, "the maxima of a round are one access");
  static_assert(kNumStages % kLoaders == 0 && kWeightStages % kTeam == 0, "a warp's blocks lie in stages of its own");
};

// What a block computes.
template <typename Spec>
struct ValueItem {
  int batch;
  int head_kv;
  int row;   // the first row within the key head
  int rows;  // 0: no work
  int first_column;
  KeyRange seen;    // keys that some row of the sequence sees
  KeyRange blocks;  // key blocks: at least one, so that rows without a key have an output

  __device__ __forceinline__ ValueItem(const ForwardParams& params, int batch_, int index,
                                       const Sequence<MaskKind::kRuntime>& sequence, int slice)
      : batch(batch_), first_column(slice * Spec::kColumns) {
    const int group = params.score_options.folded_heads;
    const int row_blocks = ceil_div(params.seq_q * group, Spec::kBlockM);
    head_kv = index / row_blocks;
    row = (index - head_kv * row_blocks) * Spec::kBlockM;
    rows = first_column < params.head_dim_v ? max(0, min(Spec::kBlockM, sequence.rows() * group - row)) : 0;
    if (rows == 0) return;
    seen = keys_of_sequence(sequence);
    blocks.begin = seen.begin / Spec::kBlockN;
    blocks.end = max(blocks.begin + 1, ceil_div(seen.end, Spec::kBlockN));
  }
};

// The block's shared memory: stages of values and scores, stages of weights (the exponentials), and the rows' final
// states. Barriers: full and empty for each stage, and one for the states.
template <typename Spec>
struct ValueRing {
  unsigned char* base;

  __device__ __forceinline__ ptx::SmemPointer values(int stage) const { return base + stage * Spec::kStageBytes; }
  __device__ __forceinline__ ptx::SmemPointer scores(int stage) const { return values(stage) + Spec::kValueBytes; }
  // For the calling lane and a group of 16 keys.
  __device__ __forceinline__ ptx::SmemPointer weights(int stage, int group) const {
    return base + Spec::kWeightOffset + stage * Spec::kWeightBytes + (group * 32 + ptx::lane_index()) * 16;
  }
  __device__ __forceinline__ ptx::SmemPointer operand(int stage, int group) const {
    return base + Spec::kWeightOffset + stage * Spec::kWeightBytes + Spec::kGroups * 32 * 16 +
           (group * 32 + ptx::lane_index()) * 16;
  }
  // The largest scores of a row in the blocks of a round.
  __device__ __forceinline__ ptx::SmemPointer maxima(int round, int row) const {
    return base + Spec::kMaximumOffset + (round % 2 * Spec::kBlockM + row) * 16;
  }
  // The factor of a row's sum and output before the block.
  __device__ __forceinline__ ptx::SmemPointer factor(int stage, int row) const {
    return base + Spec::kWeightOffset + (stage + 1) * Spec::kWeightBytes - Spec::kFactorBytes + row * 4;
  }
  __device__ __forceinline__ ptx::SmemPointer reference(int row) const { return base + Spec::kStateOffset + row * 8; }
  __device__ __forceinline__ ptx::SmemPointer sum(int row) const { return reference(row) + 4; }

  __device__ __forceinline__ ptx::Mbarrier* full(int stage) const {
    return reinterpret_cast<ptx::Mbarrier*>(base + Spec::kBarrierOffset) + stage;
  }
  __device__ __forceinline__ ptx::Mbarrier* empty(int stage) const { return full(stage) + Spec::kNumStages; }
  __device__ __forceinline__ ptx::Mbarrier* weights_full(int stage) const { return full(2 * Spec::kNumStages + stage); }
  __device__ __forceinline__ ptx::Mbarrier* weights_empty(int stage) const {
    return weights_full(stage) + Spec::kWeightStages;
  }
  __device__ __forceinline__ ptx::Mbarrier* states_full() const { return weights_full(2 * Spec::kWeightStages); }

  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < Spec::kNumStages; ++stage) {
      ptx::mbarrier_init(full(stage), 32);
      ptx::mbarrier_init(empty(stage), 2);
    }
    for (int stage = 0; stage < Spec::kWeightStages; ++stage) {
      ptx::mbarrier_init(weights_full(stage), 1);
      ptx::mbarrier_init(weights_empty(stage), 2);
    }
    ptx::mbarrier_init(states_full(), 2);
  }
};

// Called when the warp has read or written what the barrier guards.
__device__ __forceinline__ void arrive_as_warp(ptx::Mbarrier* barrier) {
  ptx::warp_sync();
  if (ptx::lane_index() == 0) ptx::mbarrier_arrive(barrier);
}

// A loading warp.
template <typename Spec>
struct ValueLoader {
  using Tile = typename Spec::Tile;
  using Element = typename Spec::Element;
  static constexpr int kOwn = Spec::kBlockN / 32;  // keys of a block whose location a lane holds

  const ForwardParams& params;
  const Sequence<MaskKind::kRuntime>& sequence;
  const ValueItem<Spec>& item;
  const ValueRing<Spec>& ring;
  const typename Spec::Scores scores;
  const Element* gmem;  // of the head, from the first column on
  const ptx::CachePolicy policy;
  // For this lane's keys: the index of the page in the table, its number, and the row in it.
  int page_of_sequence[kOwn];
  int page[kOwn];
  int row[kOwn];
  int pages_of_step;  // from a block of this warp to the next one
  int rows_of_step;

  __device__ __forceinline__ ValueLoader(const ForwardParams& params_, const Sequence<MaskKind::kRuntime>& sequence_,
                                         const ValueItem<Spec>& item_, const ValueRing<Spec>& ring_)
      : params(params_),
        sequence(sequence_),
        item(item_),
        ring(ring_),
        scores(params_, item_.batch, item_.head_kv, item_.row / Spec::kBlockM),
        gmem(static_cast<const Element*>(params_.v) + sequence_.key_offset(params_.v_stride, item_.head_kv) +
             item_.first_column),
        policy(ptx::evict_first()) {}

  // Locates the keys of a warp's first block.
  __device__ __forceinline__ void start(int block) {
    const bool has_pages = params.sequences.block_table != nullptr;
    const uint32_t page_size = has_pages ? static_cast<uint32_t>(params.sequences.page_size) : 1u << 31;
    const uint32_t step = Spec::kLoaders * Spec::kBlockN;
    pages_of_step = static_cast<int>(step / page_size);
    rows_of_step = static_cast<int>(step % page_size);
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      const uint32_t key = static_cast<uint32_t>(block * Spec::kBlockN + own * 32 + ptx::lane_index());
      page_of_sequence[own] = static_cast<int>(key / page_size);
      row[own] = static_cast<int>(key % page_size);
      state_page(block, own);
    }
  }

  // Locates those of its next block, some time before the load and without a division.
  __device__ __forceinline__ void find(int block) {
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      page_of_sequence[own] += pages_of_step;
      row[own] += rows_of_step;
      if (params.sequences.block_table != nullptr && row[own] >= params.sequences.page_size) {
        row[own] -= params.sequences.page_size;
        ++page_of_sequence[own];
      }
      state_page(block, own);
    }
  }

  // Keys that no row sees are not looked up.
  __device__ __forceinline__ void state_page(int block, int own) {
    const int key = block * Spec::kBlockN + own * 32 + ptx::lane_index();
    page[own] = 0;
    if (params.sequences.block_table != nullptr && key >= item.seen.begin && key < item.seen.end) {
      page[own] = sequence.load_page(page_of_sequence[own]);
    }
  }

  // Loads the values of the block whose keys were located; keys that no row sees become zeros, whatever the tensor
  // holds.
  __device__ __forceinline__ void load_values(int block, int stage) const {
    const int lane = ptx::lane_index();
    uint64_t own_gmem[kOwn];
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      own_gmem[own] = reinterpret_cast<uint64_t>(gmem + sequence.clamp_page(page[own]) * params.v_stride.batch +
                                                 row[own] * params.v_stride.row);
    }
#pragma unroll
    for (int group = 0; group < Spec::kGroups; ++group) {
#pragma unroll
      for (int pass = 0; pass < Tile::kPasses; ++pass) {
        const int key = group * kWarpKeys + pass * Tile::kRowsPerPass + lane / Tile::kLanes;
        const int of_sequence = block * Spec::kBlockN + key;
        const bool valid = of_sequence >= item.seen.begin && of_sequence < item.seen.end;
        const uint64_t row_gmem = ptx::shuffle_index(own_gmem[group * kWarpKeys / 32], key % 32);
        load_row<Tile, true>(ring.values(stage) + group * Spec::kGroupBytes, pass,
                             reinterpret_cast<const Element*>(row_gmem), valid, params.head_dim_v - item.first_column,
                             policy);
      }
    }
  }

  __device__ __forceinline__ void load_scores(int block, int stage) const {
    const unsigned char* gmem_of_block = reinterpret_cast<const unsigned char*>(scores.at(block * Spec::kBlockN, 0));
    const int chunks = Spec::kGroups * scores.rows * (Spec::kScoreRowBytes / kChunkBytes);
#pragma unroll
    for (int pass = 0; pass < Spec::kScoreBytes / kChunkBytes / 32; ++pass) {
      const int chunk = pass * 32 + ptx::lane_index();
      if (chunk < chunks) {
        ptx::cp_async_16(ring.scores(stage) + chunk * kChunkBytes, gmem_of_block + chunk * kChunkBytes);
      }
    }
    ptx::mbarrier_arrive_cp_async(ring.full(stage));
  }

  // `first`: this warp's first block; its other blocks are kLoaders apart.
  __device__ __forceinline__ void run(int first) {
    constexpr int kLoaders = Spec::kLoaders;
    const int begin = item.blocks.begin + first;
    const int prefilled = min(item.blocks.begin + Spec::kNumStages, item.blocks.end);
    start(begin);
#pragma unroll 1
    for (int block = begin; block < prefilled; block += kLoaders) {
      load_values(block, block - item.blocks.begin);
      find(block + kLoaders);
    }
    ptx::grid_dependency_wait();  // the scores
    ptx::grid_launch_dependents();
#pragma unroll 1
    for (int block = begin; block < prefilled; block += kLoaders) load_scores(block, block - item.blocks.begin);
    RingPosition<Spec::kNumStages> at;
    at.advance_by(first);
#pragma unroll 1
    for (int block = begin + Spec::kNumStages; block < item.blocks.end; block += kLoaders) {
      ptx::mbarrier_wait(ring.empty(at.stage), at.parity);
      load_values(block, at.stage);
      find(block + kLoaders);
      load_scores(block, at.stage);
      at.advance_by(kLoaders);
    }
  }
};

}  // namespace flashmoe::attention::decode
