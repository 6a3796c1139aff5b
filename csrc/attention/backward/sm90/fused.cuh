// dq, dk and dv in one kernel: five products a block instead of the split form's seven, and one exponential instead of two. A tile is
// 128 keys; Q and dO stream past it as in the kernel of dk and dv, whose producer this is. dS^T of both consumers passes through
// shared memory to a warpgroup of its own, which multiplies dQ = dS K of the block; three more warps add it to float32 sums in global
// memory by the copy engine. The consumers wait for nobody.
//   before   fused_prepare: row_dot, zero turns            after   fused_convert: the sums to dq
//   params.dq   the sums: [batch, heads_q, ceil(seq_q / 64)] pieces of 64 rows, in the order of FusedQueries::hand_over; then a turn
//               for each piece, the number of tiles that have added to it
//   grid, maps, counter   as of the kernel of dk and dv
//
// Tiles of a head add to a piece one after another, each when its turn has come: the same bits on every run. The last keys that the
// piece sees come first. Under a causal mask they begin at that piece's diagonal, so a tile that starts with the others of its head is
// behind those before it at every piece, and finds its turn come. A tile waits only for tiles with smaller numbers, which blocks that run
// have drawn before it: no grid waits for itself.
#pragma once

#include "attention/backward/sm90/key_value_consumer.cuh"
#include "attention/backward/sm90/producer.cuh"
#include "ptx/bulk_reduce.cuh"
#include "ptx/math.cuh"
#include "ptx/register_control.cuh"
#include "ptx/turns.cuh"

namespace flashmoe {
namespace attention {
namespace backward {
namespace sm90 {

// As of the kernel of dk and dv, with 16 warps: producer and adding warps, two consumers, the warpgroup of dq.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps_>
struct FusedSpec : KeyValueGradientSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, 12, 0, 0> {
  using Base = KeyValueGradientSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, 12, 0, 0>;
  static_assert(kHeadDim == 64, "of more columns consumers and the warpgroup of dq need more registers than there are");
  static_assert(kNumWarps_ == 16 && kBlockM == 64 && kBlockN == 128,
                "two consumers of 64 keys, dQ of one product's 64 rows");
  static constexpr int kNumThreads = 32 * kNumWarps_;
  static constexpr bool kTakesTurns = true;
  static constexpr int kStreamCost = 2;
  static constexpr int kProducerRegisters = 32;  // 128 * (32 + 2 * 208 + 64) = 65536
  static constexpr int kConsumerRegisters = 208;
  static constexpr int kQueryRegisters = 64;

  static constexpr int kScoreBuffers = 2;                     // of dS^T
  static constexpr int kSumBuffers = 3;                       // of dQ, each with an adding warp
  static constexpr int kScoreBytes = kBlockN * kBlockM * 2;   // dS^T of a block
  static constexpr int kQueryBytes = kBlockM * kHeadDim * 4;  // dQ of a block
  static constexpr int kScoreOffset = (Base::kSharedBytes + 1023) / 1024 * 1024;
  static constexpr int kQueryOffset = kScoreOffset + kScoreBuffers * kScoreBytes;
  static constexpr int kPlaceOffset = kQueryOffset + kSumBuffers * kQueryBytes;
  static constexpr int kScoreBarrierOffset = kPlaceOffset + kSumBuffers * 16;
  static constexpr int kSharedBytes = kScoreBarrierOffset + (2 * kScoreBuffers + 3 * kSumBuffers) * 8;
  static_assert(kSharedBytes <= 232448, "sm_90 gives a block at most 227 KiB");
};

template <typename Spec>
struct FusedMemory : SharedMemory<Spec> {
  using SharedMemory<Spec>::base;

  // [128 keys][64 queries], swizzled: dS^T, each consumer's half.
  __device__ __forceinline__ unsigned char* scores(int buffer) const {
    return base + Spec::kScoreOffset + buffer * Spec::kScoreBytes;
  }
  // A piece of dq, in the order of FusedQueries::hand_over.
  __device__ __forceinline__ unsigned char* query_sums(int buffer) const {
    return base + Spec::kQueryOffset + buffer * Spec::kQueryBytes;
  }
  __device__ __forceinline__ ptx::Mbarrier* scores_full(int buffer) const {
    return reinterpret_cast<ptx::Mbarrier*>(base + Spec::kScoreBarrierOffset) + buffer;
  }
  __device__ __forceinline__ ptx::Mbarrier* scores_empty(int buffer) const {
    return scores_full(Spec::kScoreBuffers + buffer);
  }
  __device__ __forceinline__ ptx::Mbarrier* sums_full(int buffer) const {
    return scores_full(2 * Spec::kScoreBuffers + buffer);
  }
  __device__ __forceinline__ ptx::Mbarrier* sums_empty(int buffer) const {
    return sums_full(Spec::kSumBuffers + buffer);
  }
  __device__ __forceinline__ ptx::Mbarrier* place_full(int buffer) const {
    return sums_full(2 * Spec::kSumBuffers + buffer);
  }
  // The piece that query_sums(buffer) is of, or -1, and the turn of this tile there. Guarded by place_full and sums_empty.
  __device__ __forceinline__ unsigned char* place(int buffer) const { return base + Spec::kPlaceOffset + 16 * buffer; }
};

// Whether some of the 64 keys from first_key on are past the last.
__device__ __forceinline__ bool has_missing_keys(const BackwardParams& params, int first_key) {
  return first_key + 64 > params.seq_k;
}

// scores (S^T) to P^T. Unlike in the kernel of dk and dv, a key past the last must have P 0: its dS is a factor of dQ.
template <typename Spec, MaskKind kMask, bool kIsMasked>
__device__ __forceinline__ void fused_exponentials(const BackwardParams& params, float (&scores)[Spec::kStreamRows / 2],
                                                   const float (&lse_log2)[Spec::kStreamRows / 4],
                                                   const BlockPlace& place) {
  constexpr int kNever = 1 << 30;
  int begin[2] = {0, 0};
  if constexpr (kIsMasked) {
    const int lane = ptx::lane_index();
    const int key = place.first_key + ptx::warp_index() % 4 * 16 + lane / 4;
    const int column = place.block * Spec::kStreamRows + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int first = kMask == MaskKind::kCausal ? diagonal_row(Lengths{params}, key + 8 * r) - column : 0;
      begin[r] = key + 8 * r < params.seq_k ? first : kNever;
    }
  }
#pragma unroll
  for (int i = 0; i < Spec::kStreamRows / 2; ++i) {
    scores[i] = ptx::exp2_approx(ptx::fma_rn(scores[i], params.scale_log2, -lse_log2[i / 4 * 2 + i % 2]));
    if constexpr (kIsMasked) {
      if (8 * (i / 4) + i % 2 < begin[i / 2 % 2]) scores[i] = 0.0f;
    }
  }
}

template <typename Spec, MaskKind kMask>
struct FusedConsumer {
  using Product = Products<Spec>;

  const BackwardParams& params;
  const FusedMemory<Spec> shared;
  const int consumer;  // 0 or 1
  RingPosition<Spec::kFirstStages> at;
  RingPosition<Spec::kFirstStages> used;  // the oldest that has not been released: `at`, or one behind
  RingPosition<Spec::kScoreBuffers> handed;

  __device__ __forceinline__ FusedConsumer(const BackwardParams& params_, const FusedMemory<Spec>& shared_,
                                           int consumer_)
      : params(params_), shared(shared_), consumer(consumer_) {}

  __device__ __forceinline__ void release_used() {
    release(shared.first_empty(used.stage));
    used.advance();
  }
  __device__ __forceinline__ void wait_block() const { ptx::mbarrier_wait(shared.first_full(at.stage), at.parity); }

  // dS^T to the warpgroup of dq, once it has done with what the buffer held.
  __device__ __forceinline__ void hand_scores(const uint32_t (&packed)[Product::kPacked]) {
    ptx::mbarrier_wait(shared.scores_empty(handed.stage), handed.parity ^ 1);
    const int lane = ptx::lane_index();
    const int row = ptx::warp_index() % 4 * 16 + lane % 16;
    unsigned char* row_smem = shared.scores(handed.stage) + (consumer * 64 + row) * 128;
#pragma unroll
    for (int step = 0; step < Spec::kStreamRows / 16; ++step) {
      const uint32_t words[4] = {packed[4 * step], packed[4 * step + 1], packed[4 * step + 2], packed[4 * step + 3]};
      ptx::stmatrix_x4(row_smem + ((step * 2 + lane / 16) ^ (row % 8)) * 16, words);
    }
    // Hazard: the product of dq reads dS before it is written and visible to it.
    ptx::fence_proxy_async_shared();
    pass_scores();
  }
  __device__ __forceinline__ void pass_scores() {
    release(shared.scores_full(handed.stage));
    handed.advance();
  }

  __device__ __forceinline__ void step(float (&dk)[Product::kOutputs], float (&dv)[Product::kOutputs],
                                       uint32_t (&p_packed)[Product::kPacked], uint32_t (&ds_packed)[Product::kPacked],
                                       const BlockPlace& place, bool is_masked) {
    float scores[Product::kScores];
    float gradients[Product::kScores];  // dP^T, then dS^T
    float lse_log2[Product::kColumns];
    float row_dot[Product::kColumns];
    wait_block();
    load_columns<Spec>(lse_log2, shared.statistics(at.stage));
    Product::template issue_scores<false>(scores, shared.own_first(consumer), shared.first(at.stage));
    // dV and dK of the block before, with S^T behind them: dP^T can have the registers of their P^T and dS^T.
    ptx::wgmma_wait<1>();
    ptx::wgmma_fence_operands(dv);
    ptx::wgmma_fence_operands(dk);
    if (used.stage != at.stage) release_used();
    Product::template issue_scores<false>(gradients, shared.own_second(consumer), shared.second(at.stage));

    ptx::wgmma_wait<1>();  // S^T
    ptx::wgmma_fence_operands(scores);
    if (is_masked) {
      fused_exponentials<Spec, kMask, true>(params, scores, lse_log2, place);
    } else {
      fused_exponentials<Spec, kMask, false>(params, scores, lse_log2, place);
    }
    load_columns<Spec>(row_dot, shared.statistics(at.stage) + Spec::kStreamRows * 4);
    Product::pack_scores(p_packed, scores);
    Product::issue_output(dv, p_packed, shared.second(at.stage));

    ptx::wgmma_wait<1>();  // dP^T
    ptx::wgmma_fence_operands(gradients);
#pragma unroll
    for (int i = 0; i < Product::kScores; ++i) {
      gradients[i] = scores[i] * (gradients[i] - row_dot[i / 4 * 2 + i % 2]);
    }
    Product::pack_scores(ds_packed, gradients);
    hand_scores(ds_packed);
    Product::issue_output(dk, ds_packed, shared.first(at.stage));
    at.advance();
  }

  // Passes over a block that only keys of the other warpgroup are seen from. It hands over nothing, but keeps the count.
  __device__ __forceinline__ void skip_block() {
    wait_block();
    at.advance();
    release_used();
    ptx::mbarrier_wait(shared.scores_empty(handed.stage), handed.parity ^ 1);
    pass_scores();
  }

  __device__ __forceinline__ void finish_products(float (&dk)[Product::kOutputs], float (&dv)[Product::kOutputs]) {
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operands(dk);
    ptx::wgmma_fence_operands(dv);
    if (used.stage != at.stage) release_used();
  }

  // Hazard: dK takes the place of K while dq's warpgroup still multiplies with it.
  __device__ __forceinline__ void wait_for_query_products() const {
    RingPosition<Spec::kScoreBuffers> buffer = handed;  // the oldest of all of them
#pragma unroll
    for (int i = 0; i < Spec::kScoreBuffers; ++i) {
      ptx::mbarrier_wait(shared.scores_empty(buffer.stage), buffer.parity ^ 1);
      buffer.advance();
    }
  }

  __device__ __forceinline__ void run(const ptx::TensorMap& dk_map, const ptx::TensorMap& dv_map) {
    const int heads = params.heads_q / params.heads_kv;
    for (int parity = 0;; parity ^= 1) {
      ptx::mbarrier_wait(shared.tile_full(consumer), parity);
      const Tile tile = read_tile<Tile>(shared.tile(consumer));
      if (tile.index < 0) break;
      ptx::mbarrier_wait(shared.own_full(consumer), parity);
      const int tile_key = tile.index * Spec::kOwnRows;
      const int first_key = tile_key + consumer * 64;
      const BlockRange range = query_blocks<Spec, kMask>(params, tile, first_key, first_key + 64);
      const BlockRange all = query_blocks<Spec, kMask>(params, tile, tile_key, tile_key + Spec::kOwnRows);
      if (first_key < params.seq_k) {
        const bool is_masked = has_missing_keys(params, first_key);
        float dk[Product::kOutputs];
        float dv[Product::kOutputs];
        uint32_t p_packed[Product::kPacked];
        uint32_t ds_packed[Product::kPacked];
        Product::clear(dk);
        Product::clear(dv);
        for (int head = 0; head < heads; ++head) {
          if (all.begin < range.begin) {
            finish_products(dk, dv);
            for (int block = all.begin; block < range.begin; ++block) skip_block();
          }
          BlockPlace place{shared.tile(consumer), tile.head * heads + head, first_key, range.begin};
          for (; place.block < range.end; ++place.block) {
            step(dk, dv, p_packed, ds_packed, place, is_masked || place.block < range.full_begin);
          }
        }
        finish_products(dk, dv);
        wait_for_query_products();
        // Hazard: dK and dV take the places of K and V while another warp of the warpgroup still multiplies with them.
        sync_consumer(consumer);
        Product::store_shared(shared.own_second(consumer), dv, 1.0f);
        Product::store_shared(shared.own_first(consumer), dk, params.scale);
        // Hazard: the copy engine reads before all 64 rows are written and visible to it.
        ptx::fence_proxy_async_shared();
        sync_consumer(consumer);
        if (ptx::thread_index() % 128 == 0) {
          const Tile done = read_tile<Tile>(shared.tile(consumer));  // again: no register holds it all the while
          const int row = done.index * Spec::kOwnRows + consumer * 64;
          Product::store_global(dv_map, shared.own_second(consumer), row, DensePlace{done.head, done.batch});
          Product::store_global(dk_map, shared.own_first(consumer), row, DensePlace{done.head, done.batch});
          ptx::tma_store_commit();
          // Hazard: the next tile's K and V overwrite the gradients while the store still reads them.
          ptx::tma_store_wait_read<0>();
        }
      } else {
        // Keys past the end: nothing to compute or to store.
        for (int head = 0; head < heads; ++head) {
          for (int block = all.begin; block < all.end; ++block) skip_block();
        }
        sync_consumer(consumer);  // every warp has read the tile's number
      }
      if (ptx::thread_index() % 128 == 0) ptx::mbarrier_arrive(shared.own_empty(consumer));
    }
  }
};

// The tile of the last keys that a row of block `block` sees.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ int last_tile(const BackwardParams& params, int block) {
  const int end_key = visible_keys<kMask>(params, Lengths{params}, (block + 1) * Spec::kStreamRows - 1).end;
  return (end_key - 1) / Spec::kOwnRows;
}

// The warpgroup of dq.
template <typename Spec, MaskKind kMask>
struct FusedQueries {
  using Element = typename Spec::Element;
  static constexpr int kSums = Spec::kHeadDim / 2;  // of 64 rows, a thread

  const BackwardParams& params;
  const FusedMemory<Spec> shared;
  RingPosition<Spec::kScoreBuffers> at;  // of dS^T
  RingPosition<Spec::kSumBuffers> sum;   // of what is added

  __device__ __forceinline__ FusedQueries(const BackwardParams& params_, const FusedMemory<Spec>& shared_)
      : params(params_), shared(shared_) {}

  // sums[64 x kHeadDim] = dS[64 x 64 * kHalves] K[64 * kHalves x kHeadDim]
  template <int kHalves>
  __device__ __forceinline__ void multiply(float (&sums)[kSums]) const {
    const uint64_t scores = ptx::make_smem_descriptor(shared.scores(at.stage), 0, 1024);
    const uint64_t keys = ptx::make_smem_descriptor(shared.own_first(0), Spec::kOwnSlabBytes, 1024);
    const int next_keys = 2 * Spec::kOwnBytes;  // own_first(1) - own_first(0)
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4 * kHalves; ++step) {
      ptx::wgmma_ss<Element, Spec::kHeadDim, true, true>(
          sums, ptx::advance_smem_descriptor(scores, step * 2048),
          ptx::advance_smem_descriptor(keys, step / 4 * next_keys + step % 4 * 2048), step == 0 ? 0 : 1);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operands(sums);
  }

  // To the warp that adds: [kHeadDim / 8][128 threads][4], where thread 32 w + 4 g + t has at j, of the rows 16 w + g and that + 8, the
  // columns 8 j + 2 t and the next.
  __device__ __forceinline__ void hand_over(const float (&sums)[kSums]) {
    // Hazard: the buffer is still read by the sum of three blocks ago.
    ptx::mbarrier_wait(shared.sums_empty(sum.stage), sum.parity ^ 1);
    unsigned char* mine = shared.query_sums(sum.stage) + ptx::thread_index() % 128 * 16;
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) {
      const uint32_t words[4] = {ptx::float_bits(sums[4 * j]), ptx::float_bits(sums[4 * j + 1]),
                                 ptx::float_bits(sums[4 * j + 2]), ptx::float_bits(sums[4 * j + 3])};
      ptx::st_shared_128(mine + j * 2048, words);
    }
    // Hazard: the copy engine reads before all is written and visible to it.
    ptx::fence_proxy_async_shared();
    release(shared.sums_full(sum.stage));
    sum.advance();
  }

  // Ahead of the product, so that the adding warp asks for its turn meanwhile.
  __device__ __forceinline__ void announce(int piece, int turn) const {
    if (ptx::thread_index() % 128 != 0) return;
    // Hazard: the place of three blocks ago is still read.
    ptx::mbarrier_wait(shared.sums_empty(sum.stage), sum.parity ^ 1);
    const uint32_t words[4] = {static_cast<uint32_t>(piece), static_cast<uint32_t>(turn), 0, 0};
    ptx::st_shared_128(shared.place(sum.stage), words);
    ptx::mbarrier_arrive(shared.place_full(sum.stage));
  }

  __device__ __forceinline__ void block(int piece, int turn, bool has_second_half) {
    float sums[kSums];
    announce(piece, turn);
    ptx::mbarrier_wait(shared.scores_full(at.stage), at.parity);
    if (has_second_half) {
      multiply<2>(sums);
    } else {
      multiply<1>(sums);
    }
    release(shared.scores_empty(at.stage));
    at.advance();
    hand_over(sums);
  }

  __device__ __forceinline__ void run() {
    const int heads = params.heads_q / params.heads_kv;
    const int pieces = ceil_div(params.seq_q, Spec::kStreamRows);
    for (int parity = 0;; parity ^= 1) {
      ptx::mbarrier_wait(shared.tile_full(0), parity);
      const Tile tile = read_tile<Tile>(shared.tile(0));
      if (tile.index < 0) break;
      ptx::mbarrier_wait(shared.own_full(0), parity);
      const int first_key = tile.index * Spec::kOwnRows;
      const bool has_second = first_key + 64 < params.seq_k;
      if (has_second) ptx::mbarrier_wait(shared.own_full(1), parity);
      const BlockRange all = query_blocks<Spec, kMask>(params, tile, first_key, first_key + Spec::kOwnRows);
      const int second_begin =
          has_second ? query_blocks<Spec, kMask>(params, tile, first_key + 64, first_key + 128).begin : all.end;
      for (int head = 0; head < heads; ++head) {
        const int first_piece = (tile.batch * params.heads_q + tile.head * heads + head) * pieces;
        for (int i = all.begin; i < all.end; ++i) {
          block(first_piece + i, last_tile<Spec, kMask>(params, i) - tile.index, i >= second_begin);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < Spec::kSumBuffers; ++i) {
      announce(-1, 0);
      sum.advance();
    }
  }
};

// One thread a buffer: adds what comes in it to the sums in global memory, each piece when its turn has come. Whose turn is the first
// stores, so nobody zeroes the sums.
template <typename Spec>
__device__ __forceinline__ void add_sums(const BackwardParams& params, const FusedMemory<Spec>& shared, int buffer) {
  float* sums_gmem = static_cast<float*>(params.dq);
  const int64_t all_pieces =
      static_cast<int64_t>(params.batch) * params.heads_q * ceil_div(params.seq_q, Spec::kStreamRows);
  auto* turns_gmem = reinterpret_cast<int32_t*>(sums_gmem + all_pieces * (Spec::kQueryBytes / 4));
  for (int parity = 0;; parity ^= 1) {
    ptx::mbarrier_wait(shared.place_full(buffer), parity);
    uint32_t words[4];
    ptx::ld_shared_128(words, shared.place(buffer));
    const int piece = static_cast<int>(words[0]);
    const int turn = static_cast<int>(words[1]);
    if (piece < 0) break;
    float* piece_gmem = sums_gmem + piece * static_cast<int64_t>(Spec::kQueryBytes / 4);
    ptx::wait_for_turn(turns_gmem + piece, turn);
    ptx::mbarrier_wait(shared.sums_full(buffer), parity);
    if (turn == 0) {
      ptx::bulk_store(piece_gmem, shared.query_sums(buffer), Spec::kQueryBytes);
    } else {
      ptx::bulk_reduce_add(piece_gmem, shared.query_sums(buffer), Spec::kQueryBytes);
    }
    ptx::tma_store_commit();
    // Hazard: the next block's dQ overwrites this one while it is read.
    ptx::tma_store_wait_read<0>();
    ptx::mbarrier_arrive(shared.sums_empty(buffer));
    // Hazard: the next tile adds before this sum is complete.
    ptx::tma_store_wait<0>();
    ptx::pass_turn(turns_gmem + piece, turn + 1);
  }
}

template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void fused_gradient(const BackwardParams& params, const ptx::TensorMap& q_map,
                                               const ptx::TensorMap& k_map, const ptx::TensorMap& v_map,
                                               const ptx::TensorMap& dout_map, const ptx::TensorMap& dk_map,
                                               const ptx::TensorMap& dv_map) {
  const FusedMemory<Spec> shared{ptx::dynamic_shared_memory()};
  // The shuffle tells the compiler that the role is the same in the whole warp.
  const int warp = ptx::shuffle_index(ptx::warp_index(), 0);
  const int warpgroup = warp / 4;

  if (warp == 0 && ptx::elect_one()) {
    ptx::prefetch_tensor_map(&q_map);
    ptx::prefetch_tensor_map(&k_map);
    ptx::prefetch_tensor_map(&v_map);
    ptx::prefetch_tensor_map(&dout_map);
    ptx::prefetch_tensor_map(&dk_map);
    ptx::prefetch_tensor_map(&dv_map);
#pragma unroll
    for (int buffer = 0; buffer < Spec::kScoreBuffers; ++buffer) {
      ptx::mbarrier_init(shared.scores_full(buffer), 4 * Spec::kNumConsumers);
      ptx::mbarrier_init(shared.scores_empty(buffer), 4);
    }
#pragma unroll
    for (int buffer = 0; buffer < Spec::kSumBuffers; ++buffer) {
      ptx::mbarrier_init(shared.sums_full(buffer), 4);
      ptx::mbarrier_init(shared.sums_empty(buffer), 1);
      ptx::mbarrier_init(shared.place_full(buffer), 1);
    }
    init_barriers(shared);
  }
  ptx::barrier_sync_block();

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Spec::kProducerRegisters>();
    if (warp == 0) {
      produce_queries<Spec, kMask>(params, shared, q_map, k_map, v_map, dout_map);
    } else if (warp <= Spec::kSumBuffers && ptx::elect_one()) {
      add_sums(params, shared, warp - 1);
    }
  } else if (warpgroup == 3) {
    ptx::setmaxnreg_dec<Spec::kQueryRegisters>();
    FusedQueries<Spec, kMask>(params, shared).run();
  } else {
    ptx::setmaxnreg_inc<Spec::kConsumerRegisters>();
    FusedConsumer<Spec, kMask>(params, shared, warpgroup - 1).run(dk_map, dv_map);
  }
}

}  // namespace sm90
}  // namespace backward
}  // namespace attention
}  // namespace flashmoe
