// The producer: one thread that asks the copy engine for Q, K and V, and hands tiles to the consumers.
#pragma once

#include "attention/sm90/schedule.cuh"
#include "attention/sm90/spec.cuh"
#include "ptx/tma.cuh"

namespace flashmoe {
namespace attention {
namespace sm90 {

// One stage of K or V: kBlockN rows from `row`, slab by slab. Rows and columns outside the tensor become zeros.
template <typename Spec>
__device__ __forceinline__ void load_keys(unsigned char* smem, const ptx::TensorMap& map, ptx::Mbarrier* full,
                                          ptx::Mbarrier* empty, int parity, int row, int kv_head, int batch) {
  ptx::mbarrier_wait(empty, parity ^ 1);
  ptx::mbarrier_arrive_expect_tx(full, Spec::kKeyBytes);
#pragma unroll
  for (int slab = 0; slab < Spec::kNumSlabs; ++slab) {
    ptx::tma_load_4d(smem + slab * Spec::kKeySlabBytes, &map, full, slab * 64, row, kv_head, batch,
                     ptx::CacheHint::kEvictLast);
  }
}

// The 64 rows of Q of one consumer warpgroup, and the tile they belong to. Rows past seq_q become zeros.
template <typename Spec>
__device__ __forceinline__ void load_query(const SharedMemory<Spec>& shared, const ptx::TensorMap& map, int consumer,
                                           int parity, const Tile& tile) {
  ptx::mbarrier_wait(shared.query_empty(consumer), parity ^ 1);
  publish_tile(shared.tile(consumer), tile);
  ptx::mbarrier_arrive_expect_tx(shared.query_full(consumer), Spec::kQueryBytes);
#pragma unroll
  for (int slab = 0; slab < Spec::kNumSlabs; ++slab) {
    ptx::tma_load_4d(shared.query(consumer) + slab * Spec::kQuerySlabBytes, &map, shared.query_full(consumer), slab * 64,
                     tile.m_block * Spec::kBlockM + consumer * 64, tile.head, tile.batch, ptx::CacheHint::kEvictFirst);
  }
}

// Per tile, with key blocks n-1 down to 0: K(n-1), Q of warpgroup 0, V(n-1), Q of the others, then K(j), V(j) downwards.
// V(n-1) stands before the other warpgroups' Q because those wait for warpgroups that may still be in the last tile.
template <typename Spec, bool kIsCausal>
__device__ __forceinline__ void produce(const ForwardParams& params, const SharedMemory<Spec>& shared,
                                        const ptx::TensorMap& q_map, const ptx::TensorMap& k_map,
                                        const ptx::TensorMap& v_map) {
  const int m_blocks = ceil_div(params.seq_q, Spec::kBlockM);
  const int num_tiles = m_blocks * params.heads_q * params.batch;
  const int section_heads = kIsCausal ? heads_per_section<Spec>(params) : 1;
  const int heads_per_kv = params.heads_q / params.heads_kv;
  RingPosition<Spec::kNumStages> key;
  RingPosition<Spec::kNumStages> value;
  int query_parity = 0;

  const auto load_key = [&](int block, int kv_head, int batch) {
    load_keys<Spec>(shared.key(key.index), k_map, shared.key_full(key.index), shared.key_empty(key.index), key.parity,
                    block * Spec::kBlockN, kv_head, batch);
    key.advance();
  };
  const auto load_value = [&](int block, int kv_head, int batch) {
    load_keys<Spec>(shared.value(value.index), v_map, shared.value_full(value.index), shared.value_empty(value.index),
                    value.parity, block * Spec::kBlockN, kv_head, batch);
    value.advance();
  };

  int index = ptx::block_index();
  while (index < num_tiles) {
    // Drawn a tile ahead: the answer arrives while this tile's loads are issued.
    const int next_index = num_tiles > ptx::grid_size() ? next_tile_index(params, num_tiles) : num_tiles;
    const Tile tile = decode_tile<Spec, kIsCausal>(params, m_blocks, section_heads, index);
    const int blocks = key_blocks<Spec, kIsCausal>(params, tile.m_block);
    const int kv_head = tile.head / heads_per_kv;
    if (blocks > 0) load_key(blocks - 1, kv_head, tile.batch);
    load_query<Spec>(shared, q_map, 0, query_parity, tile);
    if (blocks > 0) load_value(blocks - 1, kv_head, tile.batch);
#pragma unroll
    for (int consumer = 1; consumer < Spec::kNumConsumers; ++consumer) {
      load_query<Spec>(shared, q_map, consumer, query_parity, tile);
    }
    for (int block = blocks - 2; block >= 0; --block) {
      load_key(block, kv_head, tile.batch);
      load_value(block, kv_head, tile.batch);
    }
    query_parity ^= 1;
    index = next_index;
  }

#pragma unroll
  for (int consumer = 0; consumer < Spec::kNumConsumers; ++consumer) {
    ptx::mbarrier_wait(shared.query_empty(consumer), query_parity ^ 1);
    publish_tile(shared.tile(consumer), Tile{-1, 0, 0});
    ptx::mbarrier_arrive(shared.query_full(consumer));
  }
}

}  // namespace sm90
}  // namespace attention
}  // namespace flashmoe
