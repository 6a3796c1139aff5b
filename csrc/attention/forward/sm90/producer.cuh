// The producer: one thread that issues the TMA loads of Q, K and V and passes tiles to the consumers.
#pragma once

#include "attention/forward/sm90/schedule.cuh"
#include "attention/forward/sm90/spec.cuh"
#include "attention/sequences.cuh"
#include "device/persistent.cuh"
#include "device/ring.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/tma.cuh"

namespace flashmoe::attention::sm90 {

// Loads one stage of K or V: a tile's rows from `row`, slab by slab. Rows and columns outside the tensor become zeros.
template <typename Tile>
__device__ __forceinline__ void load_keys(Tile smem, const ptx::TensorMap& map, ptx::Mbarrier* full,
                                          ptx::Mbarrier* empty, int parity, int row, int kv_head, int batch) {
  ptx::mbarrier_wait(empty, parity ^ 1);
  ptx::mbarrier_arrive_expect_tx(full, Tile::kBytes);
#pragma unroll
  for (int slab = 0; slab < Tile::kNumSlabs; ++slab) {
    ptx::tma_load_4d(smem.slab(slab), &map, full, slab * 64, row, kv_head, batch, ptx::CacheHint::kEvictLast);
  }
}

// Loads the 64 rows of Q of one consumer warpgroup and publishes their tile. Rows past seq_q become zeros.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void load_query(const SharedMemory<Spec>& shared, const ptx::TensorMap& map,
                                           const RingPosition<Spec::kNumQueryStages>& at, int consumer,
                                           const Tile<kMask>& tile) {
  ptx::Mbarrier* full = shared.query_full(at.stage, consumer);
  ptx::mbarrier_wait(shared.query_empty(at.stage, consumer), at.parity ^ 1);
  publish_tile(shared.tile(at.stage, consumer), tile);
  ptx::mbarrier_arrive_expect_tx(full, Spec::QueryTile::kBytes);
#pragma unroll
  for (int slab = 0; slab < Spec::QueryTile::kNumSlabs; ++slab) {
    ptx::tma_load_4d(shared.query(at.stage, consumer).slab(slab), &map, full, slab * 64,
                     tile.m_block * Spec::kBlockM + consumer * 64, tile.head, tile.batch, ptx::CacheHint::kEvictFirst);
  }
}

// Order of the loads of a tile with key blocks 0 to n-1 (or the work item's share of them): K(0), Q of warpgroup 0,
// V(0), Q of the others, then K(j), V(j) in ascending order. V(0) precedes the Q of the other warpgroups because these
// loads wait for warpgroups that may still work on the previous tile.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void produce(const ForwardParams& params, const SharedMemory<Spec>& shared,
                                        const ptx::TensorMap& q_map, const ptx::TensorMap& k_map,
                                        const ptx::TensorMap& v_map) {
  const int m_blocks = ceil_div(params.seq_q, Spec::kBlockM);
  const int num_tiles = m_blocks * params.heads_q * params.batch * items_per_tile<Spec>(params);
  const int section_heads = kMask == MaskKind::kCausal ? heads_per_section<Spec>(params) : 1;
  const int heads_per_kv = heads_per_key_head(params);
  RingPosition<Spec::kNumStages> key;
  RingPosition<Spec::kNumStages> value;
  RingPosition<Spec::kNumQueryStages> query;

  const auto load_key = [&](int block, int kv_head, int batch) {
    load_keys(shared.key(key.stage), k_map, shared.key_full(key.stage), shared.key_empty(key.stage), key.parity,
              block * Spec::kBlockN, kv_head, batch);
    key.advance();
  };
  const auto load_value = [&](int block, int kv_head, int batch) {
    load_keys(shared.value(value.stage), v_map, shared.value_full(value.stage), shared.value_empty(value.stage),
              value.parity, block * (Spec::ValueTile::kSlabBytes / kSlabRowBytes), kv_head, batch);
    value.advance();
  };

  for (int index = ptx::block_index(); index < num_tiles; query.advance()) {
    const Tile<kMask> tile = decode_tile<Spec, kMask>(params, m_blocks, section_heads, index);
    const KeyRange range = tile.template key_blocks<Spec>(params);
    const int kv_head = tile.head / heads_per_kv;
    const bool has_keys = !Spec::kIsSplit || range.begin < range.end;
    const int draw_block = kMask == MaskKind::kCausal ? maximum(range.begin, range.end - 1 - kDrawAhead) : range.begin;
    int next_index = 0;
    if (draw_block == range.begin) next_index = next_tile_index(params.tile_counter, num_tiles, index);
    if (has_keys) load_key(range.begin, kv_head, tile.batch);
    load_query<Spec>(shared, q_map, query, 0, tile);
    if (has_keys) load_value(range.begin, kv_head, tile.batch);
#pragma unroll
    for (int consumer = 1; consumer < Spec::kNumConsumers; ++consumer) {
      load_query<Spec>(shared, q_map, query, consumer, tile);
    }
    for (int block = range.begin + 1; block < range.end; ++block) {
      if (block == draw_block) next_index = next_tile_index(params.tile_counter, num_tiles, index);
      load_key(block, kv_head, tile.batch);
      load_value(block, kv_head, tile.batch);
    }
    index = next_index;
  }

#pragma unroll
  for (int consumer = 0; consumer < Spec::kNumConsumers; ++consumer) {
    ptx::mbarrier_wait(shared.query_empty(query.stage, consumer), query.parity ^ 1);
    publish_tile(shared.tile(query.stage, consumer), Tile<kMask>{-1, 0, 0, 0});
    ptx::mbarrier_arrive(shared.query_full(query.stage, consumer));
  }
}

}  // namespace flashmoe::attention::sm90
