// The gradient of an additive mask with wgmma and TMA, for masks with an element for each row and each key. Tiles are
// 128 rows and 128 keys of the mask, processed one after another (bias_items.cuh); a consumer warpgroup has 64 rows of
// a tile.
//   grid     min(tiles, multiprocessors) blocks
//   maps     built by the host with bias_gradient_tensor_maps
//
// The producer loads an item's (Q, K), then its (dO, V), into the slots of one ring, and the mask once per tile. A
// consumer issues both products of an item, S = Q K^T and dP = dO V^T, and computes P while dP runs:
// sum += P * (dP - row_dot).
//
// | barrier            | arrivals per phase        | hazard it closes                                             |
// |--------------------|---------------------------|--------------------------------------------------------------|
// | full (slot)        | the producer, the bytes   | a pair of tensors is read before it has arrived              |
// | empty (slot)       | the consumers' 8 warps    | the next pair overwrites one that a product still reads      |
// | mask_full (slot)   | the producer, the bytes   | the mask's tile is read before it has arrived                |
// | mask_empty (slot)  | the consumers' 8 warps    | the next tile's mask overwrites one that a warp still reads  |
#pragma once

#include "attention/backward/bias_items.cuh"
#include "attention/backward/sm90/producer.cuh"
#include "attention/backward/sm90/products.cuh"
#include "device/exchange.cuh"
#include "device/ring.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/register_control.cuh"

namespace flashmoe::attention::backward::sm90 {

template <typename Element_, int kHeadDim_, int kBlockM, int kBlockN, int kNumWarps, int kSlots_, int kMaskSlots_>
struct BiasGradientSpec {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kOwnRows = kBlockM;     // queries
  static constexpr int kStreamRows = kBlockN;  // keys
  static constexpr int kSlots = kSlots_;
  static constexpr int kMaskSlots = kMaskSlots_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kWarpRows = 16;
  static constexpr int kMmaM = 1;
  static constexpr int kMmaN = kBlockN / 8;
  static constexpr bool kFolds = false;
  using OperandTile = SharedTile<kBlockM, kHeadDim>;  // Q, dO, K or V of an item
  using MaskTile = SharedTile<kBlockM, kBlockN>;
  static_assert(kBlockM == 128 && kBlockN == 128 && kNumWarps == 12, "a producer and two consumers of 64 rows");
  static_assert(kSlots >= 2, "both pairs of an item are in use at a time");

  static constexpr int kMaskOffset = kSlots * 2 * OperandTile::kBytes;
  static constexpr int kBarrierOffset = kMaskOffset + kMaskSlots * MaskTile::kBytes;
  static constexpr int kSharedBytes = kBarrierOffset + 2 * (kSlots + kMaskSlots) * 8;
  static_assert(kSharedBytes <= 232448, "sm_90 gives a block at most 227 KiB");
};

template <typename Spec>
struct BiasMemory {
  unsigned char* base;

  // Q and K, or dO and V.
  __device__ __forceinline__ typename Spec::OperandTile rows(int slot) const {
    return {base + 2 * slot * Spec::OperandTile::kBytes};
  }
  __device__ __forceinline__ typename Spec::OperandTile keys(int slot) const {
    return {base + (2 * slot + 1) * Spec::OperandTile::kBytes};
  }
  __device__ __forceinline__ typename Spec::MaskTile mask(int slot) const {
    return {base + Spec::kMaskOffset + slot * Spec::MaskTile::kBytes};
  }
  __device__ __forceinline__ ptx::Mbarrier* full(int slot) const {
    return reinterpret_cast<ptx::Mbarrier*>(base + Spec::kBarrierOffset) + slot;
  }
  __device__ __forceinline__ ptx::Mbarrier* empty(int slot) const { return full(Spec::kSlots + slot); }
  __device__ __forceinline__ ptx::Mbarrier* mask_full(int slot) const { return full(2 * Spec::kSlots + slot); }
  __device__ __forceinline__ ptx::Mbarrier* mask_empty(int slot) const {
    return full(2 * Spec::kSlots + Spec::kMaskSlots + slot);
  }
};

__device__ __forceinline__ int bias_tiles(const BiasGradientParams& params, int block_m, int block_n) {
  return ceil_div(params.rows, block_m) * ceil_div(params.keys, block_n) * params.heads * params.batches *
         params.splits;
}

// Calls do_tile(number, items) for each tile of this block.
template <typename Spec, typename DoTile>
__device__ __forceinline__ void for_each_tile(const BiasGradientParams& params, DoTile do_tile) {
  const int num_tiles = bias_tiles(params, Spec::kOwnRows, Spec::kStreamRows);
  for (int number = ptx::block_index(); number < num_tiles; number += ptx::grid_size()) {
    BiasItems<Spec> items(params, number);
    do_tile(number, items);
  }
}

// Runs on one thread.
template <typename Spec>
__device__ __forceinline__ void produce_items(const BiasGradientParams& params, const BiasMemory<Spec>& shared,
                                              const ptx::TensorMap& q_map, const ptx::TensorMap& k_map,
                                              const ptx::TensorMap& v_map, const ptx::TensorMap& dout_map,
                                              const ptx::TensorMap& mask_map) {
  const int group = params.launched.backward.heads_q / params.launched.backward.heads_kv;
  RingPosition<Spec::kSlots> at;
  RingPosition<Spec::kMaskSlots> mask;
  const auto load = [&](const ptx::TensorMap& row_map, const ptx::TensorMap& key_map, const BiasItem& item) {
    ptx::mbarrier_wait(shared.empty(at.stage), at.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(shared.full(at.stage), 2 * Spec::OperandTile::kBytes);
    copy_stream(shared.rows(at.stage), row_map, shared.full(at.stage), item.row,
                DenseCoordinates{item.head, item.batch});
    copy_stream(shared.keys(at.stage), key_map, shared.full(at.stage), item.key,
                DenseCoordinates{item.head / group, item.batch});
    at.advance();
  };
  for_each_tile<Spec>(params, [&](int, BiasItems<Spec>& items) {
    bool is_first = true;
    for (; items.left > 0; items.advance()) {
      load(q_map, k_map, items.item);
      if (is_first) {
        ptx::mbarrier_wait(shared.mask_empty(mask.stage), mask.parity ^ 1);
        ptx::mbarrier_arrive_expect_tx(shared.mask_full(mask.stage), Spec::MaskTile::kBytes);
#pragma unroll
        for (int slab = 0; slab < Spec::MaskTile::kNumSlabs; ++slab) {
          load_box(shared.mask(mask.stage).slab(slab), mask_map, shared.mask_full(mask.stage),
                   items.own.key + slab * kSlabColumns, items.own.row,
                   DenseCoordinates{items.own.head, items.own.batch}, ptx::CacheHint::kEvictFirst);
        }
        mask.advance();
      }
      is_first = false;
      load(dout_map, v_map, items.item);
    }
  });
}

// The mask's values of a warp's 16 rows, from the mask's tile in shared memory.
template <typename Spec>
struct SharedMask {
  typename Spec::MaskTile tile;
  int row;  // of the lane

  __device__ __forceinline__ void read(uint32_t (&values)[4], int, int four) const {
    ptx::ldmatrix_x4(values, tile.chunk(row, four / 4, four % 4 * 2 + ptx::lane_index() / 16));
  }
};

// store_bias_gradient for 16-bit elements, if the number of keys is a multiple of eight: a lane stores eight of them at
// a time.
template <typename Spec>
__device__ __forceinline__ void store_chunks(const BiasGradientParams& params, const BiasItems<Spec>& items,
                                             int warp_row, const BiasScores<Spec>& sums) {
  using Element = typename Spec::Element;
  const int lane = ptx::lane_index();
  const BiasItem& own = items.own;
  const int64_t matrix = (static_cast<int64_t>(items.split) * params.batches + own.batch) * params.heads + own.head;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = own.row + warp_row + lane / 4 + half * 8;
    Element* row_gmem = static_cast<Element*>(params.sums) + (matrix * params.rows + row) * params.keys;
#pragma unroll
    for (int four = 0; four < Spec::kMmaN / 4; ++four) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &sums[0][4 * four + i][2 * half];
        words[i] = pack<Element>(pair[0], pair[1]);
      }
      transpose_in_quad(words);
      const int key = own.key + 32 * four + lane % 4 * 8;
      if (row < params.rows && key < params.keys) ptx::st_global_128(row_gmem + key, words);
    }
  }
}

template <typename Spec>
struct BiasConsumer {
  using Element = typename Spec::Element;
  static constexpr int kScores = Spec::kStreamRows / 2;  // accumulators per thread
  static constexpr int kSteps = Spec::kHeadDim / 16;

  const BiasGradientParams& params;
  const BiasMemory<Spec> shared;
  const int consumer;
  const int warp_row;  // the warp's first row in the tile
  RingPosition<Spec::kSlots> at;
  RingPosition<Spec::kSlots> used;  // the oldest that has not been released
  RingPosition<Spec::kMaskSlots> mask;

  __device__ __forceinline__ BiasConsumer(const BiasGradientParams& params_, const BiasMemory<Spec>& shared_,
                                          int consumer_)
      : params(params_), shared(shared_), consumer(consumer_), warp_row(consumer_ * 64 + ptx::warp_index() % 4 * 16) {}

  static __device__ __forceinline__ float (&flat(BiasScores<Spec>& scores))
      [kScores] { return reinterpret_cast<float (&)[kScores]>(scores); }

  // Issues products[64 x kStreamRows] = the consumer's rows of the next slot, times its keys; asynchronous.
  __device__ __forceinline__ void issue(BiasScores<Spec>& products) {
    ptx::mbarrier_wait(shared.full(at.stage), at.parity);
    const typename Spec::OperandTile rows{shared.rows(at.stage).row(consumer * 64, 0)};
    issue_product<Element, kSteps>(flat(products), rows.k_major(), shared.keys(at.stage).k_major());
    at.advance();
  }
  __device__ __forceinline__ void release_slot() {
    release(shared.empty(used.stage));
    used.advance();
  }

  __device__ __forceinline__ void run() {
    const BackwardParams& backward = params.launched.backward;
    for_each_tile<Spec>(params, [&](int number, BiasItems<Spec>& items) {
      BiasScores<Spec> sums;
#pragma unroll
      for (int i = 0; i < kScores; ++i) flat(sums)[i] = 0.0f;
      BiasStatistics<Spec> statistics;
      const bool has_items = items.left > 0;
      if (has_items) {
        statistics.load(backward, items.item, items.item.row + warp_row);
        ptx::mbarrier_wait(shared.mask_full(mask.stage), mask.parity);
      }
      const SharedMask<Spec> values{shared.mask(mask.stage), warp_row + ptx::lane_index() % 16};
      while (items.left > 0) {
        const BiasItem item = items.item;
        const BiasStatistics<Spec> own = statistics;
        BiasScores<Spec> scores, gradients;
        issue(scores);
        issue(gradients);
        items.advance();
        if (items.left > 0) statistics.load(backward, items.item, items.item.row + warp_row);
        ptx::wgmma_wait<1>();
        ptx::wgmma_fence_operands(flat(scores));
        release_slot();
        bias_weights<Spec>(backward, scores, values, own, items, item.row + warp_row, item.key);
        ptx::wgmma_wait<0>();
        ptx::wgmma_fence_operands(flat(gradients));
        release_slot();
#pragma unroll
        for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sums[0][n][i] = ptx::fma_rn(scores[0][n][i], gradients[0][n][i] - own.row_dot[0][i / 2], sums[0][n][i]);
          }
      }
      if (has_items) {
        release(shared.mask_empty(mask.stage));
        mask.advance();
      }
      // Recomputed: no register holds it through the loop.
      const BiasItems<Spec> stored(params, ptx::recompute(number));
      if (params.is_float == 0 && params.keys % 8 == 0) {
        store_chunks<Spec>(params, stored, warp_row, sums);
      } else {
        store_bias_gradient<Spec>(params, stored, warp_row, sums);
      }
    });
  }
};

template <typename Spec>
__device__ __forceinline__ void bias_gradient(const BiasGradientParams& params, const ptx::TensorMap& q_map,
                                              const ptx::TensorMap& k_map, const ptx::TensorMap& v_map,
                                              const ptx::TensorMap& dout_map, const ptx::TensorMap& mask_map) {
  const BiasMemory<Spec> shared{ptx::dynamic_shared_memory()};
  const auto init = [&] {
#pragma unroll
    for (int slot = 0; slot < Spec::kSlots; ++slot) {
      ptx::mbarrier_init(shared.full(slot), 1);
      ptx::mbarrier_init(shared.empty(slot), 8);
    }
#pragma unroll
    for (int slot = 0; slot < Spec::kMaskSlots; ++slot) {
      ptx::mbarrier_init(shared.mask_full(slot), 1);
      ptx::mbarrier_init(shared.mask_empty(slot), 8);
    }
    ptx::mbarrier_init_fence();
  };
  const int warp = begin_warp(init, q_map, k_map, v_map, dout_map, mask_map);
  const int warpgroup = warp / 4;

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<24>();
    if (warp == 0 && ptx::elect_one()) {
      produce_items<Spec>(params, shared, q_map, k_map, v_map, dout_map, mask_map);
    }
  } else {
    ptx::setmaxnreg_inc<240>();
    BiasConsumer<Spec>(params, shared, warpgroup - 1).run();
  }
}

}  // namespace flashmoe::attention::backward::sm90
