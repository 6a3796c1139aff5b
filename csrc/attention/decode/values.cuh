// The second of the two kernels that decode with the bits of a prefill: softmax and P V over all keys in the prefill's order, from the scores that
// scores.cuh has left. A block has all keys of an item and kColumns columns of its output.
//
// What a prefill does one after the other is divided over warps, so that only two chains are left, each of one warp: products of 16 keys each, and
// the sum of a row's exponentials. Loading warps, and warps that take exponentials, have every fourth key block each; the latter follow the
// references through all of them.
//
// The stages that fit are filled with values before the kernel in front has ended: it writes scores alone, and what values and lengths come from
// ended before its blocks let this kernel start.
#pragma once

#include "attention/decode/load.cuh"
#include "attention/decode/plan.cuh"
#include "attention/decode/scores.cuh"
#include "attention/decode/spec.cuh"
#include "attention/params/forward.h"
#include "attention/scores.cuh"
#include "attention/sequences.cuh"
#include "attention/softmax.cuh"
#include "device/convert.cuh"
#include "device/math.cuh"
#include "device/reduce.cuh"
#include "device/ring.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe {
namespace attention {
namespace decode {

// kBlockN: the width of a prefill's key blocks, by which its bits are defined. kColumns: of the output, of a block.
template <typename Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kNumStages_, int kNumWarps_, int kColumns_>
struct ValuesSpec {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kNumStages = kNumStages_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kTeam = 4;          // warps that load, and as many that take exponentials
  static constexpr int kWeightStages = 8;  // key blocks whose exponentials wait for the two chains
  static constexpr int kColumns = kColumns_;
  static constexpr int kSlices = kHeadDim / kColumns;
  static constexpr int kMmaD = kColumns / 8;
  static constexpr int kGroups = kBlockN / kWarpKeys;  // of 16 keys, in a key block

  using Tile = RowTile<Element, kColumns>;
  using Scores = ItemScores<kBlockM, kBlockN>;
  static constexpr int kGroupBytes = kWarpKeys * Tile::kRowBytes;
  static constexpr int kValueBytes = kGroups * kGroupBytes;
  static constexpr int kScoreRowBytes = Scores::kRow * 4;
  static constexpr int kScoreBytes = kGroups * kBlockM * kScoreRowBytes;
  static constexpr int kStageBytes = kValueBytes + kScoreBytes;
  static constexpr int kFactorBytes = kBlockM * 4;
  static constexpr int kWeightBytes = kGroups * 32 * (16 + 8) + kFactorBytes;  // each lane's four, in float32 and as an operand
  static constexpr int kWeightOffset = kNumStages * kStageBytes;
  static constexpr int kStateOffset = kWeightOffset + kWeightStages * kWeightBytes;
  static constexpr int kBarrierOffset = kStateOffset + kBlockM * 8;
  static constexpr int kSharedBytes = kBarrierOffset + (2 * kNumStages + 2 * kWeightStages + 1) * 8;

  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_m16n8k16<Element>(d, a, b0, b1);
  }

  static_assert(sizeof(Element) == 2, "mma.m16n8k16 and ldmatrix here take 16-bit elements");
  static_assert(kBlockM == 8, "the lower half of an m16n8k16 product is zero");
  static_assert(kBlockN == 64, "a lane knows where two keys of a block are");
  static_assert(kColumns % 16 == 0 && kHeadDim % kColumns == 0, "ldmatrix loads 16 columns");
  static_assert(kNumWarps == 2 * kTeam + 2, "one more for the products, and one for the sums");
  static_assert(kNumStages % kTeam == 0 && kWeightStages % kTeam == 0, "a warp's blocks lie in stages of its own");
};

// What a block computes.
template <typename Spec>
struct ValueItem {
  int batch;
  int head_q;
  int row;
  int rows;  // 0: nothing
  int first_column;
  KeyRange seen;    // keys that some row of the sequence sees
  KeyRange blocks;  // key blocks: at least one, so that rows without a key have an output

  __device__ __forceinline__ ValueItem(const ForwardParams& params, int batch_, int index,
                                       const Sequence<MaskKind::kRuntime>& sequence, int slice)
      : batch(batch_), first_column(slice * Spec::kColumns) {
    const int row_blocks = ceil_div(params.seq_q, Spec::kBlockM);
    head_q = index / row_blocks;
    row = (index - head_q * row_blocks) * Spec::kBlockM;
    rows = first_column < params.head_dim_v ? max(0, min(Spec::kBlockM, sequence.rows() - row)) : 0;
    if (rows == 0) return;
    seen = keys_of_sequence(sequence);
    blocks.begin = seen.begin / Spec::kBlockN;
    blocks.end = max(blocks.begin + 1, ceil_div(seen.end, Spec::kBlockN));
  }
};

// The block's shared memory: stages of values and scores, stages of weights (the exponentials), the rows' states at the end; and barriers that say of
// a stage that it is full, or empty, and of the states that they are there.
template <typename Spec>
struct ValueRing {
  unsigned char* base;

  __device__ __forceinline__ ptx::SmemPointer values(int stage) const { return base + stage * Spec::kStageBytes; }
  __device__ __forceinline__ ptx::SmemPointer scores(int stage) const { return values(stage) + Spec::kValueBytes; }
  // Of one lane, and of a group of 16 keys.
  __device__ __forceinline__ ptx::SmemPointer weights(int stage, int group) const {
    return base + Spec::kWeightOffset + stage * Spec::kWeightBytes + (group * 32 + ptx::lane_index()) * 16;
  }
  __device__ __forceinline__ ptx::SmemPointer operand(int stage, int group) const {
    return base + Spec::kWeightOffset + stage * Spec::kWeightBytes + Spec::kGroups * 32 * 16 +
           (group * 32 + ptx::lane_index()) * 8;
  }
  // What the sums and outputs of a row before the block are multiplied by.
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
      ptx::mbarrier_init(empty(stage), Spec::kTeam + 1);
    }
    for (int stage = 0; stage < Spec::kWeightStages; ++stage) {
      ptx::mbarrier_init(weights_full(stage), 1);
      ptx::mbarrier_init(weights_empty(stage), 2);
    }
    ptx::mbarrier_init(states_full(), 2);
  }
};

// The warp has read or written what the barrier guards.
__device__ __forceinline__ void arrive_as_warp(ptx::Mbarrier* barrier) {
  ptx::warp_sync();
  if (ptx::lane_index() == 0) ptx::mbarrier_arrive(barrier);
}

// A loading warp.
template <typename Spec>
struct ValueLoader {
  using Tile = typename Spec::Tile;
  using Element = typename Spec::Element;
  static constexpr int kOwn = Spec::kBlockN / 32;  // keys of a block whose place a lane knows

  const ForwardParams& params;
  const Sequence<MaskKind::kRuntime>& sequence;
  const ValueItem<Spec>& item;
  const ValueRing<Spec>& ring;
  const typename Spec::Scores scores;
  const Element* gmem;  // of the head, from the first column on
  const ptx::CachePolicy policy;
  int page[kOwn];
  int row[kOwn];

  __device__ __forceinline__ ValueLoader(const ForwardParams& params_, const Sequence<MaskKind::kRuntime>& sequence_,
                                         const ValueItem<Spec>& item_, const ValueRing<Spec>& ring_)
      : params(params_),
        sequence(sequence_),
        item(item_),
        ring(ring_),
        scores(params_, item_.batch, item_.head_q, item_.row / Spec::kBlockM),
        gmem(static_cast<const Element*>(params_.v) +
             sequence_.key_offset(params_.v_stride, item_.head_q / heads_per_key_head(params_)) + item_.first_column),
        policy(ptx::evict_first()) {}

  // Asks for the pages of a block's keys, some time before its load.
  __device__ __forceinline__ void find(int block) {
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      const int key = block * Spec::kBlockN + own * 32 + ptx::lane_index();
      page[own] = row[own] = 0;
      if (key < item.seen.begin || key >= item.seen.end) continue;
      row[own] = key;
      if (params.sequences.block_table != nullptr) {
        const uint32_t page_size = static_cast<uint32_t>(params.sequences.page_size);
        const int page_of_sequence = static_cast<int>(static_cast<uint32_t>(key) / page_size);
        page[own] = sequence.stated_page(page_of_sequence);
        row[own] = key - page_of_sequence * params.sequences.page_size;
      }
    }
  }

  // Values of the block whose keys were found: zeros for keys that no row sees, whatever the tensor holds.
  __device__ __forceinline__ void load_values(int block, int stage) const {
    const int lane = ptx::lane_index();
    uint64_t own_gmem[kOwn];
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      own_gmem[own] = reinterpret_cast<uint64_t>(gmem + sequence.existing_page(page[own]) * params.v_stride.batch +
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
    const unsigned char* gmem_of_block =
        reinterpret_cast<const unsigned char*>(scores.at(block * Spec::kBlockN, 0));
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

  // `first`: of this warp's blocks; the others are kTeam apart.
  __device__ __forceinline__ void run(int first) {
    constexpr int kTeam = Spec::kTeam;
    const int begin = item.blocks.begin + first;
    const int prefilled = min(item.blocks.begin + Spec::kNumStages, item.blocks.end);
    find(begin);
#pragma unroll 1
    for (int block = begin; block < prefilled; block += kTeam) {
      load_values(block, block - item.blocks.begin);
      find(block + kTeam);
    }
    ptx::grid_dependency_wait();  // the scores
    ptx::grid_launch_dependents();
#pragma unroll 1
    for (int block = begin; block < prefilled; block += kTeam) load_scores(block, block - item.blocks.begin);
    RingPosition<Spec::kNumStages> at;
    at.advance_by(first);
#pragma unroll 1
    for (int block = begin + Spec::kNumStages; block < item.blocks.end; block += kTeam) {
      ptx::mbarrier_wait(ring.empty(at.stage), at.parity);
      load_values(block, at.stage);
      find(block + kTeam);
      load_scores(block, at.stage);
      at.advance_by(kTeam);
    }
  }
};

// Of warps that take exponentials `own` of kTeam. All of them follow a row's reference through all blocks, as advance_references does in a prefill
// (mma_sync/accumulate.cuh).
template <typename Spec>
__device__ __forceinline__ void take_exponentials(const ForwardParams& params, const ValueItem<Spec>& item,
                                                  const ValueRing<Spec>& ring, int own) {
  const float scale_log2 = params.scale_log2;
  const int score_rows = min(Spec::kBlockM, params.seq_q);
  const int row = ptx::lane_index() / 4;
  // Lanes of rows that the item does not have take its last one's.
  const int lane_bytes = min(score_rows - 1, row) * Spec::kScoreRowBytes + ptx::lane_index() % 4 * kChunkBytes;
  float reference = ptx::negative_infinity();
  RingPosition<Spec::kNumStages> at;
  RingPosition<Spec::kWeightStages> weights;
  weights.advance_by(own);
  int until_own = own;  // blocks
#pragma unroll 1
  for (int block = item.blocks.begin; block < item.blocks.end; ++block) {
    ptx::mbarrier_wait(ring.full(at.stage), at.parity);
    float4 S_rmem[Spec::kGroups];
    float largest = reference;
#pragma unroll
    for (int group = 0; group < Spec::kGroups; ++group) {
      S_rmem[group] =
          ptx::ld_shared_float4(ring.scores(at.stage) + group * score_rows * Spec::kScoreRowBytes + lane_bytes);
      largest = ptx::max_ftz(largest, ptx::max_ftz(ptx::max_ftz(S_rmem[group].x, S_rmem[group].y),
                                                   ptx::max_ftz(S_rmem[group].z, S_rmem[group].w)));
    }
    arrive_as_warp(ring.empty(at.stage));
    at.advance();
    float factor = 1.0f;
    if (ptx::vote_any(!reference_stays(largest, reference, scale_log2))) {
      const float of_row = quad_max(largest);
      const float next = reference_stays(of_row, reference, scale_log2) ? reference : of_row;
      const float next_shift = (next == ptx::negative_infinity() ? 0.0f : next) * scale_log2;
      factor = ptx::exp2_approx(ptx::sub_rn(reference * scale_log2, next_shift));
      reference = next;
    }
    if (until_own-- > 0) continue;
    until_own = Spec::kTeam - 1;
    const float shift = (reference == ptx::negative_infinity() ? 0.0f : reference) * scale_log2;
    const auto exponential = [&](float score) { return ptx::exp2_approx(ptx::fma_rn(score, scale_log2, -shift)); };
    ptx::mbarrier_wait(ring.weights_empty(weights.stage), weights.parity ^ 1);
#pragma unroll
    for (int group = 0; group < Spec::kGroups; ++group) {
      const float p[4] = {exponential(S_rmem[group].x), exponential(S_rmem[group].y), exponential(S_rmem[group].z),
                          exponential(S_rmem[group].w)};
      const uint32_t floats[4] = {ptx::float_bits(p[0]), ptx::float_bits(p[1]), ptx::float_bits(p[2]),
                                  ptx::float_bits(p[3])};
      ptx::st_shared_128(ring.weights(weights.stage, group), floats);
      const uint32_t packed[2] = {pack<typename Spec::Element>(p[0], p[1]), pack<typename Spec::Element>(p[2], p[3])};
      ptx::st_shared_64(ring.operand(weights.stage, group), packed);
    }
    if (ptx::lane_index() % 4 == 0) ptx::st_shared_32(ring.factor(weights.stage, row), ptx::float_bits(factor));
    arrive_as_warp(ring.weights_full(weights.stage));
    weights.advance_by(Spec::kTeam);
  }
  if (own != 0) return;
  if (ptx::lane_index() % 4 == 0) ptx::st_shared_32(ring.reference(row), ptx::float_bits(reference));
  arrive_as_warp(ring.states_full());
}

// The warp that sums a row's exponentials: a lane of a quad those of its columns, in the order of keys.
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
    // A product of its own: with the first addition the compiler would make one rounding of two.
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

// The warp of the products, O += P V, and of the output.
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
#pragma unroll 1
  for (int block = item.blocks.begin; block < item.blocks.end; ++block) {
    ptx::mbarrier_wait(ring.full(at.stage), at.parity);
    ptx::mbarrier_wait(ring.weights_full(weights.stage), weights.parity);
    const float factor = ptx::bits_float(ptx::ld_shared_32(ring.factor(weights.stage, lane / 4)));
    uint32_t P_rmem[Spec::kGroups][4];
    uint32_t V_rmem[Spec::kGroups][Spec::kMmaD / 2][4];  // 16 keys, two 8-column blocks each
#pragma unroll
    for (int group = 0; group < Spec::kGroups; ++group) {
      uint32_t words[2];
      ptx::ld_shared_64(words, ring.operand(weights.stage, group));
      P_rmem[group][0] = words[0];
      P_rmem[group][1] = 0;
      P_rmem[group][2] = words[1];
      P_rmem[group][3] = 0;
#pragma unroll
      for (int pair = 0; pair < Spec::kMmaD / 2; ++pair) {
        ptx::ldmatrix_x4_trans(V_rmem[group][pair], ring.values(at.stage) + group * Spec::kGroupBytes +
                                                        Spec::Tile::offset(lane % 16, pair * 2 + lane / 16));
      }
    }
    arrive_as_warp(ring.empty(at.stage));
    arrive_as_warp(ring.weights_empty(weights.stage));
    at.advance();
    weights.advance();
    if (ptx::vote_any(factor != 1.0f)) {
#pragma unroll
      for (int d = 0; d < Spec::kMmaD; ++d) {
        O_rmem[d][0] *= factor;
        O_rmem[d][1] *= factor;
      }
    }
#pragma unroll
    for (int group = 0; group < Spec::kGroups; ++group)
#pragma unroll
      for (int d = 0; d < Spec::kMmaD; ++d) {
        Spec::multiply(O_rmem[d], P_rmem[group], V_rmem[group][d / 2][d % 2 * 2], V_rmem[group][d / 2][d % 2 * 2 + 1]);
      }
  }

  ptx::mbarrier_wait(ring.states_full(), 0);
  if (lane / 4 >= item.rows) return;
  const int row = item.row + lane / 4;
  const float reference = ptx::bits_float(ptx::ld_shared_32(ring.reference(lane / 4)));
  const float sum = ptx::bits_float(ptx::ld_shared_32(ring.sum(lane / 4)));
  const FinishedRow finished =
      finish_row(reference * params.scale_log2, sum, sink_log2(params.score_options, item.head_q, row));
  if (item.first_column == 0 && lane % 4 == 0 && params.lse != nullptr) {
    const int64_t at_row = sequence.result_row(sequence.template result_head<false>(item.head_q, 0)) + row;
    ptx::st_global_float(params.lse + at_row, finished.lse);
  }
  Element* out_gmem = static_cast<Element*>(params.out) + sequence.row_offset(params.out_stride, item.head_q) +
                      row * params.out_stride.row + item.first_column;
#pragma unroll
  for (int d = 0; d < Spec::kMmaD; ++d) {
    const int column = d * 8 + lane % 4 * 2;
    if (item.first_column + column >= params.head_dim_v) continue;
    ptx::st_global_32(out_gmem + column,
                      pack<Element>(O_rmem[d][0] * finished.inverse, O_rmem[d][1] * finished.inverse));
  }
}

// Grid: the slices of an item side by side, for they read the same scores; items by sequence, head and row.
template <typename Spec>
__device__ __forceinline__ void decode_values(const ForwardParams& params) {
  const ValueRing<Spec> ring{ptx::dynamic_shared_memory()};
  if (ptx::thread_index() == 0) ring.init();
  const int index = ptx::block_index() / Spec::kSlices;
  const int items = params.heads_q * ceil_div(params.seq_q, Spec::kBlockM);  // of a sequence, at most
  const int batch = index / items;
  const Sequence<MaskKind::kRuntime> sequence(params, batch);
  const ValueItem<Spec> item(params, batch, index - batch * items, sequence,
                             ptx::block_index() - index * Spec::kSlices);
  if (item.rows == 0) {
    ptx::grid_dependency_wait();  // a kernel behind may take this one's end for that of both
    return;
  }
  ptx::barrier_sync_block();  // the barriers are there
  const int warp = ptx::warp_index();
  if (warp < Spec::kTeam) {
    ValueLoader<Spec>(params, sequence, item, ring).run(warp);
  } else if (warp < 2 * Spec::kTeam) {
    take_exponentials<Spec>(params, item, ring, warp - Spec::kTeam);
  } else if (warp == 2 * Spec::kTeam) {
    add_values<Spec>(params, sequence, item, ring);
  } else {
    add_exponentials<Spec>(item, ring);
  }
}

}  // namespace decode
}  // namespace attention
}  // namespace flashmoe
